//! The cursor of a queue: a watermark per priority, so that finds start behind the dead entries of settled items, and
//! the priorities that are in use.
//!
//! A watermark is a hint. Whoever makes an item eligible below it rewinds it, and now and then a sweep scans from the
//! start.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::{
    domain::{GroupName, Priority, PrioritySet, Timestamp},
    store::{
        Appeared,
        mongo::{
            cursor::{
                START,
                lease_deadlines::LeaseDeadlines,
                open_claims::OpenClaims,
                prefetch::{End, Prefetch},
            },
            schema::item::Stored,
        },
    },
};

const LEVELS: usize = Priority::LEVELS as usize;
/// Pause between sweeps of a busy queue.
const SWEEP_EVERY: Duration = Duration::from_secs(2);
/// Pause between sweeps of an empty queue.
const SWEEP_EMPTY: Duration = Duration::from_secs(1);
/// Sweeps take at most one part in this many of the time.
const SWEEP_SHARE: u32 = 50;
/// Finds may read so many bytes of payload that nobody has room for.
const CHEAP: usize = 256 << 10;
/// The clocks of brokers agree to within this many milliseconds. Watermarks stay behind the time by as much.
const UNCERTAINTY: i64 = 100;

struct State {
    /// Priorities recorded with the queue that was created at `incarnation`, as far as known.
    recorded: PrioritySet,
    incarnation: Timestamp,
    /// Priorities that may have items.
    used: PrioritySet,
    marks: [i64; LEVELS],
    /// How far the watermarks were rewound since the running scan read them.
    rewound: [i64; LEVELS],
    /// True if another broker may have used a new priority.
    reread: bool,
    /// Items that were found and not handed out.
    prefetch: Prefetch,
    swept: Option<Instant>,
    sweep_cost: Duration,
}

impl State {
    /// Adds priorities. Of those that were not in use nothing is known.
    fn start_priorities(&mut self, set: PrioritySet) {
        let new = set - self.used;
        self.prefetch.rewind(new, START);
        for level in new.iter() {
            self.marks[level as usize] = START;
        }
    }
}

/// Where the head of one queue is, as far as one broker knows.
pub(crate) struct QueueCursor {
    state: Mutex<State>,
    /// When the queue's leases end.
    pub(crate) lease_deadlines: LeaseDeadlines,
    /// Claims whose outcome is open.
    pub(crate) claims: OpenClaims,
    /// True if the queue was deep when it was last counted.
    pub(crate) deep: AtomicBool,
    /// The ordering key up to which keys were repaired; with `None` the next repair starts anew.
    pub(crate) repaired: Mutex<Option<String>>,
    /// Allows one reserve at a time: two would mix up the watermarks.
    pub(crate) turn: Arc<tokio::sync::Mutex<()>>,
    /// About how many items there were in each document that was found last.
    items_per_document: AtomicUsize,
    /// Mean bytes of payload of the items that were found last.
    bytes_per_item: AtomicUsize,
    /// Who consumes the queue through this broker.
    pub(crate) consumed: Mutex<Consumed>,
    /// True if the cursor was asked for since unused cursors were last dropped.
    pub(crate) recently_used: AtomicBool,
}

/// Who consumes a queue through this broker.
#[derive(Default)]
pub(crate) struct Consumed {
    /// Number of handles.
    pub(crate) handles: usize,
    /// The queue's group, once a handle was used.
    pub(crate) group: Option<GroupName>,
}

/// The range of a find.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scan {
    /// Priorities in use.
    pub(crate) used: PrioritySet,
    /// Where to start in each priority.
    pub(crate) marks: [i64; LEVELS],
    /// The watermarks before the scan: a priority that the scan does not reach keeps its own.
    pub(crate) before: [i64; LEVELS],
    /// True if the recorded priorities must be read again.
    pub(crate) reread: bool,
}

/// What a find saw of one priority.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scanned {
    pub(crate) level: i32,
    /// Where the next find of the priority may start.
    pub(crate) mark: i64,
}

