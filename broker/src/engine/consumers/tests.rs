//! How items are assigned to consumers, and which items are rolled back.

use std::time::Duration;

use bytes::Bytes;
use tokio::sync::oneshot;

use super::{held::DOUBT, *};
use crate::domain::{
    GroupName, Headers, Item, ItemState, LeaseToken, Priority, QueueName, Receipt,
};

pub(super) const NOW: Timestamp = Timestamp(1_000);
const LEASE_END: Timestamp = Timestamp(2_000);

/// Returns an item on its way to a consumer.
pub(in crate::engine) fn delivery(item: u8, token: u8, bytes: usize) -> Delivery {
    let queue = QueueName::parse("queue", "q").unwrap();
    let id = ItemId([item; 12]);
    let receipt = Receipt {
        item: id,
        token: LeaseToken([token; 12]),
        deliveries: 1,
        earlier_deliveries: 0,
        attempt: 1,
        keyed: false,
        queue: queue.clone(),
        group: GroupName::default(),
    };
    let item = Item {
        id,
        queue,
        payload: Bytes::from(vec![0; bytes]),
        content_type: String::new(),
        headers: Headers::new(),
        priority: Priority::default(),
        state: ItemState::Reserved,
        attempt: 1,
        deliveries: 1,
        sequence: None,
        ordering_key: None,
        dedup_id: None,
        create_time: NOW,
        eligible_time: Some(LEASE_END),
        expire_time: None,
        process_time: None,
        producer: None,
        consumer: None,
        last_reason: String::new(),
        origin_queue: None,
        due_time: None,
        dead_letter_time: None,
        dead_letter_attempts: 0,
    };
    Delivery {
        item: Box::new(item),
        receipt,
        lease_expire_time: LEASE_END,
        previous_eligible_time: NOW,
        former_lease: None,
        tag: 0,
    }
}

/// Adds a stream that waits for items.
pub(super) fn stream_for(
    consumers: &mut Consumers,
    max_in_flight: usize,
    lease: Duration,
) -> ConsumerId {
    stream_with(consumers, max_in_flight, usize::MAX, lease)
}

pub(super) fn stream(
    consumers: &mut Consumers,
    max_in_flight: usize,
    max_bytes: usize,
) -> ConsumerId {
    stream_with(consumers, max_in_flight, max_bytes, Duration::from_secs(1))
}

/// Returns settings of a stream that is told what it loses, and commits by itself.
pub(in crate::engine) fn settings(
    max_in_flight: usize,
    max_in_flight_bytes: usize,
    lease: Duration,
) -> StreamSettings {
    StreamSettings {
        max_in_flight,
        max_in_flight_bytes,
        lease,
        consumer: None,
        peer: None,
        since: Timestamp(0),
        auto_commit: false,
        renewed_for: None,
        tells_revoked: true,
    }
}

pub(super) fn stream_with(
    consumers: &mut Consumers,
    max_in_flight: usize,
    max_bytes: usize,
    lease: Duration,
) -> ConsumerId {
    let settings = settings(max_in_flight, max_bytes, lease);
    let id = consumers.add_stream(settings, Arc::new(Notify::new()));
    assert!(matches!(look(consumers, id), Inbox::Empty { dirty: true }));
    id
}

pub(super) fn look(consumers: &mut Consumers, id: ConsumerId) -> Inbox {
    let (inbox, late) = consumers.look_into_inbox(id, NOW);
    assert!(late.is_empty());
    inbox
}

/// Adds a call for one item. Returns its id and the receiver of its answer.
pub(super) fn call(
    consumers: &mut Consumers,
    lease: Duration,
) -> (ConsumerId, oneshot::Receiver<Result<Vec<Delivery>>>) {
    let (answer, answered) = oneshot::channel();
    let call = Call {
        max_items: 1,
        lease,
        consumer: None,
        peer: None,
        since: NOW,
        auto_commit: false,
        waits: true,
        answer,
    };
    (consumers.add_call(call), answered)
}

