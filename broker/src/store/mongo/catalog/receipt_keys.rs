//! Keys with which receipts are signed.

use mongodb::bson::{Document, doc};

use crate::{
    domain::Timestamp,
    store::{
        RECEIPT_KEYS, Result, StoredReceiptKey,
        mongo::{
            Inner,
            schema::{item::binary, layout::date},
            server::{
                connect::read_documents,
                error::{broken, failed, is_duplicate_key},
                time_limit::in_time,
            },
        },
    },
};

const KEYS: &str = "receiptKeys";

fn read(document: &Document) -> Option<StoredReceiptKey> {
    Some(StoredReceiptKey {
        number: u32::try_from(document.get_i64("_id").ok()?).ok()?,
        secret: document.get_binary_generic("secret").ok()?.as_slice().try_into().ok()?,
        created: Timestamp(document.get_datetime("created").ok()?.timestamp_millis()),
    })
}

/// Returns the keys that a majority has, the newest first: an election may take back any other, and with it the receipts that
/// it signed.
pub(crate) async fn list(inner: &Inner) -> Result<Vec<StoredReceiptKey>> {
    let command =
        doc! { "find": KEYS, "sort": { "_id": -1 }, "readConcern": { "level": "majority" } };
    let found = read_documents(&inner.db, command).await?;
    let keys = found.iter().map(read).collect::<Option<Vec<_>>>();
    keys.ok_or_else(|| broken(format!("a document of the collection {KEYS} is no key")))
}

/// Adds a key, unless there is one of its number, and deletes those before the last few.
pub(crate) async fn add(inner: &Inner, key: &StoredReceiptKey) -> Result<()> {
    let keys = inner.db.collection::<Document>(KEYS);
    let document = doc! {
        "_id": i64::from(key.number), "secret": binary(&key.secret), "created": date(key.created),
    };
    match in_time(&inner.db, keys.insert_one(document)).await {
        Ok(_) => {}
        Err(error) if is_duplicate_key(&error) => {}
        Err(error) => return Err(failed(error)),
    }
    let last = i64::from(key.number.saturating_sub(RECEIPT_KEYS));
    in_time(&inner.db, keys.delete_many(doc! { "_id": { "$lte": last } })).await.map_err(failed)?;
    Ok(())
}
