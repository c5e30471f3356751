//! Fuzzing of stored documents and page tokens: whatever stands in the database, nothing panics or takes for ever.

use std::time::Duration;

use mongodb::bson::{
    Document, RawArrayBuf, RawDocument, RawDocumentBuf, doc, oid::ObjectId, raw::cstr,
};

use super::{
    super::{
        admin::listing::Position,
        catalog::queues,
        schema::{
            item::{self, Start, Stored},
            layout::date,
        },
        segment::{
            claim::Opened,
            document::{self, Segment, contents},
        },
    },
    *,
};
use crate::{
    domain::{Cause, ConsumerName, DedupId, ItemId, LeaseToken, OrderingKey, QueueName, Timestamp},
    fuzz::{fuzz, near},
};

const NOW: Timestamp = Timestamp(1_700_000_000_000);

fn queue() -> Arc<Queue> {
    Arc::new(Queue::with_defaults(QueueName::parse("queue", "orders").unwrap(), NOW))
}

fn push(dedup_id: &str, key: &str) -> Push {
    let item = NewItem {
        payload: "work".into(),
        content_type: "text/plain".into(),
        headers: [("a".to_owned(), "b".to_owned())].into(),
        ttl: Some(Duration::from_mins(1)),
        dedup_id: DedupId::new(dedup_id),
        ordering_key: OrderingKey::new(key),
        ..NewItem::default()
    };
    let mut push = Push::new(queue(), item);
    push.producer = ConsumerName::parse_optional("producer", "me").unwrap();
    push
}

fn bytes(document: &RawDocumentBuf) -> Vec<u8> {
    document.as_bytes().to_vec()
}

/// Does with an item what is done with those at the head of a queue.
fn use_item(queue: &Queue, stored: Stored) {
    let _ = (stored.size(), stored.state(NOW), stored.is_over(NOW));
    let _ = queue.triage(stored.at_head(), NOW);
    let _ = Position::parse(&Position::of(&stored).to_string()).unwrap();
    let _ = stored.into_item(&queue.name, NOW);
}

#[test]
fn any_document_is_an_item_or_refused() {
    let id = ItemId(*b"0123456789ab");
    let start = |sequence, blocked| Start { id, now: NOW, sequence, blocked };
    let plain = item::encode(&push("", ""), &start(None, false)).unwrap();
    let ordered = item::encode(&push("once", "key"), &start(Some(3), true)).unwrap();
    let mut held = plain.clone();
    held.append(cstr!("lock"), ObjectId::from_bytes([7; 12]));
    held.append(cstr!("settled"), ObjectId::from_bytes([9; 12]));
    for time in [cstr!("due"), cstr!("eligible"), cstr!("processed"), cstr!("trace")] {
        held.append(time, date(NOW));
    }
    held.append(cstr!("deadLettered"), date(NOW));
    held.append(cstr!("failedAttempts"), 3_i32);
    held.append(cstr!("reason"), "broken");
    held.append(cstr!("origin"), "orders");
    held.append(cstr!("consumer"), "me");
    held.append(cstr!("settledBefore"), RawArrayBuf::from_iter([ObjectId::from_bytes([8; 12])]));
    let good = [plain, ordered, held].iter().map(bytes).collect();
    let queue = queue();
    fuzz("items", &near(good), |input| {
        let Ok(document) = RawDocument::from_bytes(input) else { return };
        if let Ok(stored) = Stored::read(document) {
            use_item(&queue, stored);
        }
    });
}

#[test]
fn any_document_is_a_segment_or_refused() {
    let pushes = [push("1", ""), push("2", ""), push("3", "")];
    let places = [Some(&pushes[0]), None, Some(&pushes[1]), Some(&pushes[2])];
    let id = ItemId(*b"0123456789ab");
    let whole = document::encode(&places, id, NOW).unwrap();
    let mut claimed = Document::try_from(&whole).unwrap();
    let mut segment = Segment::read(&whole).unwrap();
    segment.runs.push(document::Run {
        lock: LeaseToken(*b"ba9876543210"),
        items: document::Bits::of(1),
        until: NOW,
        started: NOW,
        extended: Some(NOW),
        consumer: Some("me".to_owned()),
    });
    let run = Document::try_from(&segment.runs[0].to_document()).unwrap();
    claimed.insert("runs", vec![run]);
    let claimed = RawDocumentBuf::try_from(&claimed).unwrap();
    let queue = queue();
    fuzz("segments", &near(vec![bytes(&whole), bytes(&claimed)]), |input| {
        let Ok(document) = RawDocument::from_bytes(input) else { return };
        let Ok(segment) = Segment::read(document) else { return };
        let _ = (segment.seen(), segment.first_end(), segment.present().count());
        let _ = Opened::read(&segment, document, 0);
        for (at, content) in contents(document).enumerate().filter(|(at, _)| segment.holds(*at)) {
            let _ = segment.detached(at, &content, false);
            let _ = segment.tombstone(at, ObjectId::new(), NOW);
            if let Ok(stored) = segment.item(at, Some(&content)) {
                use_item(&queue, stored);
            }
        }
    });
}

#[test]
fn any_document_is_a_queue_or_refused() {
    let good = doc! {
        "_id": "orders", "group": "default", "lease": 1_000_i64, "attemptLimit": 3_i64, "deliveryLimit": 9_i64,
        "deadLetterQueue": "orders.dead", "discardFailed": false, "defaultTtl": 9_i64, "retention": 0_i64,
        "dedupWindow": 300_000_i64, "maxDepth": 7_i64, "sequenced": true, "paused": false,
        "labels": { "a": "b" }, "created": date(NOW), "unusedSince": date(NOW), "revision": 4_i64,
        "retryPolicy": { "initialDelay": 1_000_i64, "multiplier": 2.0, "maxDelay": 300_000_i64, "jitter": 0.2 },
    };
    let good = mongodb::bson::serialize_to_vec(&good).unwrap();
    fuzz("queues", &near(vec![good]), |input| {
        let Ok(document) = Document::from_reader(input) else { return };
        if let Ok(queue) = queues::read(&document) {
            for attempt in [1, 2, 100, u32::MAX] {
                let _ = queue.failure_outcome(Cause::Lapse, attempt, attempt, 1.0);
            }
        }
    });
}

#[test]
fn a_page_token_is_one_or_refused() {
    let id = ItemId(*b"0123456789ab");
    let good = [
        Position::Live { priority: 4, when: NOW.0, id },
        Position::Shared { priority: -1, when: i64::MAX, id },
        Position::Blocked { priority: 9, id },
        Position::History { processed: i64::MIN, id },
    ];
    let good = good.map(|position| position.to_string().into_bytes()).into();
    fuzz("page-tokens-mongodb", &near(good), |input| {
        let text = String::from_utf8_lossy(input);
        if let Ok(position) = Position::parse(&text) {
            assert_eq!(Position::parse(&position.to_string()).unwrap(), position);
        }
    });
}
