//! Operations: one document each.

use std::time::Duration;

use mongodb::{
    Collection,
    bson::{Document, doc},
    options::ReturnDocument,
};

use crate::{
    domain::{OperationId, Timestamp},
    store::{
        Advance, Claim, Created, Operation, OperationPlace, OperationState, Result,
        mongo::{
            Inner,
            catalog::named::Named,
            schema::layout::date,
            server::{
                connect::read_documents,
                error::{broken, failed, integer},
                time_limit::{in_time, read_in_time},
            },
        },
        stored_work::{FORMAT, decode, encode},
    },
};

const OPERATIONS: &str = "operations";
const NAMED: Named<Operation> = Named { collection: OPERATIONS, read };
const RUNNING: &str = "running";
/// Limit of operations that are deleted at a time.
const DELETED_AT_A_TIME: i64 = 1_000;

fn collection(inner: &Inner) -> Collection<Document> {
    inner.db.collection(OPERATIONS)
}

fn write(operation: &Operation) -> Document {
    doc! {
        "_id": operation.id.to_string(), "format": FORMAT, "work": encode(&operation.work),
        "dryRun": operation.dry_run, "startedBy": &operation.started_by,
        "created": date(operation.create_time), "total": operation.total.cast_signed(),
        "state": operation.state.as_str(), "processed": operation.processed.cast_signed(),
        "error": &operation.error, "updated": date(operation.update_time),
        "claimUntil": date(Timestamp(0)),
    }
}

fn read(document: &Document) -> Result<Operation> {
    let text = |name: &str| document.get_str(name).unwrap_or_default();
    let whole = |name: &str| document.get(name).and_then(integer);
    let time =
        |name: &str| Timestamp(document.get_datetime(name).map_or(0, |at| at.timestamp_millis()));
    let id = text("_id");
    let bad = |why: &str| broken(format!("the operation {id:?} has {why}"));
    Ok(Operation {
        id: id.parse().map_err(|()| bad("no id"))?,
        work: decode(text("work")).map_err(|e| bad(&format!("work that cannot be read: {e}")))?,
        dry_run: document.get_bool("dryRun").unwrap_or_default(),
        started_by: text("startedBy").to_owned(),
        create_time: time("created"),
        total: whole("total").unwrap_or_default().cast_unsigned(),
        state: OperationState::parse(text("state")).ok_or_else(|| bad("no state"))?,
        processed: whole("processed").unwrap_or_default().cast_unsigned(),
        error: text("error").to_owned(),
        update_time: time("updated"),
        claim: whole("claim").map(Claim::of_number),
    })
}

/// Creates an operation, or returns the existing one.
pub(crate) async fn create(inner: &Inner, operation: &Operation) -> Result<Created<Operation>> {
    NAMED.create(inner, &operation.id.to_string(), &write(operation)).await
}

/// Returns an operation.
pub(crate) async fn get(inner: &Inner, id: OperationId) -> Result<Option<Operation>> {
    let filter = doc! { "_id": id.to_string(), "format": FORMAT };
    let operations = collection(inner);
    let found = read_in_time(&inner.db, || operations.find_one(filter.clone())).await?;
    found.as_ref().map(read).transpose()
}

/// Returns operations, the newest first. There are so few that they need no index.
pub(crate) async fn list(
    inner: &Inner,
    after: Option<OperationPlace>,
    limit: usize,
) -> Result<Vec<Operation>> {
    let mut filter = doc! { "format": FORMAT };
    if let Some(OperationPlace { create_time, id }) = after {
        let created = date(create_time);
        let same_time = doc! { "created": created, "_id": { "$lt": id.to_string() } };
        filter.insert("$or", vec![doc! { "created": { "$lt": created } }, same_time]);
    }
    let limit = limit as i64;
    let command = doc! {
        "find": OPERATIONS, "filter": filter, "sort": { "created": -1, "_id": -1 },
        "limit": limit, "batchSize": limit + 1,
    };
    read_documents(&inner.db, command).await?.iter().map(read).collect()
}

