//! Claims, until their items have reached the caller. A claim whose items do not get there is undone: its answer was
//! lost or came too late, another write of its round failed, or the caller has gone. Otherwise its items would be
//! leased to nobody, and the end of the lease would count as a failed attempt of each.
//!
//! If the answer to a claim was lost, the broker does not know whether the claim was applied, nor whether it will be:
//! its command may still lie in the server's socket. So undoing a claim has two parts. The first part marks the items
//! that are unchanged since they were read with a settle token, which a late claim does not match. The second part
//! returns the items that carry the claim's lease token to their places. A lapsed item gets back the lock of its last
//! holder, whose receipt is as good as before. Both parts are repeated until the server has answered. Until then this broker claims nothing more from the queue.
//!
//! The push of items that are stored as reserved is a claim too. Its first part inserts a tombstone with the id of each
//! document, which a late insert does not get past.
//!
//! A claim of an item that was announced may come before the item, which then cannot be marked. Such a claim has an end,
//! which the server heeds. If nothing was there to mark or to return, it is undone once more after that.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use mongodb::bson::{Bson, RawArrayBuf, RawDocumentBuf, doc, oid::ObjectId, rawdoc};
use sluicegate_proto::backoff::Backoff;
use tokio::runtime::Handle;

use crate::{
    domain::{IdSet, ItemId, LeaseToken, PrioritySet, QueueName, Timestamp},
    store::{
        Appeared, Reserved, Result, StoreError,
        mongo::{
            Inner,
            cursor::watermarks::QueueCursor,
            schema::{
                item::{Stored, oid, oids, token_oid},
                layout::{BY_ID, Group, TOMBSTONE, date, millis},
                settled::{WITNESS, settle_token, settled_before},
            },
            segment::{
                detach::{Detach, detach},
                document::{Run, Segment},
            },
            server::{
                connect::count,
                insert::{Refusal, insert_documents},
                statement::{Update, statement, update},
            },
        },
    },
};

/// Pauses between attempts to undo a claim.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
/// Limit of errors other than outages, after which a claim is left to the end of its leases.
const MAX_REFUSALS: usize = 10;

/// An item of a claim, as it was read before the claim.
struct Claimed {
    id: ItemId,
    token: LeaseToken,
    priority: i32,
    when: i64,
    attempt: u32,
    deliveries: u32,
    lock: Option<LeaseToken>,
    settled: Option<ObjectId>,
    /// The segment in which it was.
    segment: Option<ItemId>,
    /// The claim is the push of the item.
    is_new: bool,
}

impl Claimed {
    /// An item that nobody has held, of which nothing else is known.
    const fn fresh(id: ItemId, token: LeaseToken) -> Self {
        Self {
            id,
            token,
            priority: 0,
            when: 0,
            attempt: 1,
            deliveries: 0,
            lock: None,
            settled: None,
            segment: None,
            is_new: false,
        }
    }
}

/// A claim whose items are not with the caller yet. If it is dropped before it has [arrived](Claim::arrived), it is
/// undone in the background.
pub(crate) struct Claim {
    inner: Arc<Inner>,
    group: Arc<Group>,
    cursor: Arc<QueueCursor>,
    queue: QueueName,
    items: Vec<Claimed>,
    /// True if the server has said which of the items are claimed.
    known: bool,
    /// From when on the claim takes no effect any more, if it has such an end.
    ends: Option<Instant>,
    /// True if this claim is among the open claims of its queue.
    counted: bool,
    runtime: Handle,
    /// Keeps the store from closing until this claim has arrived or its undoing has begun.
    _open: crate::tasks::Open,
}

impl Claim {
    /// Starts a claim without items. Must be called within a runtime.
    pub(crate) fn begin(
        inner: &Arc<Inner>,
        group: &Arc<Group>,
        cursor: &Arc<QueueCursor>,
        queue: &QueueName,
    ) -> Self {
        cursor.claims.opened();
        let mut claim = Self::begin_push(inner, group, cursor, queue);
        claim.counted = true;
        claim
    }

    /// Starts the claim of items that are pushed as reserved. Reserves of the queue do not wait for it, unless its
    /// outcome turns out to be unknown.
    pub(crate) fn begin_push(
        inner: &Arc<Inner>,
        group: &Arc<Group>,
        cursor: &Arc<QueueCursor>,
        queue: &QueueName,
    ) -> Self {
        Self {
            inner: Arc::clone(inner),
            group: Arc::clone(group),
            cursor: Arc::clone(cursor),
            queue: queue.clone(),
            items: Vec::new(),
            known: false,
            ends: None,
            counted: false,
            runtime: Handle::current(),
            _open: inner.tracker.token(),
        }
    }

    /// Adds an item that is about to be claimed.
    pub(crate) fn add(&mut self, item: &Stored, token: LeaseToken) {
        self.items.push(Claimed {
            id: item.id(),
            token,
            priority: item.priority,
            when: item.when,
            attempt: item.attempt,
            deliveries: item.deliveries,
            lock: item.lock,
            settled: item.settled,
            segment: item.segment.as_ref().map(|seen| seen.id),
            is_new: false,
        });
    }

