//! Direct delivery: items that are stored as reserved for a stream that waits, and everything that
//! can come between the push and the delivery.

use futures_util::future::join;

use super::{super::EngineError, flow::take, streams::ask, *};
use crate::{
    domain::{
        ConsumerName, DedupId, Eligibility, ItemState, OrderingKey, Outcome, Priority, Pushed,
        Totals,
    },
    store::Push,
};

/// Makes a stream wait, and waits until its queue is known to be empty.
pub(super) async fn idle(bench: &Bench, stream: &mut Subscription) {
    assert!(futures_util::poll!(std::pin::pin!(stream.next())).is_pending());
    // An item that goes directly shows that the queue is known to be empty. Others come by a round.
    until("the queue is known to be empty", async || {
        let reserves = bench.faults.begun("reserve");
        bench.push(1).await;
        let taken = deliveries(stream).await;
        bench.engine.commit(&receipts(&taken)).await.unwrap();
        assert!(futures_util::poll!(std::pin::pin!(stream.next())).is_pending());
        bench.faults.begun("reserve") == reserves
    })
    .await;
}

impl Bench {
    async fn push_one(&self, item: NewItem) -> Result<Pushed> {
        Ok(self.engine.push(&name("q"), vec![item], None).await?[0])
    }
}

fn item(payload: &str) -> NewItem {
    NewItem { payload: payload.to_owned().into(), ..NewItem::default() }
}

#[tokio::test]
async fn an_item_for_an_idle_stream_is_delivered_without_a_reserve() {
    let bench = bench().await;
    let consumer = ConsumerName::parse_optional("consumer", "worker").unwrap();
    let options = ConsumeOptions { consumer: consumer.clone(), ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    idle(&bench, &mut stream).await;
    let reserves = bench.faults.begun("reserve");
    let producer = ConsumerName::parse_optional("producer", "shop").unwrap();
    let given = NewItem {
        content_type: "text/plain".into(),
        headers: [("a".to_owned(), "1".to_owned())].into(),
        priority: Priority::parse("priority", 3).unwrap(),
        ttl: Some(Duration::from_hours(1)),
        dedup_id: DedupId::new("once"),
        ..item("x")
    };
    let pushed = bench.engine.push(&name("q"), vec![given], producer).await.unwrap()[0];
    let taken = deliveries(&mut stream).await;
    assert_eq!(bench.faults.begun("reserve"), reserves, "no reserve was needed");
    assert_eq!(bench.items().await, [(*taken[0].item).clone()], "what is sent is what is stored");
    assert_eq!((taken[0].item.id, &taken[0].item.consumer), (pushed.id, &consumer));
    assert_eq!(taken[0].lease_expire_time, taken[0].item.create_time + LEASE);
    let stats = bench.engine.queue_stats(&name("q")).await.unwrap();
    assert_eq!((stats.depth.ready, stats.depth.reserved), (0, 1));
    assert_eq!(stats.totals.pushed, stats.totals.delivered);
    let outcomes = bench.engine.commit(from_ref(&taken[0].receipt)).await.unwrap();
    assert_eq!(outcomes, [Outcome::Ok]);
    assert_eq!(bench.items().await, []);
}

#[tokio::test]
async fn a_batch_for_an_idle_stream_is_delivered_without_a_reserve() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    let before = bench.engine.queue_stats(&name("q")).await.unwrap().totals;
    let reserves = bench.faults.begun("reserve");
    let once = |payload| NewItem { dedup_id: DedupId::new(payload), ..item(payload) };
    let items = vec![once("1"), once("2"), once("1"), item("3")];
    let pushed = bench.engine.push(&name("q"), items, None).await.unwrap();
    assert_eq!(
        pushed.iter().map(|p| p.deduplicated).collect::<Vec<_>>(),
        [false, false, true, false]
    );
    let taken = deliveries(&mut stream).await;
    assert_eq!(bench.faults.begun("reserve"), reserves, "no reserve was needed");
    assert_eq!(payloads(taken.iter().map(|d| &*d.item)), ["1", "2", "3"]);
    let items: Vec<Item> = taken.iter().map(|delivery| (*delivery.item).clone()).collect();
    assert_eq!(bench.items().await, items, "what is sent is what is stored");
    let stats = bench.engine.queue_stats(&name("q")).await.unwrap();
    assert_eq!((stats.depth.ready, stats.depth.reserved), (0, 3));
    assert_eq!(stats.totals.pushed, before.pushed + 3);
    assert_eq!(stats.totals.delivered, before.delivered + 3);
    assert_eq!(bench.engine.commit(&receipts(&taken)).await.unwrap(), [Outcome::Ok; 3]);
    assert_eq!(bench.items().await, []);
}

