//! The rules, each of which stands for a promise of docs/SEMANTICS.md.

use std::fmt;

macro_rules! rules {
    ($($rule:ident = $promise:literal),+ $(,)?) => {
        /// A promise that is checked.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Rule {
            $(#[doc = $promise] $rule,)+
        }

        impl Rule {
            /// Every rule.
            pub const ALL: &[Self] = &[$(Self::$rule),+];

            /// Returns the promise in a sentence.
            pub fn promise(self) -> &'static str {
                match self { $(Self::$rule => $promise,)+ }
            }
        }
    };
}

rules! {
    Lost = "What was answered as stored is there until it is settled, deleted or expired.",
    Invented = "Only what was pushed is delivered or listed, and nothing of a refused push.",
    Doubled = "One push stores one item, and a deduplication id stores one in its window.",
    LeaseOverlap = "An item is held under one valid lease at a time.",
    AfterCommit = "Nothing is delivered after its commit or deletion was answered.",
    StaleReceipt = "Only the newest receipt of an item settles it, and only once.",
    Outcome = "LEASE_LOST and GONE are answered only when they are true.",
    KeyOrder = "Items of one ordering key are delivered one at a time, in the order of their pushes.",
    SequenceOrder = "Sequence numbers grow in the order in which pushes are answered.",
    PushOrder = "A lone consumer receives what was pushed one after the other in that order.",
    TooEarly = "Nothing is delivered before it is eligible.",
    Expired = "Nothing is delivered after it has expired.",
    TooLate = "Nothing is sent in the last part of its lease, or after it.",
    Paused = "Nothing is delivered from a paused queue.",
    Attempts = "Attempts and deliveries are counted exactly.",
    Limits = "Limits of attempts, deliveries, and items and bytes in flight hold exactly.",
    Atomic = "A move and a CommitAndPush take effect as a whole or not at all.",
    Ticks = "Each tick of a schedule pushes one item; of several that were missed, the last one does.",
    NotWoken = "A waiting consumer receives what is ready within the time of the fallback poll.",
    Figures = "Totals never go back, and at rest depths and totals add up.",
    Recording = "The history contradicts itself: the recording is at fault.",
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}
