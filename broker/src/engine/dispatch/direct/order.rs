//! The order of direct pushes: what they bring is handed out in the order in which they began, whichever is stored first.

use std::{collections::VecDeque, time::Duration};

use crate::{
    domain::{Delivery, IdMark, ItemId, Timestamp},
    engine::consumers::{Claimant, Coming},
};

/// How long reserves wait at most for a direct push that is in flight.
const HOLD: Duration = Duration::from_secs(5);

/// The direct pushes of a queue that have begun, up to the last one whose items are not handed out yet.
#[derive(Default)]
pub(in crate::engine::dispatch) struct DirectPushes {
    /// In the order in which they began.
    pushes: VecDeque<Push>,
    /// The number of the first of them.
    first: u64,
    /// From this push on, items go back into the queue: those of a push before have, or may, or it takes too long.
    broken_from: Option<u64>,
    /// True if one takes too long: reserves go on.
    is_overdue: bool,
    /// The reserve behind which pushes may begin: what they bring waits for it.
    ahead: Option<Ahead>,
}

/// A reserve that is under way.
#[derive(Default)]
struct Ahead {
    /// The place of the first push that began behind it. What it finds behind this was pushed behind that push.
    mark: Option<IdMark>,
}

struct Push {
    begun: Timestamp,
    load: Load,
    /// What it brought, once it has ended.
    brought: Option<Vec<Delivery>>,
}

/// What is on its way to a stream, and how long its leases last.
#[derive(Clone, Copy)]
pub(in crate::engine::dispatch) struct Load {
    pub(super) stream: Claimant,
    pub(super) coming: Coming,
    pub(super) lasts: Duration,
}

/// A push that has ended, and those before it too.
pub(super) struct Ended {
    pub(super) load: Load,
    pub(super) deliveries: Vec<Delivery>,
    /// False if its items go back into the queue.
    pub(super) is_in_order: bool,
}

impl DirectPushes {
    /// Notes the begin of a push, which has not reached the store. `mark` is asked for its [place](crate::store::ItemStore::mark) if a reserve is ahead of it.
    /// Returns its number.
    pub(super) fn begin(
        &mut self,
        load: Load,
        now: Timestamp,
        mark: impl FnOnce() -> IdMark,
    ) -> u64 {
        if let Some(ahead) = &mut self.ahead {
            ahead.mark.get_or_insert_with(mark);
        }
        self.pushes.push_back(Push { begun: now, load, brought: None });
        self.first + self.pushes.len() as u64 - 1
    }

    /// Notes the end of a push, with what it brought. `None`: it has failed, or nobody knows.
    pub(super) fn end(&mut self, number: u64, brought: Option<Vec<Delivery>>) {
        if brought.is_none() {
            self.breaks_at(number);
        }
        let at = number.checked_sub(self.first).and_then(|at| usize::try_from(at).ok());
        if let Some(push) = at.and_then(|at| self.pushes.get_mut(at)) {
            push.brought = Some(brought.unwrap_or_default());
        }
    }

    /// Notes the begin of a reserve. If it is likely to see the end of the queue, pushes may begin behind it.
    pub(in crate::engine::dispatch) fn reserve_begins(&mut self, is_likely_last: bool) {
        self.ahead = is_likely_last.then(Ahead::default);
    }

    /// Notes its end. If something `is_left` in the queue, what pushes bring that began behind the reserve goes behind that.
    pub(super) fn reserve_ends(&mut self, is_left: bool) {
        if self.ahead.take().is_some() && is_left {
            self.items_return();
        }
    }

    /// Returns true if a push that begins now waits for a reserve that is under way.
    pub(in crate::engine::dispatch) fn may_begin_behind_reserve(&self) -> bool {
        self.ahead.is_some()
    }

    /// Returns true if an item that a reserve has found was pushed behind a push that waits for the reserve.
    pub(in crate::engine::dispatch) fn is_behind(&self, item: ItemId) -> bool {
        let mark = self.ahead.as_ref().and_then(|ahead| ahead.mark);
        mark.is_some_and(|mark| mark.is_before(item))
    }