/// An item that was stored behind a reserve is the answer to the question for the next due time, and hides that nothing follows.
#[tokio::test]
async fn one_item_behind_a_reserve_holds_up_no_direct_delivery_of_the_next() {
    let bench = bench().await;
    bench.faults.set("next_eligible", Fault::HeldBefore);
    let mut stream = bench.stream().await;
    ask(&mut stream).await;
    bench.faults.until_begun("next_eligible", 1).await;
    bench.push(1).await;
    bench.faults.set("next_eligible", Fault::None);
    assert_eq!(deliveries(&mut stream).await.len(), 1);
    ask(&mut stream).await;
    let dispatcher = bench.engine.dispatcher(&name("q")).unwrap();
    let known_empty = async || dispatcher.is_known_empty(bench.engine.now());
    until("the queue is known to be empty", known_empty).await;
    assert_eq!(bench.faults.begun("reserve"), 2, "that of the item was the last");
    bench.push(1).await;
    assert_eq!(deliveries(&mut stream).await.len(), 1);
    assert_eq!(bench.faults.begun("reserve"), 2, "no reserve was needed");
}

/// A reserve gives each of the streams its share.
#[tokio::test]
async fn a_batch_is_not_for_one_of_two_idle_streams() {
    let bench = bench().await;
    let mut streams = [bench.stream().await, bench.stream().await];
    for stream in &mut streams {
        idle(&bench, stream).await;
    }
    bench.engine.push(&name("q"), vec![item("1"), item("2")], None).await.unwrap();
    for stream in &mut streams {
        assert_eq!(deliveries(stream).await.len(), 1);
    }
}

/// One item of one push after the other, to two streams.
#[tokio::test]
async fn idle_streams_take_turns() {
    let bench = bench().await;
    let (mut a, mut b) = (bench.stream().await, bench.stream().await);
    assert!(futures_util::poll!(std::pin::pin!(b.next())).is_pending());
    let mut taken = [0, 0];
    until("both have been given items directly", async || {
        let reserves = bench.faults.begun("reserve");
        bench.push(1).await;
        let (which, received) = within("a delivery", async {
            tokio::select! {
                received = a.next() => (0, received),
                received = b.next() => (1, received),
            }
        })
        .await;
        let Ok(Received::Deliveries(received)) = received else { panic!("no delivery") };
        bench.engine.commit(&receipts(&received)).await.unwrap();
        taken[which] += usize::from(bench.faults.begun("reserve") == reserves);
        for stream in [&mut a, &mut b] {
            assert!(futures_util::poll!(std::pin::pin!(stream.next())).is_pending());
        }
        taken.iter().all(|count| *count >= 2)
    })
    .await;
    assert!(taken[0].abs_diff(taken[1]) <= 1, "{taken:?}");
}

/// What is pushed while a direct push is under way is stored and found first.
#[tokio::test]
async fn a_later_push_does_not_overtake_a_direct_push() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    let reserves = bench.faults.begun("reserve");
    let later = async {
        arrives_elsewhere(&bench).await;
        let steps = || bench.engine.dispatcher(&name("q")).unwrap().steps();
        let before = steps();
        until("the dispatcher knows", async || steps() > before).await;
        assert_eq!(bench.faults.begun("reserve"), reserves, "reserves wait for the push");
    };
    meanwhile(&bench, item("x"), later).await.unwrap();
    assert_eq!(take(&mut stream, 2).await, ["x", "elsewhere"]);
}

#[tokio::test]
async fn pushes_that_begin_together_keep_their_order() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    let all = ["1", "2", "3", "4"];
    for pushed in futures_util::future::join_all(all.map(|n| bench.push_one(item(n)))).await {
        pushed.unwrap();
    }
    assert_eq!(take(&mut stream, all.len()).await, all);
}