impl QueueCursor {
    pub(crate) fn new() -> Self {
        let state = State {
            recorded: PrioritySet::EMPTY,
            incarnation: Timestamp::default(),
            used: PrioritySet::EMPTY,
            marks: [START; LEVELS],
            rewound: [i64::MAX; LEVELS],
            reread: false,
            prefetch: Prefetch::default(),
            swept: None,
            sweep_cost: Duration::ZERO,
        };
        Self {
            state: Mutex::new(state),
            lease_deadlines: LeaseDeadlines::new(),
            claims: OpenClaims::new(),
            repaired: Mutex::default(),
            deep: AtomicBool::new(false),
            items_per_document: AtomicUsize::new(1),
            bytes_per_item: AtomicUsize::new(1),
            turn: Arc::default(),
            consumed: Mutex::default(),
            recently_used: AtomicBool::new(false),
        }
    }

    /// Returns true if a sweep is due. `empty` says that the find from the watermarks found nothing.
    pub(crate) fn sweep_due(&self, empty: bool) -> bool {
        let state = self.state.lock();
        let pause = if empty { SWEEP_EMPTY } else { SWEEP_EVERY };
        state.swept.is_none_or(|at| at.elapsed() >= pause.max(state.sweep_cost * SWEEP_SHARE))
    }

    /// Starts a scan. Rewinds from now on are noted until [`QueueCursor::seen`], which heeds them.
    pub(crate) fn look(&self) -> Scan {
        let mut state = self.state.lock();
        state.rewound = [i64::MAX; LEVELS];
        let reread = std::mem::take(&mut state.reread);
        Scan { used: state.used, marks: state.marks, before: state.marks, reread }
    }

    /// Returns the priorities in use, as far as known.
    pub(crate) fn priorities_in_use(&self) -> PrioritySet {
        self.state.lock().used
    }

    /// Notes what a scan saw.
    pub(crate) fn seen(&self, seen: &[Scanned]) {
        let mut state = self.state.lock();
        for Scanned { level, mark } in seen {
            let level = *level as usize;
            state.marks[level] = (*mark).min(state.rewound[level]);
        }
    }

    /// Returns how many items a find should read if `wanted` are wanted.
    pub(crate) fn limit(&self, wanted: usize) -> usize {
        self.state.lock().prefetch.limit(wanted)
    }

    /// Returns about how many items have so many bytes of payload in all, as far as the last find saw: at least so many
    /// as are found at little cost, in case the next ones are smaller.
    pub(crate) fn fitting(&self, bytes: usize) -> usize {
        bytes.max(CHEAP).div_ceil(self.bytes_per_item.load(Ordering::Relaxed)).max(1)
    }

    /// Notes the result of a find. `more` is true if it left items of the highest priority behind.
    pub(crate) fn found(&self, items: &[Box<Stored>], more: bool) {
        let bytes: usize = items.iter().map(|item| item.payload.len()).sum();
        if let Some(each) = bytes.checked_div(items.len()) {
            self.bytes_per_item.store(each.max(1), Ordering::Relaxed);
        }
        self.state.lock().prefetch.found(items, more);
    }

    /// About how many items each document at the head holds: as the last find saw it.
    pub(crate) fn items_per_document(&self) -> usize {
        self.items_per_document.load(Ordering::Relaxed)
    }

    /// Notes how many items a find saw in how many documents.
    pub(crate) fn found_in(&self, items: usize, documents: usize) {
        let each = items.checked_div(documents).unwrap_or(1).max(1);
        self.items_per_document.store(each, Ordering::Relaxed);
    }

    /// Takes the first prefetched items, or none if a find is needed.
    pub(crate) fn take_prefetched(&self, wanted: usize) -> Vec<Box<Stored>> {
        self.state.lock().prefetch.take(wanted)
    }

    /// Returns where to read on while the items of a reserve are claimed: see [`Prefetch::end`].
    pub(crate) fn end(&self, wanted: usize, rest: usize, last: &Stored) -> Option<End> {
        let state = self.state.lock();
        let end = state.prefetch.end(wanted, rest, last)?;
        (state.used.highest() == Some(end.priority)).then_some(end)
    }

    /// Adds items that were read behind `end`. They must not be taken before [`QueueCursor::restore`].
    pub(crate) fn append(&self, end: End, items: Vec<Box<Stored>>, more: bool) {
        self.state.lock().prefetch.append(end, items, more);
    }

