//! Done, back, on, or a little longer: what consumers do with what they hold.

use std::{collections::HashMap, sync::Arc, time::Duration};

use bytes::Bytes;

use crate::{
    domain::{
        Cause, Headers, ItemId, LimitReason, NewItem, Outcome, Priority, Pushed, Queue, QueueName,
        Receipt, Timestamp, Topic, Totals, check_header_limits, cut_reason,
    },
    store::{Move, Push, Reservation, Rollback, RollbackTo},
};

use super::{Engine, EngineError, Result, depths::Change};

/// An item to give back.
#[derive(Debug, Clone)]
pub(crate) struct RollbackRequest {
    /// Names the reservation.
    pub receipt: Receipt,
    /// When it may be handed out again, if not as the queue's retry policy says.
    pub delay: Option<Duration>,
    /// Why.
    pub reason: String,
    /// What ended the reservation.
    pub cause: Cause,
}

/// An item to move.
#[derive(Debug, Clone)]
pub(crate) struct MoveRequest {
    /// Names the reservation.
    pub receipt: Receipt,
    /// Where to.
    pub to_queue: QueueName,
    /// Its new payload, if any.
    pub payload: Option<Bytes>,
    /// Its new media type, if any.
    pub content_type: Option<String>,
    /// Merged into its headers.
    pub headers: Headers,
    /// Its new priority, if any.
    pub priority: Option<Priority>,
    /// Not before this long from now.
    pub delay: Duration,
}

impl Engine {
    /// Finishes items; answers when that is durable.
    pub(crate) async fn commit(&self, receipts: Vec<Receipt>) -> Result<Vec<Outcome>> {
        let (held, places) = self.with_queues(receipts.iter()).await?;
        let begun = self.now();
        let found = self.store.commit(held).await?;
        let outcomes = spread(&places, found, receipts.len());
        self.notify_settled(begun, receipts.iter().zip(outcomes.iter().copied()), |totals| {
            totals.committed += 1;
        });
        Ok(outcomes)
    }

    /// Gives items back.
    pub(crate) async fn rollback(&self, requests: Vec<RollbackRequest>) -> Result<Vec<Outcome>> {
        let (held, places) = self.with_queues(requests.iter().map(|r| &r.receipt)).await?;
        let count = requests.len();
        let mut requests: Vec<_> = requests.into_iter().map(Some).collect();
        let mut rollbacks = Vec::with_capacity(held.len());
        for (held, place) in held.into_iter().zip(&places) {
            if let Some(request) = requests[*place].take() {
                rollbacks.push(self.rollback_of(held, request).await?);
            }
        }
        let found = self.roll_back(rollbacks).await?;
        Ok(spread(&places, found, count))
    }

    /// What a rollback makes of its item.
    async fn rollback_of(&self, held: Reservation, request: RollbackRequest) -> Result<Rollback> {
        let reason = (!request.reason.is_empty()).then(|| cut_reason(request.reason));
        self.plan_rollback(held, request.cause, request.delay, reason).await
    }

