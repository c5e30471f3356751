//! Signals: hints between brokers that a queue has changed.

use crate::domain::{ItemId, QueueName, Timestamp};

/// The subject of a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Topic {
    /// Something became eligible, or will become eligible at a time that a waiting broker may not know.
    Insert,
    /// The queue was created, changed, paused, resumed, purged or deleted.
    Settings,
    /// Another broker's delivery was settled: its consumer may have room again.
    Settle,
    /// A consumer of the broker that sends this waits, and the broker saw the queue's end: the next insert is to be signalled at
    /// once, and may be announced before it is stored.
    Wanted,
}

/// A hint about one queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signal {
    /// The queue.
    pub queue: QueueName,
    /// The subject.
    pub topic: Topic,
    /// For inserts: no items older than this have appeared. `None` means that this is unknown.
    /// Coalesced signals have the least `since` of all, and `None` is less than every time.
    /// For [`Topic::Wanted`]: until when the items have been eligible that the sender found last. `None` means that it found none.
    pub since: Option<Timestamp>,
    /// For inserts: the one item that appeared, if it is one, and its sender knows of none before it that was not signalled. For
    /// [`Topic::Wanted`]: the one item that the sender found last, if it was one. `None`: any items.
    pub item: Option<ItemId>,
}

impl Signal {
    /// Returns a hint that names no item.
    pub const fn new(queue: QueueName, topic: Topic, since: Option<Timestamp>) -> Self {
        Self { queue, topic, since, item: None }
    }
}

impl Topic {
    /// Returns the word for the topic, as brokers send it and metrics name it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Insert => "insert",
            Self::Settings => "settings",
            Self::Settle => "settle",
            Self::Wanted => "wanted",
        }
    }

    /// Returns the topic with this word, if there is one.
    pub fn of_word(word: &str) -> Option<Self> {
        [Self::Insert, Self::Settings, Self::Settle, Self::Wanted]
            .into_iter()
            .find(|t| t.word() == word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Brokers of different versions send each other these words.
    #[test]
    fn topics_have_the_words_that_other_brokers_know() {
        let words = [
            (Topic::Insert, "insert"),
            (Topic::Settings, "settings"),
            (Topic::Settle, "settle"),
            (Topic::Wanted, "wanted"),
        ];
        for (topic, word) in words {
            assert_eq!((topic.word(), Topic::of_word(word)), (word, Some(topic)));
        }
        assert_eq!(["", "Insert", "inserts"].map(Topic::of_word), [None; 3]);
    }
}