/// Pushes an item that another broker made ready, of which a signal came or may have been missed.
async fn arrives_elsewhere(bench: &Bench) {
    let first = item("elsewhere");
    let push = Push::new(bench.queue().await, first);
    bench.store.push(vec![push]).await.unwrap();
    bench.engine.rescan_all();
}

#[tokio::test]
async fn an_item_does_not_overtake_what_a_signal_told_of() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    bench.faults.set("reserve", Fault::HeldBefore);
    arrives_elsewhere(&bench).await;
    bench.push_one(item("here")).await.unwrap();
    bench.faults.set("reserve", Fault::None);
    assert_eq!(take(&mut stream, 2).await, ["elsewhere", "here"]);
}

#[tokio::test]
async fn delayed_and_keyed_items_and_mixed_batches_wait_for_a_reserve() {
    let later = NewItem { eligibility: Eligibility::After(LEASE * 2), ..item("later") };
    let keyed = NewItem { ordering_key: OrderingKey::new("k"), ..item("keyed") };
    let urgent = NewItem { priority: Priority::parse("priority", 7).unwrap(), ..item("urgent") };
    for items in [vec![later.clone()], vec![keyed], vec![item("1"), later], vec![item("1"), urgent]]
    {
        let bench = bench().await;
        let mut stream = bench.stream().await;
        idle(&bench, &mut stream).await;
        bench.faults.set("reserve", Fault::HeldBefore);
        bench.engine.push(&name("q"), items, None).await.unwrap();
        for item in bench.items().await {
            let is_reserved = item.state == ItemState::Reserved;
            assert!(!is_reserved, "{item:?}");
        }
    }
}

/// A stream that has room for one item holds one.
#[tokio::test]
async fn a_full_stream_receives_nothing_directly() {
    let bench = bench().await;
    let options = ConsumeOptions { max_in_flight: 1, ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    idle(&bench, &mut stream).await;
    bench.push_one(item("1")).await.unwrap();
    let taken = deliveries(&mut stream).await;
    assert!(futures_util::poll!(std::pin::pin!(stream.next())).is_pending());
    let second = bench.push_one(item("2")).await.unwrap();
    let stored = bench.store.get_item(&*bench.queue().await, second.id).await.unwrap().unwrap();
    assert_eq!(stored.state, ItemState::Ready);
    bench.engine.commit(from_ref(&taken[0].receipt)).await.unwrap();
    assert_eq!(deliveries(&mut stream).await[0].item.id, second.id);
}

/// A batch that is larger than the room for it is reserved in parts.
#[tokio::test]
async fn a_batch_that_does_not_fit_waits_for_a_reserve() {
    let bench = bench().await;
    let options = ConsumeOptions { max_in_flight: 2, ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    idle(&bench, &mut stream).await;
    bench.engine.push(&name("q"), vec![item("1"), item("2"), item("3")], None).await.unwrap();
    let taken = deliveries(&mut stream).await;
    assert_eq!(payloads(taken.iter().map(|d| &*d.item)), ["1", "2"]);
    let stored = bench.items().await;
    assert_eq!(stored.iter().filter(|item| item.state == ItemState::Ready).count(), 1);
}

#[tokio::test]
async fn bytes_in_flight_are_limited() {
    let bench = bench().await;
    let options = ConsumeOptions { max_in_flight_bytes: Some(10), ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    idle(&bench, &mut stream).await;
    bench.push_one(item("12345678")).await.unwrap();
    let taken = deliveries(&mut stream).await;
    assert!(futures_util::poll!(std::pin::pin!(stream.next())).is_pending());
    bench.push_one(item("12345678")).await.unwrap();
    let ready = bench.until_ready(1).await;
    assert_eq!(ready.len(), 2);
    bench.engine.commit(from_ref(&taken[0].receipt)).await.unwrap();
    assert_eq!(deliveries(&mut stream).await.len(), 1);
}

/// Holds the answer of a direct push, does something, and lets the answer through.
async fn meanwhile(bench: &Bench, item: NewItem, act: impl Future<Output = ()>) -> Result<Pushed> {
    bench.faults.set("push", Fault::HeldAfter);
    let done = bench.faults.done("push");
    let pushing = bench.push_one(item);
    let acting = async {
        bench.faults.until_done("push", done + 1).await;
        assert_eq!(bench.items().await[0].state, ItemState::Reserved, "it is a direct push");
        act.await;
        bench.faults.set("push", Fault::None);
    };
    join(pushing, acting).await.0
}

fn is_untouched(items: &[Item]) -> bool {
    items.iter().all(|item| (item.attempt, item.state) == (1, ItemState::Ready))
}

#[tokio::test]
async fn an_item_whose_stream_has_gone_meanwhile_is_released() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    meanwhile(&bench, item("x"), async { drop(stream) }).await.unwrap();
    assert!(is_untouched(&bench.until_ready(1).await));
    let taken = deliveries(&mut bench.stream().await).await;
    assert_eq!(taken[0].item.attempt, 1);
    assert_eq!(taken[0].receipt.deliveries_here(), 1, "the one that reached nobody does not count");
}

#[tokio::test]
async fn an_item_whose_queue_was_paused_meanwhile_is_released() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    let pausing = async {
        bench.engine.pause_queue(&name("q"), true).await.unwrap();
        let steps = bench.engine.dispatcher(&name("q")).unwrap().steps();
        bench.engine.rescan_all();
        until("the dispatcher knows", async || {
            bench.engine.dispatcher(&name("q")).unwrap().steps() > steps + 1
        })
        .await;
    };
    meanwhile(&bench, item("x"), pausing).await.unwrap();
    assert!(is_untouched(&bench.until_ready(1).await));
    bench.engine.pause_queue(&name("q"), false).await.unwrap();
    assert_eq!(deliveries(&mut stream).await[0].item.attempt, 1);
}

#[tokio::test]
async fn a_paused_queue_delivers_nothing_directly() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    bench.engine.pause_queue(&name("q"), true).await.unwrap();
    bench.push_one(item("x")).await.unwrap();
    assert!(is_untouched(&bench.until_ready(1).await));
}

