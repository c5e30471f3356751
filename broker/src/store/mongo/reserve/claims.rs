//! Claims until they have reached whoever asked for them. One that does not get there is undone: its answer was
//! lost or came too late, another write of its round failed, the caller has gone. Otherwise its items would be
//! leased to nobody, and the end of the lease would count as a failed attempt of each.
//!
//! Whether a claim whose answer was lost has been applied is not known, nor whether it is applied later: its
//! command may lie in the server's socket still. So undoing one has two parts. The first marks the items that are as
//! they were read with a settle token, which a claim that comes late does not match. The second puts back those that
//! carry the claim's lease. Both are repeated until the server has answered; while that lasts nothing more is
//! claimed from the queue by this broker.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use mongodb::bson::{RawArrayBuf, RawDocumentBuf, doc, oid::ObjectId, rawdoc};
use sluicegate_proto::backoff::Backoff;
use tokio::runtime::Handle;

use crate::{
    domain::{ItemId, LeaseToken, PrioritySet, QueueName, Timestamp},
    store::{
        Reserved, Result, StoreError,
        mongo::{
            Inner,
            cursor::watermarks::QueueCursor,
            schema::{
                item::{Stored, oids, token_oid},
                layout::{Group, date},
                settled::{settle_token, settled_before},
            },
            server::statement::{Update, statement, update},
        },
    },
};

/// Pauses between attempts to undo a claim.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
/// After so many refusals that are no outage undoing is given up: the leases end by themselves.
const MAX_REFUSALS: usize = 10;

/// An item of a claim, as it was read before.
struct Claimed {
    id: ItemId,
    token: LeaseToken,
    priority: i32,
    when: i64,
    /// The number of its attempt under the claim.
    attempt: u32,
    deliveries: u32,
    lock: Option<LeaseToken>,
    settled: Option<ObjectId>,
}

/// A claim on its way: undone in the background when dropped before it [arrived](Claim::arrived).
pub(crate) struct Claim {
    inner: Arc<Inner>,
    group: Arc<Group>,
    cursor: Arc<QueueCursor>,
    queue: QueueName,
    items: Vec<Claimed>,
    /// The server has said which of the items are claimed.
    known: bool,
    runtime: Handle,
}

impl Claim {
    /// Starts a claim of no items yet. Must be called within a runtime.
    pub(crate) fn begin(
        inner: &Arc<Inner>,
        group: &Arc<Group>,
        cursor: &Arc<QueueCursor>,
        queue: &QueueName,
    ) -> Self {
        cursor.claims.opened();
        Self {
            inner: Arc::clone(inner),
            group: Arc::clone(group),
            cursor: Arc::clone(cursor),
            queue: queue.clone(),
            items: Vec::new(),
            known: false,
            runtime: Handle::current(),
        }
    }

    /// Adds an item that is about to be claimed.
    pub(crate) fn add(&mut self, item: &Stored, token: LeaseToken, attempt: u32) {
        self.items.push(Claimed {
            id: item.id(),
            token,
            priority: item.priority,
            when: item.when,
            attempt,
            deliveries: item.deliveries,
            lock: item.lock,
            settled: item.settled,
        });
    }

    /// Notes the server's answer: these items are claimed, all of them if `None`.
    pub(crate) fn answered(&mut self, won: Option<&HashSet<ItemId>>) {
        self.known = true;
        if let Some(won) = won {
            self.items.retain(|item| won.contains(&item.id));
        }
    }

    /// The items are with whoever asked for them.
    pub(crate) fn arrived(mut self) {
        self.items.clear();
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let cursor = Arc::clone(&self.cursor);
        let close = move || cursor.claims.closed();
        if self.items.is_empty() {
            close();
            return;
        }
        let lost = Lost {
            inner: Arc::clone(&self.inner),
            group: Arc::clone(&self.group),
            cursor: Arc::clone(&self.cursor),
            queue: self.queue.clone(),
            items: std::mem::take(&mut self.items),
            known: self.known,
        };
        let undoing = async move {
            lost.undo().await;
            close();
        };
        self.inner.tracker.spawn_on(undoing, &self.runtime);
    }
}

/// The answer of a reserve with the claim behind it, which is undone if the answer is dropped.
pub(crate) struct Handover {
    pub(crate) reserved: Reserved,
    pub(crate) claim: Option<Claim>,
}

impl Handover {
    /// Takes the answer: from here on the items are the caller's.
    pub(crate) fn take(self) -> Reserved {
        if let Some(claim) = self.claim {
            claim.arrived();
        }
        self.reserved
    }
}

