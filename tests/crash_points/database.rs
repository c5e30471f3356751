//! The database of a lane, as somebody sees it who looks into it beside the broker.

use std::collections::BTreeSet;

use mongodb::bson::{DateTime, Document, doc};

use crate::{inspection, sqlite::StoreFile};

/// A database of a lane.
#[derive(Clone)]
pub(crate) enum Database {
    Mongo(mongodb::Database),
    Sqlite(StoreFile),
}

impl Database {
    /// Returns what contradicts itself.
    pub(crate) async fn contradictions(&self, queues: &[String]) -> Vec<String> {
        match self {
            Self::Mongo(database) => inspection::odd_segments(database, queues).await,
            Self::Sqlite(file) => file.contradictions(),
        }
    }

    /// Returns the queues that hold items which are not settled.
    pub(crate) async fn unsettled(&self, queues: &[String]) -> BTreeSet<String> {
        match self {
            Self::Mongo(database) => inspection::unsettled(database, queues).await,
            Self::Sqlite(file) => file.unsettled(queues),
        }
    }

    /// Returns what should not be left after everything was settled, and its queues.
    pub(crate) async fn leftovers(&self, queues: &[String]) -> (Vec<String>, BTreeSet<String>) {
        match self {
            Self::Mongo(database) => inspection::leftovers(database, queues).await,
            // An item is one row, so nothing can be left but what `unsettled` finds.
            Self::Sqlite(_) => (Vec::new(), BTreeSet::new()),
        }
    }

    /// Makes the last tick of a schedule one that was missed.
    pub(crate) async fn miss_tick(&self, schedule: &str) {
        match self {
            Self::Mongo(database) => {
                let schedules = database.collection::<Document>("schedules");
                let long_ago = doc! { "$set": { "doneUntil": DateTime::from_millis(0) } };
                let changed = schedules.update_one(doc! { "_id": schedule }, long_ago).await;
                changed.expect("a schedule of long ago");
            }
            Self::Sqlite(file) => file.miss_tick(schedule),
        }
    }

    /// Returns whether a tick of the schedule was noted.
    pub(crate) async fn has_ticked(&self, schedule: &str) -> bool {
        match self {
            Self::Mongo(database) => {
                let schedules = database.collection::<Document>("schedules");
                let noted = doc! { "_id": schedule, "lastTime": { "$exists": true } };
                schedules.find_one(noted).await.is_ok_and(|found| found.is_some())
            }
            Self::Sqlite(file) => file.has_ticked(schedule),
        }
    }
}
