//! Reserves and pops: items taken for a call reach its caller or are rolled back.

use super::{super::MAY_CREATE_ALL, streams::ask, *};
use crate::domain::Limit;

const SHORT: Duration = Duration::from_millis(20);

/// The wait ends while the round is in the store. The call returns the items of the round.
#[tokio::test]
async fn a_call_that_takes_part_in_a_round_is_answered_by_it() {
    for held in ["reserve", "commit"] {
        let bench = bench().await;
        bench.push(1).await;
        bench.faults.set(held, Fault::HeldAfter);
        let pop = bench.pop(1, SHORT);
        bench.faults.until_done(held, 1).await;
        tokio::time::sleep(SHORT * 2).await; // the wait is over
        bench.faults.set(held, Fault::None);
        let popped = within("the answer", pop).await.unwrap().unwrap();
        assert_eq!(payloads(&popped), ["0"], "held in {held}");
        assert!(bench.items().await.is_empty());
    }
}

/// A call whose wait ended during a round without items is answered at the end of that round, not
/// of the next.
#[tokio::test]
async fn a_call_whose_wait_ended_during_an_empty_round_is_answered_when_the_round_ends() {
    let bench = bench().await;
    bench.push(0).await;
    bench.faults.set("reserve", Fault::HeldAfter);
    let reserve = bench.reserve(1, SHORT);
    bench.faults.until_done("reserve", 1).await;
    tokio::time::sleep(SHORT * 2).await;
    bench.faults.set("reserve", Fault::None);
    assert!(within("the answer", reserve).await.unwrap().unwrap().is_empty());
}

#[tokio::test]
async fn a_pop_whose_caller_left_before_the_commit_loses_nothing() {
    let bench = bench().await;
    bench.push(3).await;
    bench.faults.set("reserve", Fault::HeldAfter);
    let pop = bench.pop(2, LIMIT);
    bench.faults.until_done("reserve", 1).await;
    pop.abort();
    assert!(pop.await.unwrap_err().is_cancelled());
    bench.faults.set("reserve", Fault::None);
    let items = bench.until_ready(3).await;
    assert!(items.iter().all(|item| item.attempt == 1), "{items:?}");
    assert_eq!(bench.faults.begun("commit"), 0);
}

/// A failed commit in a round affects only the pops of the round.
#[tokio::test]
async fn items_of_a_failed_commit_are_rolled_back() {
    let bench = bench().await;
    bench.push(0).await;
    bench.faults.set("commit", Fault::Fails);
    bench.faults.set("reserve", Fault::HeldBefore);
    let first = bench.reserve(1, Duration::ZERO); // delays the round until the others have arrived
    bench.faults.until_begun("reserve", 1).await;
    let (pop, reserve) = (bench.pop(1, LIMIT), bench.reserve(1, LIMIT));
    bench.until_waiting(3).await;
    bench.faults.set("reserve", Fault::None);
    within("the answer", first).await.unwrap().unwrap();
    bench.until_waiting(2).await;
    bench.push(2).await;
    let reserved = within("the answer", reserve).await.unwrap();
    let failed = within("the answer", pop).await.unwrap();
    assert!(failed.is_err(), "{failed:?}");
    let reserved = reserved.expect("its items are not those of the pop");
    assert_eq!(reserved.len(), 1);
    let ready = bench.until_ready(1).await;
    let other = ready.iter().find(|item| item.id != reserved[0].item.id).unwrap();
    assert_eq!((other.attempt, ready.len()), (1, 2));
}

/// The settings are dropped while the dead-letter queue is created, as the task that watches them does when it sees the new
/// queue. The round that found the item at its limit removes the item all the same.
#[tokio::test]
async fn a_call_that_finds_an_item_at_its_limit_removes_it() {
    let bench = bench().await;
    let change = |queue: &mut Queue| {
        queue.max_attempts = Some(Limit::of(1));
        Ok(())
    };
    bench.engine.update_queue(&name("q"), &change).await.unwrap();
    bench.push(1).await;
    assert_eq!(bench.reserve(1, Duration::ZERO).await.unwrap().unwrap().len(), 1);
    bench.clock.advance(LEASE + SHORT);
    bench.faults.set("create_queue", Fault::HeldAfter);
    let reserve = bench.reserve(1, Duration::ZERO);
    bench.faults.until_done("create_queue", 1).await;
    bench.engine.queues.forget_all();
    bench.faults.set("create_queue", Fault::None);
    assert!(within("the answer", reserve).await.unwrap().unwrap().is_empty());
    assert!(bench.items().await.is_empty());
    assert_eq!(bench.faults.begun("create_queue"), 1);
}

/// A round cannot serve all of these calls. None of them waits for the fallback poll.
#[tokio::test]
async fn a_call_that_does_not_wait_takes_part_in_at_most_two_rounds() {
    let bench = bench().await;
    bench.push(0).await;
    bench.faults.set("reserve", Fault::HeldBefore);
    let calls: Vec<_> = (0..12).map(|_| bench.reserve(1_000, Duration::ZERO)).collect();
    bench.until_waiting(12).await;
    bench.faults.set("reserve", Fault::None);
    for call in calls {
        assert!(within("the answer", call).await.unwrap().unwrap().is_empty());
    }
    assert!(bench.faults.begun("reserve") <= 2, "{} looks", bench.faults.begun("reserve"));
}

