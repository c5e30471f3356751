//! The clients of a simulation. Whatever they ask and are told is recorded.

mod api;
mod consumers;
mod operators;
mod producers;
mod push_streams;
mod rush;
mod schedules;
mod streams;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use sluicegate_checker::Recorder;
use tokio_util::sync::CancellationToken;

use crate::{cluster::Cluster, dice::Dice, plan::Plan};

pub(crate) use self::{
    api::set_queue,
    operators::rest,
    schedules::{TICKS, settings as settings_of_ticks},
};

/// What all clients share.
pub(crate) struct Clients {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) recorder: Recorder,
    pub(crate) dice: Dice,
    pub(crate) plan: Plan,
    /// Cancelled when clients begin nothing new.
    pub(crate) stop: CancellationToken,
    items: AtomicU64,
    push_streams: AtomicU64,
    pub(crate) tasks: tokio_util::task::TaskTracker,
}

impl Clients {
    pub(crate) fn new(
        cluster: Arc<Cluster>,
        recorder: Recorder,
        dice: Dice,
        plan: Plan,
    ) -> Arc<Self> {
        let (stop, items) = (CancellationToken::new(), AtomicU64::new(0));
        let push_streams = AtomicU64::new(0);
        let tasks = tokio_util::task::TaskTracker::new();
        Arc::new(Self { cluster, recorder, dice, plan, stop, items, push_streams, tasks })
    }

    /// Starts all clients.
    pub(crate) fn start(self: &Arc<Self>) {
        for number in 1..=self.plan.producers {
            self.tasks.spawn(producers::produce(Arc::clone(self), number));
        }
        for number in 1..=self.plan.consumers {
            self.tasks.spawn(consumers::consume(Arc::clone(self), number));
        }
        if self.plan.rushes {
            self.tasks.spawn(rush::rush(Arc::clone(self)));
        }
        for number in 1..=self.plan.schedules {
            self.tasks.spawn(schedules::operate(Arc::clone(self), number));
        }
        for &second in &self.plan.rare_ticks {
            self.tasks.spawn(schedules::tick_rarely(Arc::clone(self), second));
        }
        for number in 1..=self.plan.operators {
            self.tasks.spawn(operators::operate(Arc::clone(self), number));
        }
    }

    /// Returns a name for a new item.
    fn item_name(&self) -> String {
        format!("item {}", self.items.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Returns a number for a new `PushStream`.
    fn next_push_stream(&self) -> u64 {
        self.push_streams.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn queue(&self) -> String {
        self.dice.one_of(&self.plan.queues).map_or_else(String::new, |(name, _)| name.clone())
    }

    /// Returns another queue than this one.
    fn queue_but(&self, queue: &str) -> String {
        let others = self.plan.queues.iter().filter(|(name, _)| name != queue);
        let others: Vec<_> = others.collect();
        self.dice.one_of(&others).map_or_else(String::new, |(name, _)| name.clone())
    }

    /// Returns how long a client waits for an answer. Some do not wait long.
    fn patience(&self) -> Option<Duration> {
        self.dice.chance(self.plan.hang_ups).then(|| self.dice.millis(0, 300))
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
}
