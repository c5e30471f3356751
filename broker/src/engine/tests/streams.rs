//! Streams: what happens to held items at the end, revoked items, and items that are no longer
//! sent.

use super::{
    super::{EngineError, RevokeReason, settle::RollbackRequest},
    *,
};
use crate::{
    domain::{Cause, Limit, Outcome, RetryPolicy, Timestamp},
    store::Extension,
};

/// Waits until the broker has assigned `count` items to streams.
pub(super) async fn until_assigned(bench: &Bench, count: u64) {
    let assigned = async || {
        let queue = bench.queue().await;
        bench.store.depth(&queue).await.unwrap().reserved == count
    };
    until("items are assigned", assigned).await;
}

/// Makes a stream ask for items without taking the items it is assigned.
pub(super) async fn ask(stream: &mut Subscription) {
    assert!(futures_util::poll!(std::pin::pin!(stream.next())).is_pending());
}

#[tokio::test]
async fn the_end_of_a_stream_counts_no_attempt() {
    let bench = bench().await;
    bench.push(3).await;
    for delivery in 1..=5 {
        let mut stream = bench.stream().await;
        let taken = deliveries(&mut stream).await;
        assert!(taken.iter().all(|d| (d.item.attempt, d.item.deliveries) == (1, delivery)));
        drop(stream);
        bench.until_ready(3).await;
    }
}

