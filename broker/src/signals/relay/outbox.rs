//! What is to be sent to the other brokers.

use std::collections::HashSet;

use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};

use crate::{
    domain::{ItemId, QueueName, Signal, Timestamp, Topic},
    signals::{coalesce::Coalescer, message::Message},
};

/// The most queues of which it is remembered that other brokers wait for them. Past that all are forgotten, which costs these brokers
/// the time in which an insert is stored.
const MAX_AWAITED: usize = 10_000;

#[derive(Default)]
struct Pending {
    coalescer: Coalescer,
    due: Vec<Signal>,
    /// The queues for whose next insert another broker waits.
    awaited: HashSet<QueueName>,
}

/// Signals that wait to be sent.
#[derive(Default)]
pub(super) struct Outbox {
    pending: Mutex<Pending>,
    /// Notified when a message becomes due, which also opens a window.
    pub(super) wake: Notify,
}

impl Outbox {
    /// Accepts a signal. Returns false if it was merged with one that waits for its window to close.
    pub(super) fn offer(&self, signal: Signal) -> bool {
        let mut pending = self.pending.lock();
        let due = match signal.topic {
            // Merged with nothing: it is said once for each signal that was received.
            Topic::Wanted => Some(signal),
            Topic::Insert | Topic::Settings | Topic::Settle => {
                pending.coalescer.offer(signal, Instant::now())
            }
        };
        let Some(due) = due else { return false };
        pending.due.push(due);
        drop(pending);
        self.wake.notify_one();
        true
    }

    /// Returns true if another broker waits for the queue's next insert.
    pub(super) fn awaits(&self, queue: &QueueName) -> bool {
        self.pending.lock().awaited.contains(queue)
    }

    /// Sends the signal of an insert that is not stored yet, if another broker waits for one. The item is left out if others of the
    /// queue have been merged: it is not to be handed out before them.
    pub(super) fn announce(&self, queue: &QueueName, since: Timestamp, item: Option<ItemId>) {
        let mut pending = self.pending.lock();
        if !pending.awaited.remove(queue) {
            return;
        }
        let are_merged = pending.coalescer.announced(queue, Instant::now());
        let (queue, item) = (queue.clone(), item.filter(|_| !are_merged));
        pending.due.push(Signal { queue, topic: Topic::Insert, since: Some(since), item });
        drop(pending);
        self.wake.notify_one();
    }

    /// Notes that another broker waits for the queue's next insert. It has found items that were eligible up to the `since` of the
    /// signal, or the one that is named. Ends the window of the inserts, unless these are among them.
    pub(super) fn wanted(&self, signal: &Signal) {
        let queue = signal.queue.clone();
        let mut pending = self.pending.lock();
        if pending.awaited.len() >= MAX_AWAITED {
            pending.awaited.clear();
        }
        pending.awaited.insert(queue.clone());
        let Some(merged) =
            pending.coalescer.end_window(queue, (signal.since, signal.item), Instant::now())
        else {
            return;
        };
        pending.due.push(merged);
        drop(pending);
        self.wake.notify_one();
    }

    /// Returns the messages to send now, and when the next window closes. With `everything`, no
    /// message waits for that close.
    pub(super) fn take(&self, everything: bool) -> (Vec<Message>, Option<Instant>) {
        let mut pending = self.pending.lock();
        let mut due = std::mem::take(&mut pending.due);
        due.extend(if everything {
            pending.coalescer.drain()
        } else {
            pending.coalescer.close(Instant::now())
        });
        (due.into_iter().map(Message::Signal).collect(), pending.coalescer.next_close())
    }
}
