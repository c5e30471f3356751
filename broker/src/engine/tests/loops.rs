//! The dispatcher's loop: what makes it reserve, and what it costs when there is nothing to do.

use super::{super::EngineError, *};
use crate::domain::Eligibility;

/// A busy queue is polled too, so that unsignalled changes by other brokers are noticed.
#[tokio::test]
async fn a_busy_queue_is_polled_too() {
    let poll = Duration::from_millis(100);
    let bench = bench_with(Limits { poll_min: poll, poll_max: poll, ..Limits::default() }).await;
    bench.push(1).await;
    let mut stream = bench.stream().await;
    deliveries(&mut stream).await;
    let queue = bench.queue().await;
    let push = crate::store::Push::new(queue, NewItem::default());
    // The dispatcher is woken more often than it polls.
    let flow = stream.flow();
    let busy = tokio::spawn(async move {
        loop {
            drop(flow.set_max_in_flight(10));
            tokio::time::sleep(poll / 10).await;
        }
    });
    bench.store.push(vec![push]).await.unwrap();
    assert_eq!(deliveries(&mut stream).await.len(), 1);
    busy.abort();
}

#[tokio::test]
async fn a_failed_reconciliation_is_repeated() {
    let bench = bench().await;
    bench.push(2).await;
    let options = ConsumeOptions { max_in_flight: 1, ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    let taken = deliveries(&mut stream).await;
    let queue = bench.queue().await;
    let receipt = taken[0].receipt.clone();
    bench.store.commit(vec![crate::store::Reservation { queue, receipt }]).await.unwrap();
    bench.faults.set("lease_ends", Fault::Fails);
    bench.engine.dispatcher(&name("q")).unwrap().settled_elsewhere(bench.engine.now());
    bench.faults.until_begun("lease_ends", 2).await;
    bench.faults.set("lease_ends", Fault::None);
    assert_eq!(deliveries(&mut stream).await.len(), 1, "its place is free");
}

/// A round that only removes expired items counts as progress.
#[tokio::test]
async fn expired_items_at_the_head_do_not_block_a_reserve() {
    let bench = bench().await;
    let mortal = || NewItem { ttl: Some(Duration::from_secs(1)), ..NewItem::default() };
    for _ in 0..30 {
        let items = (0..1_000).map(|_| mortal()).collect();
        bench.engine.push(&name("q"), items, None).await.unwrap();
    }
    bench.push(1).await;
    bench.clock.advance(Duration::from_secs(2));
    let taken = within("the item behind", bench.reserve(1, LIMIT)).await.unwrap().unwrap();
    assert_eq!(payloads(taken.iter().map(|d| &*d.item)), ["0"]);
}

/// A call that does not wait is answered before all expired items are removed.
#[tokio::test]
async fn a_call_that_does_not_wait_is_not_delayed_by_the_removal_of_expired_items() {
    let bench = bench().await;
    for _ in 0..30 {
        let mortal = |_| NewItem { ttl: Some(Duration::from_secs(1)), ..NewItem::default() };
        bench.engine.push(&name("q"), (0..1_000).map(mortal).collect(), None).await.unwrap();
    }
    bench.clock.advance(Duration::from_secs(2));
    within("an answer", bench.reserve(1, Duration::ZERO)).await.unwrap().unwrap();
    assert!(bench.faults.begun("reserve") <= 2, "{} reserves", bench.faults.begun("reserve"));
}

/// Returns how many steps a dispatcher takes in a while.
async fn steps(bench: &Bench) -> u64 {
    let dispatcher = bench.engine.dispatcher(&name("q")).unwrap();
    let before = dispatcher.steps();
    tokio::time::sleep(Duration::from_millis(300)).await;
    dispatcher.steps() - before
}

/// The queue is deleted while the client of one of its streams does not read.
#[tokio::test]
async fn a_deleted_queue_beside_a_stream_that_is_not_polled_costs_nothing() {
    let bench = bench().await;
    bench.push(1).await;
    let mut stream = bench.stream().await;
    deliveries(&mut stream).await;
    bench.engine.delete_queue(&name("q"), true).await.unwrap();
    bench.until_waiting(0).await;
    assert!(steps(&bench).await < 5);
    assert!(matches!(stream.next().await, Err(EngineError::QueueDeleted(_))));
}

#[tokio::test]
async fn a_paused_queue_with_an_item_that_became_due_costs_nothing() {
    let bench = bench().await;
    let delay = Duration::from_secs(5);
    let eligibility = Eligibility::After(delay);
    let item = NewItem { eligibility, ..NewItem::default() };
    bench.engine.push(&name("q"), vec![item], None).await.unwrap();
    let waiting = bench.reserve(1, LIMIT);
    bench.until_waiting(1).await;
    bench.engine.pause_queue(&name("q"), true).await.unwrap();
    bench.clock.advance(delay);
    bench.engine.rescan_all();
    assert!(steps(&bench).await < 20);
    bench.engine.pause_queue(&name("q"), false).await.unwrap();
    assert_eq!(within("the item", waiting).await.unwrap().unwrap().len(), 1);
}

/// A dispatcher that could assign nothing of what it found, because other brokers were faster or the
/// item is too large for the room, looks again soon, and not only with the next poll.
#[tokio::test]
async fn a_dispatcher_that_could_deal_nothing_looks_again_soon() {
    let bench = bench().await;
    let sized = |bytes: usize| NewItem { payload: vec![0; bytes].into(), ..NewItem::default() };
    bench.engine.push(&name("q"), vec![sized(60), sized(80)], None).await.unwrap();
    let options = ConsumeOptions { max_in_flight_bytes: Some(100), ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    assert_eq!(deliveries(&mut stream).await.len(), 1);
    let looks = bench.faults.begun("reserve");
    assert!(futures_util::poll!(std::pin::pin!(stream.next())).is_pending());
    bench.faults.until_begun("reserve", looks + 6).await;
    // No hint announces this.
    let queue = bench.queue().await;
    let items = bench.items().await;
    let large = items.iter().find(|item| item.payload.len() == 80).unwrap();
    let push = crate::store::Push::new(Arc::clone(&queue), sized(20));
    bench.store.push(vec![push]).await.unwrap();
    bench.store.delete_item(&queue, large.id, None).await.unwrap();
    assert_eq!(deliveries(&mut stream).await[0].item.payload.len(), 20);
    assert!(steps(&bench).await < 20);
}

/// A client that watches queues and does not read does not delay a shutdown.
#[tokio::test]
async fn a_watcher_that_does_not_read_holds_up_no_shutdown() {
    let bench = bench().await;
    bench.push(1).await;
    let mut watching = bench.engine.watch_queues(vec![name("q")]).await.unwrap();
    watching.next(1, |_| true).await.unwrap();
    bench.engine.drain().await;
    within("the end", bench.engine.close()).await;
    drop(watching);
}

/// A dispatcher without consumers ends, whatever wakes it.
#[tokio::test(start_paused = true)]
async fn a_dispatcher_without_consumers_ends_though_it_is_woken() {
    let bench = bench().await;
    bench.engine.reserve(&name("q"), 1, Duration::ZERO, None, Identity::default()).await.unwrap();
    assert!(bench.engine.dispatcher(&name("q")).is_some());
    for _ in 0..1_000 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        bench.engine.rescan_all();
        if bench.engine.dispatcher(&name("q")).is_none() {
            return;
        }
        // The store's thread does not follow the paused clock. It gets real time to finish the
        // dispatcher's call.
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("a dispatcher that is woken every second never ends");
}

/// Each settle through another broker is signalled, and each check reads everything that is held. While there is room for more,
/// one check serves the settles of a second.
#[tokio::test]
async fn settles_elsewhere_cost_few_checks_of_what_is_held() {
    let bench = bench().await;
    bench.push(3).await;
    let mut stream = bench.stream().await;
    let taken = deliveries(&mut stream).await;
    let dispatcher = bench.engine.dispatcher(&name("q")).unwrap();
    for _ in 0..50 {
        let before = dispatcher.steps();
        dispatcher.settled_elsewhere(bench.engine.now());
        until("a step", async || dispatcher.steps() > before).await;
    }
    let checks = bench.faults.begun("lease_ends");
    assert!(checks < 25, "{checks} checks for 50 signals");
    // The last signal is not forgotten.
    let queue = bench.queue().await;
    let held = taken.iter().map(|delivery| crate::store::Reservation {
        queue: Arc::clone(&queue),
        receipt: delivery.receipt.clone(),
    });
    bench.store.commit(held.collect()).await.unwrap();
    dispatcher.settled_elsewhere(bench.engine.now());
    within("the places are free", dispatcher.drained()).await;
}
