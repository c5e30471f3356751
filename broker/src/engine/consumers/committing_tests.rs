//! Items whose commits are being written take no place in their streams.

use std::time::Duration;

use super::{
    tests::{NOW, delivery, stream, stream_with, take, wanted},
    *,
};
use crate::domain::Receipt;

#[test]
fn an_item_whose_commit_is_being_written_takes_no_place() {
    let mut consumers = Consumers::default();
    let id = stream(&mut consumers, 2, 1_000);
    let receipt = |item| delivery(item, 1, 5).receipt;
    consumers.hand_to_stream(id, vec![delivery(1, 1, 5), delivery(2, 1, 5)], NOW);
    assert_eq!(take(&mut consumers, id), 2);
    let stale = delivery(1, 9, 5).receipt;
    assert!(!consumers.commit_begins(&stale, NOW), "a stale receipt frees nothing");
    assert!(consumers.commit_begins(&receipt(1), NOW));
    assert!(!consumers.commit_begins(&receipt(1), NOW), "a place is given away once");
    assert_eq!(wanted(&mut consumers, NOW), [(id, 1)]);
    consumers.commit_fails(&receipt(1)); // the second of the two commits
    assert_eq!(wanted(&mut consumers, NOW), [(id, 1)]);
    consumers.commit_fails(&receipt(1));
    assert_eq!(wanted(&mut consumers, NOW), []);

    // While commits take long, no more than four times as many items are held.
    for committing in 1..=6 {
        assert!(consumers.commit_begins(&receipt(committing), NOW));
        consumers.hand_to_stream(id, vec![delivery(committing + 2, 1, 5)], NOW);
        assert_eq!(take(&mut consumers, id), 1);
    }
    assert_eq!(wanted(&mut consumers, NOW), [], "it works on two");
    assert!(consumers.commit_begins(&receipt(7), NOW));
    assert!(consumers.commit_begins(&receipt(8), NOW));
    assert_eq!(wanted(&mut consumers, NOW), [], "six commits are being written beside those");
    assert!(consumers.committed(&receipt(1), NOW));
    assert_eq!(wanted(&mut consumers, NOW), [(id, 1)]);
    for item in 2..=8 {
        assert!(consumers.committed(&receipt(item), NOW));
    }
    assert_eq!(wanted(&mut consumers, NOW), [(id, 2)], "each was counted once");
}

#[test]
fn the_bytes_of_an_item_whose_commit_is_being_written_are_free() {
    let mut consumers = Consumers::default();
    let id = stream(&mut consumers, 100, 10);
    let wanted_bytes = |consumers: &mut Consumers| {
        let demands = consumers.demands().demands;
        demands.first().map(|demand| (demand.max_bytes, demand.may_exceed))
    };
    consumers.hand_to_stream(id, vec![delivery(1, 1, 9)], NOW);
    assert_eq!(take(&mut consumers, id), 1);
    assert_eq!(wanted_bytes(&mut consumers), Some((1, false)));
    assert!(consumers.commit_begins(&delivery(1, 1, 9).receipt, NOW));
    assert_eq!(wanted_bytes(&mut consumers), Some((10, true)));
    for (item, bytes) in [(2, 8), (3, 9), (4, 8)] {
        consumers.hand_to_stream(id, vec![delivery(item, 1, bytes)], NOW);
        assert_eq!(take(&mut consumers, id), 1);
        assert!(consumers.commit_begins(&delivery(item, 1, bytes).receipt, NOW));
    }
    assert_eq!(wanted_bytes(&mut consumers), Some((6, true)), "it holds 34 of 40 at most");
    assert_eq!(consumers.remove_stream(id).len(), 4);
}

