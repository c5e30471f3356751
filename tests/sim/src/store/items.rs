//! The path of items: push, reserve, settle.

use sluicegate_broker::{
    domain::{
        AtLimit, Delivery, Demand, Item, ItemId, ItemSize, ItemState, LeaseToken, LimitReason,
        Outcome, Pushed, Queue, QueueName, Receipt, Timestamp, Triage, assign, cut_reason,
    },
    store::{EndedDelivery, Extension, Move, Push, Reservation, Reserved, Rollback, RollbackTo},
};

use super::{
    stored::{Stored, row_of},
    world::{First, World},
};

/// The most items that one reserve hands out or removes.
const MAX_STEP: usize = 2_000;

/// The head of a queue.
#[derive(Default)]
struct Head {
    /// Items to assign, each with its attempt number.
    live: Vec<(u64, u32)>,
    dead: Vec<(u64, LimitReason, u32)>,
    expired: Vec<u64>,
    cut: bool,
}

/// A claim that can be undone while nobody has seen it.
#[derive(Debug, Clone)]
pub(super) struct Claim {
    row: u64,
    token: LeaseToken,
    before: Box<Stored>,
}

impl World {
    /// Stores items, in order. Returns the claims of those that are stored as reserved, too.
    pub(super) fn push(&mut self, items: &[Push], now: Timestamp) -> (Vec<Pushed>, Vec<Claim>) {
        for push in items {
            self.restore_queue(&push.queue, now);
        }
        let mut claims = Vec::new();
        let pushed = items.iter().map(|push| self.push_one(push, &mut claims, now)).collect();
        (pushed, claims)
    }

    fn push_one(&mut self, push: &Push, claims: &mut Vec<Claim>, now: Timestamp) -> Pushed {
        let Push { queue, item: new, producer, dedup_window, first_lease, id } = push;
        let until = new.remembered_until(queue, *dedup_window, now).filter(|end| *end > now);
        let remembered = new.dedup_id.clone().map(|id| (queue.name.clone(), id));
        if until.is_some()
            && let Some(first) = remembered.as_ref().and_then(|id| self.dedup.get(id))
            && first.until > now
        {
            let (id, sequence) = (Self::id(first.row), first.sequence);
            return Pushed { id, deduplicated: true, sequence, eligible_time: None };
        }
        let row = id.map_or_else(|| self.next_row(), row_of);
        let own = new.eligible_from(now);
        let key = new.ordering_key.as_ref();
        let waits = key.is_some_and(|key| self.must_wait(&queue.name, key, row, now));
        let sequence = self.stamp(queue, key.is_some());
        let (when, blocked) = if waits { (None, Some(own)) } else { (Some(own), None) };
        let id = Self::id(row);
        let item = new.clone().into_item(queue, id, sequence, producer.clone(), now);
        let dedup_queue = until.is_some().then(|| queue.name.clone());
        let mut stored = Stored {
            row,
            item,
            when,
            blocked,
            lock: None,
            due: None,
            earlier: 0,
            extended: Timestamp::default(),
            dedup_queue,
        };
        if let Some(lease) = first_lease {
            claims.push(Claim { row, token: lease.token, before: Box::new(stored.clone()) });
            stored.lock = Some(lease.token);
            (stored.due, stored.when) = (stored.when, Some(now + lease.lasts));
            stored.item.deliveries = 1;
            stored.item.consumer.clone_from(&lease.consumer);
        }
        self.put(stored);
        if let (Some(until), Some(id)) = (until, remembered) {
            self.dedup.insert(id, First { row, sequence, until });
        }
        Pushed { id, deduplicated: false, sequence, eligible_time: when }
    }

