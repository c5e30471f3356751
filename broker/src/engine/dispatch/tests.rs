//! When and for how long a refill waits, and when a dispatcher asks for signals.

use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    super::consumers::tests::{delivery, settings},
    run::{GATHER, gather_room},
    *,
};
use crate::domain::Delivery;

/// Returns a dispatcher with a stream that is full, and the items that the stream holds.
fn full() -> (Dispatcher, Vec<Delivery>) {
    let dispatcher = Dispatcher::new(QueueName::parse("queue", "q").unwrap(), Arc::default());
    let id = add_stream(&dispatcher);
    let items: Vec<_> = (0..8).map(|n| delivery(n, 1, 5)).collect();
    let unwanted = dispatcher.state.lock().consumers.hand(id, items.clone(), Timestamp(0));
    assert!(unwanted.is_empty());
    let (inbox, _) = dispatcher.look_into_inbox(id, Timestamp(0));
    assert!(matches!(inbox, Inbox::Items(items) if items.len() == 8));
    dispatcher.look_into_inbox(id, Timestamp(0));
    (dispatcher, items)
}

/// Adds a stream that waits for items.
fn add_stream(dispatcher: &Dispatcher) -> ConsumerId {
    let settings = settings(8, usize::MAX, Duration::from_secs(1));
    let settings = StreamSettings { tells_revoked: false, ..settings };
    let id = dispatcher.add_stream(settings, Arc::new(Notify::new()));
    dispatcher.look_into_inbox(id, Timestamp(0));
    id
}

/// Returns how long the dispatcher collects demands while `meanwhile` runs.
async fn gathers(dispatcher: &Dispatcher, meanwhile: impl Future<Output = ()>) -> Duration {
    let (start, draining) = (Instant::now(), CancellationToken::new());
    let gathering = async {
        gather_room(dispatcher, &draining).await;
        start.elapsed()
    };
    tokio::join!(gathering, meanwhile).0
}

/// Returns the next round of a queue from which nothing is reserved ahead.
fn next_round(dispatcher: &Dispatcher) -> Option<(Round, Appeared)> {
    let queue = Queue::with_defaults(dispatcher.queue().clone(), Timestamp(0));
    dispatcher.next_round(&queue, Timestamp(0))
}

fn settle<'a>(dispatcher: &Dispatcher, items: impl IntoIterator<Item = &'a Delivery>) {
    dispatcher.settled(items.into_iter().map(|item| &item.receipt), Timestamp(0));
}

#[tokio::test(start_paused = true)]
async fn a_small_refill_waits_briefly_for_others() {
    let (dispatcher, items) = full();
    settle(&dispatcher, &items[..1]);
    let waited = gathers(&dispatcher, async {}).await;
    assert!(waited >= GATHER && waited < 3 * GATHER, "{waited:?}");
    let (round, _) = next_round(&dispatcher).unwrap();
    assert_eq!(round.demands[0].max_items, 1);
}

#[tokio::test(start_paused = true)]
async fn the_wait_ends_when_there_is_enough_room() {
    let (dispatcher, items) = full();
    settle(&dispatcher, &items[..1]);
    let waited = gathers(&dispatcher, async { settle(&dispatcher, &items[1..3]) }).await;
    assert_eq!(waited, Duration::ZERO);
    let (round, _) = next_round(&dispatcher).unwrap();
    assert_eq!(round.demands[0].max_items, 3);
}

#[tokio::test(start_paused = true)]
async fn an_idle_consumer_is_not_kept_waiting() {
    let (dispatcher, items) = full();
    settle(&dispatcher, &items[..1]);
    let waited = gathers(&dispatcher, async { _ = add_stream(&dispatcher) }).await;
    assert_eq!(waited, Duration::ZERO);
    settle(&dispatcher, &items);
    assert_eq!(gathers(&dispatcher, async {}).await, Duration::ZERO);
}

