//! What operators see and do: lists, one item, depths, purge, replay, redrive.

use std::cmp::Reverse;

use sluicegate_broker::{
    domain::{Depth, Item, ItemId, ItemState, Queue, QueueName, Timestamp},
    store::{ItemDeleted, Page, Purged, RedriveFilter, Redriven, Result, Selection, StoreError},
};

use super::{
    stored::Stored,
    world::{Place, World},
};

/// Where a page starts: behind this item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Position {
    Handout(Place),
    Blocked(i64, u64),
    History(Reverse<Timestamp>, Reverse<u64>),
}

/// Limit of items of one step of a purge.
const PURGED_AT_A_TIME: usize = 1_000;

impl Position {
    fn encode(self) -> String {
        match self {
            Self::Handout((level, when, row)) => format!("a{}.{}.{row}", level.0, when.0),
            Self::Blocked(sequence, row) => format!("b0.{sequence}.{row}"),
            Self::History(time, row) => format!("c0.{}.{}", time.0.0, row.0),
        }
    }

    fn decode(text: &str) -> Option<Self> {
        let mut parts = text.get(1..)?.split('.');
        let level = parts.next()?.parse().ok()?;
        let (first, row) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        let position = match text.as_bytes().first()? {
            b'a' => Self::Handout((Reverse(level), Timestamp(first), row)),
            b'b' => Self::Blocked(first, row),
            b'c' => Self::History(Reverse(Timestamp(first)), Reverse(row)),
            _ => return None,
        };
        (position.encode() == text).then_some(position)
    }

    /// Returns true if a list of items in this state can have an item here.
    fn fits(self, state: Option<ItemState>) -> bool {
        match state {
            None => true,
            Some(ItemState::Blocked) => matches!(self, Self::Blocked(..)),
            Some(ItemState::Processed) => matches!(self, Self::History(..)),
            Some(_) => matches!(self, Self::Handout(_)),
        }
    }
}

fn cursor(text: Option<&str>, state: Option<ItemState>) -> Result<Option<Position>> {
    let decode = |text| Position::decode(text).filter(|position| position.fits(state));
    text.map(|text| decode(text).ok_or(StoreError::BadCursor)).transpose()
}

impl World {
    /// Returns the items of a queue in the order of a list.
    fn listed(
        &self,
        queue: &QueueName,
        after: Option<Position>,
    ) -> impl Iterator<Item = (Position, &Stored)> {
        let lane = self.lane(queue);
        let handout = lane.into_iter().flat_map(|lane| &lane.handout);
        let handout = handout.map(|place| (Position::Handout(*place), place.2));
        let blocked = lane.into_iter().flat_map(|lane| &lane.blocked);
        let blocked = blocked.map(|(sequence, row)| (Position::Blocked(*sequence, *row), *row));
        let history = lane.into_iter().flat_map(|lane| lane.history.iter().rev());
        let history =
            history.map(|(time, row)| (Position::History(Reverse(*time), Reverse(*row)), *row));
        handout
            .chain(blocked)
            .chain(history)
            .filter(move |(position, _)| after.is_none_or(|after| *position > after))
            .filter_map(|(position, row)| Some((position, self.get(row)?)))
    }

    pub(super) fn list(
        &self,
        queue: &Queue,
        state: Option<ItemState>,
        after: Option<&str>,
        limit: usize,
        now: Timestamp,
    ) -> Result<Page<Item>> {
        let after = cursor(after, state)?;
        let is_listed = |stored: &Stored| {
            !stored.item.has_expired(now) && state.is_none_or(|state| stored.state(now) == state)
        };
        let mut found = self.listed(&queue.name, after).filter(|(_, stored)| is_listed(stored));
        let page: Vec<_> = found.by_ref().take(limit.max(1)).collect();
        let next = found.next().and(page.last()).map(|(position, _)| position.encode());
        let entries = page.into_iter().map(|(_, stored)| stored.view(now)).collect();
        Ok(Page { entries, next })
    }

    pub(super) fn get_item(&self, queue: &Queue, id: ItemId, now: Timestamp) -> Option<Item> {
        let is_there =
            |stored: &&Stored| stored.item.queue == queue.name && !stored.item.has_expired(now);
        self.get_id(id).filter(is_there).map(|stored| stored.view(now))
    }

