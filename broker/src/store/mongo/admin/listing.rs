//! Lists of items, a page at a time.

use std::{collections::HashSet, fmt};

use mongodb::bson::{Document, doc};

use crate::{
    domain::{Item, ItemId, ItemState, PrioritySet, Queue, Timestamp},
    store::{
        Page, Result, StoreError,
        mongo::{
            Inner, priorities,
            reserve::lapse::Leases,
            schema::{
                item::{Stored, oid},
                layout::{
                    BLOCKED, Group, HANDOUT, HISTORY, LEASED, PROCESSED, READY_END, date, millis,
                },
            },
            segment::{
                self,
                detach::{detach_found, detach_items},
                listing::Expanded,
            },
            server::connect::{command_of, read_first},
        },
    },
};

/// Limit of items of a page.
const MAX_PAGE: usize = 10_000;

/// The end of a page: the position of its last item. Items are listed by phase, and within each phase by these values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Position {
    /// Ready, delayed and reserved items, in hand-out order.
    Live { priority: i32, when: i64, id: ItemId },
    /// The same for a ready item of a segment. What is left of the segment comes next.
    Shared { priority: i32, when: i64, id: ItemId },
    /// Blocked items.
    Blocked { priority: i32, id: ItemId },
    /// History, the latest first.
    History { processed: i64, id: ItemId },
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Live { priority, when, id } => write!(f, "l.{priority}.{when}.{id}"),
            Self::Shared { priority, when, id } => write!(f, "s.{priority}.{when}.{id}"),
            Self::Blocked { priority, id } => write!(f, "b.{priority}.0.{id}"),
            Self::History { processed, id } => write!(f, "h.0.{processed}.{id}"),
        }
    }
}

impl Position {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let read = || {
            let mut parts = text.split('.');
            let phase = parts.next()?;
            let priority: i32 = parts.next()?.parse().ok()?;
            let at: i64 = parts.next()?.parse().ok()?;
            let id: ItemId = parts.next()?.parse().ok()?;
            if parts.next().is_some() {
                return None;
            }
            match phase {
                "l" => Some(Self::Live { priority, when: at, id }),
                "s" => Some(Self::Shared { priority, when: at, id }),
                "b" => Some(Self::Blocked { priority, id }),
                "h" => Some(Self::History { processed: at, id }),
                _ => None,
            }
        };
        read().ok_or(StoreError::BadCursor)
    }

    pub(crate) fn of(item: &Stored) -> Self {
        let (priority, id) = (item.priority, item.id());
        match item.when {
            BLOCKED => Self::Blocked { priority, id },
            PROCESSED => Self::History { processed: item.processed.unwrap_or_default(), id },
            when if item.leased => Self::Live { priority, when: LEASED + when, id },
            when if item.segment.is_some() => Self::Shared { priority, when, id },
            when => Self::Live { priority, when, id },
        }
    }

    /// Returns the order of ready, delayed and reserved items, apart from ready items of the same time.
    fn order(self) -> (i32, i64, Option<ItemId>) {
        match self {
            Self::Live { priority, when, id } => (-priority, when, (when >= LEASED).then_some(id)),
            Self::Shared { priority, when, .. } => (-priority, when, None),
            Self::Blocked { priority, id } => (-priority, BLOCKED, Some(id)),
            Self::History { processed, id } => (0, processed, Some(id)),
        }
    }

    fn phase(self) -> Phase {
        match self {
            Self::Live { .. } | Self::Shared { .. } => Phase::Live,
            Self::Blocked { .. } => Phase::Blocked,
            Self::History { .. } => Phase::History,
        }
    }
}

/// The parts of a listing, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Live,
    Blocked,
    History,
}

/// A listing of the items of one state, or of all.
pub(crate) struct Listing<'a> {
    pub(crate) group: &'a Group,
    pub(crate) queue: &'a Queue,
    /// The priorities in use.
    pub(crate) used: PrioritySet,
    pub(crate) state: Option<ItemState>,
    pub(crate) now: Timestamp,
    pub(crate) with_payload: bool,
}

