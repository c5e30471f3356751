//! Workers that take one item at a time, for which the broker reserves items ahead.

use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::join_all;
use tokio::task::JoinHandle;

use super::*;
use crate::{
    domain::{ItemState, Limit, Outcome, Signal, Topic},
    signals::Notice,
};

const WORKERS: usize = 20;

impl Bench {
    /// Asserts that a call receives the first item of the queue.
    async fn receives_the_first(&self, asking: JoinHandle<Result<Vec<Delivery>>>) {
        let received = within("an item", asking).await.unwrap().unwrap();
        let first = self.items().await.iter().map(|item| item.id).min();
        assert_eq!(received.first().map(|delivery| delivery.item.id), first);
    }

    /// Asserts that a call during a held rollback waits for it, and receives the first item of the queue.
    async fn waits_for_the_first(&self) {
        let asking = self.reserve(1, LIMIT);
        tokio::time::sleep(Duration::from_millis(100)).await; // for what must not happen
        self.faults.set("rollback", Fault::None);
        self.receives_the_first(asking).await;
    }

    /// Lets workers take and commit single items until about `count` are committed. Returns their payloads.
    async fn work(&self, count: usize) -> Vec<String> {
        let left = AtomicUsize::new(count);
        let worker = async || {
            let mut done = Vec::new();
            while left.load(Ordering::Relaxed) > 0 {
                let who = Identity::default();
                let wait = Duration::from_millis(200);
                let taken = self.engine.reserve(&name("q"), 1, wait, Some(LEASE), who).await;
                for Delivery { item, receipt, .. } in taken.unwrap() {
                    assert_eq!((item.attempt, receipt.deliveries_here()), (1, 1));
                    assert_eq!(self.engine.commit(&[receipt]).await.unwrap(), [Outcome::Ok]);
                    done.extend(payloads([&*item]));
                    let _ =
                        left.try_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
                }
            }
            done
        };
        within("the work", join_all((0..WORKERS).map(|_| worker()))).await.concat()
    }

    /// Pushes items, and lets workers take some of them until items are reserved ahead. Returns how many items are left.
    async fn with_stock(&self) -> usize {
        loop {
            self.push(1_000).await;
            self.work(500).await;
            let items = self.items().await;
            // Everything that the workers took is committed.
            if items.iter().any(|item| item.state == ItemState::Reserved) {
                return items.len();
            }
        }
    }
}

