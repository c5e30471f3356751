//! Operations: long work of operators, as stores keep it.

use std::{fmt, str::FromStr};

use crate::{
    domain::{ItemFilter, ItemState, OperationId, QueueName, Timestamp},
    store::{RedriveFilter, Selection},
};

/// What an operation does.
#[derive(Debug, Clone, PartialEq)]
pub enum Work {
    /// Moves dead letters back.
    Redrive {
        /// The dead-letter queue.
        queue: QueueName,
        /// Where they go; `None`: each to the queue it came from.
        to: Option<QueueName>,
        /// Which items.
        filter: RedriveFilter,
        /// At most so many; 0: all.
        max_items: u64,
        /// At most so many per second; 0: no limit.
        rate: u32,
    },
    /// Makes processed items ready again.
    Replay {
        /// The queue.
        queue: QueueName,
        /// Which items.
        selection: Selection,
        /// At most so many; 0: all.
        max_items: u64,
    },
    /// Deletes all items that are not reserved, history included.
    Purge {
        /// The queue.
        queue: QueueName,
    },
    /// Deletes items.
    Delete {
        /// The queue.
        queue: QueueName,
        /// Only items in this state; `None`: in any.
        state: Option<ItemState>,
        /// Which items.
        filter: ItemFilter,
        /// At most so many; 0: all.
        max_items: u64,
        /// At most so many per second; 0: no limit.
        rate: u32,
    },
}

impl Work {
    /// Returns the queue whose items it works on.
    pub fn queue(&self) -> &QueueName {
        match self {
            Self::Redrive { queue, .. }
            | Self::Replay { queue, .. }
            | Self::Purge { queue }
            | Self::Delete { queue, .. } => queue,
        }
    }

    /// Returns the queue that it creates, unless that is there.
    pub fn creates(&self) -> Option<&QueueName> {
        match self {
            Self::Redrive { to, .. } => to.as_ref(),
            Self::Replay { .. } | Self::Purge { .. } | Self::Delete { .. } => None,
        }
    }

    /// Returns how many items it may be done to; 0: any number.
    pub fn max_items(&self) -> u64 {
        match self {
            Self::Redrive { max_items, .. }
            | Self::Replay { max_items, .. }
            | Self::Delete { max_items, .. } => *max_items,
            Self::Purge { .. } => 0,
        }
    }

    /// Returns how many items it may be done to per second; 0: any number.
    pub fn rate(&self) -> u32 {
        match self {
            Self::Redrive { rate, .. } | Self::Delete { rate, .. } => *rate,
            Self::Replay { .. } | Self::Purge { .. } => 0,
        }
    }
}

/// Whether an operation has ended, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OperationState {
    /// A broker runs it, or will soon.
    Running,
    /// All is done.
    Succeeded,
    /// It was cancelled.
    Cancelled,
    /// It could not be finished.
    Failed,
}

impl OperationState {
    /// Returns the word that is stored.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Succeeded => "succeeded",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
        }
    }

    /// Returns the state that a stored word means.
    pub fn parse(word: &str) -> Option<Self> {
        let all = [Self::Running, Self::Succeeded, Self::Cancelled, Self::Failed];
        all.into_iter().find(|state| state.as_str() == word)
    }
}

/// A broker's hold on an operation. Each claim has another number, so that a broker that lost its claim and took
/// another one cannot mistake them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// The broker, by the first four bytes of its lease tokens.
    pub broker: [u8; 4],
    /// Random.
    pub number: u32,
}

impl Claim {
    /// Returns the claim as it is stored.
    pub fn to_number(self) -> i64 {
        (i64::from(u32::from_be_bytes(self.broker)) << 32) | i64::from(self.number)
    }

    /// Returns the claim that a stored number means.
    pub fn of_number(number: i64) -> Self {
        Self { broker: ((number >> 32) as u32).to_be_bytes(), number: number as u32 }
    }
}

/// An operation and its progress.
#[derive(Debug, Clone, PartialEq)]
pub struct Operation {
    /// Its id.
    pub id: OperationId,
    /// What it does.
    pub work: Work,
    /// True if it counts items and changes nothing.
    pub dry_run: bool,
    /// The name of the token with which it was started; may be empty.
    pub started_by: String,
    /// When it was started. It works on the items that were there then.
    pub create_time: Timestamp,
    /// Number of items to look at when it was started.
    pub total: u64,
    /// Whether it has ended.
    pub state: OperationState,
    /// How many items were done, or counted.
    pub processed: u64,
    /// Why it failed; empty otherwise.
    pub error: String,
    /// When it last made progress, or ended.
    pub update_time: Timestamp,
    /// Who runs it or ran it last.
    pub claim: Option<Claim>,
}

impl Operation {
    /// Returns its place in the list.
    pub fn place(&self) -> OperationPlace {
        OperationPlace { create_time: self.create_time, id: self.id }
    }
}

/// The place of an operation in the list of all, of which the newest is the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct OperationPlace {
    /// When it was started.
    pub create_time: Timestamp,
    /// Which one of those that were started then.
    pub id: OperationId,
}

impl fmt::Display for OperationPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.create_time.0, self.id)
    }
}

impl FromStr for OperationPlace {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (at, id) = text.split_once('.').ok_or(())?;
        Ok(Self { create_time: Timestamp(at.parse().map_err(|_| ())?), id: id.parse()? })
    }
}

/// What the broker that runs an operation says about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advance {
    /// How many items are done. The number that is kept never goes back.
    pub processed: u64,
    /// Whether the operation has ended. One that was cancelled stays cancelled.
    pub state: OperationState,
    /// Why it failed; empty otherwise.
    pub error: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_and_a_place_survive_being_stored() {
        for claim in [
            Claim { broker: [0; 4], number: 0 },
            Claim { broker: [255, 1, 2, 3], number: u32::MAX },
            Claim { broker: [1, 2, 3, 255], number: 7 },
        ] {
            assert_eq!(Claim::of_number(claim.to_number()), claim);
        }
        let place = OperationPlace { create_time: Timestamp(17), id: OperationId([0xa7; 12]) };
        assert_eq!(place.to_string().parse(), Ok(place));
        for text in ["", "17", "17.", "x.a7a7a7a7a7a7a7a7a7a7a7a7", "17.a7"] {
            assert!(text.parse::<OperationPlace>().is_err(), "{text}");
        }
    }
}
