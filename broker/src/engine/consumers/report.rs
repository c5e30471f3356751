//! What a dispatcher's consumers do, for reports.

use std::ops::Bound;

use super::{ConsumerId, Consumers, stream::Stream};
use crate::{
    domain::QueueName,
    store::{ConsumerKind, ConsumerReport},
};

/// After about so many held items were looked at, the rest is left to the next step, so that nobody waits long for the
/// dispatcher's lock.
const STEP: usize = 10_000;

impl Consumers {
    /// Adds reports of streams after the one with the number `after`, until there are `most` reports or the step is over.
    /// Returns the number of the last one, `None` if there are no more.
    pub(in crate::engine) fn report_streams(
        &self,
        queue: &QueueName,
        after: ConsumerId,
        most: usize,
        reports: &mut Vec<ConsumerReport>,
    ) -> Option<ConsumerId> {
        let (mut last, mut seen) = (None, 0);
        for (&id, stream) in self.streams.range((Bound::Excluded(after), Bound::Unbounded)) {
            if reports.len() >= most || seen >= STEP {
                return last;
            }
            seen += 1 + stream.in_flight.len();
            last = Some(id);
            if stream.end.is_none() {
                reports.push(stream.report(queue, id));
            }
        }
        None
    }

    /// Adds reports of the waiting calls, until there are `most` reports.
    pub(in crate::engine) fn report_calls(
        &self,
        queue: &QueueName,
        most: usize,
        reports: &mut Vec<ConsumerReport>,
    ) {
        let room = most.saturating_sub(reports.len());
        reports.extend(self.calls.iter().take(room).map(|(id, call)| ConsumerReport {
            queue: queue.clone(),
            number: id,
            kind: ConsumerKind::Call,
            name: call.consumer.clone(),
            peer: call.peer,
            since: call.since,
            max_in_flight: call.max_items as u64,
            in_flight: 0,
            oldest_since: None,
            oldest_lease_end: None,
            next_lease_end: None,
            delivered: 0,
            committed: 0,
        }));
    }
}

impl Stream {
    fn report(&self, queue: &QueueName, id: ConsumerId) -> ConsumerReport {
        let sent = || self.in_flight.values().filter(|held| held.is_sent());
        let oldest = sent().min_by_key(|held| (held.since, held.lease_end));
        ConsumerReport {
            queue: queue.clone(),
            number: id,
            kind: ConsumerKind::Stream,
            name: self.settings.consumer.clone(),
            peer: self.settings.peer,
            since: self.settings.since,
            max_in_flight: self.settings.max_in_flight as u64,
            in_flight: self.in_flight.len() as u64,
            oldest_since: oldest.map(|held| held.since),
            oldest_lease_end: oldest.map(|held| held.lease_end),
            next_lease_end: sent().map(|held| held.lease_end).min(),
            delivered: self.delivered,
            committed: self.committed,
        }
    }
}
