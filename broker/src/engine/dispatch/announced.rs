//! Items that other brokers announce by their ids while they store them (`docs/decisions/0027-announced-by-id.md`).

use super::{Dispatcher, State};
use crate::{
    domain::{Delivery, ItemId, Timestamp},
    metrics::Wake,
    signals::WINDOW,
    store::Appeared,
};

/// An item that another broker has announced by its id.
#[derive(Clone, Copy)]
pub(super) struct Announced {
    pub(super) item: ItemId,
    pub(super) since: Timestamp,
}

impl State {
    /// Makes of an item that was announced one among others, which have to be looked for.
    pub(super) fn look_for_announced(&mut self) {
        if let Some(Announced { since, .. }) = self.announced.take() {
            self.appeared.add(Appeared::Since(since));
            self.dirty = true;
        }
    }

    /// Forgets an item that was announced while the reserve was under way that has found it.
    pub(super) fn forget_announced(&mut self, deliveries: &[(usize, Delivery)]) {
        let has_found = |item| deliveries.iter().any(|(_, found)| found.item.id == item);
        self.announced.take_if(|announced| has_found(announced.item));
    }
}

impl Dispatcher {
    /// Records another broker's announcement of an item. If there is nothing else, the next reserve claims it by its id.
    pub(in crate::engine) fn announced(&self, item: ItemId, since: Timestamp, now: Timestamp) {
        {
            let mut state = self.state.lock();
            if since > now || !state.expects_nothing_ahead(now) {
                drop(state);
                return self.inserted_elsewhere(Some(since), now);
            }
            state.announced = Some(Announced { item, since });
            state.merged_until = Some(now + WINDOW);
            state.woken_by = Wake::Signal;
        }
        self.wake.notify_one();
    }
}
