//! Settles: commit, rollback, move and extend.

use std::{collections::HashMap, sync::Arc, time::Duration};

use bytes::Bytes;

use crate::{
    domain::{
        AtLimit, Cause, Headers, ItemId, LimitReason, NewItem, Outcome, Priority, Pushed, Queue,
        QueueName, Receipt, Timestamp, Topic, Totals, check_header_limits, cut_reason,
    },
    store::{Extension, Move, Push, Reservation, Rollback, RollbackTo},
};

use super::{Engine, EngineError, MayCreate, Result, committing::Committing, depths::Change};

/// A requested rollback of an item.
#[derive(Debug, Clone)]
pub(crate) struct RollbackRequest {
    /// Identifies the reservation.
    pub receipt: Receipt,
    /// When the item may be handed out again, if not as the queue's retry policy says.
    pub delay: Option<Duration>,
    /// The reason given by the consumer.
    pub reason: String,
    /// What ended the reservation.
    pub cause: Cause,
}

/// A requested move of an item.
#[derive(Debug, Clone)]
pub(crate) struct MoveRequest {
    /// Identifies the reservation.
    pub receipt: Receipt,
    /// The destination.
    pub to_queue: QueueName,
    /// The new payload, if any.
    pub payload: Option<Bytes>,
    /// The new media type, if any.
    pub content_type: Option<String>,
    /// Headers to be merged into those of the item.
    pub headers: Headers,
    /// The new priority, if any.
    pub priority: Option<Priority>,
    /// Delay from now until the item is eligible.
    pub delay: Duration,
}

impl MoveRequest {
    /// Returns true if the item is not the same afterwards, apart from its queue.
    pub(crate) fn changes_item(&self) -> bool {
        self.payload.is_some()
            || self.content_type.is_some()
            || self.priority.is_some()
            || !self.headers.is_empty()
    }
}

/// Returns what a commit adds to the totals.
fn committed() -> Totals {
    Totals { committed: 1, ..Totals::default() }
}

impl Engine {
    /// Commits items. Returns when the commits are durable.
    pub(crate) async fn commit(&self, receipts: &[Receipt]) -> Result<Vec<Outcome>> {
        let (held, places) = self.with_queues(receipts.iter()).await?;
        let begun = self.now();
        let committing = Committing::begin(self, receipts);
        let found = self.store.commit(held).await?;
        committing.end();
        let outcomes = spread(&places, found, receipts.len());
        let settled = receipts.iter().zip(outcomes.iter().copied());
        self.notify_settled(begun, settled, &committed());
        Ok(outcomes)
    }