/// The same holds at shutdown: a pop in the middle of its commit is answered, and the others fail.
#[tokio::test]
async fn a_pop_in_its_commit_is_answered_though_the_broker_shuts_down() {
    let limits = Limits { drain: Duration::ZERO, ..Limits::default() };
    let bench = bench_with(limits).await;
    bench.push(1).await;
    bench.faults.set("commit", Fault::HeldAfter);
    let pop = bench.pop(1, LIMIT);
    bench.faults.until_done("commit", 1).await;
    let waiting = bench.reserve(1, LIMIT);
    bench.until_waiting(2).await;
    bench.engine.drain().await;
    let told = within("the answer", waiting).await.unwrap();
    assert!(matches!(told, Err(super::super::EngineError::ShuttingDown)), "{told:?}");
    bench.faults.set("commit", Fault::None);
    assert_eq!(within("the answer", pop).await.unwrap().unwrap().len(), 1);
}

/// After a pause of the whole broker an answer may be too late. Then the call returns nothing.
#[tokio::test]
async fn a_reserve_does_not_return_items_with_ended_leases() {
    let bench = bench().await;
    bench.push(1).await;
    let queue = name("q");
    let reserve = bench.engine.reserve(&queue, 1, LIMIT, Some(LEASE), Identity::default());
    let mut reserve = std::pin::pin!(reserve);
    assert!(futures_util::poll!(reserve.as_mut()).is_pending());
    bench.until_waiting(0).await; // the item is on its way to the caller
    bench.clock.advance(LEASE);
    assert!(within("the answer", reserve).await.unwrap().is_empty());
    assert_eq!(bench.until_ready(1).await[0].attempt, 1, "it reached nobody");
}

/// An item that was delivered in a queue just deleted is settled by its receipt, although the queue
/// was created again in another group meanwhile.
#[tokio::test]
async fn a_settle_reaches_an_item_in_the_former_group_of_its_queue() {
    let bench = bench().await;
    bench.push(1).await;
    let reserve = bench.reserve(1, LIMIT);
    let delivery = within("the answer", reserve).await.unwrap().unwrap().remove(0);
    let mut receipt = delivery.receipt;
    receipt.group = crate::domain::GroupName::parse("group", "former").unwrap();
    let outcomes = bench.engine.commit(&[receipt]).await.unwrap();
    assert_eq!(outcomes, [crate::domain::Outcome::Ok]);
    assert!(bench.items().await.is_empty());
}

/// While the names of queues are read anew, those read before say nothing of a queue that was created since.
#[tokio::test]
async fn a_queue_is_there_while_the_names_are_read() {
    let bench = bench().await;
    assert!(bench.engine.has_queue(&name("q")).await.unwrap());
    let queue = Queue::with_defaults(name("new"), bench.store.now());
    bench.engine.create_queue(queue, MAY_CREATE_ALL).await.unwrap();
    bench.engine.rescan_all();
    let before = bench.faults.begun("list_queues");
    bench.faults.set("list_queues", Fault::HeldBefore);
    let has = |text| {
        let engine = Arc::clone(&bench.engine);
        async move { engine.has_queue(&name(text)).await }
    };
    let reads = tokio::spawn(has("q"));
    bench.faults.until_begun("list_queues", before + 1).await;
    let asks = has("new");
    tokio::pin!(asks);
    assert!(futures_util::poll!(&mut asks).is_pending(), "answered by the earlier names");
    bench.faults.set("list_queues", Fault::None);
    assert!(within("the answer", asks).await.unwrap());
    assert!(within("the answer", reads).await.unwrap().unwrap());
}

/// A store that stalls under a change of links holds up no pause, and other changes of links for seconds only.
#[tokio::test]
async fn a_pause_does_not_wait_for_changes_of_links() {
    let bench = bench().await;
    bench.push(1).await;
    let create = |text| {
        let queue = Queue::with_defaults(name(text), bench.store.now());
        let engine = Arc::clone(&bench.engine);
        tokio::spawn(async move { engine.create_queue(queue, MAY_CREATE_ALL).await })
    };
    bench.faults.set("link_queue", Fault::HeldBefore);
    let stalled = create("other");
    bench.faults.until_begun("link_queue", 1).await;
    let paused = within("the pause", bench.engine.pause_queue(&name("q"), true)).await;
    assert!(paused.unwrap().paused);
    let second = create("second");
    bench.faults.until_begun("link_queue", 2).await;
    bench.faults.set("link_queue", Fault::None);
    for created in [stalled, second] {
        within("the queue", created).await.unwrap().unwrap();
    }
}

