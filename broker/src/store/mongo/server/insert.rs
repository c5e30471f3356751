//! Inserts documents, and tells the ways apart in which the server refuses one.

use std::collections::HashMap;

use mongodb::{bson::RawDocumentBuf, error::ErrorKind};

use crate::store::{
    Result, StoreError,
    mongo::{
        schema::layout::{BY_ID, DEDUP, Group},
        server::{
            error::{DUPLICATE_KEY, broken, failed, index_named, passing_code, unavailable},
            time_limit::in_time,
        },
    },
};

/// Why an insert left out an item.
pub(crate) enum Refusal {
    /// The item is stored already, by an earlier attempt of this insert.
    Own,
    /// Another item has its deduplication id.
    Repeated,
    /// Any other error.
    Failed(StoreError),
}

/// Inserts documents, and returns why some of them were refused, by their places.
pub(crate) async fn insert_documents(
    group: &Group,
    documents: &[RawDocumentBuf],
) -> Result<HashMap<usize, Refusal>> {
    let insert = group.items.insert_many(documents).ordered(false);
    let insert = group.db.in_session(async |it| insert.session(it).await);
    let Err(error) = in_time(&group.db, insert).await else {
        return Ok(HashMap::new());
    };
    let ErrorKind::InsertMany(insert) = error.kind.as_ref() else { return Err(failed(error)) };
    if insert.write_concern_error.is_some() {
        return Err(failed(error));
    }
    let refused = insert.write_errors.iter().flatten().map(|error| {
        let refusal = match (error.code, index_named(&error.message)) {
            (DUPLICATE_KEY, BY_ID) => Refusal::Own,
            (DUPLICATE_KEY, DEDUP) => Refusal::Repeated,
            (code, _) if passing_code(code) => Refusal::Failed(unavailable(error.message.clone())),
            _ => Refusal::Failed(broken(error.message.clone())),
        };
        (error.index, refusal)
    });
    Ok(refused.collect())
}
