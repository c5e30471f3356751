//! A history: what clients asked, what they were told, and when.
//!
//! A call has a start and an end. Between the two a stream has events. The start of a call is recorded
//! before anything is sent, and its end after the answer was read, so that an effect of the call lies
//! between them. The end of a stream that the client closes is recorded before the client closes it.

mod describe;
mod file;
mod recorder;

use serde::{Deserialize, Serialize};

pub(crate) use describe::{Focus, describe};
pub use file::{merge, read, read_merged};
pub use recorder::{Call, Clock, Recorder};

/// Microseconds of the history's clock, which never goes back and is the same for all processes of a
/// host.
pub type Time = u64;

/// A length of time in microseconds.
pub type Span = u64;

/// The number of a call or stream, unique in the history.
pub type CallId = u64;

/// One line of a history.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When it happened, as the client saw it.
    pub at: Time,
    /// What happened.
    pub what: What,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// A call or stream is about to be sent.
    Start {
        /// Its number.
        call: CallId,
        /// Who calls.
        client: String,
        /// The process that is called. A broker that was restarted has another name.
        broker: String,
        /// What is asked.
        request: Request,
    },
    /// A message with items arrived on a stream.
    Delivered {
        /// The stream.
        call: CallId,
        /// The items.
        deliveries: Vec<Delivery>,
    },
    /// A stream said that an item is no longer held.
    Revoked {
        /// The stream.
        call: CallId,
        /// The receipt.
        receipt: String,
    },
    /// A call was answered, or a stream ended.
    End {
        /// The call.
        call: CallId,
        /// The answer.
        answer: Answer,
    },
    /// A fault begins or ends. Meanwhile nobody has to be woken, and hand-out order and totals are not
    /// judged exactly.
    Disturbed {
        /// Whether it begins.
        begins: bool,
        /// What is done.
        fault: String,
    },
    /// The clock of a host or of the store was stepped: times from before are not judged any more.
    ClockStepped,
    /// Clocks of brokers and store follow one that was stepped, from here on or until here: no times are judged meanwhile,
    /// and none from before afterwards.
    ClocksFollow {
        /// Whether it begins.
        begins: bool,
    },
    /// The clock of the store runs slowly, from here on or until here, because the clock of its machine was set back: what is
    /// to last may last longer, and nothing may be shorter.
    ClockSlow {
        /// Whether it begins.
        begins: bool,
    },
    /// No call is under way, and none that was broken off still has an effect. What is named here is all
    /// that is in the store: queues that are not named are empty.
    Rest {
        /// The queues and what is in them.
        queues: Vec<QueueAtRest>,
    },
}

/// What a client asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // as in the proto, where each is described
pub enum Request {
    Push {
        queue: String,
        items: Vec<NewItem>,
        /// The number of the `PushStream`, if the batch is sent on one.
        stream: Option<u64>,
    },
    Pop {
        queue: String,
        max_items: u32,
        wait: Span,
    },
    Reserve {
        queue: String,
        max_items: u32,
        wait: Span,
        lease: Span,
    },
    Consume(Consume),
    /// On a `ConsumeStream`: how many items it may hold from now on.
    Flow {
        /// The call of the stream.
        stream: CallId,
        max_in_flight: u32,
    },
    Commit {
        receipts: Vec<String>,
    },
    Rollback {
        items: Vec<RollbackItem>,
    },
    Extend {
        receipts: Vec<String>,
        lease: Span,
    },
    Move {
        receipt: String,
        to_queue: String,
        delay: Span,
    },
    CommitAndPush {
        receipt: String,
        pushes: Vec<PushEntry>,
    },
    /// `CreateQueue` or `UpdateQueue`: the settings from now on.
    SetQueue {
        queue: String,
        settings: Settings,
    },
    DeleteQueue {
        queue: String,
        force: bool,
    },
    PauseQueue {
        queue: String,
    },
    ResumeQueue {
        queue: String,
    },
    PurgeQueue {
        queue: String,
    },
    DeleteItem {
        queue: String,
        id: String,
    },
    ReplayItems {
        queue: String,
    },
    RedriveItems {
        queue: String,
    },
    GetQueueStats {
        queue: String,
    },
    CreateSchedule {
        schedule: String,
        times: Times,
    },
    /// Other times.
    UpdateSchedule {
        schedule: String,
        times: Times,
    },
    PauseSchedule {
        schedule: String,
    },
    ResumeSchedule {
        schedule: String,
    },
    DeleteSchedule {
        schedule: String,
    },
}