    /// Notes that their consumers ask to settle these reservations otherwise than by a commit, so that no commit of all items up to one
    /// includes them, whatever becomes of that.
    fn name<'a>(&self, receipts: impl Iterator<Item = &'a Receipt>) {
        for receipt in receipts {
            if let Some(dispatcher) = self.dispatcher(&receipt.queue) {
                dispatcher.name(std::slice::from_ref(receipt));
            }
        }
    }

    /// Rolls items back.
    pub(crate) async fn rollback(&self, requests: Vec<RollbackRequest>) -> Result<Vec<Outcome>> {
        self.name(requests.iter().map(|request| &request.receipt));
        let (held, places) = self.with_queues(requests.iter().map(|r| &r.receipt)).await?;
        let count = requests.len();
        let mut requests: Vec<_> = requests.into_iter().map(Some).collect();
        let mut rollbacks = Vec::with_capacity(held.len());
        // The settings of queues whose destination of items at a limit was determined here.
        let mut known: HashMap<QueueName, Arc<Queue>> = HashMap::new();
        for (mut held, place) in held.into_iter().zip(&places) {
            let Some(request) = requests[*place].take() else { continue };
            if Self::needs_limit(&held.queue, &held.receipt, request.cause) {
                let name = &held.queue.name;
                if !known.contains_key(name) {
                    known.insert(name.clone(), self.with_known_limit(&held.queue).await?);
                }
                if let Some(queue) = known.get(name).filter(|queue| queue.group == held.queue.group)
                {
                    held.queue = Arc::clone(queue);
                }
            }
            let reason = (!request.reason.is_empty()).then(|| cut_reason(request.reason));
            rollbacks.push(self.plan_rollback(held, request.cause, request.delay, reason));
        }
        let found = self.roll_back(rollbacks).await?;
        Ok(spread(&places, found, count))
    }

    /// Carries out planned rollbacks, counts them, and wakes the consumers concerned.
    pub(super) async fn roll_back(&self, rollbacks: Vec<Rollback>) -> Result<Vec<Outcome>> {
        let told: Vec<_> = rollbacks
            .iter()
            .map(|rollback| (rollback.held.receipt.clone(), rollback.to.clone()))
            .collect();
        let begun = self.now();
        let outcomes = self.store.rollback(rollbacks).await.inspect_err(|error| {
            let queues = told.iter().filter_map(|(receipt, to)| match to {
                RollbackTo::Queue { .. } => Some(&receipt.queue),
                RollbackTo::DeadLetter { to, .. } => Some(to),
                RollbackTo::Discard { .. } => None,
            });
            self.wake_if_unknown(error, queues);
        })?;
        let settled = told.iter().map(|(receipt, _)| receipt).zip(outcomes.iter().copied());
        let rolled_back = Totals { rolled_back: 1, ..Totals::default() };
        self.notify_settled(begun, settled, &rolled_back);
        // The queues that have received items: the items' own queues or their dead-letter queues.
        let mut back: HashMap<QueueName, Timestamp> = HashMap::new();
        let mut at_limit: HashMap<(&QueueName, Option<&QueueName>, LimitReason), u64> =
            HashMap::new();
        for ((receipt, to), outcome) in told.iter().zip(&outcomes) {
            let (name, since) = match (to, outcome) {
                (RollbackTo::Queue { eligible_time, .. }, Outcome::Ok) => {
                    (&receipt.queue, *eligible_time)
                }
                (RollbackTo::DeadLetter { to, reason, .. }, Outcome::DeadLettered) => {
                    *at_limit.entry((&receipt.queue, Some(to), *reason)).or_default() += 1;
                    (to, self.now())
                }
                (RollbackTo::Discard { reason, .. }, Outcome::DeadLettered) => {
                    *at_limit.entry((&receipt.queue, None, *reason)).or_default() += 1;
                    continue;
                }
                _ => continue,
            };
            self.came_back(name, since, *outcome);
            back.entry(name.clone()).and_modify(|s| *s = since.min(*s)).or_insert(since);
        }
        for ((queue, to, reason), items) in at_limit {
            self.report_at_limit(queue, to, reason, items);
        }
        for (queue, since) in back {
            self.notify_inserted(&queue, Some(since));
        }
        Ok(outcomes)
    }

    /// Corrects a depth by one rolled-back item. [`Engine::count`] takes an item that returned to
    /// its own queue for ready, and does not count arrivals in a dead-letter queue.
    fn came_back(&self, queue: &QueueName, since: Timestamp, outcome: Outcome) {
        let change = match outcome {
            Outcome::DeadLettered => Change::arrived(1),
            _ if since > self.now() => Change { ready: -1, delayed: 1, ..Change::default() },
            _ => return,
        };
        self.stats.depths.changed(queue, || change);
    }

    /// Extends leases. Returns their new ends.
    pub(crate) async fn extend(
        &self,
        receipts: Vec<Receipt>,
        lease: Option<Duration>,
    ) -> Result<Vec<(Outcome, Option<Timestamp>)>> {
        let results = self.extend_held(&receipts, lease, false).await?;
        for (receipt, (outcome, _)) in receipts.iter().zip(&results) {
            if *outcome != Outcome::Ok
                && let Some(dispatcher) = self.dispatcher(&receipt.queue)
            {
                dispatcher.settled(std::iter::once(receipt), self.now());
            }
        }
        Ok(results)
    }

    /// Extends leases, or renews them, which does not shorten any. The caller handles the items that are no longer held.
    pub(super) async fn extend_held(
        &self,
        receipts: &[Receipt],
        lease: Option<Duration>,
        is_renewal: bool,
    ) -> Result<Vec<(Outcome, Option<Timestamp>)>> {
        let (held, places) = self.with_queues(receipts.iter()).await?;
        let now = self.now();
        let ends = held
            .iter()
            .map(|held| Ok(now + self.lease(&held.queue, lease)?))
            .collect::<Result<Vec<_>>>()?;
        let items = held.into_iter().zip(ends.iter().copied());
        let items = items.map(|(held, until)| Extension { held, until, is_renewal }).collect();
        let found = self.store.extend(items).await?;
        let mut results = vec![(Outcome::Gone, None); receipts.len()];
        for ((place, outcome), until) in places.into_iter().zip(found).zip(ends) {
            results[place] = (outcome, (outcome == Outcome::Ok).then_some(until));
            if outcome == Outcome::Ok
                && let Some(dispatcher) = self.dispatcher(&receipts[place].queue)
            {
                dispatcher.extended(&receipts[place], until, is_renewal);
            }
        }
        Ok(results)
    }

    /// Moves an item into another queue of its group, atomically.
    pub(crate) async fn move_item(
        &self,
        request: MoveRequest,
        may_create: MayCreate<'_>,
    ) -> Result<Outcome> {
        let receipt = request.receipt;
        self.name(std::iter::once(&receipt));
        let to = self.queue_for_push(&request.to_queue, 1, may_create).await?;
        if to.group != receipt.group {
            return Err(EngineError::DifferentGroup { from: receipt.group, to: to.group.clone() });
        }
        let Some(queue) = self.queue_of(&receipt).await? else { return Ok(Outcome::Gone) };
        if !request.headers.is_empty() {
            self.check_merged_headers(&queue, receipt.item, &request.headers).await?;
        }
        let eligible_time = self.now() + request.delay;
        let moved = Move {
            held: Reservation { queue, receipt: receipt.clone() },
            to: Arc::clone(&to),
            payload: request.payload,
            content_type: request.content_type,
            headers: request.headers,
            priority: request.priority,
            eligible_time,
        };
        let begun = self.now();
        let found = self.store.move_items(vec![moved]).await;
        let found = found.inspect_err(|error| self.wake_if_unknown(error, [&to.name]))?;
        let outcome = found.first().copied().unwrap_or(Outcome::Gone);
        let moved = Totals { moved: 1, ..Totals::default() };
        self.notify_settled(begun, [(&receipt, outcome)].into_iter(), &moved);
        if outcome == Outcome::Ok {
            let arrived = if eligible_time > self.now() {
                Change { delayed: 1, ..Change::default() }
            } else {
                Change::arrived(1)
            };
            self.stats.depths.changed(&to.name, || arrived);
            self.notify_inserted(&to.name, Some(eligible_time));
        }
        Ok(outcome)
    }

    /// Refuses a move that would leave an item with more headers than a push may give it. The
    /// headers cannot change between this check and the move: only a move changes them, and it
    /// would end the reservation.
    async fn check_merged_headers(&self, queue: &Queue, item: ItemId, new: &Headers) -> Result<()> {
        let Some(item) = self.store.get_item(queue, item).await? else {
            return Ok(()); // the move returns what happened to the item
        };
        let mut merged = item.headers;
        merged.extend(new.clone());
        Ok(check_header_limits("headers", &merged)?)
    }

    /// Commits an item and pushes others, all or nothing.
    pub(crate) async fn commit_and_push(
        &self,
        receipt: Receipt,
        pushes: Vec<(QueueName, NewItem)>,
        may_create: MayCreate<'_>,
    ) -> Result<(Outcome, Vec<Pushed>)> {
        self.name(std::iter::once(&receipt));
        let Some(queue) = self.queue_of(&receipt).await? else {
            return Ok((Outcome::Gone, Vec::new()));
        };
        let mut counts: HashMap<&QueueName, usize> = HashMap::new();
        for (name, _) in &pushes {
            *counts.entry(name).or_default() += 1;
        }
        let mut queues = HashMap::new();
        for (name, count) in counts {
            queues.insert(name.clone(), self.queue_for_push(name, count, may_create).await?);
        }
        let names: Vec<_> = pushes.iter().map(|(name, _)| name.clone()).collect();
        let items = pushes
            .into_iter()
            .filter_map(|(name, item)| {
                let queue = Arc::clone(queues.get(&name)?); // contains every name
                Some(Push::new(queue, item))
            })
            .collect();
        let held = Reservation { queue, receipt: receipt.clone() };
        let begun = self.now();
        let committing = Committing::begin(self, std::slice::from_ref(&receipt));
        let done = self.store.commit_and_push(held, items).await;
        let (outcome, pushed) =
            done.inspect_err(|error| self.wake_if_unknown(error, names.iter()))?;
        committing.end();
        self.notify_settled(begun, [(&receipt, outcome)].into_iter(), &committed());
        self.notify_pushed(names.iter().zip(&pushed), None);
        Ok((outcome, pushed))
    }

    /// Returns the settings of the receipt's queue; `None` if that queue was deleted, together with
    /// the item. If the queue was created again in another group, the store says whether the item
    /// is still where it was: an item that was pushed just after the deletion was delivered there.
    async fn queue_of(&self, receipt: &Receipt) -> Result<Option<Arc<Queue>>> {
        match self.queues.get(&receipt.queue).await {
            Ok(queue) if queue.group != receipt.group => {
                Ok(Some(Arc::new(former(&queue, receipt))))
            }
            Ok(queue) => Ok(Some(queue)),
            Err(EngineError::QueueNotFound(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the receipts whose queues exist, with the settings of these, and each one's index in
    /// the request.
    async fn with_queues<'a>(
        &self,
        receipts: impl Iterator<Item = &'a Receipt> + Send,
    ) -> Result<(Vec<Reservation>, Vec<usize>)> {
        let count = receipts.size_hint().0;
        let mut held = Vec::with_capacity(count);
        let mut places = Vec::with_capacity(count);
        // Most batches concern one queue, which is looked up once.
        let mut last: Option<(&Receipt, Option<Arc<Queue>>)> = None;
        for (place, receipt) in receipts.enumerate() {
            let queue = match &last {
                Some((before, queue))
                    if before.queue == receipt.queue && before.group == receipt.group =>
                {
                    queue.clone()
                }
                _ => last.insert((receipt, self.queue_of(receipt).await?)).1.clone(),
            };
            if let Some(queue) = queue {
                held.push(Reservation { queue, receipt: receipt.clone() });
                places.push(place);
            }
        }
        Ok((held, places))
    }

    /// Counts settles, frees the places of the items in our streams, signals the brokers whose
    /// streams held other items, and wakes the queue if a settle unblocked the next item of its
    /// ordering key.
    ///
    /// An item that a settle unblocks is eligible from some time after `begun`, when the settle
    /// began. `each` is what each settle that took effect adds to the totals.
    fn notify_settled<'a>(
        &self,
        begun: Timestamp,
        settled: impl Iterator<Item = (&'a Receipt, Outcome)>,
        each: &Totals,
    ) {
        #[derive(Default)]
        struct QueueChange<'a> {
            totals: Totals,
            /// Each with whether it ended with a commit.
            receipts: Vec<(&'a Receipt, bool)>,
            foreign: bool,
            keyed: bool,
        }
        let own = self.store.broker_id();
        let mut by_queue: HashMap<&QueueName, QueueChange<'a>> = HashMap::new();
        let settled: Vec<_> = settled.collect();
        for of_queue in settled.chunk_by(|(a, _), (b, _)| a.queue == b.queue) {
            let change = by_queue.entry(&of_queue[0].0.queue).or_default();
            for (receipt, outcome) in of_queue {
                let took_effect = *outcome == Outcome::Ok;
                if took_effect {
                    change.totals.add(each);
                }
                change.receipts.push((*receipt, took_effect && each.committed > 0));
                change.foreign |= receipt.token.broker() != own;
                change.keyed |= receipt.keyed;
            }
        }
        for (queue, change) in by_queue {
            self.count(queue, &change.totals);
            if let Some(dispatcher) = self.dispatcher(queue) {
                dispatcher.ended(change.receipts.into_iter(), self.now());
            }
            if change.foreign {
                self.publish(queue, Topic::Settle, None);
            }
            if change.keyed {
                self.notify_inserted(queue, Some(begun));
            }
        }
    }
}

/// Returns the settings for the items of a queue in the group that the queue was in before: those
/// of its successor, but nothing is left behind in that group.
fn former(queue: &Queue, receipt: &Receipt) -> Queue {
    let (group, retention, at_limit) = (receipt.group.clone(), Duration::ZERO, AtLimit::Nowhere);
    Queue { group, retention, at_limit, ..queue.clone() }
}

/// Returns results in the order of the requests. Requests without a queue are [`Outcome::Gone`].
fn spread(places: &[usize], found: Vec<Outcome>, len: usize) -> Vec<Outcome> {
    let mut outcomes = vec![Outcome::Gone; len];
    for (place, outcome) in places.iter().zip(found) {
        outcomes[*place] = outcome;
    }
    outcomes
}
