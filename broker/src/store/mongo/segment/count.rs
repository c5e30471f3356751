//! How many items are in the segments of a queue: by their index alone.

use mongodb::bson::{Document, doc};

use crate::{
    domain::{Depth, QueueName, Timestamp},
    store::{
        Result,
        mongo::{
            Inner,
            schema::layout::{CLAIMED, Group, SEGMENTS, millis},
            server::{connect::read_documents, error::integer},
        },
    },
};

/// What is in the segments of a queue.
#[derive(Debug, Default)]
pub(crate) struct Count {
    /// Segments with ready items: whoever counts documents counts these as ready items.
    documents: u64,
    ready: u64,
    reserved: u64,
    /// When the first lease ends, or sooner.
    pub(crate) lapse: Option<Timestamp>,
}

/// The pipeline whose result [`Count::read`] reads: one document, or none.
pub(crate) fn pipeline(queue: &QueueName) -> Vec<Document> {
    let is_ready = doc! { "$lt": ["$when", millis(CLAIMED)] };
    vec![
        doc! { "$match": { "q": queue.as_str(), "left": { "$gte": 0 } } },
        doc! { "$group": {
            "_id": null, "documents": { "$sum": { "$cond": [is_ready, 1, 0] } },
            "ready": { "$sum": "$ready" }, "left": { "$sum": "$left" }, "lapse": { "$min": "$lapse" },
        } },
        doc! { "$set": { "segments": true } },
    ]
}

impl Count {
    pub(crate) fn read(found: &Document) -> Self {
        let whole =
            |name: &str| found.get(name).and_then(integer).unwrap_or_default().cast_unsigned();
        let lapse = found.get_datetime("lapse").ok();
        Self {
            documents: whole("documents"),
            ready: whole("ready"),
            reserved: whole("left").saturating_sub(whole("ready")),
            lapse: lapse.map(|at| Timestamp(at.timestamp_millis())),
        }
    }

    /// Adds what is in the segments to a count of documents.
    pub(crate) fn add_to(&self, depth: &mut Depth) {
        depth.ready = (depth.ready + self.ready).saturating_sub(self.documents);
        depth.reserved += self.reserved;
        if self.reserved > 0 {
            depth.next_eligible = depth.next_eligible.into_iter().chain(self.lapse).min();
        }
    }
}

/// Counts the items in the segments of a queue.
pub(crate) async fn count(inner: &Inner, group: &Group, queue: &QueueName) -> Result<Count> {
    let command = doc! {
        "aggregate": group.items.name(), "hint": SEGMENTS, "cursor": {}, "pipeline": pipeline(queue),
    };
    let found = read_documents(&inner.db, command).await?;
    Ok(found.first().map(Count::read).unwrap_or_default())
}