#[test]
fn a_waiting_consumer_asks_once_per_signal_for_the_next_one() {
    let (dispatcher, now) =
        (Dispatcher::new(QueueName::parse("queue", "q").unwrap(), Arc::default()), Timestamp);
    let seen_empty = || dispatcher.state.lock().dirty = false;
    let stream = add_stream(&dispatcher);
    seen_empty();
    assert_eq!(dispatcher.wanted(now(40)), None, "nobody merges signals");
    dispatcher.inserted_elsewhere(None, now(50));
    assert_eq!(dispatcher.wanted(now(51)), None, "there may be items");
    seen_empty();
    assert!(dispatcher.wanted(now(52)).is_some());
    assert_eq!(dispatcher.wanted(now(53)), None, "it has asked");
    dispatcher.inserted_elsewhere(None, now(60));
    seen_empty();
    dispatcher.wanted_elsewhere();
    assert_eq!(dispatcher.wanted(now(61)), None, "another broker has asked");
    dispatcher.inserted_elsewhere(None, now(70));
    seen_empty();
    assert_eq!(dispatcher.wanted(now(120)), None, "the window has closed");
    dispatcher.inserted_elsewhere(None, now(130));
    dispatcher.remove_stream(stream);
    seen_empty();
    assert_eq!(dispatcher.wanted(now(131)), None, "no consumer waits");
}

/// They may have been taken back while others were returned.
#[tokio::test]
async fn nothing_is_reserved_while_items_are_to_be_returned() {
    let dispatcher = Dispatcher::new(QueueName::parse("queue", "q").unwrap(), Arc::default());
    add_stream(&dispatcher);
    let unsent = InFlight::unsent(&delivery(1, 1, 5), Timestamp(0));
    dispatcher.state.lock().consumers.stock.give_back(vec![unsent]);
    assert!(next_round(&dispatcher).is_none());
    assert_eq!(dispatcher.take_returning(Timestamp(0)).len(), 1);
    assert!(next_round(&dispatcher).is_some());
}

/// What a reserve found is unknown if it fails, and so is what was hidden by a pause, or held under a lease.
#[tokio::test]
async fn a_round_follows_a_failure_a_pause_and_the_end_of_a_lease() {
    type Cause = fn(&Dispatcher);
    let causes: [(&str, Cause); 3] = [
        ("a failure", |dispatcher| dispatcher.look_failed(&EngineError::ShuttingDown)),
        ("a pause", |dispatcher| drop(dispatcher.pause())),
        ("the end of a lease", |dispatcher| {
            let queue = Arc::new(Queue::with_defaults(dispatcher.queue().clone(), Timestamp(0)));
            assert_eq!(dispatcher.begin_step(&queue, Timestamp(2_000)).len(), 8);
        }),
    ];
    for (what, cause) in causes {
        let (dispatcher, _) = full();
        add_stream(&dispatcher);
        assert!(next_round(&dispatcher).is_some());
        assert!(next_round(&dispatcher).is_none(), "nothing has happened since");
        cause(&dispatcher);
        assert!(next_round(&dispatcher).is_some(), "{what}");
    }
}

#[test]
fn the_earliest_time_at_which_an_item_is_eligible_ends_the_wait() {
    let dispatcher = Dispatcher::new(QueueName::parse("queue", "q").unwrap(), Arc::default());
    for (since, first) in [(200, 200), (150, 150), (180, 150)] {
        dispatcher.inserted(Some(Timestamp(since)), Timestamp(100));
        assert_eq!(dispatcher.next_timer(), Some(Timestamp(first)));
    }
}

/// The earliest signalled time is passed to the next reserve, and to no other.
#[tokio::test]
async fn signals_are_passed_on_with_the_next_round() {
    let dispatcher = Dispatcher::new(QueueName::parse("queue", "q").unwrap(), Arc::default());
    add_stream(&dispatcher);
    let now = Timestamp(100);
    let appeared = || {
        let (round, appeared) = next_round(&dispatcher).unwrap();
        dispatcher.state.lock().consumers.end_round(&round, false, Timestamp(0));
        appeared
    };
    assert_eq!(appeared(), Appeared::Nothing);
    dispatcher.inserted(Some(Timestamp(10)), now);
    assert_eq!(appeared(), Appeared::Nothing, "the store knows what this broker did");
    dispatcher.inserted_elsewhere(Some(Timestamp(30)), now);
    dispatcher.inserted_elsewhere(Some(Timestamp(20)), now);
    dispatcher.inserted_elsewhere(Some(Timestamp(200)), now);
    assert_eq!(appeared(), Appeared::Since(Timestamp(20)));
    dispatcher.inserted(None, now);
    assert_eq!(appeared(), Appeared::Nothing, "it was told before");
    dispatcher.inserted_elsewhere(None, now);
    dispatcher.inserted_elsewhere(Some(Timestamp(20)), now);
    assert_eq!(appeared(), Appeared::FromStart);
    dispatcher.look_from_start(now);
    assert_eq!(appeared(), Appeared::FromStart);
}