    /// Reserves items. Returns how to undo it too.
    pub(super) fn reserve(
        &mut self,
        queue: &Queue,
        demands: &[Demand],
        broker: [u8; 4],
        now: Timestamp,
    ) -> (Reserved, Vec<Claim>) {
        let head = self.read_head(queue, demands, now);
        if !head.dead.is_empty() && queue.at_limit == AtLimit::Unknown {
            let unknown = Reserved { more: true, limit_unknown: true, ..Reserved::default() };
            return (unknown, Vec::new());
        }
        let mut reserved = Reserved { more: head.cut, ..Reserved::default() };
        for row in head.expired {
            reserved.more |= self.remove(row, now);
            reserved.expired += 1;
        }
        for (row, reason, failed_attempts) in head.dead {
            reserved.more |= self.bury(queue, row, failed_attempts, now);
            match reason {
                LimitReason::MaxDeliveries => reserved.at_limit.max_deliveries += 1,
                LimitReason::MaxAttempts | LimitReason::Rejected => {
                    reserved.at_limit.max_attempts += 1;
                }
            }
        }
        let size = |(row, _): &(u64, u32)| {
            self.get(*row).map_or(ItemSize { payload: 0, message: 0 }, Stored::size)
        };
        let assigned = assign(&head.live.iter().map(size).collect::<Vec<_>>(), demands);
        reserved.more |= assigned.len() < head.live.len();
        let token = LeaseToken::fresh(broker);
        let mut claims = Vec::new();
        for ((row, attempt), claimant) in head.live.into_iter().zip(assigned) {
            let Some(stored) = self.take(row) else { continue };
            claims.push(Claim { row, token, before: Box::new(stored.clone()) });
            let delivery = self.lease(stored, queue, attempt, token, &demands[claimant], now);
            reserved.deliveries.push((claimant, delivery));
        }
        (reserved, claims)
    }

    /// Reserves an item by its id, if it is as it was pushed.
    pub(super) fn reserve_named(
        &mut self,
        queue: &Queue,
        demands: &[Demand],
        broker: [u8; 4],
        id: ItemId,
        now: Timestamp,
    ) -> Option<(Reserved, Vec<Claim>)> {
        let stored = self.get_id(id).filter(|stored| {
            let item = &stored.item;
            item.queue == queue.name
                && stored.when.is_some_and(|when| when <= now)
                && (stored.lock, item.deliveries) == (None, 0)
                && item.ordering_key.is_none()
                && queue.triage(stored.at_head(), now) == Triage::Live { attempt: 1 }
        })?;
        let claimant = *assign(&[stored.size()], demands).first()?;
        let (row, token) = (stored.row, LeaseToken::fresh(broker));
        let stored = self.take(row)?;
        let claim = Claim { row, token, before: Box::new(stored.clone()) };
        let delivery = self.lease(stored, queue, 1, token, &demands[claimant], now);
        let deliveries = vec![(claimant, delivery)];
        Some((Reserved { deliveries, is_named: true, ..Reserved::default() }, vec![claim]))
    }

    fn lease(
        &mut self,
        mut stored: Stored,
        queue: &Queue,
        attempt: u32,
        token: LeaseToken,
        demand: &Demand,
        now: Timestamp,
    ) -> Delivery {
        let (end, previous) = (now + demand.lease, stored.when.unwrap_or(now));
        let former_lease = stored.lock.replace(token);
        (stored.due, stored.when) = (stored.when, Some(end));
        stored.item.deliveries = stored.item.deliveries.saturating_add(1);
        stored.item.attempt = attempt;
        stored.item.consumer.clone_from(&demand.consumer);
        let receipt = Receipt {
            keyed: stored.item.ordering_key.is_some(),
            item: stored.item.id,
            token,
            deliveries: stored.item.deliveries,
            earlier_deliveries: stored.earlier,
            attempt,
            queue: queue.name.clone(),
            group: queue.group.clone(),
        };
        let item = Item { state: ItemState::Reserved, ..stored.view(now) };
        let item = Item { due_time: stored.due, ..item };
        self.put(stored);
        Delivery {
            item: Box::new(item),
            receipt,
            lease_expire_time: end,
            previous_eligible_time: previous,
            former_lease,
            tag: 0,
        }
    }

    /// Undoes a claim that reached nobody, if it still stands.
    pub(super) fn undo(&mut self, claim: Claim) {
        let stands = |stored: &Stored| stored.lock == Some(claim.token);
        if self.get(claim.row).is_some_and(stands) {
            self.take(claim.row);
            self.put(*claim.before);
        }
    }

