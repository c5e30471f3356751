//! Which items of a push share a segment.

use std::collections::{HashMap, HashSet};

use mongodb::bson::RawDocumentBuf;

use crate::{
    domain::{DedupId, IdSource, ItemId, Timestamp},
    store::{
        Push, Result,
        mongo::{
            schema::item::{self, Start},
            segment::document,
        },
    },
};

/// How large segments get.
#[derive(Debug, Clone, Copy)]
pub struct SegmentSize {
    /// Most items of a segment; 0: every item is a document of its own.
    pub max: usize,
    /// An item alone is a segment too: only for tests.
    pub alone: bool,
}

impl SegmentSize {
    /// How many segments hold about so many items.
    pub(crate) fn segments_of(self, items: usize) -> usize {
        (items / self.max.max(1)).max(1)
    }
}

impl SegmentSize {
    /// Every item is a document of its own.
    pub const NONE: Self = Self { max: 0, alone: false };
    /// Large enough that statements are few; small enough that one which changes little costs little. Batches and rounds of 500
    /// or 1,000 items are whole segments, so that few claims and commits take a part of one.
    pub const SHARED: Self = Self { max: 125, alone: false };
}

impl Default for SegmentSize {
    fn default() -> Self {
        Self::SHARED
    }
}

/// Most bytes of a segment: each statement that changes a document costs more the larger the document is.
const MAX_BYTES: usize = 256 << 10;

/// Items that form one document.
pub(crate) struct Unit {
    /// Their places in the batch.
    pub(crate) places: Vec<usize>,
    /// Its id, if it is a segment.
    pub(crate) segment: Option<ItemId>,
    /// Places of items that are left out after all, because they are duplicates. The others keep their ids.
    pub(crate) left_out: HashSet<usize>,
    /// Written after the others: an item with a deduplication id that an earlier one of the batch has.
    pub(crate) is_late: bool,
    may_share: bool,
}

impl Unit {
    fn of(at: usize, may_share: bool) -> Self {
        Self {
            places: vec![at],
            segment: None,
            left_out: HashSet::new(),
            is_late: false,
            may_share,
        }
    }

    /// Returns the places of the items that are not left out.
    pub(crate) fn present(&self) -> impl Iterator<Item = usize> + '_ {
        self.places.iter().copied().filter(|at| !self.left_out.contains(at))
    }
}

/// How the items of a batch are stored.
pub(crate) struct Plan {
    pub(crate) starts: Vec<Start>,
    pub(crate) units: Vec<Unit>,
}

/// Items that may share a segment, while more may come.
struct Open {
    unit: usize,
    bytes: usize,
    /// How long their deduplication ids are remembered, if they have any.
    window: Option<Timestamp>,
}

/// Returns about how many bytes an item takes in a segment.
pub(crate) fn bytes_of(push: &Push) -> usize {
    let headers = push.item.headers.iter().map(|(name, value)| name.len() + value.len());
    push.item.payload.len()
        + DedupId::text_of(push.item.dedup_id.as_ref()).len()
        + headers.sum::<usize>()
}

/// Chooses the ids of the items that are stored as reserved, before their batch is planned. Items that follow one
/// another under one lease share segments, as far as they may share any.
pub(crate) fn choose_ids(ids: &IdSource, now: Timestamp, items: &mut [Push], size: SegmentSize) {
    let mut rest = items;
    while let Some(first) = rest.first() {
        let count = if first.first_lease.is_some() { alike(rest, now, size) } else { 1 };
        let (segment, after) = rest.split_at_mut(count);
        let id = ids.next_block(now);
        for (number, push) in segment.iter_mut().enumerate() {
            if push.first_lease.is_some() {
                push.id = Some(if count > 1 { id.at_offset(number + 1) } else { id });
            }
        }
        rest = after;
    }
}