    /// Gives items back as decided, counts them and wakes whom it concerns.
    pub(super) async fn roll_back(&self, rollbacks: Vec<Rollback>) -> Result<Vec<Outcome>> {
        let told: Vec<_> = rollbacks
            .iter()
            .map(|rollback| (rollback.held.receipt.clone(), rollback.to.clone()))
            .collect();
        let begun = self.now();
        let outcomes = self.store.rollback(rollbacks).await?;
        self.notify_settled(
            begun,
            told.iter().map(|(receipt, _)| receipt).zip(outcomes.iter().copied()),
            |totals| {
                totals.rolled_back += 1;
            },
        );
        // Who may have it now: the queue itself, or its dead-letter queue.
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
                (RollbackTo::Discard { reason }, Outcome::DeadLettered) => {
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

    /// Corrects a depth by one item that was given back: into its own queue, where [`Engine::count`] takes
    /// it for ready, or into the dead-letter queue.
    fn came_back(&self, queue: &QueueName, since: Timestamp, outcome: Outcome) {
        let change = match outcome {
            Outcome::DeadLettered => Change::arrived(1),
            _ if since > self.now() => Change { ready: -1, delayed: 1, ..Change::default() },
            _ => return,
        };
        self.stats.depths.changed(queue, || change);
    }

    /// Prolongs leases; answers their new ends.
    pub(crate) async fn extend(
        &self,
        receipts: Vec<Receipt>,
        lease: Option<Duration>,
    ) -> Result<Vec<(Outcome, Option<Timestamp>)>> {
        let results = self.extend_held(&receipts, lease).await?;
        for (receipt, (outcome, _)) in receipts.iter().zip(&results) {
            if *outcome != Outcome::Ok
                && let Some(dispatcher) = self.dispatcher(&receipt.queue)
            {
                dispatcher.settled(std::iter::once(receipt));
            }
        }
        Ok(results)
    }

    /// Prolongs leases; what is not held any more is the caller's to deal with.
    pub(super) async fn extend_held(
        &self,
        receipts: &[Receipt],
        lease: Option<Duration>,
    ) -> Result<Vec<(Outcome, Option<Timestamp>)>> {
        let (held, places) = self.with_queues(receipts.iter()).await?;
        let now = self.now();
        let ends = held
            .iter()
            .map(|held| Ok(now + self.lease(&held.queue, lease)?))
            .collect::<Result<Vec<_>>>()?;
        let items = held.into_iter().zip(ends.iter().copied()).collect();
        let found = self.store.extend(items).await?;
        let mut results = vec![(Outcome::Gone, None); receipts.len()];
        for ((place, outcome), until) in places.into_iter().zip(found).zip(ends) {
            results[place] = (outcome, (outcome == Outcome::Ok).then_some(until));
            if outcome == Outcome::Ok
                && let Some(dispatcher) = self.dispatcher(&receipts[place].queue)
            {
                dispatcher.extended(&receipts[place], until);
            }
        }
        Ok(results)
    }

    /// Puts an item into another queue of its group, in one step.
    pub(crate) async fn move_item(&self, request: MoveRequest) -> Result<Outcome> {
        let to = self.queue_for_push(&request.to_queue, 1).await?;
        let receipt = request.receipt;
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
        let found = self.store.move_items(vec![moved]).await?;
        let outcome = found.first().copied().unwrap_or(Outcome::Gone);
        self.notify_settled(begun, [(&receipt, outcome)].into_iter(), |totals| totals.moved += 1);
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

    /// Refuses a move that would leave an item with more headers than any push may give it. What the item has cannot change
    /// between this look and the move: only a move changes headers, and it would end this one's lease.
    async fn check_merged_headers(&self, queue: &Queue, item: ItemId, new: &Headers) -> Result<()> {
        let Some(item) = self.store.get_item(queue, item).await? else {
            return Ok(()); // the move will tell what became of it
        };
        let mut merged = item.headers;
        merged.extend(new.clone());
        Ok(check_header_limits("headers", &merged)?)
    }

    /// Commits an item and pushes others: all or nothing.
    pub(crate) async fn commit_and_push(
        &self,
        receipt: Receipt,
        pushes: Vec<(QueueName, NewItem)>,
    ) -> Result<(Outcome, Vec<Pushed>)> {
        let Some(queue) = self.queue_of(&receipt).await? else {
            return Ok((Outcome::Gone, Vec::new()));
        };
        let mut counts: HashMap<&QueueName, usize> = HashMap::new();
        for (name, _) in &pushes {
            *counts.entry(name).or_default() += 1;
        }
        let mut queues = HashMap::new();
        for (name, count) in counts {
            queues.insert(name.clone(), self.queue_for_push(name, count).await?);
        }
        let names: Vec<_> = pushes.iter().map(|(name, _)| name.clone()).collect();
        let items = pushes
            .into_iter()
            .filter_map(|(name, item)| {
                let queue = Arc::clone(queues.get(&name)?); // every name was looked up above
                Some(Push { queue, item, producer: None, dedup_window: None })
            })
            .collect();
        let held = Reservation { queue, receipt: receipt.clone() };
        let begun = self.now();
        let (outcome, pushed) = self.store.commit_and_push(held, items).await?;
        self.notify_settled(begun, [(&receipt, outcome)].into_iter(), |totals| {
            totals.committed += 1;
        });
        self.notify_pushed(names.iter().zip(&pushed));
        Ok((outcome, pushed))
    }

    /// The settings of the receipt's queue; `None` if that was deleted, with the item.
    async fn queue_of(&self, receipt: &Receipt) -> Result<Option<Arc<Queue>>> {
        match self.queues.get(&receipt.queue).await {
            // Made anew in another group: the item went with the queue of old.
            Ok(queue) if queue.group != receipt.group => Ok(None),
            Ok(queue) => Ok(Some(queue)),
            Err(EngineError::QueueNotFound(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The receipts whose queues are there, with these, and each one's place among all.
    async fn with_queues<'a>(
        &self,
        receipts: impl Iterator<Item = &'a Receipt> + Send,
    ) -> Result<(Vec<Reservation>, Vec<usize>)> {
        let mut held = Vec::new();
        let mut places = Vec::new();
        // Most batches are of one queue: it is looked up once.
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

    /// Counts settles, frees their places in our streams, tells the brokers whose streams held the
    /// others, and wakes the queue if a settle let the next item of its ordering key go on.
    ///
    /// What a settle lets go on is eligible from a time after `begun`, when the settle began.
    fn notify_settled<'a>(
        &self,
        begun: Timestamp,
        settled: impl Iterator<Item = (&'a Receipt, Outcome)>,
        count: impl Fn(&mut Totals),
    ) {
        #[derive(Default)]
        struct Told<'a> {
            totals: Totals,
            receipts: Vec<&'a Receipt>,
            foreign: bool,
            keyed: bool,
        }
        let own = self.store.broker_id();
        let mut by_queue: HashMap<&QueueName, Told<'a>> = HashMap::new();
        for (receipt, outcome) in settled {
            let told = by_queue.entry(&receipt.queue).or_default();
            match outcome {
                Outcome::Ok => count(&mut told.totals),
                Outcome::DeadLettered | Outcome::LeaseLost | Outcome::Gone => {}
            }
            told.receipts.push(receipt);
            told.foreign |= receipt.token.broker() != own;
            told.keyed |= receipt.keyed;
        }
        for (queue, told) in by_queue {
            self.count(queue, &told.totals);
            if let Some(dispatcher) = self.dispatcher(queue) {
                dispatcher.settled(told.receipts.into_iter());
            }
            if told.foreign {
                self.publish(queue, Topic::Settle, None);
            }
            if told.keyed {
                self.notify_inserted(queue, Some(begun));
            }
        }
    }
}

/// Puts results back in the order of the requests; those without a queue are gone.
fn spread(places: &[usize], found: Vec<Outcome>, len: usize) -> Vec<Outcome> {
    let mut outcomes = vec![Outcome::Gone; len];
    for (place, outcome) in places.iter().zip(found) {
        outcomes[*place] = outcome;
    }
    outcomes
}
