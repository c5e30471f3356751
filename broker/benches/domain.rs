//! The decisions and parsing for every item: `cargo bench -p sluicegate-broker --bench domain`.

use std::time::Duration;

use divan::{Bencher, black_box, counter::ItemsCount};
use sluicegate_broker::domain::{
    Clock, Demand, GroupName, IdSource, ItemSize, LeaseToken, QueueName, Receipt, ReceiptKey,
    ReceiptKeys, assign,
};

fn main() {
    divan::main();
}

fn receipt() -> Receipt {
    Receipt {
        item: IdSource::new().next(Clock::machine_time()),
        token: LeaseToken::fresh([1, 2, 3, 4]),
        deliveries: 1,
        earlier_deliveries: 0,
        attempt: 1,
        keyed: false,
        queue: QueueName::parse("queue", "orders.new").expect("a name"),
        group: GroupName::parse("group", "default").expect("a name"),
    }
}

fn keys() -> ReceiptKeys {
    ReceiptKeys::new([ReceiptKey::new(7, &[3; 32])])
}

/// Assigns 500 items to this many consumers.
#[divan::bench(args = [1, 10, 1_000])]
fn deal_500(bencher: Bencher<'_, '_>, consumers: usize) {
    let want = Demand {
        max_items: 500,
        max_bytes: 1 << 20,
        may_exceed: true,
        lease: Duration::from_secs(30),
        consumer: None,
        spare: false,
    };
    let (sizes, demands) =
        (vec![ItemSize { payload: 256, message: 1_656 }; 500], vec![want; consumers]);
    bencher.counter(ItemsCount::new(500_usize)).bench(|| assign(black_box(&sizes), &demands));
}

#[divan::bench]
fn id_new(bencher: Bencher<'_, '_>) {
    let (ids, now) = (IdSource::new(), Clock::machine_time());
    bencher.bench(|| ids.next(black_box(now)));
}

#[divan::bench]
fn id_print(bencher: Bencher<'_, '_>) {
    let id = receipt().item;
    bencher.bench(|| black_box(id).to_string());
}

#[divan::bench]
fn receipt_print(bencher: Bencher<'_, '_>) {
    let receipt = receipt();
    let keys = keys();
    bencher.bench(|| black_box(&receipt).encode(&keys));
}

#[divan::bench]
fn receipt_parse(bencher: Bencher<'_, '_>) {
    let keys = keys();
    let text = receipt().encode(&keys);
    bencher.bench(|| Receipt::parse("receipt", black_box(&text), &keys));
}

#[divan::bench]
fn queue_name_parse() -> bool {
    QueueName::parse("queue", black_box("orders.new")).is_ok()
}
