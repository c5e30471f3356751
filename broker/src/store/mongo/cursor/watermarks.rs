//! Where a queue's head is: a watermark per priority level, so that finds start behind the entries
//! of items long gone, and which levels are in use at all.
//!
//! A watermark is a hint. It is lowered by whoever makes something eligible below it, and now and
//! then a sweep looks from the start.

use std::{
    sync::atomic::AtomicBool,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::{
    domain::{GroupName, Priority, PrioritySet, Timestamp},
    store::{
        Appeared,
        mongo::{
            cursor::{
                START, lease_deadlines::LeaseDeadlines, open_claims::OpenClaims, prefetch::Prefetch,
            },
            schema::item::Stored,
        },
    },
};

const LEVELS: usize = Priority::LEVELS as usize;
/// A busy queue is swept about this often.
const SWEEP_EVERY: Duration = Duration::from_secs(2);
/// An empty one may be swept this soon.
const SWEEP_EMPTY: Duration = Duration::from_secs(1);
/// Sweeps take at most one part in so many of the time.
const SWEEP_SHARE: u32 = 50;
/// Brokers' clocks agree to within this many milliseconds; watermarks stay behind by it.
const UNCERTAINTY: i64 = 100;

struct State {
    /// Levels recorded with the queue's settings, as far as known, for the queue created then.
    recorded: PrioritySet,
    incarnation: Timestamp,
    /// Levels in which there may be items.
    used: PrioritySet,
    marks: [i64; LEVELS],
    /// How far the marks were lowered since the running reserve took them.
    rewound: [i64; LEVELS],
    /// Another broker may have used a new level.
    reread: bool,
    /// Found and not handed out.
    prefetch: Prefetch,
    swept: Option<Instant>,
    sweep_cost: Duration,
}

impl State {
    /// Nothing is known of those of the levels that were not in use.
    fn start_priorities(&mut self, set: PrioritySet) {
        let new = set - self.used;
        self.prefetch.rewind(new, START);
        for level in new.iter() {
            self.marks[level as usize] = START;
        }
    }
}

/// One queue's head, as one broker knows it.
pub(crate) struct QueueCursor {
    state: Mutex<State>,
    /// Its leases.
    pub(crate) lease_deadlines: LeaseDeadlines,
    /// Claims on their way.
    pub(crate) claims: OpenClaims,
    /// The queue was deep when it was counted last.
    pub(crate) deep: AtomicBool,
    /// The ordering key up to which turns were repaired; `None`: the next repair begins anew.
    pub(crate) repaired: Mutex<Option<String>>,
    /// One reserve at a time: the marks of two would get mixed up.
    pub(crate) turn: tokio::sync::Mutex<()>,
    /// Who consumes the queue here.
    pub(crate) consumed: Mutex<Consumed>,
    /// It was asked for since unused heads were dropped last.
    pub(crate) recently_used: AtomicBool,
}

/// Who consumes a queue here.
#[derive(Default)]
pub(crate) struct Consumed {
    /// How many hand out its items.
    pub(crate) handles: usize,
    /// The queue's group, once something was asked of it.
    pub(crate) group: Option<GroupName>,
}

/// What a find should look at.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scan {
    /// Levels in use.
    pub(crate) used: PrioritySet,
    /// Where to start in each.
    pub(crate) marks: [i64; LEVELS],
    /// The marks as they were before: a level that is not reached keeps its own.
    pub(crate) before: [i64; LEVELS],
    /// Read anew which levels are recorded.
    pub(crate) reread: bool,
}