/// Returns how many items each consumer would be assigned now.
pub(super) fn wanted(consumers: &mut Consumers, now: Timestamp) -> Vec<(ConsumerId, usize)> {
    consumers.take_lapsed(now);
    let Round { demands, claimants, .. } = consumers.demands();
    claimants.iter().map(|t| t.id).zip(demands.iter().map(|w| w.max_items)).collect()
}

pub(super) fn take(consumers: &mut Consumers, id: ConsumerId) -> usize {
    let taken = match look(consumers, id) {
        Inbox::Items(items) => items.len(),
        _ => 0,
    };
    look(consumers, id); // the stream asks for more
    taken
}

#[test]
fn a_stream_that_is_not_hungry_is_assigned_nothing() {
    let mut consumers = Consumers::default();
    let id = stream(&mut consumers, 10, 1_000);
    assert_eq!(wanted(&mut consumers, NOW), [(id, 10)]);
    assert!(consumers.hand_to_stream(id, vec![delivery(1, 1, 5)], NOW).is_empty());
    assert!(matches!(look(&mut consumers, id), Inbox::Items(items) if items.len() == 1));
    assert_eq!(wanted(&mut consumers, NOW), [], "the stream has not asked for more yet");
    look(&mut consumers, id);
    assert_eq!(wanted(&mut consumers, NOW), [(id, 9)]);
}

#[test]
fn a_message_can_be_settled_in_one_call() {
    let mut consumers = Consumers::default();
    let id = stream(&mut consumers, 5_000, usize::MAX);
    // The items are assigned in two rounds before the stream takes any of them.
    for round in 0..2_u16 {
        let items = (0..700_u16).map(|n| {
            let mut delivery = delivery(0, 1, 5);
            delivery.item.id.0[..2].copy_from_slice(&(round * 700 + n).to_be_bytes());
            delivery.receipt.item = delivery.item.id;
            delivery
        });
        consumers.hand_to_stream(id, items.collect(), NOW);
    }
    let messages = [(); 2].map(|()| match look(&mut consumers, id) {
        Inbox::Items(items) => items.len(),
        _ => 0,
    });
    assert_eq!(messages.iter().sum::<usize>(), 1_400);
    assert!(messages.iter().all(|items| *items <= MAX_BATCH), "{messages:?}");
}

#[test]
fn a_full_stream_has_room_again_when_something_is_settled() {
    let mut consumers = Consumers::default();
    let id = stream(&mut consumers, 2, 1_000);
    consumers.hand_to_stream(id, vec![delivery(1, 1, 5), delivery(2, 1, 5)], NOW);
    assert_eq!(take(&mut consumers, id), 2);
    assert_eq!(wanted(&mut consumers, NOW), []);
    assert!(!consumers.settled(&delivery(1, 9, 5).receipt, NOW), "a stale receipt frees nothing");
    assert!(consumers.settled(&delivery(1, 1, 5).receipt, NOW));
    assert!(!consumers.settled(&delivery(1, 1, 5).receipt, NOW), "a place is freed once");
    assert_eq!(wanted(&mut consumers, NOW), [(id, 1)]);
}

#[test]
fn only_consumers_with_work_and_little_room_can_wait() {
    let mut consumers = Consumers::default();
    let id = stream(&mut consumers, 8, 1_000);
    assert!(!consumers.can_wait(), "an idle consumer is served immediately");
    let items: Vec<_> = (0..8).map(|n| delivery(n, 1, 5)).collect();
    consumers.hand_to_stream(id, items.clone(), NOW);
    assert_eq!(take(&mut consumers, id), 8);
    assert!(!consumers.can_wait(), "no consumer wants items");
    assert!(consumers.settled(&items[0].receipt, NOW));
    assert!(consumers.can_wait(), "room for one of eight");
    assert!(consumers.settled(&items[1].receipt, NOW));
    assert!(!consumers.can_wait(), "room for a quarter");
    assert!(!consumers.settled(&items[1].receipt, NOW));
    consumers.hand_to_stream(id, vec![delivery(9, 1, 5)], NOW);
    assert_eq!(take(&mut consumers, id), 1);
    assert!(consumers.can_wait());
    stream(&mut consumers, 8, 1_000);
    assert!(!consumers.can_wait(), "another consumer is idle");
}