    /// Takes the first push, if it has ended, and no reserve is ahead of it.
    pub(super) fn next_ended(&mut self) -> Option<Ended> {
        if self.ahead.is_some() {
            return None;
        }
        let deliveries = self.pushes.front_mut()?.brought.take()?;
        let Push { load, .. } = self.pushes.pop_front()?;
        let is_in_order = self.broken_from.is_none_or(|from| self.first < from);
        self.first += 1;
        if self.pushes.is_empty() {
            (self.broken_from, self.is_overdue) = (None, false);
        }
        Some(Ended { load, deliveries, is_in_order })
    }

    /// Notes that items of the push that was taken last go back into the queue: those of the pushes behind it follow.
    pub(super) fn items_return(&mut self) {
        if !self.pushes.is_empty() {
            self.breaks_at(self.first);
        }
    }

    fn breaks_at(&mut self, number: u64) {
        self.broken_from = Some(self.broken_from.map_or(number, |from| from.min(number)));
    }

    /// Takes what has ended and goes back into the queue, though pushes before it have not ended.
    pub(super) fn take_broken(&mut self) -> Vec<Delivery> {
        let Some(from) = self.broken_from else { return Vec::new() };
        let sound = usize::try_from(from.saturating_sub(self.first)).unwrap_or(usize::MAX);
        let broken = self.pushes.iter_mut().skip(sound);
        broken.filter_map(|push| push.brought.as_mut()).flat_map(std::mem::take).collect()
    }

    /// Takes out an item that was deleted.
    pub(in crate::engine::dispatch) fn deleted(&mut self, item: ItemId) {
        for brought in self.pushes.iter_mut().filter_map(|push| push.brought.as_mut()) {
            brought.retain(|delivery| delivery.item.id != item);
        }
    }

    /// Returns true if another push may join those in flight.
    pub(super) fn may_join(&self) -> bool {
        self.broken_from.is_none()
    }

    pub(in crate::engine::dispatch) fn len(&self) -> usize {
        self.pushes.len()
    }

    /// Returns the bytes of payload of all that are in flight.
    pub(super) fn bytes(&self) -> usize {
        self.pushes.iter().map(|push| push.load.coming.bytes).sum()
    }

    /// Returns true if something that has ended waits for a push before it, and for no reserve.
    pub(in crate::engine::dispatch) fn has_waiting(&self) -> bool {
        self.ahead.is_none() && self.waiting().next().is_some()
    }

    fn waiting(&self) -> impl Iterator<Item = &Push> {
        let brought =
            |push: &&Push| push.brought.as_ref().is_some_and(|brought| !brought.is_empty());
        self.pushes.iter().filter(brought)
    }

    /// Returns until when reserves wait for the pushes that are in flight: no longer than half of the lease of what waits too.
    pub(in crate::engine::dispatch) fn held_until(&self) -> Option<Timestamp> {
        let first = self.pushes.front().filter(|_| !self.is_overdue)?;
        let leases = self.waiting().map(|push| push.begun + push.load.lasts / 2);
        leases.chain([first.begun + HOLD]).min()
    }

    /// Lets reserves go on if a push takes too long: no items of those in flight are handed out any more. Returns what was on its way to streams.
    pub(super) fn give_up_if_overdue(&mut self, now: Timestamp) -> Vec<(Claimant, Coming)> {
        for push in &mut self.pushes {
            push.begun = push.begun.min(now); // the server's clock may have been set back
        }
        if self.held_until().is_none_or(|until| until > now) {
            return Vec::new();
        }
        self.is_overdue = true;
        self.breaks_at(self.first);
        let coming = |Push { load, .. }: &mut Push| (load.stream, std::mem::take(&mut load.coming));
        self.pushes.iter_mut().map(coming).collect()
    }
}