/// Returns a dispatcher of a queue that it has seen empty, with a stream that waits.
fn idle() -> Dispatcher {
    let dispatcher = Dispatcher::new(QueueName::parse("queue", "q").unwrap(), Arc::default());
    let queue = Arc::new(Queue::with_defaults(dispatcher.queue().clone(), Timestamp(0)));
    add_stream(&dispatcher);
    sees_end(&dispatcher);
    dispatcher.state.lock().queue = Some(queue);
    dispatcher
}

fn sees_end(dispatcher: &Dispatcher) {
    let mut state = dispatcher.state.lock();
    (state.dirty, state.seen_empty) = (false, true);
    state.next_due.told(None, Timestamp(0), Timestamp(0));
}

fn item(number: u8) -> ItemId {
    ItemId([number; 12])
}

#[test]
fn an_announced_item_is_claimed_by_its_id_if_nothing_else_may_be_there() {
    type Also = fn(&Dispatcher);
    let now = Timestamp(100);
    let announced = Appeared::Item { id: item(1), since: Timestamp(90) };
    let looked_for = Appeared::Since(Timestamp(90));
    let cases: [(&str, Also, Also, Appeared); 9] = [
        ("nothing else", |_| {}, |_| {}, announced),
        (
            "another before it",
            |it| it.inserted(Some(Timestamp(1)), Timestamp(100)),
            |_| {},
            looked_for,
        ),
        (
            "another after it",
            |_| {},
            |it| it.inserted(Some(Timestamp(1)), Timestamp(100)),
            looked_for,
        ),
        (
            "one of a signal",
            |_| {},
            |it| it.inserted_elsewhere(None, Timestamp(100)),
            Appeared::FromStart,
        ),
        (
            "one that is announced before it",
            |it| it.announced(item(2), Timestamp(80), Timestamp(100)),
            |_| {},
            Appeared::Since(Timestamp(80)),
        ),
        (
            "one that is due",
            |it| _ = it.state.lock().next_due.add(Timestamp(99)),
            |_| {},
            looked_for,
        ),
        (
            "one that may be due",
            |it| it.state.lock().next_due = NextDue::default(),
            |_| {},
            looked_for,
        ),
        ("what the last reserve left", |it| it.state.lock().seen_empty = false, |_| {}, looked_for),
        (
            "a change of the settings",
            |_| {},
            |it| it.look_from_start(Timestamp(100)),
            Appeared::FromStart,
        ),
    ];
    for (what, before, after, expected) in cases {
        let dispatcher = idle();
        before(&dispatcher);
        dispatcher.announced(item(1), Timestamp(90), now);
        assert!(!dispatcher.is_known_empty(now), "no push may go directly");
        after(&dispatcher);
        assert_eq!(dispatcher.wanted(now), None, "there is something: {what}");
        let (_, appeared) = next_round(&dispatcher).unwrap();
        assert_eq!(appeared, expected, "{what}");
        assert!(next_round(&dispatcher).is_none(), "once: {what}");
    }
}

#[test]
fn an_announced_item_of_which_nobody_takes_any_is_looked_for_later() {
    let dispatcher = Dispatcher::new(QueueName::parse("queue", "q").unwrap(), Arc::default());
    let queue = Arc::new(Queue::with_defaults(dispatcher.queue().clone(), Timestamp(0)));
    dispatcher.state.lock().queue = Some(queue);
    sees_end(&dispatcher);
    dispatcher.announced(item(1), Timestamp(90), Timestamp(100));
    assert!(next_round(&dispatcher).is_none());
    add_stream(&dispatcher);
    let (_, appeared) = next_round(&dispatcher).unwrap();
    assert_eq!(appeared, Appeared::Since(Timestamp(90)));
}

/// The clock of the other broker is ahead.
#[test]
fn an_announced_item_that_is_not_eligible_yet_is_waited_for() {
    let dispatcher = idle();
    dispatcher.announced(item(1), Timestamp(101), Timestamp(100));
    assert!(next_round(&dispatcher).is_none());
    assert_eq!(dispatcher.next_timer(), Some(Timestamp(101)));
}