impl Listing<'_> {
    /// Returns documents behind `after`, in the order of the phase, and whether the answer was cut for its size.
    async fn find(
        &self,
        inner: &Inner,
        phase: Phase,
        after: Option<Position>,
        limit: usize,
    ) -> Result<(Vec<Stored>, bool)> {
        let mut filter = match phase {
            Phase::History => self.history(after),
            Phase::Live | Phase::Blocked => {
                let ranges: Vec<Document> =
                    self.used.iter().flat_map(|level| self.level(phase, level, after)).collect();
                if ranges.is_empty() {
                    return Ok((Vec::new(), false));
                }
                doc! { "$or": ranges }
            }
        };
        // Expired items are not visible.
        filter.insert("deadline", doc! { "$not": { "$lte": date(self.now) } });
        let history = phase == Phase::History;
        let mut command = doc! {
            "find": self.group.items.name(), "filter": filter,
            "sort": if history { doc! { "processed": -1, "_id": -1 } } else {
                doc! { "priority": -1, "when": 1, "_id": 1 }
            },
            "hint": if history { HISTORY } else { HANDOUT },
            "limit": limit as i64, "batchSize": limit as i64 + 1,
        };
        let without = if self.with_payload {
            doc! { "items": 0 }
        } else {
            doc! { "payload": 0, "items": 0 }
        };
        command.insert("projection", without);
        let found = read_first(&inner.db, &command_of(&command)?, Stored::read).await?;
        Ok((found.values, found.cut))
    }

    /// Returns items behind `after`, in the order of the phase, and whether the answer was cut for its size.
    async fn items(
        &self,
        inner: &Inner,
        phase: Phase,
        after: Option<Position>,
        limit: usize,
    ) -> Result<(Vec<Stored>, bool)> {
        let shared = match after {
            Some(Position::Shared { id, .. }) => Some(id),
            _ => None,
        };
        let mut from = after;
        // Ends because each round goes on behind the documents of the one before.
        loop {
            // One more for what is left of the segment that the page before ended in.
            let limit = limit + usize::from(shared.is_some());
            let (documents, cut) = self.find(inner, phase, from, limit).await?;
            let places: Vec<Position> = documents.iter().map(Position::of).collect();
            let full = documents.len() == limit;
            let expanded = segment::listing::expand(inner, self.group, documents, shared, limit);
            let Expanded { items, cut: read } = expanded.await?;
            let cut = cut || full || read.is_some();
            let last = read.unwrap_or(places.len()).checked_sub(1).map(|at| places[at]);
            if !cut || !items.is_empty() || last.is_none() {
                return Ok((items, cut));
            }
            from = last;
        }
    }

    /// Like [`Self::items`] for ready, delayed and reserved items, with those that are reserved in segments.
    async fn live(
        &self,
        inner: &Inner,
        after: Option<Position>,
        limit: usize,
    ) -> Result<(Vec<Stored>, bool)> {
        let (mut items, mut cut) = self.items(inner, Phase::Live, after, limit).await?;
        if !matches!(self.state, None | Some(ItemState::Reserved)) {
            return Ok((items, cut));
        }
        let place = |position| match position {
            Position::Live { priority, when, id } | Position::Shared { priority, when, id } => {
                Some((priority, when, id))
            }
            Position::Blocked { .. } | Position::History { .. } => None,
        };
        let after = after.and_then(place);
        let reserved = segment::listing::reserved(inner, self.group, &self.queue.name, after);
        let mut places = reserved.await?;
        if let Some(last) = items.last().filter(|_| cut).map(|last| Position::of(last).order()) {
            places.retain(|&(priority, when, id)| {
                Position::Live { priority, when, id }.order() <= last
            });
        }
        cut |= places.len() > limit;
        places.truncate(limit);
        let (reserved, too_many) =
            segment::listing::read_reserved(inner, self.group, &places).await?;
        let last = reserved.last().filter(|_| too_many).map(|last| Position::of(last).order());
        // What was claimed or detached between the two reads is in both.
        let there: HashSet<ItemId> = items.iter().map(Stored::id).collect();
        items.extend(reserved.into_iter().filter(|item| !there.contains(&item.id())));
        items.sort_by_key(|item| Position::of(item).order());
        if let Some(last) = last {
            items.retain(|item| Position::of(item).order() <= last);
        }
        Ok((items, cut || too_many))
    }

    fn history(&self, after: Option<Position>) -> Document {
        let q = self.queue.name.as_str();
        let Some(Position::History { processed, id }) = after else {
            return doc! { "q": q, "processed": { "$gte": millis(0) } };
        };
        doc! { "$or": [
            { "q": q, "processed": { "$gte": millis(0), "$lt": millis(processed) } },
            { "q": q, "processed": millis(processed), "_id": { "$lt": oid(id) } },
        ] }
    }

    /// Returns the ranges of one priority of the hand-out index.
    fn level(&self, phase: Phase, level: i32, after: Option<Position>) -> Vec<Document> {
        let q = self.queue.name.as_str();
        let range = |when: Document| doc! { "q": q, "priority": level, "when": when };
        let at = |when: i64, id: Document| {
            doc! { "q": q, "priority": level, "when": millis(when), "_id": id }
        };
        let behind = |id: ItemId| doc! { "$gt": oid(id) };
        if phase == Phase::Blocked {
            return match after {
                Some(Position::Blocked { priority, .. }) if level > priority => vec![],
                Some(Position::Blocked { priority, id }) if level == priority => {
                    vec![at(BLOCKED, behind(id))]
                }
                _ => vec![range(doc! { "$eq": millis(BLOCKED) })],
            };
        }
        // Each range is above the first and below the second time. Times are after 1970.
        let ends: &[(i64, i64)] = match self.state {
            Some(ItemState::Ready) => &[(-1, self.now.0 + 1)],
            Some(ItemState::Delayed) => &[(self.now.0, READY_END)],
            Some(ItemState::Reserved) => &[(LEASED, BLOCKED)],
            _ => &[(-1, READY_END), (LEASED, BLOCKED)],
        };
        let all =
            |(above, below): (i64, i64)| range(doc! { "$gt": millis(above), "$lt": millis(below) });
        let after = match after {
            Some(Position::Live { priority, when, id }) => Some((priority, when, behind(id))),
            // Its segment too: the rest of it comes next.
            Some(Position::Shared { priority, when, id }) => {
                Some((priority, when, doc! { "$gte": oid(id.block().0) }))
            }
            _ => None,
        };
        match after {
            Some((priority, ..)) if level > priority => vec![],
            Some((priority, when, id)) if level == priority => {
                let behind = |&(above, below): &(i64, i64)| {
                    let same = (when > above && when < below).then(|| at(when, id.clone()));
                    let later = (when < below).then(|| all((above.max(when), below)));
                    same.into_iter().chain(later)
                };
                ends.iter().flat_map(behind).collect()
            }
            _ => ends.iter().copied().map(all).collect(),
        }
    }

    /// Returns ready items behind `after` in hand-out order, and the position to go on from, `None` at the end.
    pub(crate) async fn ready(
        &self,
        inner: &Inner,
        after: Option<Position>,
        limit: usize,
    ) -> Result<(Vec<Stored>, Option<Position>)> {
        // What is in segments gets documents of its own: those that come meanwhile stand behind.
        let (items, cut) = loop {
            let (found, cut) = self.find(inner, Phase::Live, after, limit).await?;
            if !detach_found(inner, self.group, &found, limit).await? {
                break (found, cut);
            }
        };
        let more = cut || items.len() == limit;
        let next = items.last().filter(|_| more).map(Position::of);
        Ok((items, next))
    }

    /// Returns those of the items that are ready, as [`Self::ready`] does. There are further ones only if the answer
    /// was cut for its size. They are found when these have left the queue.
    pub(crate) async fn ready_of(
        &self,
        inner: &Inner,
        ids: &[ItemId],
    ) -> Result<(Vec<Stored>, Option<Position>)> {
        detach_items(inner, self.group, ids).await?;
        let ids: Vec<_> = ids.iter().map(|id| oid(*id)).collect();
        let count = ids.len() as i64;
        let filter = doc! {
            "_id": { "$in": ids }, "q": self.queue.name.as_str(), "left": { "$exists": false },
            "when": { "$gte": millis(0), "$lt": millis(self.now.0 + 1) },
            "deadline": { "$not": { "$lte": date(self.now) } },
        };
        let command = doc! {
            "find": self.group.items.name(), "filter": filter,
            "sort": { "priority": -1, "when": 1, "_id": 1 }, "hint": "_id_",
            "limit": count, "batchSize": count + 1, "projection": { "payload": 0 },
        };
        let found = read_first(&inner.db, &command_of(&command)?, Stored::read).await?;
        let next = found.values.last().filter(|_| found.cut).map(Position::of);
        Ok((found.values, next))
    }
}

