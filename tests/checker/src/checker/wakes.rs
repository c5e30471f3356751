//! Waiting consumers: what is ready reaches one of them in bounded time.

use super::{Checker, key::Key, state::Call, streams::Taker};
use crate::{
    history::{CallId, Request, Time},
    rules::Rule,
};

/// How many spans of waiting in vain are remembered for each queue.
const WAITS: usize = 64;

/// Returns whether a consumer waits: it has room, and takes what comes. With a limit of bytes there is room for any item if the consumer
/// holds none.
fn waits(call: &Call) -> bool {
    match &call.request {
        Request::Pop { wait, .. } | Request::Reserve { wait, .. } => *wait > 0,
        Request::Consume(consume) => {
            let most = match consume.max_in_flight_bytes {
                0 => u64::from(call.flow.least()),
                _ => u64::from(call.flow.least().min(1)),
            };
            !consume.slow && call.surely_not_free < most
        }
        _ => false,
    }
}

impl Checker {
    /// A consumer ends or is answered with nothing: what was ready all the while should have reached it.
    pub(super) fn waited_in_vain(&mut self, id: CallId, queue: &str) {
        let Some(call) = self.calls.get(&id).filter(|call| waits(call)) else { return };
        let (from, to) = (call.idle.at, self.now.at);
        let Some(queue) = self.queues.get_mut(&Key::of(queue)) else { return };
        if to - from > self.options.wake {
            queue.waits.push_back((from, to, self.now.event));
            if queue.waits.len() > WAITS {
                queue.waits.pop_front();
            }
        }
    }

    /// An item is delivered: nobody waited for it too long.
    pub(super) fn check_wake(&mut self, id: Key, taker: Taker) {
        if !taker.slow {
            self.check_overdue_item(id);
        }
    }

    /// Nothing that is still there has been ready for too long while somebody waited.
    pub(super) fn check_overdue(&mut self) {
        let overdue = |ready: Option<Time>| {
            ready.is_some_and(|ready| ready + self.options.wake < self.now.at)
        };
        let items = self.items.iter().filter(|(_, item)| overdue(item.ready));
        let ids: Vec<Key> =
            items.filter(|(_, item)| !self.may_have_left(item, false)).map(|(id, _)| *id).collect();
        for id in ids {
            self.check_overdue_item(id);
        }
    }

    fn check_overdue_item(&mut self, id: Key) {
        let Some(item) = self.items.get(&id) else { return };
        let Some(ready) = item.ready else { return };
        let Some(queue) = self.queues.get(&item.queue) else { return };
        let since = ready.max(queue.excused_until).max(self.fault_ended.at);
        let is_known = self.clock_stepped <= item.entered.1.event;
        if self.faults > 0 || queue.halted || !is_known || since + self.options.wake >= self.now.at
        {
            return;
        }
        let too_long =
            |from: Time, to: Time| to.saturating_sub(from.max(since)) > self.options.wake;
        let open = queue.consumers.iter().filter_map(|call| self.calls.get(call));
        let waiting = open
            .filter(|call| waits(call) && too_long(call.idle.at, self.now.at))
            .map(|call| call.idle.event.max(call.start.event))
            .next();
        let ended = queue.waits.iter().find(|(from, to, _)| too_long(*from, *to));
        let Some(consumer) = waiting.or(ended.map(|(_, _, event)| *event)) else { return };
        let waited = (self.now.at - since) / 1000;
        let explanation = format!("ready for {waited} ms while a consumer of its queue waited");
        let events = [item.entered.0.event, item.entered.1.event, consumer];
        self.violate(Rule::NotWoken, Some(id), "", explanation, &events);
    }
}