    /// Adds the only item of the claim, which nobody has read: it is about to be claimed by its id, where it was pushed, by a command
    /// that takes no effect after `ends`.
    pub(crate) fn add_unread(&mut self, id: ItemId, token: LeaseToken, ends: Instant) {
        self.ends = Some(ends);
        self.items.push(Claimed::fresh(id, token));
    }

    /// Notes that the server has claimed the only item of this claim, and what it was before.
    pub(crate) fn was_read(&mut self, item: &Stored, token: LeaseToken) {
        self.items.clear();
        self.add(item, token);
        self.known = true;
    }

    /// Adds an item that is about to be pushed.
    pub(crate) fn add_new(&mut self, id: ItemId, token: LeaseToken, priority: i32, now: Timestamp) {
        self.items.push(Claimed {
            priority,
            when: now.0,
            segment: (id.block().1 > 0).then_some(id.block().0),
            is_new: true,
            ..Claimed::fresh(id, token)
        });
    }

    /// Notes the server's answer: these items are claimed, or all of them if `None`.
    pub(crate) fn answered(&mut self, won: Option<&IdSet<ItemId>>) {
        self.known = true;
        if let Some(won) = won {
            self.items.retain(|item| won.contains(&item.id));
        }
    }

    /// Ends the claim: its items are with the caller.
    pub(crate) fn arrived(mut self) {
        self.items.clear();
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let cursor = Arc::clone(&self.cursor);
        if self.items.is_empty() {
            if self.counted {
                cursor.claims.closed();
            }
            return;
        }
        if !self.counted {
            cursor.claims.opened();
        }
        let lost = Lost {
            inner: Arc::clone(&self.inner),
            group: Arc::clone(&self.group),
            cursor: Arc::clone(&self.cursor),
            queue: self.queue.clone(),
            items: std::mem::take(&mut self.items),
            known: self.known,
            ends: self.ends,
        };
        let undoing = async move {
            lost.undo().await;
            cursor.claims.closed();
        };
        self.inner.tracker.spawn_on(undoing, &self.runtime);
    }
}

/// The result of a reserve together with its claim, which is undone if the result is dropped.
pub(crate) struct Handover {
    pub(crate) reserved: Reserved,
    pub(crate) claim: Option<Claim>,
}

impl Handover {
    /// Takes the result. From here on the items are the caller's.
    pub(crate) fn take(self) -> Reserved {
        if let Some(claim) = self.claim {
            claim.arrived();
        }
        self.reserved
    }
}

/// A claim whose items reached nobody.
struct Lost {
    inner: Arc<Inner>,
    group: Arc<Group>,
    cursor: Arc<QueueCursor>,
    queue: QueueName,
    items: Vec<Claimed>,
    known: bool,
    ends: Option<Instant>,
}

impl Lost {
    async fn undo(&self) {
        let (mut failures, mut refusals) = (0, 0);
        let mut ends = self.ends.filter(|_| self.is_unread());
        loop {
            let error = match self.try_to_undo().await {
                Err(error) => error,
                Ok(0) if let Some(ends) = ends.take() => {
                    if !self.is_stored().await.unwrap_or(false) {
                        // The claim may find it when it is.
                        let ended = tokio::time::sleep_until(ends.into());
                        self.inner.stop.run_until_cancelled(ended).await;
                    }
                    continue; // it may have been stored in between
                }
                Ok(_) => break,
            };
            let pause = BACKOFF.delay(failures);
            failures += 1;
            refusals += usize::from(!matches!(error, StoreError::Unavailable { .. }));
            if failures == 1 {
                tracing::warn!(queue = %self.queue, items = self.items.len(), %error,
                    "the outcome of a claim is not known; undoing it");
            }
            let stop = &self.inner.stop;
            if refusals == MAX_REFUSALS
                || stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none()
            {
                tracing::warn!(queue = %self.queue, items = self.items.len(), %error,
                    "could not undo a claim: its items are ready again when their leases end");
                break;
            }
        }
        self.cursor.forget_prefetched();
        if self.is_unread() {
            self.cursor.appeared(Appeared::FromStart);
            return;
        }
        for item in &self.items {
            self.cursor.rewind(PrioritySet::of(item.priority), item.when);
        }
    }

    /// True if nothing is known of the only item but its id, and that the claim matches it only where it was pushed.
    const fn is_unread(&self) -> bool {
        self.ends.is_some() && !self.known
    }

    /// Returns true if one of the items is there.
    async fn is_stored(&self) -> Result<bool> {
        let ids: Vec<ObjectId> = self.items.iter().map(|item| oid(item.id)).collect();
        let filter = doc! { "_id": { "$in": ids } };
        Ok(count(&self.inner.db, self.group.items.name(), filter, BY_ID).await? > 0)
    }

    /// Returns how many documents were marked or returned, or fewer.
    async fn try_to_undo(&self) -> Result<u64> {
        // First, so that a segment that is stored meanwhile is found.
        self.fence_pushes().await?;
        self.detach().await?;
        let settled = settle_token(&self.inner);
        let mut statements = Vec::new();
        if !self.known {
            self.fence(settled, &mut statements)?;
        }
        self.restore(settled, &mut statements)?;
        update(&self.inner, &self.group, statements).await
    }