#[test]
fn a_stream_with_little_room_for_bytes_can_wait_and_a_call_cannot() {
    let mut consumers = Consumers::default();
    let id = stream(&mut consumers, 100, 10);
    consumers.hand_to_stream(id, vec![delivery(1, 1, 9)], NOW);
    assert_eq!(take(&mut consumers, id), 1);
    assert!(consumers.can_wait());
    let _answered = call(&mut consumers, Duration::from_secs(1));
    assert!(!consumers.can_wait());
}

#[test]
fn a_flow_lowered_during_a_round_applies_to_the_items_of_the_round() {
    let mut consumers = Consumers::default();
    let id = stream(&mut consumers, 8, 1_000);
    assert_eq!(wanted(&mut consumers, NOW), [(id, 8)]);
    drop(consumers.set_max_in_flight(id, 2, NOW));
    let back = consumers.hand_to_stream(id, (0..5).map(|n| delivery(n, 1, 5)).collect(), NOW);
    assert_eq!(back.iter().map(|d| d.item.id.0[0]).collect::<Vec<_>>(), [2, 3, 4]);
    assert_eq!(take(&mut consumers, id), 2);
    assert!(!consumers.settled(&back[0].receipt, NOW), "it does not hold the returned items");
    assert!(wanted(&mut consumers, NOW).is_empty());
}

/// A round asked for as many bytes as there was room for, or for one larger item.
#[test]
fn items_that_come_during_a_round_take_bytes_from_it() {
    let mut consumers = Consumers::default();
    let id = stream(&mut consumers, 8, 10);
    assert_eq!(wanted(&mut consumers, NOW), [(id, 8)]);
    assert!(
        consumers.hand_pushed(&Claimant::new(id, false), vec![delivery(1, 1, 4)], NOW).is_empty()
    );
    let back = consumers.hand_to_stream(id, vec![delivery(2, 1, 50)], NOW);
    assert_eq!(back.len(), 1, "the larger item would not be alone");
    let round = vec![delivery(3, 1, 6), delivery(4, 1, 1)];
    let back = consumers.hand_to_stream(id, round, NOW);
    assert_eq!(back.iter().map(|d| d.item.id.0[0]).collect::<Vec<_>>(), [4]);
    assert_eq!(take(&mut consumers, id), 2);
}

#[test]
fn bytes_fill_a_stream_too() {
    let mut consumers = Consumers::default();
    let id = stream(&mut consumers, 9, 10);
    consumers.hand_to_stream(id, vec![delivery(1, 1, 50)], NOW);
    assert_eq!(take(&mut consumers, id), 1);
    assert_eq!(wanted(&mut consumers, NOW), []);
    assert!(consumers.settled(&delivery(1, 1, 50).receipt, NOW));
    assert_eq!(wanted(&mut consumers, NOW), [(id, 9)]);
}

#[test]
fn a_lapsed_lease_frees_its_place_in_a_full_stream() {
    let mut consumers = Consumers::default();
    let id = stream(&mut consumers, 1, 1_000);
    consumers.hand_to_stream(id, vec![delivery(1, 1, 5)], NOW);
    assert_eq!(take(&mut consumers, id), 1);
    assert_eq!(consumers.next_lapse(), Some(LEASE_END));
    assert_eq!(wanted(&mut consumers, LEASE_END), [(id, 1)]);
    assert_eq!(consumers.held_count(), 0);
}