/// What a find saw in one level.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scanned {
    pub(crate) level: i32,
    /// The next find of the level may start here.
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
            turn: tokio::sync::Mutex::default(),
            consumed: Mutex::default(),
            recently_used: AtomicBool::new(false),
        }
    }

    /// True if a sweep is due; `empty`: the find from the watermarks found nothing.
    pub(crate) fn sweep_due(&self, empty: bool) -> bool {
        let state = self.state.lock();
        let pause = if empty { SWEEP_EMPTY } else { SWEEP_EVERY };
        state.swept.is_none_or(|at| at.elapsed() >= pause.max(state.sweep_cost * SWEEP_SHARE))
    }

    /// Starts a look: lowerings from now on are kept apart until [`QueueCursor::seen`].
    pub(crate) fn look(&self) -> Scan {
        let mut state = self.state.lock();
        state.rewound = [i64::MAX; LEVELS];
        let reread = std::mem::take(&mut state.reread);
        Scan { used: state.used, marks: state.marks, before: state.marks, reread }
    }

    /// The levels in use, as far as known.
    pub(crate) fn priorities_in_use(&self) -> PrioritySet {
        self.state.lock().used
    }

    /// Notes what a look found.
    pub(crate) fn seen(&self, seen: &[Scanned]) {
        let mut state = self.state.lock();
        for Scanned { level, mark } in seen {
            let level = *level as usize;
            state.marks[level] = (*mark).min(state.rewound[level]);
        }
    }

    /// How many items to ask for if so many are wanted.
    pub(crate) fn limit(&self, wanted: usize) -> usize {
        self.state.lock().prefetch.limit(wanted)
    }

    /// Notes what a find brought; `more`: it left some of the highest level behind.
    pub(crate) fn found(&self, items: &[Stored], more: bool) {
        self.state.lock().prefetch.found(items, more);
    }

    /// Takes the first items found before; none if a find is needed.
    pub(crate) fn take_prefetched(&self, wanted: usize) -> Vec<Stored> {
        self.state.lock().prefetch.take(wanted)
    }

    /// Keeps what was found and not handed out, unless something got ahead of it since the look began.
    pub(crate) fn restore(&self, items: Vec<Stored>) {
        let mut state = self.state.lock();
        let State { prefetch, used, rewound, .. } = &mut *state;
        prefetch.restore(items, *used);
        for level in used.iter() {
            prefetch.rewind(PrioritySet::of(level), rewound[level as usize]);
        }
    }

    /// Others were faster with what was found, or it is not to be relied on.
    pub(crate) fn forget_prefetched(&self) {
        self.state.lock().prefetch.clear();
    }

    /// Notes a sweep and what it cost.
    pub(crate) fn swept(&self, cost: Duration) {
        let mut state = self.state.lock();
        state.swept = Some(Instant::now());
        state.sweep_cost = cost;
    }

    /// The mark of a level in which nothing more was found up to `now`.
    pub(crate) fn mark_of_empty(now: Timestamp) -> i64 {
        now.0 - UNCERTAINTY
    }

    /// Something became eligible at `since` in one of the levels.
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

    /// A hint, of unknown levels.
    pub(crate) fn appeared(&self, appeared: Appeared) {
        let since = match appeared {
            Appeared::Nothing => return,
            Appeared::Since(since) => since.0 - UNCERTAINTY,
            Appeared::FromStart => START,
        };
        let used = {
            let mut state = self.state.lock();
            state.reread = true;
            state.used
        };
        self.rewind(used, since);
    }

    /// The levels in use, as the index shows them; those added meanwhile stay.
    pub(crate) fn set_used(&self, set: PrioritySet, before: PrioritySet) {
        let mut state = self.state.lock();
        let added = state.used - before;
        state.start_priorities(set);
        state.used = set | added;
    }

    /// Adds levels that another broker recorded; true if any is new.
    pub(crate) fn add_used(&self, set: PrioritySet) -> bool {
        let mut state = self.state.lock();
        let new = !(set - state.used).is_empty();
        state.start_priorities(set);
        state.used |= set;
        new
    }

    /// Which of the levels are not known to be recorded with the queue created at `incarnation`.
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

    /// Notes that the levels are recorded.
    pub(crate) fn recorded(&self, set: PrioritySet) {
        self.state.lock().recorded |= set;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_pushed_during_a_look_is_not_passed_over() {
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