    pub(super) fn delete_item(
        &mut self,
        queue: &Queue,
        id: ItemId,
        only_if: Option<ItemState>,
        now: Timestamp,
    ) -> ItemDeleted {
        let of_queue = |stored: &&Stored| stored.item.queue == queue.name;
        let Some(stored) = self.get_id(id).filter(of_queue) else { return ItemDeleted::NotFound };
        let (row, state) = (stored.row, stored.state(now));
        if stored.item.has_expired(now) {
            self.remove_expired(row, now);
            return ItemDeleted::NotFound;
        }
        if only_if.is_some_and(|wanted| wanted != state) {
            return ItemDeleted::OtherState(state);
        }
        self.erase(row, now);
        ItemDeleted::Done
    }

    /// Deletes the items of a queue, blocked ones first, so that none is unblocked on the way.
    /// Returns how many had not expired.
    pub(super) fn purge(&mut self, queue: &QueueName, reserved_too: bool, now: Timestamp) -> u64 {
        let is_purged = |stored: &Stored| reserved_too || stored.state(now) != ItemState::Reserved;
        self.erase_some(queue, now, usize::MAX, is_purged).items
    }

    /// Deletes some of the items that were first pushed by `created_by` and are not reserved.
    pub(super) fn purge_step(
        &mut self,
        queue: &QueueName,
        created_by: Timestamp,
        now: Timestamp,
    ) -> Purged {
        self.erase_some(queue, now, PURGED_AT_A_TIME, |stored| {
            stored.item.create_time <= created_by && stored.state(now) != ItemState::Reserved
        })
    }

    fn erase_some(
        &mut self,
        queue: &QueueName,
        now: Timestamp,
        limit: usize,
        is_purged: impl Fn(&Stored) -> bool,
    ) -> Purged {
        let mut rows: Vec<(bool, u64, bool)> = self
            .listed(queue, None)
            .filter(|(_, stored)| is_purged(stored))
            .map(|(_, stored)| (stored.blocked.is_none(), stored.row, stored.item.has_expired(now)))
            .collect();
        rows.sort_unstable();
        let more = rows.len() > limit;
        rows.truncate(limit);
        for (_, row, _) in &rows {
            self.erase(*row, now);
        }
        let items = rows.iter().filter(|(_, _, expired)| !expired).count() as u64;
        Purged { items, more }
    }

    pub(super) fn holds_items(&self, queue: &QueueName, now: Timestamp) -> bool {
        self.listed(queue, None)
            .any(|(_, stored)| !stored.is_processed() && !stored.item.has_expired(now))
    }

    pub(super) fn replay(
        &mut self,
        queue: &Queue,
        selection: &Selection,
        limit: u64,
        now: Timestamp,
    ) -> u64 {
        let is_selected = |stored: &Stored| match selection {
            Selection::Ids(ids) => ids.contains(&stored.item.id),
            Selection::Processed { start, end } => {
                stored.item.process_time.is_some_and(|time| time >= *start && time < *end)
            }
        };
        let rows: Vec<u64> = self
            .lane(&queue.name)
            .into_iter()
            .flat_map(|lane| &lane.history)
            .filter_map(|(_, row)| self.get(*row))
            .filter(|stored| is_selected(stored) && !stored.item.has_expired(now))
            .map(|stored| stored.row)
            .take(usize::try_from(limit).unwrap_or(usize::MAX))
            .collect();
        for row in &rows {
            let Some(stored) = self.get(*row) else { continue };
            let key = stored.item.ordering_key.clone();
            let ordered = key.filter(|_| stored.item.origin_queue.is_none());
            let waits = ordered.is_some_and(|key| self.must_wait(&queue.name, &key, *row, now));
            let Some(mut stored) = self.take(*row) else { continue };
            let origin = stored.item.origin_queue.clone();
            let dead = (stored.item.dead_letter_time, stored.item.dead_letter_attempts);
            stored.arrive(queue, now, waits);
            if origin.is_some() {
                stored.item.origin_queue = origin;
                (stored.item.dead_letter_time, stored.item.dead_letter_attempts) = dead;
            }
            stored.item.process_time = None;
            stored.item.expire_time = queue.default_ttl.map(|ttl| now + ttl);
            self.put(stored);
        }
        rows.len() as u64
    }

