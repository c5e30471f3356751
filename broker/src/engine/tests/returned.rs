//! Items that a reserve brought and that nobody can take any more: they are back before the next reserve.

use super::{streams::ask, *};

/// What a reserve brought does not fit its stream, whose flow was lowered meanwhile.
#[tokio::test]
async fn what_does_not_fit_is_not_overtaken() {
    let bench = bench().await;
    bench.push(4).await;
    bench.faults.set("reserve", Fault::HeldAfter);
    let mut stream = bench.stream().await;
    ask(&mut stream).await;
    bench.faults.until_done("reserve", 1).await;
    stream.flow().set_max_in_flight(2);
    bench.faults.set("rollback", Fault::HeldBefore);
    bench.faults.set("reserve", Fault::None);
    bench.faults.until_begun("rollback", 1).await;
    let mut received = deliveries(&mut stream).await;
    bench.engine.push(&name("q"), vec![later()], None).await.unwrap();
    stream.flow().set_max_in_flight(10);
    ask(&mut stream).await;
    tokio::time::sleep(Duration::from_millis(100)).await; // for what must not happen
    bench.faults.set("rollback", Fault::None);
    while received.len() < 5 {
        received.append(&mut deliveries(&mut stream).await);
    }
    let received = payloads(received.iter().map(|delivery| &*delivery.item));
    assert_eq!(received, ["0", "1", "2", "3", "later"]);
}

/// The answer of the store takes longer than the lease. Nobody has had the item, and the caller goes on waiting for it.
#[tokio::test]
async fn what_comes_too_late_has_not_failed() {
    let bench = bench().await;
    bench.push(1).await;
    bench.faults.set("reserve", Fault::HeldAfter);
    let waiting = bench.reserve(1, LIMIT);
    bench.faults.until_done("reserve", 1).await;
    bench.clock.advance(LEASE);
    bench.faults.set("rollback", Fault::HeldBefore);
    bench.faults.set("reserve", Fault::None);
    bench.faults.until_begun("rollback", 1).await;
    let also_waiting = bench.reserve(1, LIMIT);
    tokio::time::sleep(Duration::from_millis(100)).await; // for what must not happen
    bench.push(1).await;
    bench.faults.set("rollback", Fault::None);
    for waiting in [waiting, also_waiting] {
        let taken = within("an item", waiting).await.unwrap().unwrap();
        assert_eq!((taken[0].item.attempt, taken[0].item.deliveries), (1, 1));
    }
}

fn later() -> NewItem {
    NewItem { payload: "later".into(), ..NewItem::default() }
}
