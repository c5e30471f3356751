//! Replays: makes processed items ready again.

use mongodb::bson::{Document, doc, rawdoc};

use crate::{
    domain::{Queue, Timestamp},
    store::{
        Result, Selection,
        mongo::{
            Inner,
            ordering::{self, OrderKey},
            schema::{
                item::{Stored, oid, oids},
                layout::{BY_ID, Group, HISTORY, PROCESSED, date, millis},
                settled::{settle_token, settled_before},
            },
            server::{
                connect::{command_of, read},
                statement::{Update, statement},
            },
            settle::{move_item::enter, receipts::update_counted},
        },
    },
};

/// Limit of items of one step.
const STEP: u64 = 500;

/// Makes processed items ready again, the oldest first, and returns how many.
pub(crate) async fn replay(
    inner: &Inner,
    queue: &Queue,
    selection: &Selection,
    limit: u64,
) -> Result<u64> {
    let group = inner.group(&queue.group).await?;
    let (mut replayed, mut after) = (0, None);
    while replayed < limit {
        let step = STEP.min(limit - replayed);
        let items = find(inner, &group, queue, selection, after, step).await?;
        let Some(last) = items.last() else { break };
        after = last.processed.map(|processed| (processed, last.id()));
        replayed += make_ready(inner, &group, queue, &items).await?;
    }
    Ok(replayed)
}

async fn find(
    inner: &Inner,
    group: &Group,
    queue: &Queue,
    selection: &Selection,
    after: Option<(i64, crate::domain::ItemId)>,
    limit: u64,
) -> Result<Vec<Stored>> {
    let q = queue.name.as_str();
    let (mut filter, index) = match selection {
        Selection::Ids(ids) => {
            let ids: Vec<_> = ids.iter().map(|id| oid(*id)).collect();
            (doc! { "_id": { "$in": ids }, "q": q, "when": millis(PROCESSED) }, BY_ID)
        }
        Selection::Processed { start, end } => {
            (doc! { "q": q, "processed": { "$gte": date(*start), "$lt": date(*end) } }, HISTORY)
        }
    };
    filter.insert("deadline", doc! { "$not": { "$lte": date(inner.now()) } });
    if let Some((processed, id)) = after {
        filter.insert(
            "$or",
            vec![
                doc! { "processed": { "$gt": millis(processed) } },
                doc! { "processed": millis(processed), "_id": { "$gt": oid(id) } },
            ],
        );
    }
    let command: Document = doc! {
        "find": group.items.name(), "filter": filter, "hint": index,
        "sort": { "processed": 1, "_id": 1 }, "projection": { "payload": 0 },
        "limit": limit as i64, "batchSize": limit as i64 + 1,
    };
    read(&inner.db, &command_of(&command)?, Stored::read).await
}

async fn make_ready(inner: &Inner, group: &Group, queue: &Queue, items: &[Stored]) -> Result<u64> {
    let (now, settled): (Timestamp, _) = (inner.now(), settle_token(inner));
    let (plain, keyed): (Vec<&Stored>, Vec<&Stored>) =
        items.iter().partition(|item| item.key.is_none());
    let mut statements = Vec::new();
    for lot in [&plain, &keyed] {
        let Some(one) = lot.first() else { continue };
        let filter = rawdoc! {
            "_id": { "$in": oids(lot.iter().map(|item| item.id())) },
            "q": queue.name.as_str(),
            "when": millis(PROCESSED),
        };
        let mut set = doc! {
            "attempt": 1, "earlier": "$deliveries",
            "settled": settled, "settledBefore": settled_before(),
            "deadLettered": of_dead_letters("$deadLettered"),
            "failedAttempts": of_dead_letters("$failedAttempts"),
        };
        let mut unset = vec!["processed", "expires", "deadline", "started"];
        let mut numbers = vec![];
        enter(&mut set, &mut numbers, one, now.0, 0); // items keep their numbers
        unset.retain(|field| !numbers.contains(field));
        let stages = [doc! { "$set": set }, doc! { "$unset": unset }];
        statements.push(statement(filter, Update::pipeline(&stages)?));
    }
    let ids = items.iter().map(Stored::id);
    let n = update_counted(inner, group, statements, settled, ids).await;
    // Rewinds even if the outcome is unknown: the items may be ready, and a cursor must not skip them.
    let set = plain.iter().map(|item| item.priority).collect();
    inner.cursor(&queue.name).rewind(set, now.0);
    let n = n?;
    let keys: Vec<OrderKey> = keyed
        .iter()
        .filter_map(|item| item.key.clone())
        .map(|key| (queue.name.clone(), key))
        .collect();
    ordering::unblock(inner, group, &keys).await?;
    Ok(n)
}

/// Returns an expression: what only a dead letter keeps, and an item that was discarded does not.
fn of_dead_letters(field: &str) -> Document {
    doc! { "$cond": [{ "$gt": ["$origin", null] }, field, "$$REMOVE"] }
}
