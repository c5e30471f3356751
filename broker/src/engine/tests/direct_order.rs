//! What direct delivery must not overtake.

use futures_util::future::join;

use super::{direct::idle, streams::ask, *};
use crate::domain::{Eligibility, ItemState, OrderingKey};

impl Bench {
    async fn push_with(&self, payload: &str, eligibility: Eligibility) {
        let item =
            NewItem { payload: payload.to_owned().into(), eligibility, ..NewItem::default() };
        self.engine.push(&name("q"), vec![item], None).await.unwrap();
    }
}

/// Batches of one push stream are pushed while earlier ones are being stored, and are delivered in their order.
#[tokio::test]
async fn of_pushes_in_flight_the_first_alone_goes_directly() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    let done = bench.faults.done("push");
    bench.faults.set("push", Fault::HeldAfter);
    let push = |payload| bench.push_with(payload, Eligibility::default());
    let looking = async {
        bench.faults.until_done("push", done + 2).await;
        let items = bench.items().await;
        let direct = items.iter().filter(|item| item.state == ItemState::Reserved);
        assert_eq!(payloads(direct), ["a"]);
        bench.faults.set("push", Fault::None);
    };
    join(join(push("a"), push("b")), looking).await;
}

#[tokio::test]
async fn an_item_that_has_become_due_comes_first() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    bench.push_with("due", Eligibility::After(LEASE)).await;
    ask(&mut stream).await;
    bench.clock.advance(2 * LEASE);
    bench.push_with("pushed later", Eligibility::default()).await;
    let received = deliveries(&mut stream).await;
    assert_eq!(payloads(received.iter().map(|one| &*one.item)), ["due", "pushed later"]);
}

/// What a reserve is about to bring was in the queue before.
#[tokio::test]
async fn an_item_waits_for_a_reserve_that_is_under_way() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    let reserves = bench.faults.done("reserve");
    bench.faults.set("reserve", Fault::HeldAfter);
    let keyed = NewItem {
        ordering_key: OrderingKey::new("key"),
        payload: "a".into(),
        ..NewItem::default()
    };
    bench.engine.push(&name("q"), vec![keyed], None).await.unwrap();
    bench.faults.until_done("reserve", reserves + 1).await;
    bench.push_with("b", Eligibility::default()).await;
    let items = bench.items().await;
    let waits = items.iter().filter(|item| item.state == ItemState::Ready);
    assert_eq!(payloads(waits), ["b"]);
    bench.faults.set("reserve", Fault::None);
    let received = deliveries(&mut stream).await;
    assert_eq!(payloads(received.iter().map(|one| &*one.item))[0], "a");
}
