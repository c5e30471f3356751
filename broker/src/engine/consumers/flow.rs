//! Changes of flow: how many items a stream may hold from now on, and what becomes of those that were assigned to it before.

use tokio::sync::oneshot;

use super::{ConsumerId, Consumers, InFlight, stream::Stream};
use crate::domain::Timestamp;

/// Ends when a change of flow is in force: nothing is delivered any more that the new flow has no place for.
pub(crate) type InForce = oneshot::Receiver<()>;

impl Consumers {
    /// Changes how many items a stream may hold. What was assigned to the stream, was not sent, and has no place any more is
    /// taken back.
    pub(in crate::engine) fn set_max_in_flight(
        &mut self,
        id: ConsumerId,
        max: usize,
        now: Timestamp,
    ) -> InForce {
        let (waiting, in_force) = oneshot::channel();
        let Some(stream) = self.streams.get_mut(&id) else { return in_force };
        stream.settings.max_in_flight = max;
        stream.halt = (max == 0).then_some(waiting); // an older flow is replaced
        stream.tell_if_halted();
        let back = stream.take_excess();
        self.give_back(back, now);
        in_force
    }

    /// Rolls back what was taken back from a stream, before the next reserve.
    pub(super) fn give_back(&mut self, back: Vec<InFlight>, now: Timestamp) {
        for held in &back {
            self.holders.remove(&held.receipt.item);
        }
        if !back.is_empty() {
            // What is reserved ahead is behind the items that return.
            self.stock.withdraw(now);
            self.stock.give_back(back);
        }
    }
}

impl Stream {
    /// Takes back the last of the items that were not sent, as many as have no place. Committed items can only be sent, and stay.
    fn take_excess(&mut self) -> Vec<InFlight> {
        if self.settings.auto_commit {
            return Vec::new();
        }
        let excess = self.load().saturating_sub(self.settings.max_in_flight);
        let excess = self.inbox.take_from(self.inbox.len().saturating_sub(excess));
        let back: Vec<_> = excess.iter().filter_map(|one| self.take_out(one.item.id)).collect();
        self.taken_back += u64::from(!back.is_empty());
        back
    }

    /// Tells whoever waits for it that nothing more is delivered. A stream whose items are committed before they are sent delivers
    /// what it was assigned, and what a running round brings.
    pub(super) fn tell_if_halted(&mut self) {
        if !self.settings.auto_commit || self.inbox.is_empty() && !self.in_round {
            self.halt = None;
        }
    }
}
