//! What becomes of items that were assigned to a stream when its flow changes.

use std::time::Duration;

use super::{
    tests::{NOW, delivery, look, settings, stream, take, wanted},
    *,
};

fn numbers<'a>(items: impl IntoIterator<Item = &'a InFlight>) -> Vec<u8> {
    items.into_iter().map(|held| held.receipt.item.0[0]).collect()
}

#[test]
fn what_was_not_sent_and_has_no_place_is_taken_back_from_the_end() {
    let mut consumers = Consumers::default();
    let id = stream(&mut consumers, 8, 1_000);
    consumers.hand(id, vec![delivery(1, 1, 5)], NOW);
    assert_eq!(take(&mut consumers, id), 1);
    consumers.hand(id, (2..=5).map(|n| delivery(n, 1, 5)).collect(), NOW);
    drop(consumers.set_max_in_flight(id, 5, NOW));
    assert_eq!(numbers(&consumers.take_returning(NOW)), [0; 0], "all have their places");
    drop(consumers.set_max_in_flight(id, 3, NOW));
    assert_eq!(numbers(&consumers.take_returning(NOW)), [4, 5]);
    assert!(!consumers.settled(&delivery(5, 1, 5).receipt, NOW), "it holds them no more");
    assert_eq!(take(&mut consumers, id), 2);
    drop(consumers.set_max_in_flight(id, 0, NOW));
    assert_eq!(numbers(&consumers.take_returning(NOW)), [0; 0], "what was sent stays");
    assert_eq!(consumers.held_count(), 3);
    assert_eq!(wanted(&mut consumers, NOW), []);
}

/// It is behind those items.
#[test]
fn what_is_reserved_ahead_returns_with_what_is_taken_back() {
    let mut consumers = Consumers::default();
    let id = stream(&mut consumers, 8, 1_000);
    consumers.hand(id, vec![delivery(1, 1, 5)], NOW);
    consumers.hand(STOCK, vec![delivery(2, 1, 5)], NOW);
    drop(consumers.set_max_in_flight(id, 0, NOW));
    assert_eq!(numbers(&consumers.take_returning(NOW)), [2, 1]);
}

/// Returns a stream that holds an item which was not sent, and the round in which it asked for more.
fn asking() -> (Consumers, ConsumerId, Round) {
    let mut consumers = Consumers::default();
    let id = stream(&mut consumers, 8, 1_000);
    consumers.hand(id, vec![delivery(1, 1, 5)], NOW);
    let round = consumers.demands();
    consumers.begin_round(&round);
    (consumers, id, round)
}

#[test]
fn what_was_asked_for_before_does_not_overtake_what_was_taken_back() {
    for pushed in [false, true] {
        let (mut consumers, id, round) = asking();
        drop(consumers.set_max_in_flight(id, 0, NOW));
        drop(consumers.set_max_in_flight(id, 8, NOW));
        let (claimant, next) = (&round.claimants[0], vec![delivery(2, 1, 5)]);
        let back = if pushed {
            consumers.hand_pushed(claimant, next, NOW)
        } else {
            consumers.hand_reserved(claimant, next, NOW)
        };
        assert_eq!(back.len(), 1);
        consumers.end_round(&round, true, NOW);
        let round = consumers.demands();
        let both = vec![delivery(1, 2, 5), delivery(2, 2, 5)];
        assert!(consumers.hand_reserved(&round.claimants[0], both, NOW).is_empty());
        assert_eq!(take(&mut consumers, id), 2);
    }
}

#[test]
fn what_was_asked_for_before_is_handed_out_if_nothing_was_taken_back() {
    let (mut consumers, id, round) = asking();
    assert_eq!(take(&mut consumers, id), 1);
    drop(consumers.set_max_in_flight(id, 0, NOW));
    drop(consumers.set_max_in_flight(id, 8, NOW));
    let next = vec![delivery(2, 1, 5)];
    assert!(consumers.hand_reserved(&round.claimants[0], next, NOW).is_empty());
    assert_eq!(take(&mut consumers, id), 1);
}

/// Returns a stream whose items are committed before they are sent.
fn committed() -> (Consumers, ConsumerId) {
    let settings = settings(8, usize::MAX, Duration::from_secs(1));
    let settings = StreamSettings { auto_commit: true, ..settings };
    let mut consumers = Consumers::default();
    let id = consumers.add_stream(settings, Arc::new(Notify::new()));
    assert!(matches!(look(&mut consumers, id), Inbox::Empty { .. }));
    (consumers, id)
}

/// Returns true if a change of flow is in force.
fn is_in_force(flow: &mut InForce) -> bool {
    !matches!(flow.try_recv(), Err(tokio::sync::oneshot::error::TryRecvError::Empty))
}

#[test]
fn a_halt_is_in_force_when_committed_items_are_sent() {
    let (mut consumers, id) = committed();
    let round = consumers.demands();
    consumers.begin_round(&round);
    let mut halt = consumers.set_max_in_flight(id, 0, NOW);
    assert!(!is_in_force(&mut halt), "the round may bring items");
    consumers.hand_reserved(&round.claimants[0], vec![delivery(1, 1, 5)], NOW);
    consumers.end_round(&round, true, NOW);
    assert!(!is_in_force(&mut halt), "an item is to be sent");
    assert_eq!(take(&mut consumers, id), 1);
    assert!(is_in_force(&mut halt));

    consumers.set_max_in_flight(id, 8, NOW);
    assert!(matches!(look(&mut consumers, id), Inbox::Empty { .. }));
    let round = consumers.demands();
    consumers.begin_round(&round);
    let mut halt = consumers.set_max_in_flight(id, 0, NOW);
    consumers.end_round(&round, true, NOW);
    assert!(is_in_force(&mut halt), "the round brought nothing");

    let round = consumers.demands();
    consumers.begin_round(&round);
    let mut halt = consumers.set_max_in_flight(id, 0, NOW);
    assert!(is_in_force(&mut halt), "the stream takes part in no round");
    let mut more = consumers.set_max_in_flight(id, 8, NOW);
    assert!(is_in_force(&mut more));
}
