//! Fuzzing of signals: whoever can write to the channel can send anything.

use mongodb::bson::{Document, doc, oid::ObjectId, serialize_to_vec};

use super::{message::Message, mongo};
use crate::{
    domain::{ItemId, QueueName, Signal, Timestamp, Topic},
    fuzz::{fuzz, near},
};

const BROKER: [u8; 4] = [0xa1, 2, 3, 4];

#[test]
fn a_text_is_a_signal_or_ignored() {
    let queue = QueueName::parse("queue", "orders").unwrap();
    let signal = |since| Signal::new(queue.clone(), Topic::Insert, since);
    let known = signal(Some(Timestamp(1_700_000_000_123)));
    let named = Signal { item: Some(ItemId(*b"twelve bytes")), ..known.clone() };
    let good = [
        Message::Missed,
        Message::Signal(signal(None)),
        Message::Signal(known),
        Message::Signal(named),
    ];
    let good = good.map(|message| message.encode(BROKER).into_bytes());
    fuzz("signals", &near(good.into()), |input| {
        let text = String::from_utf8_lossy(input);
        if let Some((broker, message)) = Message::decode(&text) {
            assert_eq!(Message::decode(&message.encode(broker)), Some((broker, message)));
        }
    });
}

#[test]
fn a_document_is_a_signal_or_ignored() {
    let since = mongodb::bson::DateTime::from_millis(1_700_000_000_123);
    let good = [
        doc! { "what": "missed", "broker": "a1020304" },
        doc! { "what": "insert", "queue": "orders", "since": since, "broker": "a1020304" },
        doc! {
            "what": "insert", "queue": "orders", "since": since, "broker": "a1020304",
            "item": ObjectId::from_bytes(*b"twelve bytes"),
        },
    ];
    let good = good.iter().map(|one| serialize_to_vec(one).unwrap()).collect();
    fuzz("signal-documents", &near(good), |input| {
        let Ok(document) = Document::from_reader(input) else { return };
        if let Some((broker, message)) = mongo::decode(&document) {
            let again = Message::decode(&message.encode(broker));
            assert_eq!(again, Some((broker, message)), "a signal that another transport refuses");
        }
    });
}