#[test]
fn an_item_that_is_reserved_again_leaves_its_old_stream() {
    let mut consumers = Consumers::default();
    let slow = stream(&mut consumers, 2, 1_000);
    let quick = stream(&mut consumers, 2, 1_000);
    consumers.hand_to_stream(slow, vec![delivery(1, 1, 5)], NOW);
    assert_eq!(take(&mut consumers, slow), 1);
    consumers.hand_to_stream(quick, vec![delivery(1, 2, 5)], LEASE_END);
    assert_eq!(wanted(&mut consumers, NOW), [(slow, 2), (quick, 1)]);
    assert_eq!(consumers.remove_stream(slow).len(), 0, "it has nothing to roll back");
    assert_eq!(consumers.remove_stream(quick).len(), 1);
}

#[test]
fn items_without_a_consumer_are_returned() {
    let mut consumers = Consumers::default();
    assert_eq!(consumers.hand_to_stream(7, vec![delivery(1, 1, 5)], NOW).len(), 1);
    let (id, answered) = call(&mut consumers, Duration::from_secs(1));
    drop(answered);
    assert_eq!(consumers.hand(id, vec![delivery(1, 1, 5)], NOW).len(), 1);
}

#[test]
fn the_least_loaded_stream_comes_first() {
    let mut consumers = Consumers::default();
    let a = stream(&mut consumers, 9, 1_000);
    let b = stream(&mut consumers, 9, 1_000);
    consumers.hand_to_stream(a, vec![delivery(1, 1, 5)], NOW);
    take(&mut consumers, a);
    assert_eq!(wanted(&mut consumers, NOW), [(b, 9), (a, 8)]);
}

/// A stream that does not read is assigned one message's worth at a time, however much it may hold.
#[test]
fn a_byte_limit_never_raises_the_demand_of_a_stream() {
    for limit in [usize::MAX, 400 << 20, 20 << 20] {
        let mut consumers = Consumers::default();
        let id = stream(&mut consumers, 100, limit);
        let want = |consumers: &Consumers| consumers.demands().demands[0].clone();
        assert_eq!(want(&consumers).max_bytes, MAX_ROUND_BYTES, "{limit}");
        consumers.hand_to_stream(id, vec![delivery(1, 1, 5 << 20)], NOW);
        assert_eq!(take(&mut consumers, id), 1);
        let more = want(&consumers);
        let left = limit - (5 << 20);
        let most = if more.may_exceed { more.max_bytes.max(15 << 20) } else { more.max_bytes };
        assert!(most <= left, "{limit}: up to {most} of {left} bytes");
    }
}

/// Among consumers that hold nothing, the one that has waited longest comes first, whether it is a
/// stream or a call. An unlimited number of calls leaves a part of each round to streams.
#[test]
fn calls_do_not_starve_streams() {
    let mut consumers = Consumers::default();
    let id = stream(&mut consumers, 1_000, usize::MAX);
    consumers.begin_round(&consumers.demands());
    let calls: Vec<_> = (0..600).map(|_| call(&mut consumers, Duration::from_secs(1))).collect();
    let wanted = wanted(&mut consumers, NOW);
    assert_eq!(wanted[0], (id, STREAM_BATCH));
    assert_eq!(wanted.len(), 1 + MAX_BATCH - STREAM_BATCH);
    assert_eq!(wanted[1].0, calls[0].0, "the oldest call is the first of them");
}

#[test]
fn calls_share_a_round() {
    let mut consumers = Consumers::default();
    let mut call = |max_items| {
        let (answer, _) = oneshot::channel();
        let lease = Duration::from_secs(1);
        let waits = false;
        let call = Call {
            max_items,
            lease,
            consumer: None,
            peer: None,
            since: NOW,
            auto_commit: false,
            waits,
            answer,
        };
        consumers.add_call(call)
    };
    let ids = [call(1_000), call(10), call(1_000), call(1_000)];
    let wanted: Vec<_> = wanted(&mut consumers, NOW);
    assert_eq!(wanted.iter().map(|wanted| wanted.0).collect::<Vec<_>>(), ids);
    assert_eq!(wanted.iter().map(|wanted| wanted.1).collect::<Vec<_>>(), [250, 10, 370, 370]);
}

