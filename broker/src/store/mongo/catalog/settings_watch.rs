//! Finds out which queues' settings other brokers have changed.

use std::{collections::HashSet, sync::Arc};

use async_trait::async_trait;
use mongodb::bson::{Bson, doc};

use crate::{
    domain::QueueName,
    store::{
        Result, SettingsChanges, SettingsWatch,
        mongo::{
            Inner,
            catalog::{
                deleted::{DELETED, name_of},
                queues::QUEUES,
            },
            schema::layout::millis,
            server::{connect::read_documents, error::integer, time_limit::read_in_time},
        },
    },
};

/// Milliseconds after its time at which a change may become visible: no write takes longer, and the clocks of brokers
/// agree to within milliseconds.
const LATE: i64 = 30_000;

/// Behind a router, milliseconds after which there may have been an election.
const ROUTED: i64 = 60_000;

/// How far changes have been read.
#[derive(Clone, Default)]
struct Mark {
    /// The election of the server that was read.
    election: Option<Bson>,
    /// The time up to which all changes were read.
    at: i64,
    /// Changes that were read and may be read again: the queue, the time, and the revision.
    seen: HashSet<(QueueName, i64, i64)>,
}

pub(crate) struct MongoSettingsWatch {
    inner: Arc<Inner>,
    mark: Mark,
}

impl MongoSettingsWatch {
    pub(crate) fn new(inner: Arc<Inner>) -> Self {
        Self { inner, mark: Mark::default() }
    }
}

#[async_trait]
impl SettingsWatch for MongoSettingsWatch {
    async fn changes(&mut self) -> Result<SettingsChanges> {
        let mut moved = self.mark.clone();
        let operation = |inner: Arc<Inner>| async move {
            inner.notice_format().await?;
            let changes = changes(&inner, &mut moved).await?;
            Ok((moved, changes))
        };
        let (moved, changes) = self.inner.run(operation).await?;
        self.mark = moved;
        Ok(changes)
    }
}

/// Returns which settings have changed since the mark, and advances the mark.
///
/// The time of a change is that of the broker that makes it, and the change becomes visible when it is written. So
/// changes are read again for as long as an older one may become visible, and each is returned once.
///
/// An election takes back what only the old primary has, and leaves no trace of it. Settings that were read there may
/// never have come to be, so after an election any may have changed. Changes are not read as a majority has them: where
/// the other members are behind, a change would become visible later than any limit.
async fn changes(inner: &Inner, mark: &mut Mark) -> Result<SettingsChanges> {
    let election = Some(election(inner).await?);
    let anew = mark.election != election;
    let now = inner.now();
    let from = millis((if anew { now.0 } else { mark.at.min(now.0) }) - LATE);
    let deleted =
        vec![doc! { "$match": { "at": { "$gte": from } } }, doc! { "$project": { "at": 1 } }];
    let command = doc! {
        "aggregate": QUEUES,
        "pipeline": [
            { "$match": { "updated": { "$gte": from } } },
            { "$project": { "at": "$updated", "revision": 1 } },
            { "$unionWith": { "coll": DELETED, "pipeline": deleted } },
        ],
        "hint": "updated",
        "cursor": { "batchSize": 10_000 },
    };
    let mut seen = HashSet::new();
    for change in read_documents(&inner.db, command).await? {
        let Some(queue) = name_of(&change) else { continue };
        let at = change.get_datetime("at").map_or(0, |at| at.timestamp_millis());
        let revision = change.get("revision").and_then(integer).unwrap_or(-1);
        seen.insert((queue, at, revision));
    }
    let new: HashSet<&QueueName> = seen.difference(&mark.seen).map(|(queue, ..)| queue).collect();
    let changes = if anew {
        SettingsChanges::Unknown
    } else {
        SettingsChanges::Of(new.into_iter().cloned().collect())
    };
    *mark = Mark { election, at: now.0, seen };
    Ok(changes)
}

/// Returns what differs after an election: its id. A router knows none, so there the time has to do.
async fn election(inner: &Inner) -> Result<Bson> {
    let hello = read_in_time(&inner.db, || inner.db.run_command(doc! { "hello": 1 })).await?;
    Ok(if hello.get_str("msg").is_ok_and(|msg| msg == "isdbgrid") {
        Bson::Int64(inner.now().0 / ROUTED)
    } else {
        hello.get("electionId").cloned().unwrap_or(Bson::Null)
    })
}
