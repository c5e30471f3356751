//! Commits one item and stores others in one transaction.

use std::sync::Arc;

use mongodb::{ClientSession, bson::doc};

use crate::{
    domain::{OrderingKey, Outcome, Pushed},
    store::{
        Push, Reservation, Result,
        mongo::{
            Inner, ordering,
            push::{Marks, ordered::insert, record_priorities, wake},
            schema::{
                item::{Stored, check, oid, token_oid},
                layout::{Group, date},
                settled::{finish, settle_token},
            },
            segment::detach::detach_held,
            server::transaction::{Failure, Patience, abort, attempt_in_time, begin, commit},
            settle::receipts::{look, stale},
        },
    },
};

/// Commits one item and pushes others; either all of it takes effect or nothing.
pub(crate) async fn commit_and_push(
    inner: &Arc<Inner>,
    held: Reservation,
    items: Vec<Push>,
) -> Result<(Outcome, Vec<Pushed>)> {
    items.iter().try_for_each(|push| check(&push.item))?;
    let group = inner.group(&held.receipt.group).await?;
    let mut lots: Vec<(Arc<Group>, Vec<usize>, Vec<Push>)> = Vec::new();
    for (at, push) in items.iter().enumerate() {
        let target = inner.group(&push.queue.group).await?;
        let place = lots.iter().position(|lot| Arc::ptr_eq(&lot.0, &target));
        let place = place.unwrap_or_else(|| {
            lots.push((target, Vec::new(), Vec::new()));
            lots.len() - 1
        });
        lots[place].1.push(at);
        lots[place].2.push(push.clone());
    }
    for (group, _, items) in &lots {
        record_priorities(inner, group, items).await?;
    }
    inner.lease_cache.take(&held.receipt);
    detach_held(inner, &group, [(held.receipt.item, held.receipt.token)]).await?;
    let mut patience = Patience::new();
    loop {
        let mut session = begin(&inner.db).await?;
        let mut marks = Marks::default();
        let attempt = async {
            let Some(key) = settle(inner, &group, &held, &mut session).await? else {
                return Ok(None);
            };
            let mut pushed = Vec::new();
            for (group, _, items) in &lots {
                pushed.push(insert(inner, group, items, &mut session, &mut marks).await?);
            }
            commit(&mut session).await?;
            Ok(Some((key, pushed)))
        };
        let outcome = attempt_in_time(attempt).await;
        marks.rewind(inner);
        match patience.after(&mut session, outcome).await? {
            Some(None) => {
                abort(&mut session).await;
                let found = look(inner, &group, [held.receipt.item]).await?;
                return Ok((stale(found.get(&held.receipt.item), inner.now()), Vec::new()));
            }
            Some(Some((key, pushed))) => {
                let mut results = vec![None; items.len()];
                for ((group, places, items), mut pushed) in lots.iter().zip(pushed) {
                    wake(inner, group, items, pushed.iter_mut()).await;
                    for (at, pushed) in places.iter().zip(pushed) {
                        results[*at] = Some(pushed);
                    }
                }
                if let Some(key) = key {
                    let key = [(held.receipt.queue.clone(), key)];
                    ordering::unblock_settled(inner, &group, &key).await;
                }
                return Ok((Outcome::Ok, results.into_iter().flatten().collect()));
            }
            None => {}
        }
    }
}

/// Ends the reservation within the transaction. Returns the item's ordering key, which may be empty, or `None` if the
/// receipt does not hold the item.
async fn settle(
    inner: &Inner,
    group: &Group,
    held: &Reservation,
    session: &mut ClientSession,
) -> Result<Option<Option<OrderingKey>>, Failure> {
    let (now, token) = (inner.now(), settle_token(inner));
    let filter = doc! {
        "_id": oid(held.receipt.item), "lock": token_oid(held.receipt.token),
        "deadline": { "$not": { "$lte": date(now) } },
    };
    // Leaves a tombstone even if this broker could delete the item, so that a repeated call gets the same answer.
    let change = finish(now, token, &held.queue, None);
    let found = group
        .items
        .find_one_and_update(filter, change)
        .projection(doc! { "payload": 0 })
        .session(session)
        .await?;
    Ok(match found {
        Some(found) => Some(Stored::read(&found)?.key),
        None => None,
    })
}
