//! Tasks that one broker does for all. A document among the counters names the broker and the end of its term.

use std::time::Duration;

use mongodb::bson::{Binary, Document, doc, spec::BinarySubtype};

use crate::store::{
    Result,
    mongo::{
        Inner,
        schema::layout::date,
        server::{
            error::{failed, is_duplicate_key},
            time_limit::in_time,
        },
    },
};

/// Takes or keeps a task for `lasting`; zero ends the term. Returns false if another broker has the task.
pub(crate) async fn lead(inner: &Inner, task: &str, lasting: Duration) -> Result<bool> {
    let now = inner.now();
    let own = Binary { subtype: BinarySubtype::Generic, bytes: inner.broker.to_vec() };
    let free = doc! {
        "_id": format!("lead/{task}"),
        "$or": [{ "broker": &own }, { "until": { "$lte": date(now) } }],
    };
    let taken = doc! { "$set": { "broker": own, "until": date(now + lasting) } };
    let counters = inner.db.collection::<Document>("counters");
    match in_time(&inner.db, counters.update_one(free, taken).upsert(true)).await {
        Ok(_) => Ok(!lasting.is_zero()),
        // The document exists and belongs to another broker.
        Err(error) if is_duplicate_key(&error) => Ok(false),
        Err(error) => Err(failed(error)),
    }
}
