//! What direct delivery must not overtake.

use futures_util::future::{join, join3};

use super::{direct::idle, flow::take, streams::ask, *};
use crate::domain::{Eligibility, ItemState};

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

impl Bench {
    /// Pushes an item for which a reserve begins that does not end, and one behind it that goes directly.
    async fn push_behind_a_reserve(&self, held: Fault) {
        let begun = self.faults.begun("reserve");
        self.faults.set("reserve", held);
        self.push_keyed("a").await;
        self.faults.until_begun("reserve", begun + 1).await;
        self.push_with("b", Eligibility::default()).await;
        let items = self.items().await;
        let mut reserved = items.iter().filter(|item| item.state == ItemState::Reserved);
        assert!(reserved.any(|item| item.payload == "b"), "{items:?}");
    }
}

/// What a reserve is about to bring was in the queue before.
#[tokio::test]
async fn an_item_that_goes_directly_waits_for_a_reserve_that_is_under_way() {
    for held in [Fault::HeldBefore, Fault::HeldAfter] {
        let bench = bench().await;
        let mut stream = bench.stream().await;
        idle(&bench, &mut stream).await;
        bench.push_behind_a_reserve(held).await;
        bench.faults.set("reserve", Fault::None);
        assert_eq!(take(&mut stream, 2).await, ["a", "b"]);
    }
}

/// A reserve that the store works on late finds what has been pushed since too.
#[tokio::test]
async fn what_a_reserve_finds_that_was_pushed_behind_such_an_item_comes_behind_it() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    bench.push_behind_a_reserve(Fault::HeldBefore).await;
    bench.push_keyed("c").await;
    bench.faults.set("reserve", Fault::None);
    assert_eq!(take(&mut stream, 3).await, ["a", "b", "c"]);
}

/// A reserve that fails leaves what it should have brought.
#[tokio::test]
async fn an_item_behind_a_reserve_that_fails_comes_behind_what_that_leaves() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    bench.push_behind_a_reserve(Fault::HeldBefore).await;
    let begun = bench.faults.begun("reserve");
    bench.faults.set("reserve", Fault::Fails);
    bench.faults.until_begun("reserve", begun + 1).await; // the next one
    bench.faults.set("reserve", Fault::None);
    assert_eq!(take(&mut stream, 2).await, ["a", "b"]);
}

/// A connection that leads nowhere must not keep items that others could have, or let their leases end.
#[tokio::test]
async fn what_waits_for_a_reserve_that_takes_long_goes_back() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    bench.push_behind_a_reserve(Fault::HeldBefore).await;
    let done = bench.faults.done("rollback");
    bench.clock.advance(Duration::from_secs(6));
    bench.faults.until_done("rollback", done + 1).await;
    let items = bench.items().await;
    assert!(items.iter().all(|item| item.state == ItemState::Ready), "{items:?}");
    bench.faults.set("reserve", Fault::None);
    assert_eq!(take(&mut stream, 2).await, ["a", "b"]);
}
