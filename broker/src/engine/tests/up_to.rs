//! Commits of all that was delivered on a stream up to one item.

use super::{
    streams::{ask, until_assigned},
    *,
};
use crate::{
    domain::{Cause, Headers, Outcome},
    engine::{MAY_CREATE_ALL, MoveRequest, RollbackRequest},
};

/// Returns a bench with so many items, and a stream that has received them all.
async fn received(count: usize) -> (Bench, Subscription, Vec<Delivery>) {
    let bench = bench().await;
    bench.push(count).await;
    let mut stream = bench.stream().await;
    let mut received = Vec::new();
    while received.len() < count {
        received.extend(deliveries(&mut stream).await);
    }
    (bench, stream, received)
}

/// Returns a rollback after which the item is ready at once.
fn rollback(receipt: &Receipt) -> RollbackRequest {
    RollbackRequest {
        receipt: receipt.clone(),
        delay: Some(Duration::ZERO),
        reason: String::new(),
        cause: Cause::Rollback,
    }
}

/// Returns the payloads of the items that are left, in any state.
async fn left(bench: &Bench) -> Vec<String> {
    let mut left = payloads(&bench.items().await);
    left.sort_unstable();
    left
}

#[tokio::test]
async fn all_items_up_to_one_are_committed() {
    let (bench, stream, items) = received(5).await;
    let delivered = stream.delivered();
    let up_to_3 = delivered.up_to(3).unwrap();
    assert_eq!(up_to_3, receipts(&items[..3]), "in their order");
    assert_eq!(delivered.commit(&up_to_3).await.unwrap(), [Outcome::Ok; 3]);
    assert_eq!(left(&bench).await, ["3", "4"]);
    assert_eq!(delivered.up_to(3), Ok(vec![]), "nothing is left up to there");
    let up_to_5 = delivered.up_to(5).unwrap();
    assert_eq!(delivered.commit(&up_to_5).await.unwrap(), [Outcome::Ok; 2]);
    assert_eq!(left(&bench).await, [""; 0]);
}

#[tokio::test]
async fn only_what_was_delivered_has_a_tag() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    assert_eq!(stream.delivered().up_to(1), Err(0));
    ask(&mut stream).await;
    bench.push(2).await;
    until_assigned(&bench, 2).await;
    assert_eq!(stream.delivered().up_to(1), Err(0), "they are assigned and not sent");
    deliveries(&mut stream).await;
    assert_eq!(stream.delivered().up_to(0), Err(2));
    assert_eq!(stream.delivered().up_to(3), Err(2));
    let delivered = stream.delivered();
    drop(stream);
    assert_eq!(delivered.up_to(2), Ok(vec![]), "a stream that has ended holds nothing");
}

#[tokio::test]
async fn what_is_settled_by_its_receipt_is_left_out() {
    let (bench, stream, items) = received(4).await;
    let delivered = stream.delivered();
    let receipts = receipts(&items);
    delivered.name(&receipts[2..3]);
    // Whatever becomes of that: a rollback that fails must not become a commit.
    bench.faults.set("rollback", Fault::Fails);
    let rollback = rollback(&receipts[1]);
    bench.engine.rollback(vec![rollback]).await.unwrap_err();
    let expected = [receipts[0].clone(), receipts[3].clone()];
    assert_eq!(delivered.up_to(4).unwrap(), expected);
    assert_eq!(delivered.commit(&expected).await.unwrap(), [Outcome::Ok; 2]);
    assert_eq!(left(&bench).await, ["1", "2"]);
    assert_eq!(bench.engine.commit(&receipts[2..3]).await.unwrap(), [Outcome::Ok]);
}

#[tokio::test]
async fn what_is_to_be_moved_is_left_out() {
    let (bench, stream, items) = received(3).await;
    let delivered = stream.delivered();
    let step = bench.engine.commit_and_push(items[0].receipt.clone(), vec![], MAY_CREATE_ALL);
    bench.faults.set("commit_and_push", Fault::Fails);
    step.await.unwrap_err();
    let request = MoveRequest {
        receipt: items[1].receipt.clone(),
        to_queue: name("elsewhere"),
        payload: None,
        content_type: None,
        headers: Headers::new(),
        priority: None,
        delay: Duration::ZERO,
    };
    bench.faults.set("move_items", Fault::Fails);
    bench.engine.move_item(request, MAY_CREATE_ALL).await.unwrap_err();
    assert_eq!(delivered.up_to(3).unwrap(), receipts(&items[2..]));
}

#[tokio::test]
async fn commits_that_end_in_a_panic_are_included_again() {
    let (bench, stream, items) = received(1).await;
    let (delivered, included) = (stream.delivered(), stream.delivered().up_to(1).unwrap());
    bench.faults.set("commit", Fault::Panics);
    tokio::spawn(async move { delivered.commit(&included).await }).await.unwrap_err();
    assert_eq!(stream.delivered().up_to(1).unwrap(), receipts(&items));
}

#[tokio::test]
async fn commits_under_way_are_left_out_until_they_fail() {
    let (bench, stream, _) = received(4).await;
    let delivered = stream.delivered();
    let first = delivered.up_to(2).unwrap();
    let second = delivered.up_to(4).unwrap();
    assert_eq!((first.len(), second.len()), (2, 2));
    bench.faults.set("commit", Fault::Fails);
    delivered.commit(&first).await.unwrap_err();
    assert_eq!(delivered.up_to(4).unwrap(), first, "what failed is committed again");
    delivered.name(&first[..1]);
    delivered.commit(&first).await.unwrap_err();
    assert_eq!(delivered.up_to(4).unwrap(), first[1..], "the other is named meanwhile");
    delivered.commit(&first[1..]).await.unwrap_err();
    // A commit whose answer was lost has taken effect, as the next one is told.
    bench.faults.set("commit", Fault::AnswerLost);
    delivered.commit(&second).await.unwrap_err();
    bench.faults.set("commit", Fault::None);
    let all = delivered.up_to(4).unwrap();
    let expected = [Outcome::Ok, Outcome::Gone, Outcome::Gone];
    assert_eq!(delivered.commit(&all).await.unwrap(), expected);
    assert_eq!(left(&bench).await, ["0"]);
}

#[tokio::test]
async fn an_item_that_is_delivered_again_has_a_new_tag() {
    let (bench, mut stream, items) = received(1).await;
    let rollback = rollback(&items[0].receipt);
    assert_eq!(bench.engine.rollback(vec![rollback]).await.unwrap(), [Outcome::Ok]);
    let again = deliveries(&mut stream).await;
    assert_eq!(stream.delivered().up_to(1), Ok(vec![]), "its first reservation has ended");
    assert_eq!(stream.delivered().up_to(2), Ok(receipts(&again)));
}

#[tokio::test]
async fn more_items_than_a_call_may_name_are_committed_at_once() {
    let bench = bench().await;
    for _ in 0..5 {
        bench.push(500).await;
    }
    let options = ConsumeOptions { max_in_flight: 2_500, ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    let mut count = 0;
    while count < 2_500 {
        count += deliveries(&mut stream).await.len();
    }
    let delivered = stream.delivered();
    let all = delivered.up_to(2_500).unwrap();
    assert_eq!(delivered.commit(&all).await.unwrap(), vec![Outcome::Ok; 2_500]);
    assert_eq!(left(&bench).await, [""; 0]);
}
