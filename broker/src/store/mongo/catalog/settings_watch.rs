//! Finds out which queues' settings other brokers have changed.

use std::{collections::HashSet, sync::Arc};

use async_trait::async_trait;
use mongodb::bson::doc;

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
            server::{connect::read_documents, error::integer},
        },
    },
};

/// Milliseconds after its time at which a change may become visible: no write takes longer, and the clocks of brokers
/// agree to within milliseconds.
const LATE: i64 = 30_000;

/// How far changes have been read.
#[derive(Clone, Default)]
struct Mark {
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
async fn changes(inner: &Inner, mark: &mut Mark) -> Result<SettingsChanges> {
    let first = mark.at == 0;
    let now = inner.now();
    let from = millis((if first { now.0 } else { mark.at.min(now.0) }) - LATE);
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
    let changes = if first {
        SettingsChanges::Unknown
    } else {
        SettingsChanges::Of(new.into_iter().cloned().collect())
    };
    *mark = Mark { at: now.0, seen };
    Ok(changes)
}