/// Returns how many of the items, from the first on, can share one segment under the lease of the first.
fn alike(items: &[Push], now: Timestamp, size: SegmentSize) -> usize {
    let facts = |push: &Push| {
        let lease = push.first_lease.as_ref().map(|lease| lease.token);
        (lease, push.item.priority.level(), item::window(push, now))
    };
    let (first, mut bytes) = (&items[0], 0);
    let fits = |push: &&Push| {
        bytes += bytes_of(push);
        push.item.may_share(&push.queue)
            && push.queue.name == first.queue.name
            && facts(push) == facts(first)
            && bytes <= MAX_BYTES
    };
    let most = size.max.min(ItemId::MAX_OFFSET);
    items.iter().take(most).take_while(fits).count().max(1)
}

/// Plans a batch. Items of one queue and priority keep their order.
pub(crate) fn plan(ids: &IdSource, now: Timestamp, items: &[Push], size: SegmentSize) -> Plan {
    let mut units: Vec<Unit> = Vec::new();
    let mut open: HashMap<(&str, u8), Open> = HashMap::new();
    let mut ids_here: HashSet<(&str, &str)> = HashSet::new();
    // The units of segments whose ids are chosen.
    let mut reserved: HashMap<ItemId, usize> = HashMap::new();
    for (at, push) in items.iter().enumerate() {
        let place = (push.queue.name.as_str(), push.item.priority.level());
        let chosen = push.id;
        let (window, id) = (item::window(push, now), DedupId::text_of(push.item.dedup_id.as_ref()));
        // The index allows one document to have an id twice, and of two documents it may refuse the first.
        let is_late = window.is_some() && !ids_here.insert((place.0, id));
        if is_late {
            units.push(Unit { is_late, ..Unit::of(at, false) });
        }
        if let Some(id) = chosen.filter(|id| id.block().1 > 0) {
            let unit = *reserved.entry(id.block().0).or_insert_with(|| {
                open.remove(&place);
                units.push(Unit { places: Vec::new(), ..Unit::of(at, true) });
                units.len() - 1
            });
            units[unit].places.push(at);
            if is_late {
                units[unit].left_out.insert(at);
            }
            continue;
        }
        if is_late {
            continue;
        }
        if size.max == 0 || chosen.is_some() || !push.item.may_share(&push.queue) {
            open.remove(&place);
            units.push(Unit::of(at, false));
            continue;
        }
        let bytes = bytes_of(push);
        if let Some(open) = open.get_mut(&place)
            && open.bytes + bytes <= MAX_BYTES
            && open.window == window
            && units[open.unit].places.len() < size.max.min(ItemId::MAX_OFFSET)
        {
            open.bytes += bytes;
            units[open.unit].places.push(at);
        } else {
            open.insert(place, Open { unit: units.len(), bytes, window });
            units.push(Unit::of(at, true));
        }
    }
    let mut starts: Vec<Option<ItemId>> = vec![None; items.len()];
    for unit in &mut units {
        if let Some(id) = items[unit.places[0]].id {
            let (segment, number) = id.block();
            unit.segment = (number > 0 && !unit.is_late).then_some(segment);
            unit.places.iter().for_each(|&at| starts[at] = items[at].id);
            continue;
        }
        let first = ids.next_block(now);
        let shared = unit.places.len() > 1 || (size.alone && unit.may_share);
        unit.segment = shared.then_some(first);
        for (number, &at) in unit.places.iter().enumerate() {
            starts[at] = Some(if shared { first.at_offset(number + 1) } else { first });
        }
    }
    let start = |id: Option<ItemId>| {
        let id = id.unwrap_or_else(|| ids.next_block(now)); // each item is in a unit
        Start { id, now, sequence: None, blocked: false }
    };
    Plan { starts: starts.into_iter().map(start).collect(), units }
}

/// The document of a unit.
pub(crate) fn encode(unit: &Unit, items: &[Push], starts: &[Start]) -> Result<RawDocumentBuf> {
    let first = unit.places[0];
    match unit.segment {
        None => item::encode(&items[first], &starts[first]),
        Some(id) => {
            let push = |at: &usize| (!unit.left_out.contains(at)).then(|| &items[*at]);
            let pushes: Vec<Option<&Push>> = unit.places.iter().map(push).collect();
            document::encode(&pushes, id, starts[first].now)
        }
    }
}
