//! The load: clients of every kind. Whatever they ask and are told is recorded.

mod calls;
mod consumers;
mod producers;
mod push_streams;
mod rest;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use sluicegate_checker::{
    Recorder,
    history::{NewItem, Settings},
    messages::micros,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{dice::Dice, world::World};
pub(crate) use calls::Way;

/// The lease of queues, which is longer than any that the clients ask for.
const LEASE: Duration = Duration::from_secs(2);
/// The queue from which items are taken at most once: what a cut answer has taken is no loss there.
const POPS: &str = "pops";
const PRODUCERS: u64 = 3;
const CONSUMERS: u64 = 5;

/// The clients of one cycle.
pub(crate) struct Load {
    pub(crate) world: Arc<World>,
    pub(crate) recorder: Recorder,
    dice: Dice,
    cycle: u64,
    queues: Vec<(String, Settings)>,
    /// Cancelled when clients begin nothing new.
    stop: CancellationToken,
    tasks: TaskTracker,
    items: AtomicU64,
    calls: AtomicU64,
    push_streams: AtomicU64,
}

impl Load {
    /// Starts the clients, with queues of their own.
    pub(crate) async fn start(world: Arc<World>, seed: u64, cycle: u64) -> Arc<Self> {
        let dice = Dice::new(seed, cycle, 2);
        let name = |name: &str| format!("{name}-{seed}-{cycle}");
        let queues = ["a", "b", "c", POPS].map(|queue| (name(queue), settings(&dice)));
        let load = Arc::new(Self {
            world,
            recorder: Recorder::default(),
            dice,
            cycle,
            queues: queues.into(),
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
            items: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            push_streams: AtomicU64::new(0),
        });
        for (queue, settings) in &load.queues {
            while load.create(&load.way(), queue, settings, LEASE).await.is_err() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
        for number in 1..=PRODUCERS {
            load.tasks.spawn(producers::produce(Arc::clone(&load), number));
        }
        for number in 1..=CONSUMERS {
            load.tasks.spawn(consumers::consume(Arc::clone(&load), number, false));
        }
        for number in 1..=2 {
            load.tasks.spawn(consumers::consume(Arc::clone(&load), CONSUMERS + number, true));
        }
        load.tasks.spawn(operate(Arc::clone(&load)));
        load
    }

    /// Ends the clients. Returns false if one does not end.
    pub(crate) async fn stop(&self) -> bool {
        self.stop.cancel();
        self.tasks.close();
        tokio::time::timeout(Duration::from_mins(1), self.tasks.wait()).await.is_ok()
    }

    /// Returns how many items were to be pushed.
    pub(crate) fn items(&self) -> u64 {
        self.items.load(Ordering::Relaxed)
    }

    /// Returns a way to one of the brokers.
    fn way(&self) -> Way {
        let node = self.world.next();
        Way { client: node.client.clone(), broker: node.name() }
    }

    /// Returns a way to whichever broker answers. The checker takes each call as one of a broker of its own.
    fn any_way(&self) -> Way {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        Way { client: self.world.client.clone(), broker: format!("any broker {number}") }
    }

    /// Returns a number for a new `PushStream`.
    fn number_of_stream(&self) -> u64 {
        self.push_streams.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn queue(&self) -> String {
        self.dice.one_of(&self.queues).0.clone()
    }

    /// Returns another queue than this one.
    fn queue_but(&self, queue: &str) -> String {
        let others: Vec<_> = self.queues.iter().filter(|(name, _)| name != queue).collect();
        self.dice.one_of(&others).0.clone()
    }

    /// Waits a while, or for the end of all clients. Returns false at the end.
    async fn pause(&self, from: u64, to: u64) -> bool {
        let time = self.dice.millis(from, to);
        tokio::select! {
            biased;
            () = self.stop.cancelled() => false,
            () = tokio::time::sleep(time) => true,
        }
    }

    /// Returns a new item of any kind.
    fn new_item(&self) -> NewItem {
        let dice = &self.dice;
        let number = self.items.fetch_add(1, Ordering::Relaxed) + 1;
        let name = format!("{}-{number}", self.cycle);
        let ordering_key =
            if dice.chance(0.25) { format!("key {}", dice.number(1, 4)) } else { String::new() };
        let dedup_id = if dice.chance(0.3) { name.clone() } else { String::new() };
        let delay = if dice.chance(0.15) { dice.millis(1, 1_000) } else { Duration::ZERO };
        let ttl = dice.chance(0.03).then(|| micros(dice.millis(500, 5_000)));
        let priority = if dice.chance(0.1) { dice.number(1, 9) as u8 } else { 0 };
        let delay = micros(delay);
        NewItem { name, bytes: 0, ordering_key, dedup_id, priority, delay, ttl }
    }
}

fn settings(dice: &Dice) -> Settings {
    Settings {
        max_attempts: *dice.one_of(&[2, 3, 25]),
        max_deliveries: *dice.one_of(&[0, 4, 100]),
        discard_failed: dice.chance(0.2),
        retention: dice.chance(0.2),
        // Longer than any cycle: a push may be repeated for as long as it is not answered.
        dedup_window: 300_000_000,
        sequenced: dice.chance(0.3),
        ..Settings::default()
    }
}

/// Reads figures until the end.
async fn operate(load: Arc<Load>) {
    while load.pause(100, 500).await {
        let _ = load.figures(&load.way(), &load.queue()).await;
    }
}
