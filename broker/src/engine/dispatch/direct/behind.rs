//! Direct pushes that begin while a reserve is under way: what they bring is handed out behind what the reserve brings.

use std::{sync::Arc, time::Duration};

use tokio::time::timeout;

use crate::{
    domain::Timestamp,
    engine::{Engine, dispatch::Dispatcher},
};

/// How often a reserve that takes long is looked at: a few times in half of the shortest lease.
const LOOK: Duration = Duration::from_millis(20);

/// A reserve that is under way. Direct pushes that began behind it wait until this is dropped.
pub(in crate::engine::dispatch) struct UnderWay<'a> {
    engine: &'a Arc<Engine>,
    dispatcher: &'a Arc<Dispatcher>,
    is_left: bool,
}

impl<'a> UnderWay<'a> {
    /// Notes that a reserve is under way, for which the dispatcher has begun a round.
    pub(in crate::engine::dispatch) fn new(
        engine: &'a Arc<Engine>,
        dispatcher: &'a Arc<Dispatcher>,
    ) -> Self {
        Self { engine, dispatcher, is_left: true }
    }

    /// Waits for a part of the reserve. Pushes do so for a limited time: what they brought may be others' then.
    pub(in crate::engine::dispatch) async fn watch<T>(&self, part: impl Future<Output = T>) -> T {
        tokio::pin!(part);
        loop {
            if let Ok(done) = timeout(LOOK, &mut part).await {
                return done;
            }
            self.dispatcher.state.lock().give_up_if_overdue(self.engine.now());
            self.dispatcher.return_soon(self.engine);
        }
    }

    /// Ends the reserve, whose items are handed out. If something `is_left` in the queue that the reserve did not hand out, or may be, that is ahead of what
    /// the pushes bring.
    pub(in crate::engine::dispatch) fn end(mut self, is_left: bool) {
        self.is_left = is_left;
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let (is_wanted, now) = (!self.engine.is_draining(), self.engine.now());
        if self.dispatcher.end_reserve(self.is_left, is_wanted, now) {
            self.dispatcher.return_soon(self.engine);
        }
    }
}

impl Dispatcher {
    /// Ends a reserve of the loop, and hands out what direct pushes that began behind it have brought. Returns true if items are to be rolled back.
    pub(super) fn end_reserve(&self, is_left: bool, is_wanted: bool, now: Timestamp) -> bool {
        let mut state = self.state.lock();
        state.direct.reserve_ends(is_left);
        state.hand_out_pushed(is_wanted, now)
    }
}