    /// Items of segments get documents of their own and are ready, also those that were not claimed: a command that
    /// comes late does not find the segment as it was read.
    async fn detach(&self) -> Result<()> {
        let shared = || self.items.iter().filter(|item| item.segment.is_some());
        let tokens: HashMap<ItemId, LeaseToken> =
            shared().map(|item| (item.id, item.token)).collect();
        let segments: BTreeSet<ItemId> = shared().filter_map(|item| item.segment).collect();
        let segments: Vec<ItemId> = segments.into_iter().collect();
        let choose = |segment: &Segment, at: usize, run: Option<&Run>| match run {
            // Also those behind the ones that return: a segment stands where its first item stood.
            None => Detach::Ready,
            Some(run) if tokens.get(&segment.id_of(at)) == Some(&run.lock) => Detach::Ready,
            Some(_) => Detach::No,
        };
        detach(&self.inner, &self.group, &segments, choose).await?;
        Ok(())
    }

    /// Takes the ids of documents that were not stored, so that an insert that comes late cannot store them: their producer
    /// was told that the push failed, and may have repeated it.
    async fn fence_pushes(&self) -> Result<()> {
        let expires = millis(self.inner.now().0 + WITNESS);
        let tombstone = |id: ItemId| {
            rawdoc! {
                "_id": oid(id), "q": self.queue.as_str(), "when": millis(TOMBSTONE), "expires": expires,
            }
        };
        let new = self.items.iter().filter(|item| item.is_new);
        let ids: BTreeSet<ItemId> = new.map(|item| item.segment.unwrap_or(item.id)).collect();
        let tombstones: Vec<RawDocumentBuf> = ids.into_iter().map(tombstone).collect();
        if tombstones.is_empty() {
            return Ok(());
        }
        let refused = insert_documents(&self.group, &tombstones).await?;
        refused.into_values().try_for_each(|refusal| match refusal {
            Refusal::Own | Refusal::Repeated => Ok(()), // the item is stored
            Refusal::Failed(error) => Err(error),
        })
    }

    /// Marks the items that were not claimed, so that a command that comes late cannot claim them.
    fn fence(&self, settled: ObjectId, statements: &mut Vec<RawDocumentBuf>) -> Result<()> {
        let mut lots: HashMap<u32, Vec<&Claimed>> = HashMap::new();
        for item in self.items.iter().filter(|item| item.segment.is_none() && !item.is_new) {
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

    /// Returns the items that were claimed to their places.
    fn restore(&self, settled: ObjectId, statements: &mut Vec<RawDocumentBuf>) -> Result<()> {
        let mut lots: HashMap<_, Vec<ItemId>> = HashMap::new();
        for item in &self.items {
            let when = (!self.is_unread()).then_some(item.when);
            let alike = (item.token, when, item.attempt, item.lock);
            lots.entry(alike).or_default().push(item.id);
        }
        for ((token, when, attempt, lock), ids) in lots {
            let filter = rawdoc! { "_id": { "$in": oids(ids) }, "lock": token_oid(token) };
            let when = when.map_or(Bson::from("$created"), |when| date(Timestamp(when)).into());
            let mut set = doc! {
                "when": when, "attempt": i64::from(attempt),
                "deliveries": { "$subtract": ["$deliveries", 1] },
                "settled": settled, "settledBefore": settled_before(),
            };
            let mut stages = Vec::new();
            match lock {
                Some(lock) => _ = set.insert("lock", token_oid(lock)),
                None => stages.push(doc! { "$unset": ["lock"] }),
            }
            stages.push(doc! { "$set": set });
            statements.push(statement(filter, Update::pipeline(&stages)?));
        }
        Ok(())
    }
}

/// Adds to a filter that lease tokens and settle tokens are as they were read. One set of tokens serves all items of a
/// statement, whose filter names their number of deliveries too.
///
/// Items that were claimed, or settled, by one call share a token. So an item may have changed since it was read, and carry
/// tokens with which another item of the statement was read a moment later. Only two things leave its number of deliveries as
/// it was: the item was reserved in between and returned unsent, or an operator moved it away and back. It is ready all the
/// same, and a claim may take it. If that claim is one that comes late, and [`Lost::fence`] came before the item returned, the
/// item is leased to nobody until the lease ends; several answers have to be lost or late within one write for that.
pub(crate) fn as_read(
    filter: &mut RawDocumentBuf,
    tokens: impl Iterator<Item = (Option<LeaseToken>, Option<ObjectId>)> + Clone,
) {
    use mongodb::bson::raw::cstr;
    filter.append(cstr!("lock"), one_of(tokens.clone().map(|(lock, _)| lock.map(token_oid))));
    filter.append(cstr!("settled"), one_of(tokens.map(|(_, settled)| settled)));
}

/// Returns a condition for a field that has one of these values, or is absent if `None` is among them.
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
