//! Waiting reserves and pops: each wants one answer.
//!
//! A call that takes part in a running round is answered by that round, whatever happens meanwhile: the
//! store may be committing items for it at this moment, and nobody else could have them.

use std::{collections::BTreeMap, mem, time::Duration};

use tokio::sync::oneshot;

use super::{ConsumerId, EngineError, Result};
use crate::domain::{ConsumerName, Delivery};

/// In so many looks at the store at most a call that does not wait takes part.
const LOOKS: u8 = 2;

/// A waiting reserve or pop.
pub(in crate::engine) struct Call {
    pub(in crate::engine) max_items: usize,
    pub(in crate::engine) lease: Duration,
    pub(in crate::engine) consumer: Option<ConsumerName>,
    pub(in crate::engine) auto_commit: bool,
    /// False: it wants an answer after one look, whatever there is.
    pub(in crate::engine) waits: bool,
    pub(in crate::engine) answer: oneshot::Sender<Result<Vec<Delivery>>>,
}

enum Patience {
    /// It waits until it is withdrawn.
    Waits,
    /// It is answered after so many more looks.
    Looks(u8),
    /// It is answered when its round ends: with what that brought, else with this.
    Over(Option<EngineError>),
}

pub(super) struct Waiting {
    pub(super) call: Call,
    patience: Patience,
    /// The round before which it came.
    pub(super) since: u64,
    /// It takes part in a running round.
    in_round: bool,
}

/// All waiting calls of a dispatcher, the oldest first.
#[derive(Default)]
pub(super) struct Calls {
    waiting: BTreeMap<ConsumerId, Waiting>,
}

impl Calls {
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn add(&mut self, id: ConsumerId, call: Call, round: u64) {
        let patience = if call.waits { Patience::Waits } else { Patience::Looks(LOOKS) };
        self.waiting.insert(id, Waiting { call, patience, since: round, in_round: false });
    }

    /// Who would be given how many of `budget` items: each a fair share, what one leaves is for the next.
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

    /// A round begins in which the call takes part.
    pub(super) fn begin_round(&mut self, id: ConsumerId) {
        if let Some(waiting) = self.waiting.get_mut(&id) {
            waiting.in_round = true;
        }
    }

    /// A round has ended, and what it brought was handed out: answers with nothing the calls that do
    /// not wait any longer. `newest`: of those that were there when it began; `all_seen`: it found
    /// all there was, also for those that did not take part.
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
                let _ = call.answer.send(answer); // nothing is lost if nobody listens
            }
        }
    }

    /// The call's time is up. True if a round is running that will answer it.
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

    /// The caller has gone.
    pub(super) fn remove(&mut self, id: ConsumerId) {
        self.waiting.remove(&id);
    }

    /// True while somebody waits for the call's answer.
    pub(super) fn listens(&self, id: ConsumerId) -> bool {
        self.waiting.get(&id).is_some_and(|waiting| !waiting.call.answer.is_closed())
    }

    pub(super) fn contains(&self, id: ConsumerId) -> bool {
        self.waiting.contains_key(&id)
    }

    /// Answers a call with what it was dealt; what it cannot have comes back.
    pub(super) fn hand(&mut self, id: ConsumerId, deliveries: Vec<Delivery>) -> Vec<Delivery> {
        match self.waiting.remove(&id) {
            Some(waiting) => match waiting.call.answer.send(Ok(deliveries)) {
                Ok(()) => Vec::new(),
                Err(unsent) => unsent.unwrap_or_default(),
            },
            None => deliveries,
        }
    }

    /// Fails all calls: those that take part in a running round when that has ended with nothing for them.
    pub(super) fn fail(&mut self, error: &EngineError) {
        for (id, mut waiting) in mem::take(&mut self.waiting) {
            if waiting.in_round {
                waiting.patience = Patience::Over(Some(error.clone()));
                self.waiting.insert(id, waiting);
            } else {
                let _ = waiting.call.answer.send(Err(error.clone())); // nobody listens: nobody to tell
            }
        }
    }

    /// The round failed: so do all calls.
    pub(super) fn fail_round(&mut self, error: &EngineError) {
        for waiting in self.waiting.values_mut() {
            waiting.in_round = false;
        }
        self.fail(error);
    }
}