/// When a schedule ticks: at all multiples of `every` on the history's clock, or `offset` later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Times {
    /// The time between two ticks.
    pub every: Span,
    /// Less than `every`.
    pub offset: Span,
}

impl Times {
    /// Returns the ticks after a point of time.
    pub(crate) fn after(self, at: Time) -> impl Iterator<Item = Time> {
        let Self { every, offset } = self;
        let first = (at + every - offset) / every;
        (first..).map(move |number| number * every + offset)
    }

    /// Returns whether there is a tick at this time.
    pub(crate) fn hold(self, at: Time) -> bool {
        at % self.every == self.offset
    }
}

/// `Consume` or `ConsumeStream`. What is settled on a `ConsumeStream` is recorded as calls of their own.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // as in the proto
pub struct Consume {
    pub queue: String,
    pub max_in_flight: u32,
    /// 0: no limit.
    #[serde(default)]
    pub max_in_flight_bytes: u64,
    pub lease: Span,
    pub auto_commit: bool,
    pub on_disconnect: OnDisconnect,
    pub renew: bool,
    /// The client does not always read at once: what it is sent may arrive late, and it need not be
    /// sent anything.
    pub slow: bool,
}

/// What becomes of the items of a stream when it ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // as in the proto
pub enum OnDisconnect {
    #[default]
    Release,
    Count,
    KeepLease,
}

/// An item as it is pushed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NewItem {
    /// What the test recognises the item by, for example its payload. A push that is repeated with the
    /// same `dedup_id` has the same name; each other item has one of its own.
    pub name: String,
    /// Length of the payload in bytes, if that is more than the name has: spaces follow the name.
    #[serde(skip_serializing_if = "is_zero")]
    pub bytes: usize,
    /// The ordering key, or nothing.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub ordering_key: String,
    /// The deduplication id, or nothing.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub dedup_id: String,
    /// 0 to 9.
    pub priority: u8,
    /// How long after the push the item is ready.
    pub delay: Span,
    /// How long after the push the item expires.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttl: Option<Span>,
}

impl NewItem {
    /// Leaves the item nothing for which it would have to wait, so that it may be delivered directly.
    pub fn wait_for_nothing(&mut self) {
        self.ordering_key.clear();
        (self.priority, self.delay) = (0, 0);
    }
}

#[allow(clippy::trivially_copy_pass_by_ref)] // as serde calls it
fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// One item of a `CommitAndPush`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PushEntry {
    /// The queue it goes to.
    pub queue: String,
    /// The item.
    pub item: NewItem,
}

/// One item of a `Rollback`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // as in the proto
pub struct RollbackItem {
    pub receipt: String,
    pub delay: Option<Span>,
    pub keep_attempt: bool,
    pub dead_letter: bool,
}

/// The settings of a queue that promises depend on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // as in the proto
pub struct Settings {
    /// 0: no limit.
    pub max_attempts: u32,
    /// 0: no limit.
    pub max_deliveries: u32,
    /// Empty: `<queue>.dead`.
    pub dead_letter_queue: String,
    pub discard_failed: bool,
    pub retention: bool,
    pub dedup_window: Span,
    pub sequenced: bool,
}

impl Default for Settings {
    /// Returns what a queue has that was created by a push to a broker with default settings.
    fn default() -> Self {
        Self {
            max_attempts: 25,
            max_deliveries: 100,
            dead_letter_queue: String::new(),
            discard_failed: false,
            retention: false,
            dedup_window: 300_000_000,
            sequenced: false,
        }
    }
}