/// Returns lapsed items to the ready ones, for operations that read items by their place. Returns the priorities in
/// use.
pub(crate) async fn reclaim(
    inner: &Inner,
    group: &Group,
    queue: &Queue,
    now: Timestamp,
) -> Result<PrioritySet> {
    let used = priorities::in_index(inner, group.items.name(), &queue.name).await?;
    let cursor = inner.cursor(&queue.name);
    cursor.lease_deadlines.forget();
    let leases = Leases { inner, group, cursor: &cursor, queue: &queue.name, used };
    while leases.reclaim(now).await? {} // a step at a time; leases that end after `now` do not count
    Ok(used)
}

/// Lists items in hand-out order, then blocked ones, then history.
pub(crate) async fn list(
    inner: &Inner,
    queue: &Queue,
    state: Option<ItemState>,
    cursor: Option<&str>,
    limit: usize,
) -> Result<Page<Item>> {
    let start = cursor.map(Position::parse).transpose()?;
    let limit = limit.min(MAX_PAGE);
    let group = inner.group(&queue.group).await?;
    let now = inner.now();
    let used = reclaim(inner, &group, queue, now).await?;
    let listing = Listing { group: &group, queue, used, state, now, with_payload: true };
    let phases: &[Phase] = match state {
        None => &[Phase::Live, Phase::Blocked, Phase::History],
        Some(ItemState::Blocked) => &[Phase::Blocked],
        Some(ItemState::Processed) => &[Phase::History],
        Some(_) => &[Phase::Live],
    };
    let mut found: Vec<Stored> = Vec::new();
    let mut cut = false;
    for &phase in phases {
        if start.is_some_and(|start| start.phase() > phase) || found.len() > limit || cut {
            continue;
        }
        let after = start.filter(|start| start.phase() == phase);
        let room = limit + 1 - found.len();
        let (items, is_cut) = match phase {
            Phase::Live => listing.live(inner, after, room).await?,
            Phase::Blocked | Phase::History => listing.items(inner, phase, after, room).await?,
        };
        cut = is_cut;
        found.extend(items);
    }
    let more = cut || found.len() > limit;
    found.truncate(limit);
    let next = found.last().filter(|_| more).map(|last| Position::of(last).to_string());
    let entries = found
        .into_iter()
        .map(|stored| stored.into_item(&queue.name, now))
        .collect::<Result<_>>()?;
    Ok(Page { entries, next })
}

