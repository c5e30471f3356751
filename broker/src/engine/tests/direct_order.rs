//! What direct delivery must not overtake.

use futures_util::future::{join, join3};

use super::{direct::idle, flow::take, streams::ask, *};
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
async fn pushes_in_flight_go_directly_in_their_order() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    let reserves = bench.faults.begun("reserve");
    let done = bench.faults.done("push");
    bench.faults.set("push", Fault::HeldAfter);
    let push = |payload| bench.push_with(payload, Eligibility::default());
    let looking = async {
        bench.faults.until_done("push", done + 3).await;
        let items = bench.items().await;
        assert!(items.iter().all(|item| item.state == ItemState::Reserved), "{items:?}");
        bench.faults.set("push", Fault::None);
    };
    join(join3(push("a"), push("b"), push("c")), looking).await;
    assert_eq!(take(&mut stream, 3).await, ["a", "b", "c"]);
    assert_eq!(bench.faults.begun("reserve"), reserves, "no reserve was needed");
}

/// One that waits for a reserve is in flight: what is pushed behind it waits too.
#[tokio::test]
async fn a_push_behind_one_that_waits_for_a_reserve_waits_too() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    let done = bench.faults.done("push");
    bench.faults.set("push", Fault::HeldAfter);
    let later = Eligibility::After(LEASE);
    let looking = async {
        bench.faults.until_done("push", done + 2).await;
        let items = bench.items().await;
        assert!(items.iter().all(|item| item.state != ItemState::Reserved), "{items:?}");
        bench.faults.set("push", Fault::None);
    };
    let pushes = join(bench.push_with("a", later), bench.push_with("b", Eligibility::default()));
    join(pushes, looking).await;
}

/// Nobody waits for the first of two pushes any more: whether it is stored is not known, and the second one does not overtake it.
#[tokio::test]
async fn a_push_behind_one_that_is_given_up_is_delivered_all_the_same() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    let done = bench.faults.done("push");
    bench.faults.set("push", Fault::HeldAfter);
    let push = |payload| bench.push_with(payload, Eligibility::default());
    let first = async {
        tokio::select! {
            () = push("a") => panic!("it is held"),
            () = bench.faults.until_done("push", done + 2) => {}
        }
        bench.faults.set("push", Fault::None);
    };
    join(first, push("b")).await;
    assert_eq!(take(&mut stream, 1).await, ["b"]);
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
