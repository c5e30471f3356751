//! Streams while commits of what they hold are being written.

use std::task::Poll;

use tokio::task::JoinHandle;

use super::{
    super::EngineError,
    streams::{ask, until_assigned},
    *,
};
use crate::domain::Outcome;

impl Bench {
    /// Returns a stream that has one item in flight at most.
    async fn stream_of_one(&self) -> Subscription {
        let options = ConsumeOptions { max_in_flight: 1, ..Self::options() };
        self.engine.consume(options).await.unwrap()
    }

    /// Starts a commit that names the first of these items so many times.
    fn commit(&self, taken: &[Delivery], times: usize) -> JoinHandle<Result<Vec<Outcome>>> {
        let (engine, receipts) = (Arc::clone(&self.engine), vec![taken[0].receipt.clone(); times]);
        tokio::spawn(async move { engine.commit(&receipts).await })
    }
}

/// Asserts that a stream has no more items, and makes it ask for some.
async fn has_no_items(stream: &mut Subscription) {
    while let Poll::Ready(event) = futures_util::poll!(std::pin::pin!(stream.next())) {
        assert!(matches!(event, Ok(Received::Revoked(_))), "it is handed more items");
    }
}

#[tokio::test]
async fn a_stream_receives_the_next_item_while_a_commit_is_written() {
    let bench = bench().await;
    bench.push(4).await;
    let mut stream = bench.stream_of_one().await;
    bench.faults.set("commit", Fault::HeldBefore);
    let first = deliveries(&mut stream).await;
    let committing = bench.commit(&first, 1);
    let second = within("the second item", deliveries(&mut stream)).await;
    assert_eq!(payloads(second.iter().map(|one| &*one.item)), ["1"]);
    assert_eq!(bench.items().await.len(), 4, "nothing is committed yet");
    let also_committing = bench.commit(&second, 1);
    bench.faults.until_begun("commit", 2).await;
    let third = within("the third item", deliveries(&mut stream)).await;
    assert_eq!(payloads(third.iter().map(|one| &*one.item)), ["2"]);

    // A failed commit takes its place again, and one whose caller leaves.
    bench.faults.set("commit", Fault::Fails);
    committing.await.unwrap().unwrap_err();
    also_committing.await.unwrap().unwrap_err();
    bench.faults.set("commit", Fault::HeldBefore);
    let left = bench.commit(&first, 1);
    bench.faults.until_begun("commit", 3).await;
    left.abort();
    assert!(left.await.unwrap_err().is_cancelled());
    bench.faults.set("commit", Fault::None);
    assert_eq!(bench.commit(&first, 1).await.unwrap().unwrap(), [Outcome::Ok]);
    ask(&mut stream).await; // two items are in flight
    until_assigned(&bench, 2).await;
    assert_eq!(bench.commit(&second, 1).await.unwrap().unwrap(), [Outcome::Ok]);
    ask(&mut stream).await; // the third item is in flight
    until_assigned(&bench, 1).await;
    assert_eq!(bench.commit(&third, 1).await.unwrap().unwrap(), [Outcome::Ok]);
    let fourth = within("the fourth item", deliveries(&mut stream)).await;
    assert_eq!(payloads(fourth.iter().map(|one| &*one.item)), ["3"]);
}

