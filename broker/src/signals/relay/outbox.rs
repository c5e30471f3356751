//! What is to be sent to the other brokers.

use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};

use crate::{
    domain::{QueueName, Signal, Topic},
    signals::{coalesce::Coalescer, message::Message},
};

#[derive(Default)]
struct Pending {
    coalescer: Coalescer,
    due: Vec<Signal>,
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

    /// Ends the window of a queue's inserts, because another broker waits for them.
    pub(super) fn wanted(&self, queue: QueueName) {
        let mut pending = self.pending.lock();
        let Some(merged) = pending.coalescer.end_window(queue, Topic::Insert, Instant::now())
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