/// This holds even if the announcement takes several messages.
#[test]
fn a_revoked_receipt_is_announced_once() {
    let mut consumers = Consumers::default();
    let id = stream(&mut consumers, 9, 1_000);
    let items = [delivery(1, 1, 5), delivery(2, 1, 5)];
    consumers.hand_to_stream(id, items.to_vec(), NOW);
    assert_eq!(take(&mut consumers, id), 2);
    assert!(consumers.found_void(&items[0].receipt, NOW));
    assert!(consumers.found_void(&items[1].receipt, NOW));
    assert!(!consumers.settled(&items[0].receipt, NOW), "its place was free already");
    assert!(!consumers.found_void(&items[1].receipt, NOW));
    assert!(matches!(look(&mut consumers, id), Inbox::Empty { .. }), "not before it is certain");
    consumers.take_lapsed(NOW + DOUBT);
    let Inbox::Revoked(revoked) = look(&mut consumers, id) else { panic!() };
    assert_eq!(revoked.len(), 1, "the other item was settled by its holder");
    assert_eq!(revoked[0].receipt, items[1].receipt);
    consumers.take_lapsed(LEASE_END);
    assert!(matches!(look(&mut consumers, id), Inbox::Empty { .. }));
}

/// It is rolled back, and may be another consumer's by then.
#[test]
fn what_was_taken_out_unsent_is_not_sent_later() {
    let mut consumers = Consumers::default();
    let id = stream(&mut consumers, 2, 1_000);
    consumers.hand(id, vec![delivery(1, 1, 5)], NOW);
    let late = Timestamp(LEASE_END.millis() - 50);
    assert_eq!(consumers.take_lapsed(late).len(), 1);
    assert!(matches!(look(&mut consumers, id), Inbox::Empty { .. }));
}

#[test]
fn nothing_is_announced_that_was_never_sent() {
    let mut consumers = Consumers::default();
    let id = stream(&mut consumers, 2, 1_000);
    consumers.hand(id, vec![delivery(1, 1, 5)], NOW);
    assert!(consumers.found_void(&delivery(1, 1, 5).receipt, NOW));
    consumers.take_lapsed(NOW + DOUBT);
    assert!(matches!(look(&mut consumers, id), Inbox::Empty { .. }));
}

#[test]
fn streams_share_the_items_of_a_round() {
    let mut consumers = Consumers::default();
    let streams = [(); 3].map(|()| stream(&mut consumers, STREAM_BATCH * 3 / 5, usize::MAX));
    let [first, second, _] = streams;
    let left = STREAM_BATCH - STREAM_BATCH * 3 / 5;
    assert_eq!(wanted(&mut consumers, NOW), [(first, STREAM_BATCH - left), (second, left)]);
}

#[test]
fn a_lease_is_renewed_if_that_makes_it_longer_and_no_longer_than_it_may_be() {
    let mut consumers = Consumers::default();
    let id = stream(&mut consumers, 2, 1_000);
    consumers.hand(id, vec![delivery(1, 1, 5)], NOW);
    assert_eq!(take(&mut consumers, id), 1);
    let later = |time: Timestamp| Timestamp(time.millis() + 1);
    for (oldest, until, renewed) in
        [(NOW, later(LEASE_END), 1), (later(NOW), later(LEASE_END), 0), (NOW, LEASE_END, 0)]
    {
        assert_eq!(consumers.to_renew(id, oldest, until).len(), renewed, "{oldest:?} {until:?}");
    }
}