/// Returns conditions on `when` for the items in a state.
pub(super) fn within(state: ItemState, now: Timestamp) -> Vec<Document> {
    let range = |(from, below): (i64, i64)| {
        doc! { "when": { "$gte": millis(from), "$lt": millis(below) } }
    };
    let ranges: &[(i64, i64)] = match state {
        // Items whose leases have ended are ready, even if nobody has returned them yet.
        ItemState::Ready => &[(0, now.0 + 1), (LEASED, LEASED + now.0 + 1)],
        ItemState::Delayed => &[(now.0 + 1, READY_END)],
        ItemState::Reserved => &[(LEASED + now.0 + 1, BLOCKED)],
        ItemState::Blocked => &[(BLOCKED, BLOCKED + 1)],
        ItemState::Processed => &[(PROCESSED, PROCESSED + 1)],
    };
    ranges.iter().copied().map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursors_survive_their_text_form() {
        let id = ItemId(*b"0123456789ab");
        for position in [
            Position::Live { priority: 9, when: 1_700_000_000_000, id },
            Position::Shared { priority: 0, when: 1_700_000_000_000, id },
            Position::Blocked { priority: 0, id },
            Position::History { processed: 5, id },
        ] {
            assert_eq!(Position::parse(&position.to_string()).unwrap(), position);
        }
        for bad in ["", "l", "l.1.2.3", "x.1.2.303132333435363738396162", "l.1.2.30.31"] {
            assert!(matches!(Position::parse(bad), Err(StoreError::BadCursor)), "{bad:?}");
        }
    }
}