/// How a call ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// It was answered. A stream: the client closes it.
    Ok(Response),
    /// It was refused, so that it changed nothing.
    Refused(String),
    /// It was not answered, or by an error that leaves the outcome open. A stream: it broke, or the
    /// broker ended it.
    Unknown(String),
}

impl Answer {
    /// Returns the answer that a gRPC status stands for, by the name of its code. Only codes by which
    /// the broker says that nothing was done are refusals.
    pub fn from_code(code: &str) -> Self {
        let words: String = code.chars().filter(char::is_ascii_alphanumeric).collect();
        match words.to_ascii_lowercase().as_str() {
            "invalidargument" | "notfound" | "alreadyexists" | "failedprecondition"
            | "resourceexhausted" | "unauthenticated" | "permissiondenied" | "unimplemented"
            | "outofrange" => Self::Refused(code.to_owned()),
            _ => Self::Unknown(code.to_owned()),
        }
    }
}

/// What was answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// Calls of operators, and the end of a stream.
    Done,
    /// `Push`.
    Pushed(Vec<Pushed>),
    /// `Reserve` and `Pop`.
    Deliveries(Vec<Delivery>),
    /// `Commit`, `Rollback` and `Move`: one outcome per receipt.
    Settled(Vec<Outcome>),
    /// `Extend`: one per receipt, with the new end of the lease.
    Extended(Vec<(Outcome, Option<Time>)>),
    /// `CommitAndPush`.
    CommittedAndPushed(Outcome, Vec<Pushed>),
    /// `GetQueueStats`.
    Stats(Figures),
}

/// The answer to one pushed item.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // as in the proto
pub struct Pushed {
    pub id: String,
    pub deduplicated: bool,
    pub sequence: u64,
}

/// The answer to one receipt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // as in the proto
pub enum Outcome {
    Ok,
    DeadLettered,
    LeaseLost,
    Gone,
}

/// An item that was handed out.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Delivery {
    /// The receipt; empty if the item is committed already.
    pub receipt: String,
    /// The item's id.
    pub id: String,
    /// The name it was pushed under.
    pub name: String,
    /// Length of its payload in bytes.
    pub bytes: usize,
    /// The queue it comes from.
    pub queue: String,
    /// Failed attempts plus one.
    pub attempt: u32,
    /// How often it was handed out.
    pub deliveries: u32,
    /// Its sequence number, or 0.
    pub sequence: u64,
    /// The end of its lease on the history's clock; 0 if it is committed already.
    pub lease_end: Time,
    /// When it left its broker on a stream, if that is known: in a simulation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sent: Option<Time>,
    /// The queue it was dead-lettered from, or nothing.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub origin_queue: String,
    /// How many attempts had failed then.
    pub dead_letter_attempts: u32,
    /// The tick that pushed it, if one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tick: Option<Tick>,
}

/// A tick of a schedule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tick {
    /// The schedule.
    pub schedule: String,
    /// When it was due, on the history's clock.
    pub at: Time,
}

/// The state of a listed item.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // as in the proto
pub enum State {
    #[default]
    Ready,
    Delayed,
    Reserved,
    Blocked,
    Processed,
}

/// An item that is in a queue at rest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // as in the proto
pub struct Listed {
    pub id: String,
    pub name: String,
    pub state: State,
}

/// A queue at rest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueAtRest {
    /// Its name.
    pub queue: String,
    /// All its items.
    pub items: Vec<Listed>,
    /// Its figures, if they were asked for.
    pub figures: Option<Figures>,
}

/// A queue's depth and totals.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // as in the proto
pub struct Figures {
    pub ready: u64,
    pub delayed: u64,
    pub reserved: u64,
    pub blocked: u64,
    pub processed: u64,
    pub pushed: u64,
    pub delivered: u64,
    pub committed: u64,
    pub rolled_back: u64,
    pub moved: u64,
    pub dead_lettered: u64,
    pub expired: u64,
    pub popped: u64,
    pub discarded: u64,
}