#[test]
fn what_was_asked_for_before_does_not_come_on_top_of_the_most_bytes() {
    let mut consumers = Consumers::default();
    let id = stream(&mut consumers, 100, 10);
    let hand_and_commit = |consumers: &mut Consumers, item, bytes| {
        assert!(consumers.hand_to_stream(id, vec![delivery(item, 1, bytes)], NOW).is_empty());
        assert_eq!(take(consumers, id), 1);
        assert!(consumers.commit_begins(&delivery(item, 1, bytes).receipt, NOW));
    };
    hand_and_commit(&mut consumers, 1, 9);
    let round = consumers.demands();
    consumers.begin_round(&round);
    hand_and_commit(&mut consumers, 2, 32);
    let back = consumers.hand_reserved(&round.claimants[0], vec![delivery(3, 1, 1)], NOW);
    assert_eq!(back.len(), 1, "it holds 41 bytes, and 40 are four times what it may");
}

/// The idle stream came after the last round.
#[test]
fn an_idle_stream_comes_before_one_that_is_committing() {
    let mut consumers = Consumers::default();
    let busy = stream(&mut consumers, 1, 1_000);
    let round = consumers.demands();
    consumers.begin_round(&round);
    consumers.hand(busy, vec![delivery(1, 1, 5)], NOW);
    consumers.end_round(&round, false, NOW);
    take(&mut consumers, busy);
    let idle = stream(&mut consumers, 1, 1_000);
    assert!(consumers.commit_begins(&delivery(1, 1, 5).receipt, NOW));
    assert_eq!(wanted(&mut consumers, NOW), [(idle, 1), (busy, 1)], "who holds least comes first");
}

