//! Figures: totals that never go back, and sums that are right at rest.

use super::{
    Checker,
    key::Key,
    state::{Call, Count},
};
use crate::{
    history::{Figures, Listed, QueueAtRest, Request, State},
    rules::Rule,
};

fn totals(figures: &Figures) -> [(&'static str, u64); 9] {
    [
        ("pushed", figures.pushed),
        ("delivered", figures.delivered),
        ("committed", figures.committed),
        ("rolled_back", figures.rolled_back),
        ("moved", figures.moved),
        ("dead_lettered", figures.dead_lettered),
        ("expired", figures.expired),
        ("popped", figures.popped),
        ("discarded", figures.discarded),
    ]
}

impl Checker {
    /// The totals that a broker answers never go back.
    pub(super) fn check_totals(&mut self, call: &Call, figures: Figures) {
        let Request::GetQueueStats { queue: name } = &call.request else { return };
        let queue = self.queue(name);
        let deletions = self.queues.get(&queue).map(|queue| queue.deletions).unwrap_or_default();
        let key = queue.and(call.broker);
        let before = self
            .totals_seen
            .get(&key)
            .filter(|(_, at)| *at < call.start && !deletions.since(at.event));
        if let Some((before, at)) = before {
            let event = at.event;
            let pairs = totals(before).into_iter().zip(totals(&figures));
            let back = pairs.filter(|((_, before), (_, now))| now < before);
            let back: Vec<String> = back
                .map(|((what, before), (_, now))| format!("{what} falls from {before} to {now}"))
                .collect();
            if !back.is_empty() {
                let events = [event, call.start.event];
                self.violate(Rule::Figures, None, name, back.join(", "), &events);
            }
        }
        self.totals_seen.insert(key, (figures, self.now));
    }

    /// At rest the figures are those of what is there and what has happened.
    pub(super) fn check_figures(&mut self, at_rest: &QueueAtRest) {
        let Some(figures) = &at_rest.figures else { return };
        let key = self.queue(&at_rest.queue);
        let count = |state: State| {
            at_rest.items.iter().filter(|item: &&Listed| item.state == state).count() as u64
        };
        let mut wrong = Vec::new();
        for (what, state, figure) in [
            ("ready", State::Ready, figures.ready),
            ("delayed", State::Delayed, figures.delayed),
            ("reserved", State::Reserved, figures.reserved),
            ("blocked", State::Blocked, figures.blocked),
            ("processed", State::Processed, figures.processed),
        ] {
            let listed = count(state);
            if listed != figure {
                wrong.push(format!("{what} is {figure}, and {listed} are listed"));
            }
        }
        let Some(queue) = self.queues.get(&key) else { return };
        let totals = &queue.totals;
        let least = |sure: u64| Count { sure, maybe: u64::MAX / 2 };
        for (what, count, figure) in [
            ("pushed", totals.pushed, figures.pushed),
            ("committed", totals.committed, figures.committed),
            ("popped", totals.popped, figures.popped),
            ("moved", totals.moved, figures.moved),
            ("delivered", least(totals.delivered), figures.delivered),
            (
                "dead_lettered",
                least(totals.dead_lettered),
                figures.dead_lettered + figures.discarded,
            ),
        ] {
            let most = count.sure.saturating_add(count.maybe);
            if !totals.unsure && !(count.sure..=most).contains(&figure) {
                let uncertain = count.maybe.min(u64::MAX / 2);
                let Count { sure, .. } = count;
                wrong.push(format!(
                    "{what} is {figure}; {sure} were answered, {uncertain} are uncertain"
                ));
            }
        }
        if !wrong.is_empty() {
            self.violate(Rule::Figures, None, &at_rest.queue, wrong.join(", "), &[]);
        }
    }

    /// Returns whether a listed item is known to be in a queue.
    pub(super) fn is_in(&self, id: Key, queue: Key) -> bool {
        self.items.get(&id).is_some_and(|item| item.queue == queue)
    }
}