    fn read_head(&self, queue: &Queue, demands: &[Demand], now: Timestamp) -> Head {
        let max_items =
            demands.iter().fold(0_usize, |sum, want| sum.saturating_add(want.max_items));
        let max_items = max_items.min(MAX_STEP);
        let mut head = Head::default();
        let Some(lane) = self.lane(&queue.name).filter(|_| max_items > 0) else { return head };
        let mut level = Some(std::cmp::Reverse(u8::MAX));
        while let Some(from) = level.take() {
            for place in lane.handout.range((from, Timestamp(i64::MIN), 0)..) {
                let (this, when, row) = *place;
                if when > now {
                    // The rest of this priority is not eligible either.
                    level = this.0.checked_sub(1).map(std::cmp::Reverse);
                    break;
                }
                let Some(stored) = self.get(row) else { continue };
                match queue.triage(stored.at_head(), now) {
                    Triage::Expired => head.expired.push(row),
                    Triage::AtLimit { reason, failed_attempts } => {
                        head.dead.push((row, reason, failed_attempts));
                    }
                    Triage::Live { attempt } => head.live.push((row, attempt)),
                }
                head.cut =
                    head.live.len() > max_items || head.expired.len() + head.dead.len() >= MAX_STEP;
                if head.cut {
                    return head;
                }
            }
        }
        head
    }

    fn bury(&mut self, queue: &Queue, row: u64, failed_attempts: u32, now: Timestamp) -> bool {
        let known = self.get(row).map(|stored| stored.item.last_reason.clone());
        let reason = known.filter(|known| !known.is_empty());
        let reason = Some(reason.unwrap_or_else(|| "lease lapsed".to_owned()));
        match &queue.at_limit {
            AtLimit::DeadLetter(to) => {
                self.dead_letter(queue, row, to, failed_attempts, reason, now)
            }
            AtLimit::Discard => self.discard(queue, row, failed_attempts, reason, now),
            // The caller handles `Unknown`, and with `Nowhere` no item is at a limit.
            AtLimit::Unknown | AtLimit::Nowhere => false,
        }
    }

    fn dead_letter(
        &mut self,
        queue: &Queue,
        row: u64,
        to: &QueueName,
        failed_attempts: u32,
        reason: Option<String>,
        now: Timestamp,
    ) -> bool {
        self.restore_dead_letter_queue(to, queue, now);
        let Some(left) = self.take(row) else { return false };
        let mut stored = left.clone();
        (stored.when, stored.lock, stored.earlier) = (Some(now), None, left.item.deliveries);
        stored.item.origin_queue = Some(left.item.queue.clone());
        stored.item.queue = to.clone();
        stored.item.attempt = 1;
        stored.item.dead_letter_time = Some(now);
        stored.item.dead_letter_attempts = failed_attempts;
        stored.item.last_reason = reason.unwrap_or(stored.item.last_reason);
        self.put(stored);
        self.pass_turn(&left, now)
    }

    fn discard(
        &mut self,
        queue: &Queue,
        row: u64,
        failed_attempts: u32,
        reason: Option<String>,
        now: Timestamp,
    ) -> bool {
        if queue.keeps_history()
            && let Some(mut stored) = self.take(row)
        {
            stored.item.dead_letter_time = Some(now);
            stored.item.dead_letter_attempts = failed_attempts;
            stored.item.last_reason = reason.unwrap_or(stored.item.last_reason);
            self.put(stored);
        }
        self.finish(queue, row, now)
    }

    /// Removes a settled item, or keeps it as history. Returns true if another one of its key is
    /// ready now.
    fn finish(&mut self, queue: &Queue, row: u64, now: Timestamp) -> bool {
        if !queue.keeps_history() {
            return self.remove(row, now);
        }
        let Some(left) = self.take(row) else { return false };
        let mut stored = left.clone();
        (stored.when, stored.lock) = (None, None);
        stored.item.process_time = Some(now);
        stored.item.expire_time = Some(now + queue.retention);
        self.put(stored);
        self.pass_turn(&left, now)
    }

    pub(super) fn commit(&mut self, held: &Reservation, now: Timestamp) -> Outcome {
        match self.held(&held.receipt, now) {
            Ok(row) => {
                self.finish(&held.queue, row, now);
                Outcome::Ok
            }
            Err(outcome) => outcome,
        }
    }