/// Streams to which anything may happen, by chance.
struct World {
    consumers: Consumers,
    dice: u64,
    now: Timestamp,
    streams: Vec<ConsumerId>,
    receipts: Vec<Receipt>,
    /// Those of which a commit has begun.
    committing: Vec<Receipt>,
    /// Those in commits of all items up to one that have not failed.
    included: Vec<Receipt>,
    items: u8,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut world = Self {
            consumers: Consumers::default(),
            dice: seed.wrapping_mul(88_172_645_463_325_252) | 1,
            now: NOW,
            streams: Vec::new(),
            receipts: Vec::new(),
            committing: Vec::new(),
            included: Vec::new(),
            items: 0,
        };
        for _ in 0..=world.below(3) {
            let (most, bytes) = (1 + world.below(5), 10 + world.below(30));
            let lease = Duration::from_millis(500);
            world.streams.push(stream_with(&mut world.consumers, most, bytes, lease));
        }
        world
    }

    fn below(&mut self, end: usize) -> usize {
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        (self.dice % end as u64) as usize
    }

    fn any_receipt(&mut self) -> Option<Receipt> {
        let index = self.below(self.receipts.len().max(1));
        self.receipts.get(index).cloned()
    }

    /// Returns an item, which may be held already, as after a lapsed lease.
    fn item(&mut self) -> Delivery {
        self.items = self.items.wrapping_add(1);
        let item = if self.below(6) == 0 { self.items.wrapping_sub(3) } else { self.items };
        let bytes = if self.below(20) == 0 { 50 } else { 1 + self.below(12) };
        let lease_expire_time = self.now + Duration::from_millis(500);
        let item = Delivery { lease_expire_time, ..delivery(item % 40, self.items, bytes) };
        self.included.retain(|receipt| *receipt != item.receipt);
        self.receipts.push(item.receipt.clone());
        item
    }

    /// Assigns items to all that want them. Commits begin and fail meanwhile.
    fn round(&mut self) {
        let round = self.consumers.demands();
        self.consumers.begin_round(&round);
        for _ in 0..self.below(3) {
            self.commit();
        }
        for (claimant, demand) in round.claimants.iter().zip(&round.demands) {
            let mut items: Vec<Delivery> = Vec::new();
            for _ in 0..self.below(demand.max_items + 1) {
                let item = self.item();
                let bytes: usize = items.iter().map(|item| item.item.payload.len()).sum();
                let fits = bytes + item.item.payload.len() <= demand.max_bytes
                    || (items.is_empty() && demand.may_exceed);
                if fits && items.iter().all(|other| other.item.id != item.item.id) {
                    items.push(item);
                }
            }
            self.consumers.hand_reserved(claimant, items, self.now);
        }
        let all_seen = self.below(2) == 0;
        self.consumers.end_round(&round, all_seen, self.now);
    }

    fn commit(&mut self) {
        if let Some(receipt) = self.any_receipt() {
            self.consumers.commit_begins(&receipt, self.now);
            self.committing.push(receipt);
        }
    }

    fn end_commit(&mut self) {
        if self.committing.is_empty() {
            return;
        }
        let index = self.below(self.committing.len());
        let receipt = self.committing.swap_remove(index);
        match self.below(4) {
            0 => self.consumers.commit_fails(&receipt),
            1 => _ = self.consumers.settled(&receipt, self.now),
            2 => _ = self.consumers.found_void(&receipt, self.now),
            _ => _ = self.consumers.committed(&receipt, self.now),
        }
    }

    fn step(&mut self) {
        let index = self.below(self.streams.len());
        let stream = self.streams[index];
        match self.below(15) {
            0..=2 => self.round(),
            3..=4 => self.commit(),
            5..=6 => self.end_commit(),
            7 => {
                let most = self.below(6);
                drop(self.consumers.set_max_in_flight(stream, most, self.now));
                self.consumers.take_returning(self.now);
            }
            8 => {
                self.now = self.now + Duration::from_millis(self.below(200) as u64);
                self.consumers.take_lapsed(self.now);
            }
            9 => {
                if let Some(receipt) = self.any_receipt() {
                    self.consumers.deleted(receipt.item);
                }
            }
            10 => match self.below(30) {
                0..=2 => _ = self.consumers.take_unsent(),
                3 => _ = self.consumers.end_stream(stream, &EngineError::ShuttingDown),
                4 => self.consumers.retire_stream(stream),
                _ => {}
            },
            11 => {
                let tag = self.below(20) as u64;
                let included = |receipt: &_| self.included.contains(receipt);
                let expected = self.consumers.streams[&stream].to_include(tag, included);
                let receipts = self.consumers.include_up_to(stream, tag);
                assert_eq!(receipts.as_ref().ok(), expected.as_ref());
                self.included.extend(receipts.unwrap_or_default());
            }
            12 => {
                let failed = self.included.split_off(self.included.len() / 2);
                self.consumers.exclude(&failed);
            }
            13 => {
                if let Some(receipt) = self.any_receipt() {
                    self.consumers.name(&[receipt]);
                }
            }
            _ => {
                for id in self.streams.clone() {
                    self.consumers.look_into_inbox(id, self.now);
                    self.consumers.look_into_inbox(id, self.now);
                }
            }
        }
    }

    /// Compares what each stream counts with what it holds.
    fn check(&self) {
        for id in &self.streams {
            let stream = &self.consumers.streams[id];
            let count = |all: bool| {
                let held = stream.in_flight.values().filter(|held| all || held.commits == 0);
                held.fold((0, 0), |(items, bytes), held| (items + 1, bytes + held.bytes))
            };
            let ((load, load_bytes), (held, held_bytes)) = (count(false), count(true));
            assert_eq!((stream.load(), stream.in_flight.len()), (load, held));
            let room = |most: usize, load, held| {
                most.saturating_sub(load).min((4 * most).saturating_sub(held))
            };
            let StreamSettings { max_in_flight: most, max_in_flight_bytes: bytes, .. } =
                stream.settings;
            assert_eq!(stream.room(), room(most, load, held));
            assert_eq!(stream.wanted_bytes().0, room(bytes, load_bytes, held_bytes));
            stream.check_sent();
            assert!(stream.in_flight.keys().all(|item| self.consumers.holders[item] == *id));
        }
        let held: usize = self.consumers.streams.values().map(|s| s.in_flight.len()).sum();
        assert_eq!(held, self.consumers.held_count());
    }
}

#[test]
fn the_counts_of_streams_hold_whatever_happens() {
    for seed in 1..=3_000 {
        let mut world = World::new(seed);
        for _ in 0..120 {
            world.step();
            world.check();
        }
    }
}