/// A queue and its dead-letter queue that are created at the same time, one of them by a push, end up in one group.
#[tokio::test]
async fn queues_that_are_created_at_the_same_time_share_a_group_with_their_dead_letters() {
    let elsewhere = || crate::domain::GroupName::parse("group", "elsewhere").unwrap();
    let grouped = |text: &str, bench: &Bench| {
        let queue = Queue::with_defaults(name(text), bench.store.now());
        Queue { group: elsewhere(), ..queue }
    };
    // A push creates the dead-letter queue.
    let bench = bench().await;
    bench.faults.set("create_queue", Fault::HeldBefore);
    let engine = Arc::clone(&bench.engine);
    let pushed =
        tokio::spawn(
            async move { engine.push(&name("x.dead"), vec![NewItem::default()], None).await },
        );
    bench.faults.until_begun("create_queue", 1).await;
    bench.engine.create_queue(grouped("x", &bench), MAY_CREATE_ALL).await.unwrap();
    bench.faults.set("create_queue", Fault::None);
    within("the push", pushed).await.unwrap().unwrap();
    let dead = bench.store.get_queue(&name("x.dead")).await.unwrap().unwrap();
    assert_eq!(dead.group, elsewhere());

    // A push creates the queue itself.
    let bench = super::bench().await;
    bench.engine.delete_queue(&name("q"), true).await.unwrap();
    bench.faults.set("link_queue", Fault::HeldBefore);
    let (engine, dead) = (Arc::clone(&bench.engine), grouped("q.dead", &bench));
    let created = tokio::spawn(async move { engine.create_queue(dead, MAY_CREATE_ALL).await });
    bench.faults.until_begun("link_queue", 1).await;
    bench.push(1).await;
    bench.faults.set("link_queue", Fault::None);
    let refused = within("an answer", created).await.unwrap().unwrap_err();
    assert!(matches!(refused, super::super::EngineError::DeadLetterGroup { .. }), "{refused}");
    assert!(bench.store.get_queue(&name("q.dead")).await.unwrap().is_none());
}

/// The commit of an item that was deleted meanwhile delivers nothing.
#[tokio::test]
async fn what_a_pop_did_not_commit_is_not_delivered() {
    let bench = bench().await;
    bench.push(2).await;
    bench.faults.set("commit", Fault::HeldBefore);
    let popping = bench.pop(2, Duration::ZERO);
    bench.faults.until_begun("commit", 1).await;
    let first = bench.items().await.remove(0);
    bench.engine.delete_item(&name("q"), first.id, None).await.unwrap();
    bench.faults.set("commit", Fault::None);
    let popped = within("the pop", popping).await.unwrap().unwrap();
    assert_eq!(payloads(&popped), ["1"]);
}

/// Pushes an item that expires after five seconds.
async fn push_mortal(bench: &Bench) {
    let ttl = Some(Duration::from_secs(5));
    let mortal = NewItem { payload: "mortal".into(), ttl, ..NewItem::default() };
    bench.engine.push(&name("q"), vec![mortal], None).await.unwrap();
}

/// Returns how many items of the queue were handed out, committed, popped and found expired.
async fn taken(bench: &Bench) -> [u64; 4] {
    let totals = bench.engine.queue_stats(&name("q")).await.unwrap().totals;
    [totals.delivered, totals.committed, totals.popped, totals.expired]
}

/// A commit may take long. What expires meanwhile reaches nobody: it counts as expired, not as popped, and the `Pop` waits for
/// another item.
#[tokio::test]
async fn what_expires_while_its_pop_is_committed_counts_as_expired() {
    let bench = bench().await;
    push_mortal(&bench).await;
    bench.faults.set("commit", Fault::HeldAfter);
    let popping = bench.pop(1, LIMIT);
    bench.faults.until_done("commit", 1).await;
    bench.clock.advance(Duration::from_secs(6));
    bench.faults.set("commit", Fault::None);
    until("it is counted", async || taken(&bench).await == [0, 0, 0, 1]).await;
    bench.push(1).await;
    let popped = within("the next item", popping).await.unwrap().unwrap();
    assert_eq!(payloads(&popped), ["0"]);
    assert_eq!(taken(&bench).await, [1, 1, 1, 1]);
    let stats = bench.engine.queue_stats(&name("q")).await.unwrap();
    assert_eq!((stats.depth.ready, stats.depth.reserved), (0, 0));
}

/// The same holds for a stream that commits what it is sent.
#[tokio::test]
async fn what_expires_while_it_is_committed_for_a_stream_counts_as_expired() {
    let bench = bench().await;
    push_mortal(&bench).await;
    bench.push(1).await;
    bench.faults.set("commit", Fault::HeldAfter);
    let options = ConsumeOptions { auto_commit: true, ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    ask(&mut stream).await;
    bench.faults.until_done("commit", 1).await;
    bench.clock.advance(Duration::from_secs(6));
    bench.faults.set("commit", Fault::None);
    let received = deliveries(&mut stream).await;
    assert_eq!(payloads(received.iter().map(|one| &*one.item)), ["0"]);
    assert_eq!(taken(&bench).await, [1, 1, 1, 1]);
}
