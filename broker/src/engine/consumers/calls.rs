//! Waiting reserves and pops, each of which expects one answer.
//!
//! A call that takes part in a running round is always answered by that round. The store may be
//! committing items for the call at this moment, and no other consumer could receive those.

use std::{collections::BTreeMap, mem, net::SocketAddr, time::Duration};

use tokio::sync::oneshot;

use super::{ConsumerId, EngineError, Result, stock::Terms};
use crate::domain::{ConsumerName, Delivery, Timestamp};

/// A call that does not wait takes part in at most this many rounds.
const LOOKS: u8 = 2;

/// A waiting reserve or pop.
pub(in crate::engine) struct Call {
    pub(in crate::engine) max_items: usize,
    pub(in crate::engine) lease: Duration,
    pub(in crate::engine) consumer: Option<ConsumerName>,
    pub(in crate::engine) peer: Option<SocketAddr>,
    /// When the call came.
    pub(in crate::engine) since: Timestamp,
    pub(in crate::engine) auto_commit: bool,
    /// If false, the call is answered after at most [`LOOKS`] rounds, even with no items.
    pub(in crate::engine) waits: bool,
    pub(in crate::engine) answer: oneshot::Sender<Result<Vec<Delivery>>>,
}

impl Call {
    /// Returns what an item has to be reserved for.
    pub(super) fn terms(&self) -> Terms {
        Terms { lease: self.lease, consumer: self.consumer.clone() }
    }
}

enum Patience {
    /// Waits until the call is withdrawn.
    Waits,
    /// Answered after this many more rounds.
    Looks(u8),
    /// Answered when the current round ends: with the items of the round, else with this result.
    Over(Option<EngineError>),
}

pub(super) struct Waiting {
    pub(super) call: Call,
    patience: Patience,
    /// The number of rounds begun before the call arrived.
    pub(super) since: u64,
    /// True if the call takes part in a running round.
    in_round: bool,
}

/// All waiting calls of a dispatcher, in the order of their arrival.
#[derive(Default)]
pub(super) struct Calls {
    waiting: BTreeMap<ConsumerId, Waiting>,
}

impl Calls {
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (ConsumerId, &Call)> {
        self.waiting.iter().map(|(id, waiting)| (*id, &waiting.call))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn add(&mut self, id: ConsumerId, call: Call, round: u64) {
        let patience = if call.waits { Patience::Waits } else { Patience::Looks(LOOKS) };
        self.waiting.insert(id, Waiting { call, patience, since: round, in_round: false });
    }

    /// Shares `budget` items among the calls: each gets a fair share, and what one call leaves goes
    /// to the next.
    pub(super) fn demands(
        &self,
        budget: usize,
    ) -> impl Iterator<Item = (ConsumerId, usize, &Waiting)> {
        let count = self.waiting.len().min(budget);
        let mut left = budget;
        self.waiting.iter().take(count).enumerate().map(move |(nth, (id, waiting))| {
            let items = waiting.call.max_items.min(left / (count - nth));
            left -= items;
            (*id, items, waiting)
        })
    }

    /// Marks the call as part of the round that begins.
    pub(super) fn begin_round(&mut self, id: ConsumerId) {
        if let Some(waiting) = self.waiting.get_mut(&id) {
            waiting.in_round = true;
        }
    }

    /// Ends a round whose items have been handed out, and answers with no items the calls that wait
    /// no longer. `newest` is the newest consumer that existed when the round began. `all_seen`
    /// says that the round found everything there was, which also answers calls that did not take
    /// part.
    pub(super) fn end_round(&mut self, newest: ConsumerId, all_seen: bool) {
        let is_answered = |waiting: &mut Waiting| {
            let took_part = mem::take(&mut waiting.in_round);
            match &mut waiting.patience {
                Patience::Waits => false,
                Patience::Looks(left) => {
                    *left = left.saturating_sub(u8::from(took_part));
                    all_seen || *left == 0
                }
                Patience::Over(_) => true,
            }
        };
        let answered = self.waiting.range_mut(..=newest);
        let answered: Vec<_> =
            answered.filter_map(|(id, waiting)| is_answered(waiting).then_some(*id)).collect();
        for id in answered {
            if let Some(Waiting { call, patience, .. }) = self.waiting.remove(&id) {
                let answer = match patience {
                    Patience::Over(Some(error)) => Err(error),
                    _ => Ok(Vec::new()),
                };
                let _ = call.answer.send(answer); // without items, a missing listener loses nothing
            }
        }
    }

    /// Withdraws a call whose time is up. Returns true if a running round will answer the call.
    pub(super) fn withdraw(&mut self, id: ConsumerId) -> bool {
        match self.waiting.get_mut(&id) {
            Some(waiting) if waiting.in_round => {
                waiting.patience = Patience::Over(None);
                true
            }
            Some(_) => {
                self.waiting.remove(&id);
                false
            }
            None => false,
        }
    }

    /// Removes a call whose caller has gone.
    pub(super) fn remove(&mut self, id: ConsumerId) {
        self.waiting.remove(&id);
    }

    /// Returns true while the caller waits for the answer.
    pub(super) fn listens(&self, id: ConsumerId) -> bool {
        self.waiting.get(&id).is_some_and(|waiting| !waiting.call.answer.is_closed())
    }

    pub(super) fn get(&self, id: ConsumerId) -> Option<&Call> {
        self.waiting.get(&id).map(|waiting| &waiting.call)
    }

    /// Returns a call that waits for items that are not committed at once, and takes part in no round.
    pub(super) fn outside_of_rounds(&self, id: ConsumerId) -> Option<&Call> {
        let waiting = self.waiting.get(&id)?;
        let is_free = !waiting.in_round && !waiting.call.auto_commit;
        is_free.then_some(&waiting.call)
    }

    /// Makes a pop of a reserve.
    #[cfg(test)]
    pub(super) fn commits(&mut self, id: ConsumerId) {
        if let Some(waiting) = self.waiting.get_mut(&id) {
            waiting.call.auto_commit = true;
        }
    }

    /// Answers a call with its items. Returns the items that the call can no longer receive.
    pub(super) fn hand(&mut self, id: ConsumerId, deliveries: Vec<Delivery>) -> Vec<Delivery> {
        match self.waiting.remove(&id) {
            Some(waiting) => match waiting.call.answer.send(Ok(deliveries)) {
                Ok(()) => Vec::new(),
                Err(unsent) => unsent.unwrap_or_default(),
            },
            None => deliveries,
        }
    }

    /// Fails all calls. Those in a running round fail when the round ends without items for them.
    pub(super) fn fail(&mut self, error: &EngineError) {
        for (id, mut waiting) in mem::take(&mut self.waiting) {
            if waiting.in_round {
                waiting.patience = Patience::Over(Some(error.clone()));
                self.waiting.insert(id, waiting);
            } else {
                let _ = waiting.call.answer.send(Err(error.clone())); // the caller may have gone
            }
        }
    }

    /// Fails all calls after a failed round.
    pub(super) fn fail_round(&mut self, error: &EngineError) {
        for waiting in self.waiting.values_mut() {
            waiting.in_round = false;
        }
        self.fail(error);
    }
}
