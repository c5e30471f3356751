//! The messages of the hot path, to bytes and back: `cargo bench -p sluicegate-broker --bench codec`. The documents of
//! MongoDB are the store's own business and are timed with it, in `stores`.

use bytes::Bytes;
use divan::{Bencher, black_box, counter::ItemsCount};
use prost::Message;
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
