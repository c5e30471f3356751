//! Between consumers and the stock: who receives what is reserved ahead, and when more is reserved, or all of it returned.

use super::{
    Claimant, ConsumerId, Consumers, MAX_ROUND_BYTES, Round, STOCK, stock, stream::InFlight,
};
use crate::domain::{Timestamp, limits::MAX_BATCH};

impl Consumers {
    /// Hands a consumer what is in stock for it. Returns true if that was anything. A consumer that takes part in a round
    /// is answered by the round.
    pub(in crate::engine) fn serve(&mut self, id: ConsumerId, now: Timestamp) -> bool {
        if self.stock.is_empty() {
            return false;
        }
        let taken = if let Some(call) = self.calls.outside_of_rounds(id) {
            if !self.stock.suits(&call.terms(), call.max_items) {
                return false;
            }
            self.stock.take(call.max_items, |items, bytes| items == 1 || bytes <= MAX_ROUND_BYTES)
        } else if let Some(stream) = self.streams.get(&id).filter(|s| s.demands() && !s.in_round) {
            let settings = &stream.settings;
            if settings.auto_commit || !self.stock.suits(&settings.terms(), settings.max_in_flight)
            {
                return false;
            }
            let room = stream.room();
            let (max_bytes, may_exceed) = stream.wanted_bytes();
            let fits = |items, bytes| bytes <= max_bytes || items == 1 && may_exceed;
            self.stock.take(room, fits)
        } else {
            return false;
        };
        if taken.is_empty() {
            return false;
        }
        self.round += 1; // the next item is another stream's, as after a round
        let back = self.hand(id, taken, now);
        let is_served = back.is_empty();
        self.stock.put_back(back, now);
        is_served
    }

    /// Hands all consumers what is in stock for them.
    pub(super) fn serve_all(&mut self, now: Timestamp) {
        if self.stock.is_empty() {
            return;
        }
        for claimant in self.demands().claimants {
            self.serve(claimant.id, now);
        }
    }

    /// Hands all consumers what is in stock for them, and takes what has to be rolled back before the next reserve: also the rest
    /// of the stock, if it hides items from consumers that want others.
    pub(in crate::engine) fn take_returning(&mut self, now: Timestamp) -> Vec<InFlight> {
        self.serve_all(now);
        if self.stock.is_empty() || self.demands().demands.is_empty() {
            return self.stock.take_returning();
        }
        self.stock.take_hiding(now)
    }

    /// Adds the demand for items that nobody has asked for yet, if consumers take items fast enough.
    pub(in crate::engine) fn add_stock(&mut self, round: &mut Round, now: Timestamp) {
        let wanted: usize = round.demands.iter().map(|demand| demand.max_items).sum();
        if wanted <= MAX_BATCH - stock::MOST
            && let Some(demand) = self.stock.demand(now)
        {
            round.demands.push(demand);
            round.claimants.push(Claimant::new(STOCK, false));
        }
    }
}