/// A claim that reached nobody.
struct Lost {
    inner: Arc<Inner>,
    group: Arc<Group>,
    cursor: Arc<QueueCursor>,
    queue: QueueName,
    items: Vec<Claimed>,
    known: bool,
}

impl Lost {
    async fn undo(&self) {
        let (mut failures, mut refusals) = (0, 0);
        loop {
            let Err(error) = self.try_to_undo().await else { break };
            let pause = BACKOFF.delay(failures);
            failures += 1;
            refusals += usize::from(!matches!(error, StoreError::Unavailable { .. }));
            if failures == 1 {
                tracing::warn!(queue = %self.queue, items = self.items.len(), %error,
                    "what became of a claim is not known; taking it back");
            }
            let stop = &self.inner.stop;
            if refusals == MAX_REFUSALS
                || stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none()
            {
                tracing::warn!(queue = %self.queue, items = self.items.len(), %error,
                    "could not take a claim back: its items are ready again when their leases end");
                break;
            }
        }
        self.cursor.forget_prefetched();
        for item in &self.items {
            self.cursor.rewind(PrioritySet::of(item.priority), item.when);
        }
    }

    async fn try_to_undo(&self) -> Result<()> {
        let settled = settle_token(&self.inner);
        let mut statements = Vec::new();
        if !self.known {
            self.fence(settled, &mut statements)?;
        }
        self.restore(settled, &mut statements)?;
        update(&self.inner, &self.group, statements).await?;
        Ok(())
    }

    /// What was not claimed cannot be claimed by a command that comes late.
    fn fence(&self, settled: ObjectId, statements: &mut Vec<RawDocumentBuf>) -> Result<()> {
        let mut lots: HashMap<u32, Vec<&Claimed>> = HashMap::new();
        for item in &self.items {
            lots.entry(item.deliveries).or_default().push(item);
        }
        for (deliveries, lot) in lots {
            let mut filter = rawdoc! {
                "_id": { "$in": oids(lot.iter().map(|item| item.id)) },
                "q": self.queue.as_str(),
                "deliveries": i64::from(deliveries),
            };
            as_read(&mut filter, lot.iter().map(|item| (item.lock, item.settled)));
            let mark = doc! { "settled": settled, "settledBefore": settled_before() };
            statements.push(statement(filter, Update::pipeline(&[doc! { "$set": mark }])?));
        }
        Ok(())
    }

    /// What was claimed goes back to its place.
    fn restore(&self, settled: ObjectId, statements: &mut Vec<RawDocumentBuf>) -> Result<()> {
        let mut lots: HashMap<(LeaseToken, i64, u32), Vec<ItemId>> = HashMap::new();
        for item in &self.items {
            lots.entry((item.token, item.when, item.attempt)).or_default().push(item.id);
        }
        for ((token, when, attempt), ids) in lots {
            let filter = rawdoc! { "_id": { "$in": oids(ids) }, "lock": token_oid(token) };
            let set = doc! {
                "when": date(Timestamp(when)), "attempt": i64::from(attempt),
                "deliveries": { "$subtract": ["$deliveries", 1] },
                "settled": settled, "settledBefore": settled_before(),
            };
            let stages = [doc! { "$set": set }, doc! { "$unset": ["lock"] }];
            statements.push(statement(filter, Update::pipeline(&stages)?));
        }
        Ok(())
    }
}

/// Adds to a filter that leases and settle tokens are as they were read. No two items ever carry the same token
/// at different times, so one set of tokens serves all of a statement's items.
pub(crate) fn as_read(
    filter: &mut RawDocumentBuf,
    tokens: impl Iterator<Item = (Option<LeaseToken>, Option<ObjectId>)> + Clone,
) {
    use mongodb::bson::raw::cstr;
    filter.append(cstr!("lock"), one_of(tokens.clone().map(|(lock, _)| lock.map(token_oid))));
    filter.append(cstr!("settled"), one_of(tokens.map(|(_, settled)| settled)));
}

/// Matches a field that has one of these values, or is absent if `None` is among them.
fn one_of(values: impl Iterator<Item = Option<ObjectId>>) -> RawDocumentBuf {
    let distinct: HashSet<Option<ObjectId>> = values.collect();
    let mut array = RawArrayBuf::new();
    for value in distinct {
        match value {
            Some(value) => array.push(value),
            None => array.push(mongodb::bson::RawBson::Null),
        }
    }
    rawdoc! { "$in": array }
}
