//! Which items of a push share a segment.

use std::collections::HashMap;

use mongodb::bson::RawDocumentBuf;

use crate::{
    domain::{IdSource, ItemId, Timestamp},
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
    /// Large enough that statements are few; small enough that one which changes little costs little.
    pub const SHARED: Self = Self { max: 200, alone: false };
}

impl Default for SegmentSize {
    fn default() -> Self {
        Self::NONE
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
    may_share: bool,
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
}

/// Plans a batch. Items of one queue and priority keep their order.
pub(crate) fn plan(ids: &IdSource, now: Timestamp, items: &[Push], size: SegmentSize) -> Plan {
    let mut units: Vec<Unit> = Vec::new();
    let mut open: HashMap<(&str, u8), Open> = HashMap::new();
    for (at, push) in items.iter().enumerate() {
        let place = (push.queue.name.as_str(), push.item.priority.level());
        if size.max == 0 || !push.item.may_share(&push.queue) {
            open.remove(&place);
            units.push(Unit { places: vec![at], segment: None, may_share: false });
            continue;
        }
        let bytes = push.item.payload.len()
            + push.item.headers.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>();
        if let Some(open) = open.get_mut(&place)
            && open.bytes + bytes <= MAX_BYTES
            && units[open.unit].places.len() < size.max.min(ItemId::MAX_OFFSET)
        {
            open.bytes += bytes;
            units[open.unit].places.push(at);
        } else {
            open.insert(place, Open { unit: units.len(), bytes });
            units.push(Unit { places: vec![at], segment: None, may_share: true });
        }
    }
    let mut starts: Vec<Option<ItemId>> = vec![None; items.len()];
    for unit in &mut units {
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
            let pushes: Vec<&Push> = unit.places.iter().map(|at| &items[*at]).collect();
            document::encode(&pushes, id, starts[first].now)
        }
    }
}
