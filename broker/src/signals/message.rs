//! The messages between brokers, in a form that people can read: `insert orders 1700000000123 a1b2c3d4`. The signal of an insert that is
//! one item ends with the item's id.

use crate::domain::{FOREVER, QueueName, Signal, Timestamp, Topic};

/// One message between brokers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Message {
    /// A hint about one queue.
    Signal(Signal),
    /// The sender could not send for a while: scan all queues.
    Missed,
}

/// The word of [`Message::Missed`].
pub(super) const MISSED: &str = "missed";

/// Returns a broker's id as eight hexadecimal digits.
pub(super) fn broker_text(broker: [u8; 4]) -> String {
    format!("{:08x}", u32::from_be_bytes(broker))
}

/// Returns the id that is written as eight hexadecimal digits.
pub(super) fn broker_of(text: &str) -> Option<[u8; 4]> {
    let digits = text.len() == 8 && text.bytes().all(|b| b.is_ascii_hexdigit());
    if digits { u32::from_str_radix(text, 16).ok().map(u32::to_be_bytes) } else { None }
}

/// Returns the time of a signal, if it lies within what clocks and delays lead to.
pub(super) fn plausible(millis: i64) -> Option<Timestamp> {
    (-FOREVER.0..=FOREVER.0).contains(&millis).then_some(Timestamp(millis))
}

impl Message {
    /// Returns the message as text: topic, queue, since, sender, and the item if there is one. An unknown time is written as `-`.
    pub(super) fn encode(&self, broker: [u8; 4]) -> String {
        let broker = broker_text(broker);
        let Self::Signal(Signal { queue, topic, since, item }) = self else {
            return format!("{MISSED} - - {broker}");
        };
        let since = since.map_or_else(|| "-".to_owned(), |since| since.millis().to_string());
        let item = item.map_or_else(String::new, |item| format!(" {item}"));
        format!("{} {queue} {since} {broker}{item}", topic.word())
    }

    /// Reads a message and its sender. Returns `None` if the text is no message. Later versions may add words at
    /// the end, which are ignored.
    pub(super) fn decode(text: &str) -> Option<([u8; 4], Self)> {
        let mut words = text.split(' ');
        let (what, queue, since) = (words.next()?, words.next()?, words.next()?);
        let broker = broker_of(words.next()?)?;
        if what == MISSED {
            return Some((broker, Self::Missed));
        }
        let topic = Topic::of_word(what)?;
        let queue = QueueName::parse("queue", queue).ok()?;
        let since = match since {
            "-" => None,
            // Whoever can write to the channel can write any number.
            millis => Some(millis.parse().ok().and_then(plausible)?),
        };
        // What stands there otherwise may be of a later version.
        let item = words.next().and_then(|item| item.parse().ok());
        Some((broker, Self::Signal(Signal { queue, topic, since, item })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::ItemId;

    #[test]
    fn messages_survive_their_text_form() {
        let broker = [0xa1, 0x02, 0xff, 0x00];
        for topic in [Topic::Insert, Topic::Settings, Topic::Settle, Topic::Wanted] {
            for since in [None, Some(Timestamp(1_700_000_000_123)), Some(Timestamp(-1))] {
                for item in [None, Some(ItemId(*b"twelve bytes"))] {
                    let queue = QueueName::parse("queue", "orders.eu-1_x").unwrap();
                    let message = Message::Signal(Signal { queue, topic, since, item });
                    let text = message.encode(broker);
                    assert_eq!(Message::decode(&text), Some((broker, message)), "{text}");
                }
            }
        }
        assert_eq!(Message::decode("missed - - a102ff00"), Some((broker, Message::Missed)));
    }

    #[test]
    fn messages_are_readable() {
        let queue = QueueName::parse("queue", "orders").unwrap();
        let since = Some(Timestamp(1_700_000_000_123));
        let signal = Signal::new(queue, Topic::Insert, since);
        let text = Message::Signal(signal.clone()).encode([0xa1, 0xb2, 0xc3, 0xd4]);
        assert_eq!(text, "insert orders 1700000000123 a1b2c3d4");
        let item = Some(ItemId(*b"twelve bytes"));
        let text = Message::Signal(Signal { item, ..signal }).encode([0xa1, 0xb2, 0xc3, 0xd4]);
        assert_eq!(text, "insert orders 1700000000123 a1b2c3d4 7477656c7665206279746573");
    }

    /// Brokers of later versions may say more.
    #[test]
    fn what_is_behind_a_message_is_ignored() {
        let broker = [0xa1, 0xb2, 0xc3, 0xd4];
        let queue = QueueName::parse("queue", "orders").unwrap();
        let plain = Signal::new(queue, Topic::Insert, None);
        let item = Some(ItemId(*b"twelve bytes"));
        for (text, signal) in [
            ("insert orders - a1b2c3d4 ", plain.clone()),
            ("insert orders - a1b2c3d4 7477656c", plain.clone()),
            ("insert orders - a1b2c3d4 urgent 7477656c7665206279746573", plain.clone()),
            ("insert orders - a1b2c3d4 7477656c7665206279746573 more", Signal { item, ..plain }),
        ] {
            assert_eq!(Message::decode(text), Some((broker, Message::Signal(signal))), "{text}");
        }
    }

    #[test]
    fn invalid_messages_are_ignored() {
        for bad in [
            "",
            "insert",
            "insert orders - ",
            "insert orders - xyz",
            "insert orders - +1b2c3d4",
            "insert orders soon a1b2c3d4",
            "insert .orders - a1b2c3d4",
            "insert orders 9223372036854775807 a1b2c3d4",
            "insert orders -9223372036854775808 a1b2c3d4",
            "insert orders 99999999999999999999 a1b2c3d4",
            "remove orders - a1b2c3d4",
        ] {
            assert_eq!(Message::decode(bad), None, "{bad:?}");
        }
    }
}
