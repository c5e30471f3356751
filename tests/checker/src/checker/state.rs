//! What is known of items, reservations and queues at one point of the history.

use std::collections::VecDeque;

use super::{
    flow::Flow,
    key::{Key, Map},
};
use crate::{
    history::{CallId, Delivery, Request, Settings, Span, Time},
    report::Violation,
};

/// A point of the history. Its number says what happened before what; its time is for durations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Mark {
    pub(super) event: u64,
    pub(super) at: Time,
}

/// A call or stream under way.
pub(super) struct Call {
    pub(super) start: Mark,
    pub(super) broker: Key,
    pub(super) request: Request,
    /// The last event.
    pub(super) last: Mark,
    /// A waiting consumer: since when it has room and has received nothing.
    pub(super) idle: Mark,
    /// A consumer: what it is assigned may be taken back from it before it is sent.
    pub(super) may_go_unsent: bool,
    /// A stream: what it is assigned may lapse before it is sent, also without a fault.
    pub(super) may_go_unread: bool,
    /// A stream: receipts of what it was sent and may still hold.
    pub(super) held: Vec<Key>,
    /// How many of these are certain to hold no place, as their settling has begun.
    pub(super) may_be_free: usize,
    /// How many items were sent and not certainly settled.
    pub(super) surely_not_free: u64,
    /// A stream: how many items it may hold.
    pub(super) flow: Flow,
    /// Violations unless the stream had broken by then, each with when it had to be alive.
    pub(super) suspects: Vec<(Mark, Violation)>,
}

/// An item of a push, until the push is answered or the item was seen.
pub(super) struct Pushing {
    pub(super) call: CallId,
    pub(super) index: usize,
    pub(super) queue: Key,
    pub(super) stream: Option<u64>,
    pub(super) broker: Key,
    pub(super) start: Mark,
    /// The hash of the ordering key.
    pub(super) ordering: Option<Key>,
    /// The hash of queue and deduplication id.
    pub(super) dedup: Option<Key>,
    pub(super) priority: u8,
    pub(super) delay: Span,
    pub(super) ttl: Option<Span>,
    /// What the item's sequence number has to exceed, and by which event.
    pub(super) floor: (u64, u64),
    /// The item that this push has stored, as far as is known.
    pub(super) stored: Option<Key>,
    /// The outcome is unknown.
    pub(super) unknown: bool,
}

/// What was pushed under one name.
#[derive(Default)]
pub(super) struct Named {
    /// How many pushes had this name: with more than one it is not known which has stored the item.
    pub(super) pushes: u32,
    /// Pushes that are not answered.
    pub(super) open: Vec<Pushing>,
    /// The item that was stored last, and when that was known.
    pub(super) item: Option<(Key, Mark)>,
}

/// What was pushed under one deduplication id.
#[derive(Default)]
pub(super) struct Dedup {
    /// The first item, and when its push began.
    pub(super) first: Option<(Key, Mark)>,
    /// Names of pushes that are not answered.
    pub(super) open: Vec<Key>,
    /// The id may have been forgotten: the item or the queue was deleted.
    pub(super) unsure: bool,
}

/// An item that was stored and is not certainly gone.
pub(super) struct Item {
    pub(super) id: Box<str>,
    pub(super) name: Box<str>,
    pub(super) name_key: Key,
    pub(super) queue: Key,
    pub(super) ordering: Option<Key>,
    /// The item has a place among those of its ordering key, which a dead letter has not.
    pub(super) ordered: bool,
    pub(super) dedup: Option<Key>,
    /// Between these points the item came into its queue.
    pub(super) entered: (Mark, Mark),
    /// The push or move, and the item's place in it.
    pub(super) entered_by: (CallId, usize),
    pub(super) stream: Option<u64>,
    pub(super) broker: Key,
    pub(super) priority: u8,
    /// Pushed without a delay, and still where it was pushed to.
    pub(super) in_push_order: bool,
    /// How often it had been handed out when it came into its queue, if that is known.
    pub(super) deliveries_before: Option<u32>,
    /// How many of its deliveries in this queue may not count for `max_deliveries`: those that nobody saw, and those that a
    /// broker may have taken back when it shut down.
    pub(super) uncounted: u32,
    /// Not to be delivered before that time, because of that event.
    pub(super) not_before: (Time, u64),
    /// From then on it is certain to be ready.
    pub(super) ready: Option<Time>,
    /// It expires between these times; the second is unknown while the push is.
    pub(super) expires: Option<(Time, Option<Time>)>,
    /// The event that showed that the item is stored.
    pub(super) stored: u64,
    /// The highest count of deliveries that was seen.
    pub(super) number: u32,
    /// The newest reservation in this queue.
    pub(super) last: Option<Reservation>,
    /// Settles of the newest reservation that are under way or have an unknown outcome.
    pub(super) settles: Vec<Settle>,
    /// A deletion of the item is under way or has an unknown outcome.
    pub(super) maybe_deleted: bool,
    /// Violations that a settle under way excuses, unless it turns out to have changed nothing.
    pub(super) suspects: Vec<(CallId, Violation)>,
    /// How many consumers of the queue had ended when the item was seen last.
    pub(super) cuts: u64,
}