/// Returns the number of running operations.
pub(crate) async fn running(inner: &Inner) -> Result<u64> {
    let operations = collection(inner);
    read_in_time(&inner.db, || operations.count_documents(doc! { "state": RUNNING })).await
}

/// Claims the oldest running operation that nobody has a claim on.
pub(crate) async fn claim(
    inner: &Inner,
    claim: Claim,
    lasting: Duration,
) -> Result<Option<Operation>> {
    let now = inner.now();
    let filter = doc! { "state": RUNNING, "format": FORMAT, "claimUntil": { "$lte": date(now) } };
    let take = doc! { "$set": { "claim": claim.to_number(), "claimUntil": date(now + lasting) } };
    let operations = collection(inner);
    let update = operations
        .find_one_and_update(filter, take)
        .sort(doc! { "created": 1, "_id": 1 })
        .return_document(ReturnDocument::After);
    let found = in_time(&inner.db, update).await.map_err(failed)?;
    found.as_ref().map(read).transpose()
}

/// Notes how far an operation is, if the claim is still valid.
pub(crate) async fn advance(
    inner: &Inner,
    id: OperationId,
    claim: Claim,
    advance: &Advance,
    lasting: Duration,
) -> Result<Option<Operation>> {
    let now = inner.now();
    let if_running = |new: &str, field: &str| {
        doc! { "$cond": [{ "$eq": ["$state", RUNNING] }, { "$literal": new }, field] }
    };
    let set = doc! { "$set": {
        "processed": { "$max": ["$processed", advance.processed.cast_signed()] },
        "updated": date(now), "claimUntil": date(now + lasting),
        "error": if_running(&advance.error, "$error"),
        "state": if_running(advance.state.as_str(), "$state"),
    } };
    let filter = doc! { "_id": id.to_string(), "claim": claim.to_number() };
    change(inner, filter, vec![set]).await
}

async fn change(
    inner: &Inner,
    filter: Document,
    stages: Vec<Document>,
) -> Result<Option<Operation>> {
    let operations = collection(inner);
    let update =
        operations.find_one_and_update(filter, stages).return_document(ReturnDocument::After);
    let found = in_time(&inner.db, update).await.map_err(failed)?;
    found.as_ref().map(read).transpose()
}

/// Cancels an operation, if it is running.
pub(crate) async fn cancel(inner: &Inner, id: OperationId) -> Result<Option<Operation>> {
    let filter = doc! { "_id": id.to_string(), "format": FORMAT, "state": RUNNING };
    let set = doc! { "$set": {
        "state": OperationState::Cancelled.as_str(), "updated": date(inner.now()),
    } };
    match change(inner, filter, vec![set]).await? {
        Some(cancelled) => Ok(Some(cancelled)),
        None => get(inner, id).await,
    }
}

/// Deletes operations that ended before this time, and those beyond the `keep` that ended last.
pub(crate) async fn delete(inner: &Inner, ended_before: Timestamp, keep: usize) -> Result<()> {
    let operations = collection(inner);
    let ended = doc! { "state": { "$ne": RUNNING } };
    let mut old = ended.clone();
    old.insert("updated", doc! { "$lt": date(ended_before) });
    in_time(&inner.db, operations.delete_many(old)).await.map_err(failed)?;
    let command = doc! {
        "find": OPERATIONS, "filter": ended.clone(), "projection": { "_id": 1 },
        "sort": { "updated": -1, "created": -1, "_id": -1 }, "skip": keep as i64,
        "limit": DELETED_AT_A_TIME, "batchSize": DELETED_AT_A_TIME + 1,
    };
    let beyond = read_documents(&inner.db, command).await?;
    if beyond.is_empty() {
        return Ok(());
    }
    let ids: Vec<_> = beyond.iter().filter_map(|document| document.get("_id")).collect();
    let mut those = ended;
    those.insert("_id", doc! { "$in": ids });
    in_time(&inner.db, operations.delete_many(those)).await.map_err(failed)?;
    Ok(())
}