#[tokio::test]
async fn a_stream_may_request_that_its_end_counts_as_a_failure() {
    let bench = bench().await;
    bench.push(1).await;
    let policy = RetryPolicy { initial_delay: Duration::from_hours(1), ..RetryPolicy::default() };
    bench
        .engine
        .update_queue(&name("q"), &|queue: &mut Queue| {
            queue.retry_policy = Some(policy.clone());
            Ok(())
        })
        .await
        .unwrap();
    let options = ConsumeOptions { on_disconnect: OnDisconnect::Count, ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    deliveries(&mut stream).await;
    drop(stream);
    let delayed = async || {
        let queue = bench.queue().await;
        bench.store.depth(&queue).await.unwrap().delayed == 1
    };
    until("it waits as the retry policy says", delayed).await;
    let items = bench.items().await;
    assert_eq!((items[0].attempt, items[0].last_reason.is_empty()), (2, false));
}

#[tokio::test]
async fn a_stream_may_keep_the_leases_of_sent_items() {
    let bench = bench().await;
    bench.push(1).await;
    let options = ConsumeOptions { on_disconnect: OnDisconnect::KeepLease, ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    let taken = deliveries(&mut stream).await;
    ask(&mut stream).await;
    bench.push(1).await;
    until_assigned(&bench, 2).await;
    drop(stream);
    let items = bench.until_ready(1).await;
    assert_eq!(items.len(), 2);
    let outcomes = bench.engine.commit(from_ref(&taken[0].receipt)).await.unwrap();
    assert_eq!(outcomes, [Outcome::Ok]);
}

/// The stream is not polled, as when its client does not read.
#[tokio::test]
async fn shutdown_rolls_back_the_items_of_a_stream_whether_it_is_polled_or_not() {
    let bench = bench_with(Limits { drain: Duration::ZERO, ..Limits::default() }).await;
    bench.push(2).await;
    let mut stream = bench.stream().await;
    deliveries(&mut stream).await;
    ask(&mut stream).await;
    bench.push(1).await;
    until_assigned(&bench, 3).await;
    bench.engine.drain().await;
    within("the end", bench.engine.close()).await;
    let items = bench.until_ready(3).await;
    assert!(items.iter().all(|item| item.attempt == 1), "{items:?}");
    assert!(matches!(stream.next().await, Err(EngineError::ShuttingDown)));
}

/// The headers are large: a message holds a few of the items, and the others have not left the
/// broker.
#[tokio::test]
async fn only_items_in_a_message_count_as_sent() {
    let bench = bench().await;
    let headers = [("k".to_owned(), "v".repeat(16_000))];
    let item = || NewItem { headers: headers.clone().into(), ..NewItem::default() };
    let items = (0..200).map(|_| item()).collect();
    bench.engine.push(&name("q"), items, None).await.unwrap();
    let on_disconnect = OnDisconnect::Count;
    let options = ConsumeOptions { max_in_flight: 200, on_disconnect, ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    let sent = deliveries(&mut stream).await.len();
    assert!(sent < 100, "{sent} items of 16 KiB in one message");
    drop(stream);
    let items = bench.until_ready(200).await;
    assert_eq!(items.iter().filter(|item| item.attempt == 2).count(), sent);
}

#[tokio::test]
async fn rollbacks_are_retried_while_the_store_is_unreachable() {
    let bench = bench().await;
    bench.push(2).await;
    let mut stream = bench.stream().await;
    deliveries(&mut stream).await;
    bench.faults.set("rollback", Fault::Fails);
    drop(stream);
    bench.faults.until_begun("rollback", 7).await;
    bench.faults.set("rollback", Fault::None);
    let items = bench.until_ready(2).await;
    assert!(items.iter().all(|item| item.attempt == 1), "{items:?}");
}

#[tokio::test]
async fn an_item_is_not_sent_after_its_lease() {
    let bench = bench().await;
    bench.push(0).await;
    let mut stream = bench.stream().await;
    ask(&mut stream).await;
    bench.push(2).await;
    until_assigned(&bench, 2).await;
    bench.faults.set("reserve", Fault::HeldBefore); // else the stream would be assigned the items again
    bench.clock.advance(LEASE.saturating_sub(Duration::from_millis(500))); // within the margin
    ask(&mut stream).await;
    let items = bench.until_ready(2).await;
    assert!(items.iter().all(|item| item.attempt == 1), "they were never sent: {items:?}");
    bench.faults.set("reserve", Fault::None);
    assert_eq!(deliveries(&mut stream).await.len(), 2);
}

async fn revoked(stream: &mut Subscription) -> Vec<super::super::Revoked> {
    loop {
        match within("what is revoked", stream.next()).await {
            Ok(Received::Revoked(revoked)) => return revoked,
            Ok(Received::Deliveries(_)) => {}
            Err(error) => panic!("not {error}"),
        }
    }
}

#[tokio::test]
async fn a_stream_is_told_which_items_it_no_longer_holds_and_why() {
    let bench = bench().await;
    bench.push(4).await;
    let mut stream = bench.stream().await;
    let taken = deliveries(&mut stream).await;
    assert_eq!(taken.len(), 4);
    ask(&mut stream).await;
    // The stream is not told of items that its consumer settles, by whichever call.
    bench.engine.commit(from_ref(&taken[0].receipt)).await.unwrap();
    bench.engine.delete_item(&name("q"), taken[1].item.id, None).await.unwrap();
    let lost = revoked(&mut stream).await;
    assert_eq!(lost.len(), 1);
    assert_eq!((&lost[0].receipt, lost[0].reason), (&taken[1].receipt, RevokeReason::Deleted));
    ask(&mut stream).await;

    // Another broker would settle in this way.
    let queue = bench.queue().await;
    let receipt = taken[2].receipt.clone();
    bench.store.commit(vec![crate::store::Reservation { queue, receipt }]).await.unwrap();
    bench.engine.dispatcher(&name("q")).unwrap().settled_elsewhere(bench.engine.now());
    let lost = revoked(&mut stream).await;
    assert_eq!(lost.len(), 1);
    assert_eq!((&lost[0].receipt, lost[0].reason), (&taken[2].receipt, RevokeReason::Cancelled));
    ask(&mut stream).await;

    bench.clock.advance(LEASE);
    bench.engine.rescan_all();
    let lost = revoked(&mut stream).await;
    assert_eq!(lost.len(), 1);
    assert_eq!((&lost[0].receipt, lost[0].reason), (&taken[3].receipt, RevokeReason::Lapsed));
}

/// Returns a stream that has room for one item and holds it, of two that are there.
async fn full_stream() -> (Bench, Subscription, Vec<crate::domain::Delivery>) {
    let bench = bench().await;
    bench.push(2).await;
    let options = ConsumeOptions { max_in_flight: 1, ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    let taken = deliveries(&mut stream).await;
    ask(&mut stream).await;
    (bench, stream, taken)
}

/// Another broker extends the lease of an item that a stream of this broker holds.
#[tokio::test]
async fn a_lease_that_was_extended_elsewhere_has_not_ended() {
    let (bench, mut stream, taken) = full_stream().await;
    let (queue, receipt) = (bench.queue().await, taken[0].receipt.clone());
    let held = crate::store::Reservation { queue: Arc::clone(&queue), receipt: receipt.clone() };
    let until = bench.store.now() + LEASE * 3;
    bench.store.extend(vec![Extension { held, until, is_renewal: false }]).await.unwrap();

    bench.clock.advance(LEASE * 2);
    bench.engine.rescan_all();
    bench.faults.until_done("lease_ends", 1).await;
    assert_eq!(bench.engine.commit(&[receipt]).await.unwrap(), [Outcome::Ok]);
    // The stream had no room for the second item until now, and is not told that it lost the first.
    let next = deliveries(&mut stream).await;
    assert_eq!(next[0].item.attempt, 1);
    ask(&mut stream).await;

    bench.clock.advance(LEASE * 2);
    bench.engine.rescan_all();
    let lost = revoked(&mut stream).await;
    assert_eq!((&lost[0].receipt, lost[0].reason), (&next[0].receipt, RevokeReason::Lapsed));
}

/// A consumer extends a lease further than the broker renews it, through this broker or another one.
#[tokio::test]
async fn a_renewal_does_not_shorten_what_was_extended() {
    let bench = bench().await;
    bench.push(3).await;
    let options =
        ConsumeOptions { renew: true, lease: Some(Duration::from_secs(3)), ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    let taken = deliveries(&mut stream).await;
    assert_eq!(taken.len(), 3);
    let here = vec![taken[0].receipt.clone()];
    let until = bench.engine.extend(here, Some(LEASE)).await.unwrap()[0].1.unwrap();
    let (queue, receipt) = (bench.queue().await, taken[1].receipt.clone());
    let held = crate::store::Reservation { queue, receipt };
    bench.store.extend(vec![Extension { held, until, is_renewal: false }]).await.unwrap();
    // The third item shows that a renewal took effect.
    let ends = async || {
        let items = bench.items().await;
        taken
            .iter()
            .map(|one| items.iter().find(|item| item.id == one.item.id))
            .map(|item| item.unwrap().eligible_time.unwrap())
            .collect::<Vec<_>>()
    };
    until_renewed(&ends, taken[2].lease_expire_time).await;
    assert_eq!(ends().await[..2], [until, until]);
}

/// Waits until the last of these leases ends later than at a time.
async fn until_renewed(ends: &impl AsyncFn() -> Vec<Timestamp>, before: Timestamp) {
    until("a renewal", async || ends().await.last().is_some_and(|end| *end > before)).await;
}

#[tokio::test]
async fn a_lease_counts_as_held_until_the_store_says_that_it_has_ended() {
    let (bench, mut stream, taken) = full_stream().await;
    bench.faults.set("lease_ends", Fault::Fails);
    let reserves = bench.faults.begun("reserve");
    bench.clock.advance(LEASE * 2);
    bench.engine.rescan_all();
    bench.faults.until_begun("lease_ends", 2).await;
    assert_eq!(bench.faults.begun("reserve"), reserves, "the stream has no room");
    bench.faults.set("lease_ends", Fault::None);
    let lost = revoked(&mut stream).await;
    assert_eq!((&lost[0].receipt, lost[0].reason), (&taken[0].receipt, RevokeReason::Lapsed));
}

/// The reservation is found void while the commit that ended it has not been answered yet.
#[tokio::test]
async fn a_settle_that_is_about_to_be_answered_revokes_nothing() {
    let bench = bench().await;
    bench.push(1).await;
    let mut stream = bench.stream().await;
    let taken = deliveries(&mut stream).await;
    ask(&mut stream).await;
    bench.faults.set("commit", Fault::HeldAfter);
    let engine = Arc::clone(&bench.engine);
    let receipts = vec![taken[0].receipt.clone()];
    let commit = tokio::spawn(async move { engine.commit(&receipts).await });
    bench.faults.until_done("commit", 1).await;
    let dispatcher = bench.engine.dispatcher(&name("q")).unwrap();
    dispatcher.settled_elsewhere(bench.engine.now());
    bench.faults.until_done("lease_ends", 1).await;
    bench.faults.set("commit", Fault::None);
    assert_eq!(commit.await.unwrap().unwrap(), [Outcome::Ok]);
    bench.clock.advance(Duration::from_secs(5));
    bench.push(1).await;
    let next = within("an event", stream.next()).await.unwrap();
    assert!(matches!(next, Received::Deliveries(_)), "{next:?}");
}

/// The item is delivered again while the rollback that ended its first reservation has not been answered yet.
#[tokio::test]
async fn a_rollback_that_is_about_to_be_answered_revokes_nothing() {
    let bench = bench().await;
    bench.push(1).await;
    let mut stream = bench.stream().await;
    let taken = deliveries(&mut stream).await;
    ask(&mut stream).await;
    bench.faults.set("rollback", Fault::HeldAfter);
    let engine = Arc::clone(&bench.engine);
    let request = RollbackRequest {
        receipt: taken[0].receipt.clone(),
        delay: Some(Duration::ZERO),
        reason: String::new(),
        cause: Cause::Rollback,
    };
    let rollback = tokio::spawn(async move { engine.rollback(vec![request]).await });
    bench.faults.until_done("rollback", 1).await;
    bench.engine.rescan_all();
    let again = deliveries(&mut stream).await;
    assert_eq!(again[0].item.id, taken[0].item.id);
    bench.faults.set("rollback", Fault::None);
    assert_eq!(rollback.await.unwrap().unwrap(), [Outcome::Ok]);
    bench.clock.advance(Duration::from_secs(5));
    assert_eq!(bench.engine.commit(from_ref(&again[0].receipt)).await.unwrap(), [Outcome::Ok]);
    bench.push(1).await;
    let next = within("an event", stream.next()).await.unwrap();
    assert!(matches!(next, Received::Deliveries(_)), "{next:?}");
}

#[tokio::test]
async fn the_longest_lease_is_a_reason_of_its_own() {
    let longest = Duration::from_mins(1);
    let bench = bench_with(Limits { max_lease: longest, ..Limits::default() }).await;
    bench.push(1).await;
    let options = ConsumeOptions { renew: true, ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    deliveries(&mut stream).await;
    ask(&mut stream).await;
    bench.clock.advance(longest + LEASE);
    bench.engine.rescan_all();
    let lost = revoked(&mut stream).await;
    assert_eq!(lost[0].reason, RevokeReason::MaxLease);
}

/// A stream that has reached its maximum age ends, so that its consumer reconnects elsewhere. The
/// stream is handed nothing more, and its consumer can settle its items.
#[tokio::test]
async fn a_retiring_stream_ends_when_all_its_items_are_settled() {
    let bench = bench().await;
    bench.push(1).await;
    let mut stream = bench.stream().await;
    let taken = deliveries(&mut stream).await;
    stream.retirement().begin();
    bench.push(1).await;
    ask(&mut stream).await;
    let other = bench.reserve(10, Duration::from_mins(1)).await.unwrap().unwrap();
    assert_eq!(
        payloads(other.iter().map(|d| &*d.item)),
        ["0"],
        "the other item is for other consumers"
    );
    let ended = tokio::spawn(async move { stream.next().await.map(|_| ()) });
    bench.engine.commit(from_ref(&taken[0].receipt)).await.unwrap();
    let ended = within("the end", ended).await.unwrap();
    assert!(matches!(ended, Err(EngineError::StreamTooOld)), "{ended:?}");
}

/// Items that the consumer does not settle in time are rolled back with nothing counted, whatever
/// the stream requested.
#[tokio::test]
async fn the_items_of_a_retired_stream_are_rolled_back_uncounted() {
    let bench = bench().await;
    bench.push(2).await;
    let options = ConsumeOptions { on_disconnect: OnDisconnect::Count, ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    deliveries(&mut stream).await;
    stream.retirement().begin();
    drop(stream);
    let items = bench.until_ready(2).await;
    assert!(items.iter().all(|item| item.attempt == 1), "{items:?}");
}

/// The same holds if its client does not read, so that nobody polls the stream.
#[tokio::test]
async fn a_retired_stream_that_is_not_polled_keeps_nothing() {
    let bench = bench().await;
    bench.push(2).await;
    let mut stream = bench.stream().await;
    deliveries(&mut stream).await;
    stream.retirement().begin();
    stream.retirement().end();
    let items = bench.until_ready(2).await;
    assert!(items.iter().all(|item| item.attempt == 1), "{items:?}");
    let ended = within("the end", stream.next()).await;
    assert!(matches!(ended, Err(EngineError::StreamTooOld)), "{ended:?}");
}

/// Auto-committed items can only be sent, so that a stream does not end while a round may have some
/// for it.
#[tokio::test]
async fn a_retiring_stream_receives_all_auto_committed_items() {
    for fault in ["reserve", "commit"] {
        let bench = bench().await;
        bench.push(1).await;
        bench.faults.set(fault, Fault::HeldAfter);
        let options = ConsumeOptions { auto_commit: true, ..Bench::options() };
        let mut stream = bench.engine.consume(options).await.unwrap();
        ask(&mut stream).await;
        bench.faults.until_begun(fault, 1).await;
        stream.retirement().begin();
        ask(&mut stream).await;
        bench.faults.set(fault, Fault::None);
        let mut received = 0;
        loop {
            match within("the end", stream.next()).await {
                Ok(Received::Deliveries(more)) => received += more.len(),
                Err(EngineError::StreamTooOld) => break,
                other => panic!("{other:?}"),
            }
        }
        drop(stream);
        let kept = bench.items().await.len();
        assert_eq!(received + kept, 1, "{fault}: handed out, or still there");
    }
}

/// Items that are committed when they are handed out are lost with the stream, so one whose client does not read is handed
/// no more than it asked for.
#[tokio::test]
async fn a_stream_that_is_not_polled_does_not_empty_its_queue() {
    let bench = bench().await;
    bench.push(0).await;
    let options = ConsumeOptions { auto_commit: true, ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    ask(&mut stream).await;
    bench.push(1_000).await;
    // Each of these takes part in a round of its own.
    for _ in 0..5 {
        let taken = within("an item", bench.reserve(1, LIMIT)).await.unwrap().unwrap();
        assert_eq!(taken.len(), 1);
    }
    let queue = bench.queue().await;
    let depth = bench.store.depth(&queue).await.unwrap();
    assert_eq!((depth.ready, depth.reserved), (985, 5), "one round of ten for the stream");
    assert_eq!(deliveries(&mut stream).await.len(), 10);
}

/// Others are not kept waiting by a stream whose client does not read: it is dealt two rounds at the most.
#[tokio::test]
async fn a_stream_that_is_not_polled_leaves_the_rest_to_others() {
    let bench = bench().await;
    bench.push(0).await;
    let options = || ConsumeOptions { max_in_flight: 10_000, ..Bench::options() };
    let mut silent = bench.engine.consume(options()).await.unwrap();
    ask(&mut silent).await;
    let mut reading = bench.engine.consume(options()).await.unwrap();
    ask(&mut reading).await;
    for _ in 0..3 {
        bench.push(1_000).await;
    }
    let mut read = 0;
    while read < 2_000 {
        read += deliveries(&mut reading).await.len();
    }
}

/// What was never sent is not renewed: it goes to somebody else before its lease ends, and has not failed.
#[tokio::test]
async fn what_a_stream_does_not_take_is_not_renewed() {
    let bench = bench().await;
    bench.push(0).await;
    let lease = Some(Duration::from_secs(3));
    let options = ConsumeOptions { renew: true, lease, ..Bench::options() };
    let mut silent = bench.engine.consume(options).await.unwrap();
    ask(&mut silent).await;
    bench.push(3).await;
    until_assigned(&bench, 3).await;
    let mut reading = bench.stream().await;
    let taken = deliveries(&mut reading).await;
    assert!(taken.iter().all(|delivery| delivery.item.attempt == 1), "{taken:?}");
}

/// An item that is past its end is not sent, whatever is left of its lease.
#[tokio::test]
async fn nothing_is_sent_past_its_own_end() {
    let bench = bench().await;
    bench.push(0).await;
    let mut stream = bench.stream().await;
    ask(&mut stream).await;
    let mortal = || NewItem { ttl: Some(Duration::from_secs(5)), ..NewItem::default() };
    bench.engine.push(&name("q"), vec![mortal(), mortal()], None).await.unwrap();
    until_assigned(&bench, 2).await;
    bench.clock.advance(Duration::from_secs(6));
    ask(&mut stream).await;

    // Nor is a call answered with it.
    let other = name("other");
    bench.engine.push(&other, vec![mortal()], None).await.unwrap();
    bench.faults.set("reserve", Fault::HeldAfter);
    let engine = Arc::clone(&bench.engine);
    let call =
        async move { engine.reserve(&other, 1, LIMIT, Some(LEASE), Identity::default()).await };
    let done = bench.faults.done("reserve");
    let call = tokio::spawn(call);
    bench.faults.until_done("reserve", done + 1).await;
    bench.clock.advance(Duration::from_secs(6));
    bench.faults.set("reserve", Fault::None);
    assert!(within("an answer", call).await.unwrap().unwrap().is_empty());
}

/// Where items at a limit go is found out once for all that a stream held.
#[tokio::test]
async fn a_stream_full_of_items_at_their_limit_ends_with_one_look_at_the_limit() {
    let bench = bench().await;
    bench.push(0).await;
    let change = |queue: &mut Queue| {
        queue.max_attempts = Some(Limit::of(1));
        Ok(())
    };
    bench.engine.update_queue(&name("q"), &change).await.unwrap();
    bench.push(50).await;
    let on_disconnect = OnDisconnect::Count;
    let options = ConsumeOptions { max_in_flight: 50, on_disconnect, ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    assert_eq!(deliveries(&mut stream).await.len(), 50);
    let before = bench.faults.begun("create_queue");
    drop(stream);
    let all_dead = async || match bench.store.get_queue(&name("q.dead")).await.unwrap() {
        Some(dead) => bench.store.depth(&dead).await.unwrap().ready == 50,
        None => false,
    };
    until("the items are dead letters", all_dead).await;
    assert_eq!(bench.faults.begun("create_queue") - before, 1);
}

/// A rollback took effect, and its answer was lost: repeating it finds nothing to do, but somebody has to be woken.
#[tokio::test]
async fn what_came_back_without_an_answer_wakes_who_waits() {
    let bench = bench().await;
    bench.push(1).await;
    let mut stream = bench.stream().await;
    deliveries(&mut stream).await;
    let waiting = bench.reserve(1, LIMIT);
    bench.until_waiting(2).await;
    // From here on nothing but a hint makes the dispatcher look before the lease ends.
    bench.faults.until_begun("next_eligible", 2).await;
    bench.faults.set("rollback", Fault::AnswerLost);
    drop(stream);
    let taken = timeout(LEASE / 2, waiting).await.expect("the item before its lease ends");
    assert_eq!(taken.unwrap().unwrap().len(), 1);
    bench.faults.set("rollback", Fault::None);
}

/// The same for a push, which its caller may repeat with a `dedup_id`.
#[tokio::test]
async fn what_was_pushed_without_an_answer_wakes_who_waits() {
    let bench = bench().await;
    bench.push(0).await;
    let waiting = bench.reserve(1, LIMIT);
    bench.until_waiting(1).await;
    bench.faults.set("push", Fault::AnswerLost);
    bench.engine.push(&name("q"), vec![NewItem::default()], None).await.unwrap_err();
    assert_eq!(within("the item", waiting).await.unwrap().unwrap().len(), 1);
}

/// What was dealt to a stream before a pause, and not sent, is not sent during the pause.
#[tokio::test]
async fn what_is_not_sent_when_a_queue_is_paused_returns_to_it() {
    let bench = bench().await;
    bench.push(0).await;
    let mut stream = bench.stream().await;
    ask(&mut stream).await;
    bench.push(2).await;
    until_assigned(&bench, 2).await;
    bench.engine.pause_queue(&name("q"), true).await.unwrap();
    let items =
        timeout(LEASE / 2, bench.until_ready(2)).await.expect("long before their leases end");
    assert!(items.iter().all(|item| item.attempt == 1), "they were never sent: {items:?}");
    ask(&mut stream).await;
    bench.engine.pause_queue(&name("q"), false).await.unwrap();
    let taken = deliveries(&mut stream).await;
    assert_eq!(payloads(taken.iter().map(|delivery| &*delivery.item)), ["0", "1"]);
}

/// An item is reserved anew after its lease lapsed, and reaches nobody. Its last holder may have finished the work.
#[tokio::test]
async fn an_item_that_reached_nobody_is_settled_by_its_last_holder() {
    let bench = bench().await;
    bench.push(1).await;
    let taken = within("the item", bench.reserve(1, LIMIT)).await.unwrap().unwrap();
    let mut stream = bench.stream().await;
    ask(&mut stream).await;
    bench.clock.advance(LEASE);
    bench.engine.rescan_all();
    until_assigned(&bench, 1).await;
    drop(stream);
    bench.until_ready(1).await;
    let receipts = vec![taken[0].receipt.clone()];
    assert_eq!(bench.engine.commit(&receipts).await.unwrap(), [Outcome::Ok]);
}