impl Item {
    /// Returns how many deliveries came between the newest one and this one, and nobody saw them.
    pub(super) fn unseen(&self, delivery: &Delivery) -> u32 {
        delivery.deliveries.saturating_sub(self.number + 1)
    }

    /// Returns whether a broker that shut down may have taken the newest delivery back, which then does not count.
    pub(super) fn may_be_taken_back(&self) -> bool {
        let is_open = |last: &Reservation| last.ended.is_none();
        self.last
            .as_ref()
            .is_some_and(|last| is_open(last) && (last.by_stream || !self.settles.is_empty()))
    }

    /// Returns the settle that may end the reservation, if there is one.
    pub(super) fn ender(&self) -> Option<CallId> {
        self.settled_by(Kind::ends)
    }

    /// Returns the first settle of a kind that is under way or has an unknown outcome.
    pub(super) fn settled_by(&self, kind: impl Fn(Kind) -> bool) -> Option<CallId> {
        self.settles.iter().find(|settle| kind(settle.kind)).map(|settle| settle.call)
    }
}

/// Changes that touch many items at once: when the last one ended, and how many may go on.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Changes {
    pub(super) open: u32,
    pub(super) done: u64,
}

impl Changes {
    /// Returns whether something that was there at an event may have been changed since.
    pub(super) fn since(self, event: u64) -> bool {
        self.open > 0 || self.done > event
    }
}

/// One reservation of an item: the newest that was seen.
pub(super) struct Reservation {
    pub(super) receipt: Key,
    pub(super) number: u32,
    pub(super) attempt: u32,
    pub(super) delivered: Mark,
    pub(super) call: CallId,
    /// The lease is certain to last until then, if it was not ended.
    pub(super) lease: Time,
    pub(super) ended: Option<Ended>,
    /// It also ends with its stream.
    pub(super) by_stream: bool,
}

/// How a reservation ended, for certain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// Rolled back as a failed attempt.
    Failed,
    /// Rolled back with `keep_attempt`.
    Kept,
}

/// A settle whose outcome is not known yet.
pub(super) struct Settle {
    pub(super) call: CallId,
    pub(super) start: Mark,
    pub(super) kind: Kind,
}

/// What a settle does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Commit,
    Rollback { delay: Option<Span>, keep_attempt: bool, dead_letter: bool },
    Extend { lease: Span },
    Move { to: Key, delay: Span },
}

impl Kind {
    /// Returns whether the reservation ends.
    pub(super) fn ends(self) -> bool {
        !matches!(self, Self::Extend { .. })
    }

    /// Returns whether the item may leave its queue.
    pub(super) fn removes(self) -> bool {
        match self {
            Self::Commit | Self::Move { .. } => true,
            Self::Rollback { dead_letter, .. } => dead_letter,
            Self::Extend { .. } => false,
        }
    }
}

/// A receipt that was handed out.
pub(super) struct Receipt {
    pub(super) item: Key,
    pub(super) queue: Key,
    pub(super) number: u32,
    /// Length of the item's payload.
    pub(super) bytes: usize,
    pub(super) call: CallId,
    pub(super) delivered: Mark,
    /// When a newer one was seen.
    pub(super) newer: Option<Mark>,
    /// When a settle by it was answered as done.
    pub(super) ended: Option<Mark>,
    /// A settle by it has begun.
    pub(super) settling: bool,
    /// Its lease may have ended before an extension of it took effect, and the stream may have given its place away then.
    pub(super) may_be_free: bool,
}