#[tokio::test]
async fn a_shutdown_waits_for_the_commit_that_is_written_and_hands_out_nothing() {
    let bench = bench().await;
    bench.push(3).await;
    let mut stream = bench.stream_of_one().await;
    let first = deliveries(&mut stream).await;
    ask(&mut stream).await;
    bench.faults.set("commit", Fault::HeldBefore);
    let engine = Arc::clone(&bench.engine);
    let draining = tokio::spawn(async move { engine.drain().await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    let commit = bench.commit(&first, 1);
    bench.faults.until_begun("commit", 1).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!draining.is_finished(), "the commit is not written yet");
    ask(&mut stream).await;
    bench.faults.set("commit", Fault::None);
    assert_eq!(commit.await.unwrap().unwrap(), [Outcome::Ok]);
    within("the drain", draining).await.unwrap();
    within("the end", bench.engine.close()).await;
    let items = bench.until_ready(2).await;
    assert!(items.iter().all(|item| (item.attempt, item.deliveries) == (1, 0)), "{items:?}");
}

#[tokio::test]
async fn a_retiring_stream_ends_after_the_commit_is_written() {
    let bench = bench().await;
    bench.push(3).await;
    let mut stream = bench.stream_of_one().await;
    let first = deliveries(&mut stream).await;
    ask(&mut stream).await;
    stream.retirement().begin();
    bench.faults.set("commit", Fault::HeldBefore);
    let commit = bench.commit(&first, 1);
    bench.faults.until_begun("commit", 1).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    ask(&mut stream).await;
    bench.faults.set("commit", Fault::None);
    assert_eq!(commit.await.unwrap().unwrap(), [Outcome::Ok]);
    let ended = within("the end", stream.next()).await;
    assert!(matches!(ended, Err(EngineError::StreamTooOld)), "{ended:?}");
    let items = bench.until_ready(2).await;
    assert!(items.iter().all(|item| (item.attempt, item.deliveries) == (1, 0)), "{items:?}");
}

/// The lease lapses while its commit hangs, and the same stream is handed the item again.
#[tokio::test]
async fn an_old_commit_does_not_free_the_place_of_a_new_reservation() {
    let bench = bench().await;
    bench.push(2).await;
    let mut stream = bench.stream_of_one().await;
    let first = deliveries(&mut stream).await;
    bench.faults.set("commit", Fault::HeldBefore);
    let old = bench.commit(&first, 1);
    let second = deliveries(&mut stream).await;
    assert_eq!(second[0].item.payload, "1");
    bench.faults.until_begun("commit", 1).await;
    bench.clock.advance(LEASE * 2);
    bench.engine.rescan_all();
    let mut again = Vec::new();
    while again.is_empty() {
        match within("an event", stream.next()).await.unwrap() {
            Received::Deliveries(more) => again = more,
            Received::Revoked(_) => {}
        }
    }
    assert_eq!(again.len(), 1);
    assert_eq!(again[0].item.payload, "0");
    has_no_items(&mut stream).await;
    bench.faults.set("commit", Fault::None);
    assert_eq!(old.await.unwrap().unwrap(), [Outcome::LeaseLost]);
    tokio::time::sleep(Duration::from_millis(100)).await;
    has_no_items(&mut stream).await; // it still works on the first item
    until_assigned(&bench, 1).await;
    assert_eq!(bench.commit(&again, 1).await.unwrap().unwrap(), [Outcome::Ok]);
    let last = deliveries(&mut stream).await;
    assert_eq!(last[0].item.payload, "1");
}

/// The caller of the second commit leaves while the first one is still being written.
#[tokio::test]
async fn a_second_commit_that_fails_first_does_not_take_the_place_back() {
    let bench = bench().await;
    bench.push(6).await;
    let mut stream = bench.stream_of_one().await;
    let first = deliveries(&mut stream).await;
    bench.faults.set("commit", Fault::HeldBefore);
    let one = bench.commit(&first, 2);
    bench.faults.until_begun("commit", 1).await;
    let two = bench.commit(&first, 1);
    bench.faults.until_begun("commit", 2).await;
    two.abort();
    let _ = two.await;
    let second = deliveries(&mut stream).await;
    assert_eq!(second.len(), 1);
    ask(&mut stream).await;
    bench.faults.set("commit", Fault::None);
    let outcomes = one.await.unwrap().unwrap();
    assert_eq!(outcomes[0], Outcome::Ok);
    tokio::time::sleep(Duration::from_millis(100)).await;
    ask(&mut stream).await;
    until_assigned(&bench, 1).await;
    assert_eq!(bench.commit(&second, 2).await.unwrap().unwrap()[0], Outcome::Ok);
    assert_eq!(deliveries(&mut stream).await.len(), 1);
    ask(&mut stream).await;
    until_assigned(&bench, 1).await;
}

#[tokio::test]
async fn one_receipt_twice_in_one_commit() {
    let bench = bench().await;
    bench.push(6).await;
    let mut stream = bench.stream_of_one().await;
    let mut held = deliveries(&mut stream).await;
    for _ in 0..4 {
        bench.faults.set("commit", Fault::HeldBefore);
        let commit = bench.commit(&held, 2);
        held = within("the next item", deliveries(&mut stream)).await;
        assert_eq!(held.len(), 1);
        ask(&mut stream).await;
        bench.faults.set("commit", Fault::None);
        assert_eq!(commit.await.unwrap().unwrap(), [Outcome::Ok, Outcome::Gone]);
        tokio::time::sleep(Duration::from_millis(50)).await;
        ask(&mut stream).await;
        until_assigned(&bench, 1).await;
    }
}