    pub(super) fn origins(&self, queue: &QueueName, now: Timestamp) -> Vec<QueueName> {
        let is_ready = |stored: &Stored| {
            stored.state(now) == ItemState::Ready && !stored.item.has_expired(now)
        };
        let mut origins: Vec<QueueName> = self
            .listed(queue, None)
            .filter(|(_, stored)| is_ready(stored))
            .filter_map(|(_, stored)| stored.item.origin_queue.clone())
            .collect();
        origins.sort_unstable();
        origins.dedup();
        origins
    }

    pub(super) fn redrive(
        &mut self,
        queue: &Queue,
        to: &Queue,
        filter: &RedriveFilter,
        after: Option<&str>,
        limit: u64,
        now: Timestamp,
    ) -> Result<Redriven> {
        self.restore_queue(to, now);
        let by_ids = !filter.ids.is_empty();
        // Items that were moved are no longer found by their ids.
        let after = cursor(after, Some(ItemState::Ready))?.filter(|_| !by_ids);
        let ready_by = filter.ready_by.map_or(now, |by| by.min(now));
        let passes = |stored: &Stored| {
            stored.when.is_some_and(|when| when <= ready_by)
                && !stored.item.has_expired(now)
                && (!by_ids || filter.ids.contains(&stored.item.id))
                && (filter.origin_queue.is_none()
                    || stored.item.origin_queue == filter.origin_queue)
                && stored.item.last_reason.contains(&filter.reason_contains)
                && filter.reason.as_ref().is_none_or(|reason| stored.item.last_reason == *reason)
                && filter.created_from.is_none_or(|time| stored.item.create_time >= time)
                && filter.created_before.is_none_or(|time| stored.item.create_time < time)
        };
        let found: Vec<(Position, u64)> = self
            .listed(&queue.name, after)
            .filter(|(_, stored)| passes(stored))
            .map(|(position, stored)| (position, stored.row))
            .take(usize::try_from(limit).unwrap_or(usize::MAX))
            .collect();
        for (_, row) in &found {
            self.redrive_one(*row, to, now);
        }
        let items = found.len() as u64;
        let next = found.last().filter(|_| items == limit).map(|(last, _)| last.encode());
        Ok(Redriven { items, next })
    }

    fn redrive_one(&mut self, row: u64, to: &Queue, now: Timestamp) {
        let Some(left) = self.get(row).cloned() else { return };
        let key = left.item.ordering_key.as_ref();
        let waits = key.is_some_and(|key| self.must_wait(&to.name, key, row, now));
        let returns = left.item.origin_queue.as_ref() == Some(&to.name);
        let sequence = if returns { left.item.sequence } else { self.stamp(to, key.is_some()) };
        self.take(row);
        let mut stored = left.clone();
        stored.arrive(to, now, waits);
        stored.item.sequence = sequence;
        self.put(stored);
        self.pass_turn(&left, now);
    }

    pub(super) fn next_eligible(&self, queue: &QueueName, after: Timestamp) -> Option<Timestamp> {
        let lane = self.lane(queue)?;
        let counts = |row: u64, when| {
            self.get(row).is_some_and(|stored| stored.item.expire_time.is_none_or(|end| end > when))
        };
        let of_level = |level: u8| {
            let from = (Reverse(level), Timestamp(after.0 + 1), 0);
            lane.handout
                .range(from..)
                .take_while(|(other, ..)| other.0 == level)
                .find(|(_, when, row)| counts(*row, *when))
                .map(|(_, when, _)| *when)
        };
        (0..10).filter_map(of_level).min()
    }

    pub(super) fn depth(&self, queue: &QueueName, now: Timestamp) -> Depth {
        let mut depth = Depth { next_eligible: self.next_eligible(queue, now), ..Depth::default() };
        for (_, stored) in self.listed(queue, None) {
            if stored.item.has_expired(now) {
                continue;
            }
            match stored.state(now) {
                ItemState::Ready => {
                    depth.ready += 1;
                    depth.oldest_ready = depth.oldest_ready.or(stored.when);
                }
                ItemState::Delayed => depth.delayed += 1,
                ItemState::Reserved => depth.reserved += 1,
                ItemState::Blocked => depth.blocked += 1,
                ItemState::Processed => depth.processed += 1,
            }
        }
        depth
    }
}