/// Asserts that the items are as if nobody had reserved them.
fn assert_untouched(items: &[Item]) {
    for item in items {
        assert_eq!((item.attempt, item.state), (1, ItemState::Ready));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_receive_each_item_once() {
    let bench = bench().await;
    bench.push(1_000).await;
    bench.push(1_000).await;
    let mut done = bench.work(2_000).await;
    let mut pushed: Vec<String> = (0..1_000).map(|n| n.to_string()).collect();
    pushed.extend(pushed.clone());
    done.sort();
    pushed.sort();
    assert_eq!(done, pushed);
    assert_eq!(bench.items().await, []);
    let totals = bench.engine.queue_stats(&name("q")).await.unwrap().totals;
    assert_eq!(totals.committed, 2_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn items_that_no_worker_takes_return_untouched() {
    let bench = bench().await;
    let left = bench.with_stock().await;
    assert_untouched(&bench.until_ready(left).await);
}

/// A lone consumer receives items in their order, whenever it asks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_returned_is_there_again_before_the_next_reserve() {
    let bench = bench().await;
    let returned = loop {
        let returned = bench.faults.begun("rollback");
        bench.with_stock().await;
        bench.faults.set("rollback", Fault::HeldBefore);
        if bench.faults.begun("rollback") == returned {
            break returned;
        }
        bench.faults.set("rollback", Fault::None); // the stock was returned already
    };
    bench.faults.until_begun("rollback", returned + 1).await;
    bench.waits_for_the_first().await;
}

/// The same for what was withdrawn because another broker has settled something.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_withdrawn_is_there_again_before_the_next_reserve() {
    let bench = bench().await;
    bench.with_stock().await;
    let signal = Signal::new(name("q"), Topic::Settle, None);
    bench.engine.receive(&Notice::Signal(signal));
    bench.receives_the_first(bench.reserve(1, LIMIT)).await;
}

/// The same where a caller has gone, and what the reserve for it brought is ahead of the stock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_returned_is_not_overtaken_by_what_is_in_stock() {
    let bench = bench().await;
    let gone = loop {
        bench.with_stock().await;
        bench.faults.set("reserve", Fault::HeldAfter);
        let done = bench.faults.done("reserve");
        // Most calls are answered from the stock, until one of them needs a reserve.
        let gone = loop {
            let mut call = bench.reserve(1, LIMIT);
            tokio::select! {
                taken = &mut call => {
                    let receipts = taken.unwrap().unwrap().into_iter().map(|one| one.receipt);
                    bench.engine.commit(&receipts.collect::<Vec<_>>()).await.unwrap();
                }
                () = bench.faults.until_done("reserve", done + 1) => break call,
            }
        };
        let items = bench.items().await;
        if items.iter().filter(|item| item.state == ItemState::Reserved).count() > 1 {
            break gone;
        }
        bench.faults.set("reserve", Fault::None); // nothing is reserved ahead with it
        let receipts = gone.await.unwrap().unwrap().into_iter().map(|one| one.receipt);
        bench.engine.commit(&receipts.collect::<Vec<_>>()).await.unwrap();
    };
    gone.abort();
    assert!(gone.await.unwrap_err().is_cancelled());
    bench.faults.set("rollback", Fault::HeldBefore);
    let returned = bench.faults.begun("rollback");
    bench.faults.set("reserve", Fault::None);
    bench.faults.until_begun("rollback", returned + 1).await;
    bench.waits_for_the_first().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_returns_what_is_reserved_ahead() {
    let bench = bench().await;
    let left = bench.with_stock().await;
    bench.engine.drain().await;
    bench.engine.close().await;
    let items = bench.items().await;
    assert_eq!(items.len(), left);
    assert_untouched(&items);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_queue_hands_out_nothing_that_is_reserved_ahead() {
    let bench = bench().await;
    let left = bench.with_stock().await;
    bench.engine.pause_queue(&name("q"), true).await.unwrap();
    let taken = within("an answer", bench.reserve(1, Duration::ZERO)).await.unwrap();
    assert_eq!(taken.unwrap().len(), 0);
    assert_untouched(&bench.until_ready(left).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_whose_items_have_one_attempt_keeps_them_until_they_are_asked_for() {
    let bench = bench().await;
    let queue = Queue { max_attempts: Some(Limit::of(1)), ..(*bench.queue().await).clone() };
    bench.store.update_queue(&queue).await.unwrap();
    bench.engine.rescan_all();
    for _ in 0..3 {
        bench.push(1_000).await;
        bench.work(500).await;
        let items = bench.items().await;
        assert!(items.iter().all(|item| item.state == ItemState::Ready));
    }
}

/// Asserts that the items came in the order of their pushes.
fn assert_in_order(received: &[String]) {
    let numbers: Vec<usize> = received.iter().map(|payload| payload.parse().unwrap()).collect();
    assert!(numbers.is_sorted(), "{numbers:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lone_popper_receives_items_in_order() {
    let bench = bench().await;
    bench.push(1_000).await;
    let mut received = Vec::new();
    while received.len() < 1_000 {
        received.extend(payloads(&within("items", bench.pop(1, LIMIT)).await.unwrap().unwrap()));
    }
    assert_in_order(&received);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lone_stream_receives_items_in_order() {
    let bench = bench().await;
    bench.push(1_000).await;
    let options = ConsumeOptions { max_in_flight: 8, ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    let mut received = Vec::new();
    while received.len() < 1_000 {
        let items = deliveries(&mut stream).await;
        received.extend(payloads(items.iter().map(|delivery| &*delivery.item)));
        bench.engine.commit(&receipts(&items)).await.unwrap();
    }
    assert_in_order(&received);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lone_caller_receives_items_in_order() {
    let bench = bench().await;
    bench.push(1_000).await;
    let mut received = Vec::new();
    while received.len() < 1_000 {
        let items = within("items", bench.reserve(4, LIMIT)).await.unwrap().unwrap();
        received.extend(payloads(items.iter().map(|delivery| &*delivery.item)));
        bench.engine.commit(&receipts(&items)).await.unwrap();
    }
    assert_in_order(&received);
}

impl Bench {
    /// Lets workers take items until all that are left are in stock. Returns how many these are.
    async fn all_in_stock(&self) -> usize {
        loop {
            self.push(1_000).await;
            let left = self.items().await.len();
            self.work(left.saturating_sub(15 + WORKERS)).await;
            let items = self.items().await;
            if !items.is_empty() && items.iter().all(|item| item.state == ItemState::Reserved) {
                return items.len();
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pop_that_does_not_wait_finds_what_is_reserved_ahead() {
    let bench = bench().await;
    bench.all_in_stock().await;
    assert_eq!(within("an answer", bench.pop(1, Duration::ZERO)).await.unwrap().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn items_of_a_deleted_queue_are_not_handed_out() {
    let bench = bench().await;
    bench.all_in_stock().await;
    bench.engine.delete_queue(&name("q"), true).await.unwrap();
    bench.push(1).await;
    let new = within("the new item", bench.reserve(1, LIMIT)).await.unwrap().unwrap();
    assert_eq!(payloads(new.iter().map(|delivery| &*delivery.item)), ["0"]);
    for _ in 0..3 {
        let more = within("an answer", bench.reserve(1, Duration::ZERO)).await.unwrap().unwrap();
        assert!(more.is_empty());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_item_that_another_broker_has_deleted_is_not_handed_out() {
    let bench = bench().await;
    bench.all_in_stock().await;
    let queue = bench.queue().await;
    for item in bench.items().await {
        bench.store.delete_item(&queue, item.id, None).await.unwrap();
    }
    let signal = Signal::new(name("q"), Topic::Settle, None);
    bench.engine.receive(&Notice::Signal(signal));
    for _ in 0..3 {
        let none = within("an answer", bench.reserve(1, Duration::ZERO)).await.unwrap().unwrap();
        assert!(none.is_empty());
    }
}
