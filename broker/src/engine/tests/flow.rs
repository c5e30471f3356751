//! Streams whose flow changes while items are assigned to them that they have not been sent.

use futures_util::future::join;
use tokio::sync::oneshot;

use super::{
    direct::idle,
    streams::{ask, until_assigned},
    *,
};
use crate::{
    domain::{ItemState, OrderingKey},
    engine::subscription::Flow,
};

impl Bench {
    async fn push_item(&self, payload: &str) {
        let item = NewItem { payload: payload.to_owned().into(), ..NewItem::default() };
        self.engine.push(&name("q"), vec![item], None).await.unwrap();
    }

    /// Pushes an item that no push hands to a stream: it has to be reserved.
    pub(super) async fn push_keyed(&self, payload: &str) {
        let ordering_key = OrderingKey::new(payload);
        let item =
            NewItem { payload: payload.to_owned().into(), ordering_key, ..NewItem::default() };
        self.engine.push(&name("q"), vec![item], None).await.unwrap();
    }

    /// Returns a stream that was assigned "a" and "b", and has not been polled since.
    async fn assigned(&self, options: ConsumeOptions) -> Subscription {
        let mut stream = self.engine.consume(options).await.unwrap();
        ask(&mut stream).await;
        for (payload, count) in [("a", 1), ("b", 2)] {
            self.push_keyed(payload).await;
            until_assigned(self, count).await;
        }
        stream
    }
}

/// Halts a stream for a moment.
fn interrupt(flow: &Flow) {
    drop(flow.set_max_in_flight(0));
    drop(flow.set_max_in_flight(10));
}

/// Takes items from a stream. Returns their payloads, which are those of first attempts, and of first deliveries.
pub(super) async fn take(stream: &mut Subscription, count: usize) -> Vec<String> {
    let mut taken = Vec::new();
    while taken.len() < count {
        taken.extend(deliveries(stream).await);
    }
    assert!(taken.iter().all(|one| (one.item.attempt, one.receipt.deliveries_here()) == (1, 1)));
    payloads(taken.iter().map(|one| &*one.item))
}

#[tokio::test]
async fn nothing_is_delivered_after_a_halt() {
    let bench = bench().await;
    let mut stream = bench.assigned(Bench::options()).await;
    let _ = within("the halt", stream.flow().set_max_in_flight(0)).await;
    ask(&mut stream).await;
    let items = bench.until_ready(2).await;
    assert!(items.iter().all(|item| (item.attempt, item.deliveries) == (1, 0)), "{items:?}");
    ask(&mut stream).await;
    let mut other = bench.stream().await;
    assert_eq!(take(&mut other, 2).await, ["a", "b"], "they are for others now");
    drop(other);
    let _ = within("the flow", stream.flow().set_max_in_flight(10)).await;
    assert_eq!(payloads(deliveries(&mut stream).await.iter().map(|one| &*one.item)), ["a", "b"]);
}

#[tokio::test]
async fn committed_items_are_delivered_before_a_halt() {
    let bench = bench().await;
    let options = ConsumeOptions { auto_commit: true, ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    ask(&mut stream).await;
    bench.faults.set("commit", Fault::HeldAfter);
    bench.push_item("a").await;
    bench.faults.until_done("commit", 1).await;
    let mut halt = stream.flow().set_max_in_flight(0);
    assert!(halt.try_recv().is_err_and(|error| error == oneshot::error::TryRecvError::Empty));
    bench.faults.set("commit", Fault::None);
    assert_eq!(payloads(deliveries(&mut stream).await.iter().map(|one| &*one.item)), ["a"]);
    bench.push_item("b").await;
    let _ = within("the halt", halt).await;
    ask(&mut stream).await;
    assert_eq!(bench.until_ready(1).await.len(), 1);
}

/// The reserve waits for what is taken back.
#[tokio::test]
async fn a_lone_consumer_receives_items_in_order_after_a_halt() {
    let bench = bench().await;
    let mut stream = bench.assigned(Bench::options()).await;
    bench.push_keyed("c").await;
    until_assigned(&bench, 2).await; // the stream has not been polled since it was assigned two rounds
    bench.faults.set("rollback", Fault::HeldBefore);
    let flow = stream.flow();
    interrupt(&flow);
    bench.faults.until_begun("rollback", 1).await;
    ask(&mut stream).await;
    bench.push_keyed("d").await;
    tokio::time::sleep(Duration::from_millis(100)).await; // for what must not happen
    ask(&mut stream).await;
    bench.faults.set("rollback", Fault::None);
    assert_eq!(take(&mut stream, 4).await, ["a", "b", "c", "d"]);
}

#[tokio::test]
async fn what_a_reserve_brings_does_not_overtake_what_was_taken_back() {
    let bench = bench().await;
    let mut stream = bench.engine.consume(Bench::options()).await.unwrap();
    ask(&mut stream).await;
    bench.push_keyed("a").await;
    until_assigned(&bench, 1).await;
    let dispatcher = bench.engine.dispatcher(&name("q")).expect("the queue is consumed");
    until("the reserves have ended", async || dispatcher.rests()).await;
    bench.faults.set("reserve", Fault::HeldAfter);
    bench.push_keyed("b").await;
    until_assigned(&bench, 2).await;
    interrupt(&stream.flow());
    bench.faults.set("reserve", Fault::None);
    bench.push_keyed("c").await;
    assert_eq!(take(&mut stream, 3).await, ["a", "b", "c"]);
}

#[tokio::test]
async fn what_is_pushed_to_a_stream_does_not_overtake_what_was_taken_back() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    bench.push_item("a").await;
    bench.faults.set("push", Fault::HeldAfter);
    let done = bench.faults.done("push");
    let acting = async {
        bench.faults.until_done("push", done + 1).await;
        let items = bench.items().await;
        assert!(items.iter().all(|item| item.state == ItemState::Reserved), "both went directly");
        interrupt(&stream.flow());
        bench.faults.set("push", Fault::None);
    };
    join(bench.push_item("b"), acting).await;
    bench.push_item("c").await;
    assert_eq!(take(&mut stream, 3).await, ["a", "b", "c"]);
}

/// Nor is what is pushed later, while those items are on their way back.
#[tokio::test]
async fn an_item_does_not_go_directly_past_what_was_taken_back() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    bench.push_item("a").await;
    assert_eq!(bench.items().await[0].state, ItemState::Reserved, "it went directly");
    bench.faults.set("rollback", Fault::HeldBefore);
    interrupt(&stream.flow());
    bench.faults.until_begun("rollback", 1).await;
    ask(&mut stream).await;
    bench.push_item("b").await;
    let ready = bench.items().await.iter().filter(|item| item.state == ItemState::Ready).count();
    assert_eq!(ready, 1, "the second waits for the first");
    bench.faults.set("rollback", Fault::None);
    assert_eq!(take(&mut stream, 2).await, ["a", "b"]);
}