#[tokio::test]
async fn an_item_that_a_shutdown_finds_under_way_is_released() {
    let bench = bench_with(Limits { drain: Duration::ZERO, ..Limits::default() }).await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    meanwhile(&bench, item("x"), bench.engine.drain()).await.unwrap();
    within("the end", bench.engine.close()).await;
    assert!(is_untouched(&bench.until_ready(1).await));
    assert!(matches!(stream.next().await, Err(EngineError::ShuttingDown)));
}

/// The whole broker stood still, or its store did.
#[tokio::test]
async fn an_item_whose_lease_is_about_to_end_is_not_sent() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    bench.faults.set("reserve", Fault::HeldBefore); // else it would be delivered again
    let freezing = async {
        bench.clock.advance(LEASE.saturating_sub(Duration::from_millis(500))); // within the margin
    };
    meanwhile(&bench, item("x"), freezing).await.unwrap();
    assert!(futures_util::poll!(std::pin::pin!(stream.next())).is_pending());
    assert!(is_untouched(&bench.until_ready(1).await));
}

/// The item was handed out again before the answer of its push came. The stream holds it by its new reservation.
#[tokio::test]
async fn an_item_that_lapsed_meanwhile_keeps_its_new_reservation() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    let mut taken = Vec::new();
    let lapsing = async {
        bench.clock.advance(LEASE * 2);
        bench.engine.rescan_all();
        taken.extend(deliveries(&mut stream).await);
    };
    meanwhile(&bench, item("x"), lapsing).await.unwrap();
    assert_eq!((taken.len(), taken[0].item.attempt), (1, 2));
    ask(&mut stream).await;
    let mut reports = Vec::new();
    bench.engine.dispatcher(&name("q")).expect("a consumer").report(1, &mut reports);
    assert_eq!(reports[0].in_flight, 1, "it takes a place");
    assert_eq!(bench.engine.commit(from_ref(&taken[0].receipt)).await.unwrap(), [Outcome::Ok]);
}

