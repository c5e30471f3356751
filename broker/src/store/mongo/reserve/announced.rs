//! Claims an item by the id that another broker has announced, without looking for it first. The queue was empty, so that
//! nothing is ahead of it.
//!
//! The id comes from outside. So the command matches nothing but an item that stands where it was pushed and that nobody
//! has ever held: it may have been claimed as well by a reserve that finds it. Whatever else the id stands for is left to
//! the reserve that follows, and so is an item that is not stored yet.

use std::time::{Duration, Instant};

use mongodb::bson::{RawBson, RawDocumentBuf, rawdoc};

use super::{
    Alike, Lease, change,
    claims::{Claim, Handover},
    scan::Place,
};
use crate::{
    domain::{Demand, ItemId, ItemSize, LeaseToken, PrioritySet, Timestamp, Triage, assign},
    store::{
        MAX_NAMED_BYTES, Reserved, Result,
        mongo::{
            schema::{
                item::{Stored, oid},
                layout::{BY_ID, date, durable},
            },
            server::{
                connect::command_of,
                error::{failed, written},
                time_limit::{ANSWER_LIMIT, within},
            },
        },
    },
};

/// The claim takes no effect if it reaches the server later than this.
const BEGINS_WITHIN: Duration = Duration::from_millis(500);
/// How long the server may take for it at most, until it is durable.
const TAKES: Duration = ANSWER_LIMIT;
/// How far the server's clock may be behind this broker's.
const CLOCKS_DIFFER: Duration = Duration::from_millis(100);

/// Claims the item for one of the demands. Returns `None` if it is not claimed.
pub(crate) async fn claim(
    place: &Place<'_>,
    demands: &[Demand],
    id: ItemId,
) -> Result<Option<Handover>> {
    let Place { inner, group, cursor, queue } = *place;
    let now = inner.now();
    if cursor.lease_deadlines.is_pressing(now) {
        return Ok(None); // what they held comes first
    }
    // What is claimed and cannot be taken would have to be put back, hidden from others meanwhile.
    let largest = ItemSize { payload: MAX_NAMED_BYTES, message: 0 };
    let Some(&at) = assign(&[largest], demands).first() else { return Ok(None) };
    let demand = &demands[at];
    let token = LeaseToken::fresh(inner.broker);
    let lease = Lease { token, attempt: 1, until: now + demand.lease, lapsed: false };
    let ends = Instant::now() + BEGINS_WITHIN + TAKES + CLOCKS_DIFFER;
    let mut claim = Claim::begin(inner, group, cursor, &queue.name);
    claim.add_unread(id, token, ends);
    cursor.lease_deadlines.expect(lease.until);
    // If it fails, dropping the claim undoes it.
    let command = command(place, id, demand, &lease, now)?;
    let reply = inner.db.run(command);
    let reply = within(&inner.db, BEGINS_WITHIN + TAKES, reply).await.map_err(failed)?;
    // Once more: a scan for lapsed leases that ran meanwhile may have missed this one.
    cursor.lease_deadlines.expect(lease.until);
    let Ok(before) = reply.get_document("value") else {
        claim.arrived(); // with nothing, whether that is durable or not
        return Ok(None);
    };
    written(&reply)?;
    let item = Stored::read(&command_of(before)?)?;
    cursor.add_used(PrioritySet::of(item.priority));
    claim.was_read(&item, token);
    let is_live = queue.triage(item.at_head(), now) == Triage::Live { attempt: 1 };
    if !is_live || item.size().payload > MAX_NAMED_BYTES {
        return Ok(None);
    }
    inner.lease_cache.add(vec![(id, lease.cached(&item, now))], now);
    let delivery = lease.delivery(item, queue, demand.consumer.as_ref(), now)?;
    let reserved =
        Reserved { deliveries: vec![(at, delivery)], is_named: true, ..Reserved::default() };
    Ok(Some(Handover { reserved, claim: Some(claim) }))
}

fn command(
    place: &Place<'_>,
    id: ItemId,
    demand: &Demand,
    lease: &Lease,
    now: Timestamp,
) -> Result<RawDocumentBuf> {
    // Absent fields: it has never been reserved, settled, moved, delayed or keyed, and is no segment. The end is in the
    // server's time, which `now` is not while it stands still because the clock was set back.
    let fence = rawdoc! {
        "_id": oid(id),
        "q": place.queue.name.as_str(),
        "when": { "$lte": date(now) },
        "attempt": 1,
        "deliveries": 0,
        "lock": RawBson::Null,
        "settled": RawBson::Null,
        "eligible": RawBson::Null,
        "key": RawBson::Null,
        "left": RawBson::Null,
        "$expr": { "$lt": ["$$NOW", date(place.inner.clock.now() + BEGINS_WITHIN)] },
    };
    let alike = Alike {
        consumer: demand.consumer.clone(),
        until: lease.until,
        deliveries: 0,
        attempt: lease.attempt,
        lapsed: lease.lapsed,
    };
    Ok(rawdoc! {
        "findAndModify": place.group.items.name(),
        "query": fence,
        "update": command_of(&change(&alike, lease.token, now))?,
        "hint": BY_ID,
        "maxTimeMS": TAKES.as_millis() as i64,
        "writeConcern": durable(),
    })
}
