//! Pushes into a queue begin one after the other, and a large one waits a moment for its way to be clear: once one has gone through the queue, those behind it
//! cannot go directly before a reserve has seen the end of the queue again.

use std::{sync::Arc, time::Duration};

use sluicegate_proto::backoff::Backoff;
use tokio::{
    sync::{Mutex, MutexGuard},
    task::unconstrained,
    time::{Instant, sleep, timeout},
};

use super::{DirectPush, LARGE, PushInFlight};
use crate::{
    engine::{Engine, dispatch::Dispatcher},
    store::Push,
};

/// How often it looks: what it waits for are events of the dispatcher, of streams, and of other pushes.
const LOOK: Duration = Duration::from_millis(1);
/// How long others wait at most for a turn to end: its caller may have other things to do.
const LONGEST_TURN: Duration = Duration::from_secs(5);
/// How long no push waits after one has waited in vain, so that producers are not slowed by consumers that cannot keep up.
const PAUSES: Backoff = Backoff::new(Duration::from_secs(2), Duration::from_secs(30));

/// The pushes of a queue that are about to begin.
#[derive(Default)]
pub(in crate::engine) struct Turns(Mutex<Waits>);

/// What the pushes of a queue have waited.
#[derive(Default)]
pub(in crate::engine) struct Waits {
    /// How many in a row have waited in vain.
    in_vain: u32,
    /// Until when none waits again.
    pause: Option<Instant>,
}

impl Waits {
    fn may_wait(&self) -> bool {
        self.pause.is_none_or(|until| until <= Instant::now())
    }

    fn ended(&mut self, in_vain: bool) {
        if in_vain {
            self.pause = Some(Instant::now() + PAUSES.delay(self.in_vain));
            self.in_vain += 1;
        } else {
            *self = Self::default();
        }
    }
}

impl Turns {
    /// Waits for the turn of a push, which ends when the result is dropped. Turns are taken in the order in which this is polled first.
    /// Whoever waits too long goes on without.
    pub(in crate::engine) async fn next(&self) -> Option<MutexGuard<'_, Waits>> {
        timeout(LONGEST_TURN, unconstrained(self.0.lock())).await.ok()
    }
}

impl Engine {
    /// Begins a push whose turn it is: its items are reserved for a stream of this broker if nothing can be ahead of them, or if that is so in a moment.
    pub(in crate::engine) async fn begin_in_turn(
        self: &Arc<Self>,
        dispatcher: &Arc<Dispatcher>,
        mut turn: MutexGuard<'_, Waits>,
        in_flight: &mut PushInFlight<'_>,
        pushes: &mut [Push],
    ) -> Option<DirectPush> {
        let direct = self.begin_direct_push(dispatcher, in_flight, pushes);
        if direct.is_some() || !turn.may_wait() {
            return direct;
        }
        let bytes: usize = pushes.iter().map(|push| push.item.payload.len()).sum();
        if bytes < LARGE {
            return None;
        }
        let until = Instant::now() + self.limits.max_push_wait;
        while self.may_go_directly(pushes) && dispatcher.may_take_soon(pushes.len(), bytes) {
            if Instant::now() >= until {
                turn.ended(true);
                return None;
            }
            sleep(LOOK).await;
            let direct = self.begin_direct_push(dispatcher, in_flight, pushes);
            if direct.is_some() {
                turn.ended(false);
                return direct;
            }
        }
        None
    }
}

impl Dispatcher {
    /// Returns true if a push of so many items and bytes can go directly once the reserves and pushes that are under way have ended,
    /// and its stream has sent what it was assigned. Several items go to a stream that is the only one.
    fn may_take_soon(&self, items: usize, bytes: usize) -> bool {
        let state = self.state.lock();
        !state.consumers.calls_wait() && state.consumers.have_places(items, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_wait_in_vain_there_is_a_pause() {
        let mut waits = Waits::default();
        assert!(waits.may_wait());
        waits.ended(true);
        assert!(!waits.may_wait());
        waits.ended(false);
        assert!(waits.may_wait(), "the way was clear since");
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_that_does_not_end_holds_up_others_for_a_limited_time() {
        let turns = Turns::default();
        let turn = turns.next().await;
        assert!(turn.is_some());
        assert!(turns.next().await.is_none());
        drop(turn);
        assert!(turns.next().await.is_some());
    }

    #[test]
    fn a_pause_ends() {
        let mut waits = Waits::default();
        waits.ended(true);
        waits.pause = Some(Instant::now());
        assert!(waits.may_wait());
        assert_eq!(waits.in_vain, 1, "the next pause is longer");
    }
}