    /// Keeps the items that were found and not handed out, unless something got ahead of them since the scan began.
    pub(crate) fn restore(&self, items: Vec<Box<Stored>>) {
        let mut state = self.state.lock();
        let State { prefetch, used, rewound, .. } = &mut *state;
        prefetch.restore(items, *used);
        for level in used.iter() {
            prefetch.rewind(PrioritySet::of(level), rewound[level as usize]);
        }
    }

    /// Drops the prefetched items: another broker claimed some of them, or they are no longer reliable.
    pub(crate) fn forget_prefetched(&self) {
        self.state.lock().prefetch.clear();
    }

    /// Notes a sweep and its cost.
    pub(crate) fn swept(&self, cost: Duration) {
        let mut state = self.state.lock();
        state.swept = Some(Instant::now());
        state.sweep_cost = cost;
    }

    /// Returns the watermark of a priority in which nothing more was found up to `now`.
    pub(crate) fn mark_of_empty(now: Timestamp) -> i64 {
        now.0 - UNCERTAINTY
    }

    /// Rewinds the watermarks of these priorities, because an item became eligible at `since` in one of them.
    pub(crate) fn rewind(&self, set: PrioritySet, since: i64) {
        let mut state = self.state.lock();
        state.used |= set;
        state.prefetch.rewind(set, since);
        for level in set.iter() {
            let level = level as usize;
            state.marks[level] = state.marks[level].min(since);
            state.rewound[level] = state.rewound[level].min(since);
        }
    }

    /// Rewinds the watermarks for a hint, which names no priorities.
    pub(crate) fn appeared(&self, appeared: Appeared) {
        let Some(since) = appeared.since() else { return };
        let since = since.map_or(START, |since| since.0 - UNCERTAINTY);
        let used = {
            let mut state = self.state.lock();
            state.reread = true;
            state.used
        };
        self.rewind(used, since);
    }

    /// Sets the priorities in use as the index shows them. Those added since `before` was read stay.
    pub(crate) fn set_used(&self, set: PrioritySet, before: PrioritySet) {
        let mut state = self.state.lock();
        let added = state.used - before;
        state.start_priorities(set);
        state.used = set | added;
    }

    /// Adds priorities that another broker recorded. Returns true if any of them is new.
    pub(crate) fn add_used(&self, set: PrioritySet) -> bool {
        let mut state = self.state.lock();
        let new = !(set - state.used).is_empty();
        state.start_priorities(set);
        state.used |= set;
        new
    }

    /// Returns the priorities that are not known to be recorded with the queue that was created at `incarnation`.
    pub(crate) fn unrecorded(
        &self,
        set: PrioritySet,
        incarnation: Option<Timestamp>,
    ) -> PrioritySet {
        let mut state = self.state.lock();
        if let Some(incarnation) = incarnation
            && state.incarnation != incarnation
        {
            state.incarnation = incarnation;
            state.recorded = PrioritySet::EMPTY;
        }
        set - state.recorded
    }

    /// Notes that the priorities are recorded, unless the queue was created anew meanwhile.
    pub(crate) fn recorded(&self, set: PrioritySet, incarnation: Option<Timestamp>) {
        let mut state = self.state.lock();
        if incarnation.is_none_or(|incarnation| state.incarnation == incarnation) {
            state.recorded |= set;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_item_pushed_during_a_scan_is_not_skipped() {
        let cursor = QueueCursor::new();
        cursor.rewind(PrioritySet::of(3), 100);
        let _ = cursor.look();
        cursor.rewind(PrioritySet::of(3), 150);
        cursor.seen(&[Scanned { level: 3, mark: 500 }]);
        assert_eq!(cursor.look().marks[3], 150);
        cursor.seen(&[Scanned { level: 3, mark: 500 }]);
        assert_eq!(cursor.look().marks[3], 500);
        cursor.appeared(Appeared::Since(Timestamp(400)));
        assert_eq!(cursor.look().marks[3], 400 - UNCERTAINTY);
        cursor.appeared(Appeared::Nothing);
        assert_eq!(cursor.look().marks[3], 400 - UNCERTAINTY);
        cursor.appeared(Appeared::FromStart);
        assert_eq!(cursor.look().marks[3], START);
    }
}
