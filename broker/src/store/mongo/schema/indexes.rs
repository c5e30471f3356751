//! Creates what a group needs in the database: indexes, the view for people, and the document that keeps deletes fast.

use mongodb::{
    Collection,
    bson::{Document, doc, oid::ObjectId},
};

use crate::store::{
    Result,
    mongo::{
        schema::layout::{DEDUP, ENDS, Group, HANDOUT, HISTORY, SEGMENTS, TURN, WAITING},
        segment::view,
        server::{
            error::{failed, is_duplicate_key, written},
            places::Db,
            time_limit::in_time,
        },
    },
};

impl Group {
    /// Creates the indexes, once per process.
    pub(crate) async fn ensure_indexes(&self, db: &Db) -> Result<()> {
        self.indexes.get_or_try_init(|| create_indexes(db, self.items.name())).await?;
        Ok(())
    }
}

async fn create_indexes(db: &Db, collection: &str) -> Result<()> {
    let partial = |field: &str| doc! { field: { "$exists": true } };
    let indexes: [Document; 8] = [
        doc! { "name": HANDOUT, "key": { "q": 1, "priority": -1, "when": 1, "_id": 1 } },
        doc! {
            "name": "expires", "key": { "expires": 1 }, "expireAfterSeconds": 0,
            "partialFilterExpression": partial("expires"),
        },
        doc! {
            "name": ENDS, "key": { "q": 1, "deadline": 1 },
            "partialFilterExpression": partial("deadline"),
        },
        doc! {
            "name": HISTORY, "key": { "q": 1, "processed": 1, "_id": 1 },
            "partialFilterExpression": partial("processed"),
        },
        doc! {
            "name": DEDUP, "key": { "dedup": 1 }, "unique": true,
            "partialFilterExpression": partial("dedup"),
        },
        doc! {
            "name": TURN, "key": { "q": 1, "turn": 1 }, "unique": true,
            "partialFilterExpression": partial("turn"),
        },
        doc! {
            "name": WAITING, "key": { "q": 1, "key": 1, "seq": 1 },
            "partialFilterExpression": partial("due"),
        },
        doc! {
            "name": SEGMENTS,
            "key": { "q": 1, "lapse": 1, "priority": 1, "when": 1, "left": 1, "ready": 1 },
            "partialFilterExpression": { "left": { "$gte": 0 } },
        },
    ];
    let command = doc! { "createIndexes": collection, "indexes": indexes.to_vec() };
    let reply = in_time(db, db.run_command(command)).await.map_err(failed)?;
    written(&reply)?;
    set_last(db, &db.collection(collection)).await?;
    view::create(db, collection).await
}

/// Inserts the document behind all others by `_id`. It is never deleted.
///
/// After each document, a delete of many returns to its place in the index of ids and searches for the next live entry
/// there. Behind the newest item of all there is no live entry, and the search would turn round and walk through
/// everything that was ever deleted. This took a quarter of the server's time.
async fn set_last(db: &Db, items: &Collection<Document>) -> Result<()> {
    let last = doc! {
        "_id": ObjectId::from_bytes([0xFF; 12]), "q": "\u{10FFFF}",
        "note": "keeps deletes fast: leave it here",
    };
    match in_time(db, items.insert_one(last)).await {
        Err(error) if is_duplicate_key(&error) => Ok(()),
        result => result.map(|_| ()).map_err(failed),
    }
}