    pub(super) fn commit_and_push(
        &mut self,
        held: &Reservation,
        items: &[Push],
        now: Timestamp,
    ) -> (Outcome, Vec<Pushed>) {
        match self.commit(held, now) {
            Outcome::Ok => (Outcome::Ok, self.push(items, now).0),
            outcome => (outcome, Vec::new()),
        }
    }

    pub(super) fn roll_back(&mut self, rollback: &Rollback, now: Timestamp) -> Outcome {
        let Rollback { held: Reservation { queue, receipt }, to, reason } = rollback;
        let row = match self.held(receipt, now) {
            Ok(row) => row,
            Err(outcome) => return outcome,
        };
        let reason = reason.clone().map(cut_reason);
        match to {
            RollbackTo::Queue { eligible_time, attempt, ended } => {
                let (unsent, former_lease) = match ended {
                    EndedDelivery::Unsent { former_lease } => (true, *former_lease),
                    EndedDelivery::Counted | EndedDelivery::Withdrawn => (false, None),
                };
                if let Some(mut stored) = self.take(row) {
                    (stored.when, stored.lock) = (Some(*eligible_time), former_lease);
                    stored.item.attempt = *attempt;
                    stored.item.deliveries -= u32::from(unsent);
                    stored.item.last_reason = reason.unwrap_or(stored.item.last_reason);
                    stored.earlier += u32::from(*ended == EndedDelivery::Withdrawn);
                    self.put(stored);
                }
                Outcome::Ok
            }
            RollbackTo::DeadLetter { to, failed_attempts, .. } => {
                self.dead_letter(queue, row, to, *failed_attempts, reason, now);
                Outcome::DeadLettered
            }
            RollbackTo::Discard { failed_attempts, .. } => {
                self.discard(queue, row, *failed_attempts, reason, now);
                Outcome::DeadLettered
            }
        }
    }

    pub(super) fn extend(
        &mut self,
        extension: &Extension,
        asked: Timestamp,
        now: Timestamp,
    ) -> Outcome {
        let Extension { held, until, is_renewal } = extension;
        match self.held(&held.receipt, now) {
            // Of several extensions the one that was asked for last counts.
            Ok(row) if self.get(row).is_some_and(|stored| stored.extended > asked) => Outcome::Ok,
            Ok(row) => {
                if let Some(mut stored) = self.take(row) {
                    if *is_renewal {
                        stored.when = stored.when.max(Some(*until));
                    } else {
                        (stored.when, stored.extended) = (Some(*until), asked);
                    }
                    self.put(stored);
                }
                Outcome::Ok
            }
            Err(outcome) => outcome,
        }
    }

    pub(super) fn move_item(&mut self, item: &Move, now: Timestamp) -> Outcome {
        self.restore_queue(&item.to, now);
        let row = match self.held(&item.held.receipt, now) {
            Ok(row) => row,
            Err(outcome) => return outcome,
        };
        let Some(left) = self.get(row).cloned() else { return Outcome::Gone };
        let key = left.item.ordering_key.as_ref();
        let waits = key.is_some_and(|key| self.must_wait(&item.to.name, key, row, now));
        let sequence = self.stamp(&item.to, key.is_some());
        self.take(row);
        let mut stored = left.clone();
        stored.item.headers.extend(item.headers.clone());
        if let Some(payload) = &item.payload {
            stored.item.payload = payload.clone();
        }
        if let Some(content_type) = &item.content_type {
            stored.item.content_type.clone_from(content_type);
        }
        stored.item.priority = item.priority.unwrap_or(stored.item.priority);
        stored.arrive(&item.to, item.eligible_time, waits);
        stored.item.sequence = sequence;
        self.put(stored);
        self.pass_turn(&left, now);
        Outcome::Ok
    }
}

impl Stored {
    /// Enters a queue as if new.
    pub(super) fn arrive(&mut self, queue: &Queue, eligible: Timestamp, waits: bool) {
        (self.when, self.blocked) =
            if waits { (None, Some(eligible)) } else { (Some(eligible), None) };
        (self.lock, self.earlier) = (None, self.item.deliveries);
        self.item.queue = queue.name.clone();
        self.item.attempt = 1;
        self.item.origin_queue = None;
        self.item.dead_letter_time = None;
        self.item.dead_letter_attempts = 0;
    }
}