/// A push that takes long does not hold up the queue. A round may fill the stream meanwhile.
#[tokio::test]
async fn an_item_whose_stream_was_filled_meanwhile_is_released() {
    let bench = bench().await;
    let options = ConsumeOptions { max_in_flight: 1, ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    idle(&bench, &mut stream).await;
    let mut taken = Vec::new();
    let filling = async {
        bench.clock.advance(Duration::from_secs(5)); // reserves wait no longer
        arrives_elsewhere(&bench).await;
        taken.extend(deliveries(&mut stream).await);
    };
    meanwhile(&bench, item("x"), filling).await.unwrap();
    bench.until_ready(1).await;
    assert_eq!(payloads(taken.iter().map(|d| &*d.item)), ["elsewhere"]);
    bench.engine.commit(from_ref(&taken[0].receipt)).await.unwrap();
    let taken = deliveries(&mut stream).await;
    assert_eq!((taken[0].item.attempt, payloads([&*taken[0].item])), (1, vec!["x".to_owned()]));
}

/// Until the item is back, nothing later is handed out.
#[tokio::test]
async fn an_item_that_is_released_is_not_overtaken() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    bench.faults.set("rollback", Fault::HeldBefore);
    let begun = bench.faults.begun("rollback");
    let lowering = async { drop(stream.flow().set_max_in_flight(0)) };
    meanwhile(&bench, item("first"), lowering).await.unwrap();
    bench.faults.until_begun("rollback", begun + 1).await;
    stream.flow().set_max_in_flight(10);
    ask(&mut stream).await;
    bench.push_one(item("second")).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await; // for what must not happen
    bench.faults.set("rollback", Fault::None);
    assert_eq!(take(&mut stream, 2).await, ["first", "second"]);
}

/// The push fails without effect, and is repeated.
#[tokio::test]
async fn a_direct_push_that_fails_delivers_nothing_and_can_be_repeated() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    let once = || NewItem { dedup_id: DedupId::new("once"), ..item("x") };
    bench.faults.set("push", Fault::Fails);
    bench.push_one(once()).await.unwrap_err();
    bench.faults.set("push", Fault::None);
    assert!(!bench.push_one(once()).await.unwrap().deduplicated);
    let taken = deliveries(&mut stream).await;
    assert_eq!((taken.len(), taken[0].item.attempt), (1, 1));
    assert!(futures_util::poll!(std::pin::pin!(stream.next())).is_pending());
}

/// The producer does not know that its item is stored, and pushes it again.
#[tokio::test]
async fn a_push_whose_answer_is_lost_hands_out_nothing_twice() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    let once = || NewItem { dedup_id: DedupId::new("once"), ..item("x") };
    bench.faults.set("push", Fault::AnswerLost);
    bench.push_one(once()).await.unwrap_err();
    bench.faults.set("push", Fault::None);
    assert!(bench.push_one(once()).await.unwrap().deduplicated);
    // A store that loses an answer releases the item. This one does not know; the lease ends.
    assert!(futures_util::poll!(std::pin::pin!(stream.next())).is_pending());
    bench.clock.advance(LEASE);
    bench.engine.rescan_all();
    let taken = deliveries(&mut stream).await;
    assert_eq!(taken.len(), 1);
    let outcomes = bench.engine.commit(from_ref(&taken[0].receipt)).await.unwrap();
    assert_eq!((outcomes, bench.items().await), (vec![Outcome::Ok], Vec::new()));
}

/// The lease of an item that went directly ends, and no round has seen the item.
#[tokio::test]
async fn the_lease_of_an_item_that_went_directly_has_a_timer() {
    let bench = bench().await;
    let (lease, on_disconnect) = (Some(Duration::from_secs(2)), OnDisconnect::KeepLease);
    let options = ConsumeOptions { lease, on_disconnect, ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    idle(&bench, &mut stream).await;
    let reserves = bench.faults.begun("reserve");
    bench.push_one(item("x")).await.unwrap();
    assert_eq!(deliveries(&mut stream).await.len(), 1);
    assert_eq!(bench.faults.begun("reserve"), reserves, "it went directly");
    let taken = within("the next attempt", async {
        loop {
            match stream.next().await.unwrap() {
                Received::Deliveries(taken) => return taken,
                Received::Revoked(_) => {}
            }
        }
    });
    assert_eq!(taken.await[0].item.attempt, 2);
}

/// Totals and depths are as after a push and a reserve.
#[tokio::test]
async fn figures_count_the_push_and_the_delivery() {
    let bench = bench().await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    let before = bench.engine.queue_stats(&name("q")).await.unwrap().totals;
    bench.push_one(item("x")).await.unwrap();
    assert_eq!(deliveries(&mut stream).await.len(), 1);
    let after = bench.engine.queue_stats(&name("q")).await.unwrap().totals;
    let expected = Totals { pushed: before.pushed + 1, delivered: before.delivered + 1, ..before };
    assert_eq!(after, expected);
}