/// An item that is no longer there.
pub(super) struct Gone {
    pub(super) mark: Mark,
    pub(super) number: u32,
    pub(super) how: How,
    pub(super) queue: Key,
    /// When it expires: see [`Item::expires`].
    pub(super) expires: Option<(Time, Option<Time>)>,
}

/// Why an item is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    Committed,
    Deleted,
    Discarded,
    /// A settle was answered `GONE`.
    SaidGone,
    /// An item pushed by the `CommitAndPush` was seen.
    PushesSeen,
}

/// The items of an ordering key in a queue.
#[derive(Default)]
pub(super) struct Line {
    /// In the order in which their pushes were answered.
    pub(super) items: VecDeque<Key>,
    /// The one that was delivered last.
    pub(super) held: Option<Key>,
    /// The highest sequence number answered, and by which event.
    pub(super) floor: (u64, u64),
    /// The call answered last, and the number of its last item.
    pub(super) last_answer: (CallId, u64),
    /// Pushes that are under way or have an unknown outcome.
    pub(super) open: u64,
}

/// How often something happened: certainly, and at most.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Count {
    pub(super) sure: u64,
    pub(super) maybe: u64,
}

/// What the totals of a queue have to be.
#[derive(Default)]
pub(super) struct Totals {
    pub(super) pushed: Count,
    pub(super) committed: Count,
    pub(super) popped: Count,
    pub(super) moved: Count,
    pub(super) delivered: u64,
    pub(super) dead_lettered: u64,
    /// They cannot be known: the queue was deleted, or a fault cut the totals of a broker.
    pub(super) unsure: bool,
}

/// The last item that was delivered of those pushed through one broker at one priority.
#[derive(Clone, Copy)]
pub(super) struct Watermark {
    pub(super) start: Mark,
    pub(super) call: CallId,
    pub(super) index: usize,
    pub(super) delivered: u64,
}

/// A queue.
#[derive(Default)]
pub(super) struct Queue {
    pub(super) name: String,
    pub(super) settings: Settings,
    /// The settings are being changed until then.
    pub(super) settings_unsure_until: Time,
    /// Since when it is paused for certain.
    pub(super) paused: Option<Mark>,
    /// Consumers under way.
    pub(super) consumers: Vec<CallId>,
    /// When a consumer broke off, or a stream ended, last.
    pub(super) cut: Mark,
    /// When a call was answered last that had taken nearly as long as its leases last: what was reserved for it meanwhile may have been too
    /// late to be handed out.
    pub(super) late: Mark,
    /// When a consumer began or ended last whose items may be taken back before they are sent.
    pub(super) unsent: Mark,
    /// The same of one that does not read, and has short leases.
    pub(super) unread: Mark,
    /// When a client last changed the flow of its stream.
    pub(super) flow_changed: Mark,
    /// What was pushed after this event is handed out to one consumer at a time.
    pub(super) lone_since: u64,
    /// What was ready before has to be delivered only some time after that.
    pub(super) excused_until: Time,
    /// How many consumers broke off, and how many streams ended.
    pub(super) cuts: u64,
    /// It is being paused, is paused or is being resumed.
    pub(super) halted: bool,
    /// Purges, and deletions with all items.
    pub(super) purges: Changes,
    /// Deletions: numbers and deduplication ids start afresh.
    pub(super) deletions: Changes,
    /// Replays of processed items.
    pub(super) replays: Changes,
    /// Redrives of dead letters.
    pub(super) redrives: Changes,
    /// Calls that broke off and may still take items.
    pub(super) lost_calls: u64,
    /// How many items may have been handed out for good to nobody.
    pub(super) popped_unseen: u64,
    /// The highest sequence number answered, and by which event.
    pub(super) floor: (u64, u64),
    /// The call answered last, and the number of its last item.
    pub(super) last_answer: (CallId, u64),
    /// The numbers that were given, each with its event.
    pub(super) sequences: Map<u64, u64>,
    pub(super) watermarks: Map<Key, Watermark>,
    /// Spans in which a consumer waited in vain: from, to, and the event of the end.
    pub(super) waits: VecDeque<(Time, Time, u64)>,
    pub(super) totals: Totals,
}
