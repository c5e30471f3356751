//! The conversions of an item on its way in and out: bytes to message, message to item, item to
//! document, and back: `cargo bench -p sluicegate-broker --bench codec`.

use std::sync::Arc;

use bytes::Bytes;
use divan::{Bencher, black_box, counter::ItemsCount};
use prost::Message;
use sluicegate_broker::{
    bench::{convert_deliveries, parse_push},
    domain::{
        self, Clock, GroupName, IdSource, LeaseToken, Queue, QueueName, Receipt, ReceiptKeys,
        Timestamp,
    },
    store::{Push, mongo::bench as document},
};
use sluicegate_proto::v1::{CommitRequest, ConsumeResponse, Delivery, Item, NewItem, PushRequest};

const ITEMS: usize = 500;

fn main() {
    divan::main();
}

fn payload() -> Bytes {
    vec![b'.'; 256].into()
}

fn push() -> PushRequest {
    let item = NewItem { payload: payload(), ..Default::default() };
    PushRequest { queue: "orders.new".into(), items: vec![item; ITEMS], ..Default::default() }
}

fn deliveries() -> ConsumeResponse {
    let item = Item {
        id: "66f00000aabbccddeeff0011".into(),
        queue: "orders.new".into(),
        payload: payload(),
        attempt: 1,
        deliveries: 1,
        create_time: Some(prost_types::Timestamp { seconds: 1_790_000_000, nanos: 1_000_000 }),
        ..Default::default()
    };
    let delivery = Delivery { receipt: "r".repeat(60), item: Some(item), ..Default::default() };
    ConsumeResponse { deliveries: vec![delivery; ITEMS] }
}

fn commit() -> CommitRequest {
    CommitRequest { receipts: vec!["r".repeat(60); ITEMS] }
}

fn decode<M: Message + Default>(bencher: Bencher<'_, '_>, message: &M) {
    let bytes = Bytes::from(message.encode_to_vec());
    bencher.counter(ItemsCount::new(ITEMS)).bench(|| M::decode(black_box(bytes.clone())));
}

fn encode<M: Message>(bencher: Bencher<'_, '_>, message: &M) {
    bencher.counter(ItemsCount::new(ITEMS)).bench(|| black_box(message).encode_to_vec());
}

#[divan::bench]
fn push_500_decode(bencher: Bencher<'_, '_>) {
    decode(bencher, &push());
}

#[divan::bench]
fn deliveries_500_encode(bencher: Bencher<'_, '_>) {
    encode(bencher, &deliveries());
}

#[divan::bench]
fn commit_500_decode(bencher: Bencher<'_, '_>) {
    decode(bencher, &commit());
}

fn queue_name() -> QueueName {
    QueueName::parse("queue", "orders.new").expect("a name")
}

/// Returns a push in the form that the store takes.
fn stored_push(now: Timestamp) -> Push {
    let queue = Arc::new(Queue::with_defaults(queue_name(), now));
    let item = domain::NewItem { payload: payload(), ..domain::NewItem::default() };
    Push::new(queue, item)
}

/// Returns deliveries as the store returns them.
fn stored_deliveries() -> Vec<domain::Delivery> {
    let (now, ids) = (Clock::machine_time(), IdSource::new());
    let (queue, token) = (queue_name(), LeaseToken::fresh([1, 2, 3, 4]));
    let delivery = |_| {
        let id = ids.next(now);
        let raw = document::encode(&stored_push(now), id, now).expect("a document");
        let item = document::decode(&raw, &queue, now).expect("an item");
        let receipt = Receipt {
            item: id,
            token,
            deliveries: 1,
            earlier_deliveries: 0,
            attempt: 1,
            keyed: false,
            queue: queue.clone(),
            group: GroupName::parse("group", "default").expect("a name"),
        };
        let (lease_expire_time, previous_eligible_time) = (now, now);
        domain::Delivery {
            item: Box::new(item),
            receipt,
            lease_expire_time,
            previous_eligible_time,
            former_lease: None,
            tag: 0,
        }
    };
    (0..ITEMS).map(delivery).collect()
}

#[divan::bench]
fn push_500_parse(bencher: Bencher<'_, '_>) {
    let parse = |request| parse_push(request).expect("a good push");
    bencher.counter(ItemsCount::new(ITEMS)).with_inputs(push).bench_values(parse);
}

#[divan::bench]
fn deliveries_500_convert(bencher: Bencher<'_, '_>) {
    let deliveries = stored_deliveries();
    let inputs = || deliveries.clone();
    let keys = ReceiptKeys::new([]);
    let convert = |deliveries| convert_deliveries(deliveries, &keys);
    bencher.counter(ItemsCount::new(ITEMS)).with_inputs(inputs).bench_values(convert);
}

#[divan::bench]
fn documents_500_encode(bencher: Bencher<'_, '_>) {
    let now = Clock::machine_time();
    let (push, ids) = (stored_push(now), IdSource::new());
    bencher.counter(ItemsCount::new(ITEMS)).bench(|| {
        for _ in 0..ITEMS {
            black_box(document::encode(black_box(&push), ids.next(now), now)).expect("a document");
        }
    });
}

#[divan::bench]
fn documents_500_decode(bencher: Bencher<'_, '_>) {
    let now = Clock::machine_time();
    let document = document::encode(&stored_push(now), IdSource::new().next(now), now);
    let (document, queue) = (document.expect("a document"), queue_name());
    bencher.counter(ItemsCount::new(ITEMS)).bench(|| {
        for _ in 0..ITEMS {
            black_box(document::decode(black_box(&document), &queue, now)).expect("an item");
        }
    });
}
