//! What a dispatcher knows of the time at which its queue's next item becomes eligible.

use std::time::Duration;

use crate::domain::Timestamp;

/// Shortest interval at which an emptied queue is asked when its next item becomes eligible.
const INTERVAL: Duration = Duration::from_millis(200);
/// The same while nothing is known of the time to come.
const INTERVAL_UNKNOWN: Duration = Duration::from_millis(20);

/// When the next item becomes eligible that is not eligible yet.
#[derive(Default)]
pub(super) struct NextDue {
    /// When an item that was seen becomes eligible, or may become eligible.
    at: Option<Timestamp>,
    /// True if no other item becomes eligible before that one, as far as this broker knows. False once that time has come, until the
    /// store has told the one after it: that may come at any moment.
    is_known: bool,
    /// When the store was last asked.
    asked: Timestamp,
    /// True if the store is to be asked as soon as it may be.
    is_to_ask: bool,
}

impl NextDue {
    /// Returns when to look.
    pub(super) fn at(&self) -> Option<Timestamp> {
        let ask = self.is_to_ask.then(|| self.may_ask_from());
        [self.at, ask].into_iter().flatten().min()
    }

    /// Returns true if no item has become eligible until `now`, as far as this broker knows.
    pub(super) fn is_ahead(&self, now: Timestamp) -> bool {
        self.is_known && self.at.is_none_or(|at| at > now)
    }

    /// Notes that an item becomes eligible, or may become eligible, at `at`. Returns true if that is to be looked at earlier than what
    /// was known.
    pub(super) fn add(&mut self, at: Timestamp) -> bool {
        let is_first = self.at().is_none_or(|known| at < known);
        self.at = Some(self.at.map_or(at, |known| known.min(at)));
        is_first
    }

    /// Returns true if it is time to look: once.
    pub(super) fn take(&mut self, now: Timestamp) -> bool {
        self.follow(now);
        let is_due = self.at().is_some_and(|at| at <= now);
        if self.at.is_some_and(|at| at <= now) {
            (self.at, self.is_known) = (None, false);
        }
        self.is_to_ask &= self.may_ask_from() > now;
        is_due
    }

    /// Returns true if the store may be asked. If not, it is time to look when it may be.
    pub(super) fn may_ask(&mut self, now: Timestamp) -> bool {
        self.follow(now);
        self.is_to_ask = self.may_ask_from() > now;
        !self.is_to_ask
    }

    /// Keeps a clock that was set back since the store was asked from holding up the next question.
    fn follow(&mut self, now: Timestamp) {
        self.asked = self.asked.min(now);
    }

    fn may_ask_from(&self) -> Timestamp {
        self.asked + if self.is_known { INTERVAL } else { INTERVAL_UNKNOWN }
    }

    /// Notes what the store has told of the time after a reserve, when it was asked at `asked`.
    pub(super) fn told(&mut self, at: Option<Timestamp>, asked: Timestamp, now: Timestamp) {
        self.asked = asked;
        // An item that was stored behind the reserve is eligible already, and hides those that follow it.
        self.is_known = at.is_none_or(|at| at > now);
        if let Some(at) = at {
            self.add(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKED: Timestamp = Timestamp(1_000);
    const NOW: Timestamp = Timestamp(1_003);

    fn told(at: Option<i64>) -> NextDue {
        let mut next = NextDue::default();
        next.told(at.map(Timestamp), ASKED, NOW);
        next
    }

    #[test]
    fn nothing_is_known_before_the_store_has_told() {
        let mut next = NextDue::default();
        assert!(!next.is_ahead(NOW));
        assert!(next.may_ask(ASKED));
        next.told(None, ASKED, NOW);
        assert!(next.is_ahead(NOW));
    }

    #[test]
    fn a_time_that_has_come_leaves_unknown_what_follows_it() {
        let mut next = told(Some(1_010));
        assert!(next.is_ahead(Timestamp(1_009)));
        assert!(!next.is_ahead(Timestamp(1_010)));
        assert!(!next.take(Timestamp(1_009)));
        assert!(next.take(Timestamp(1_010)));
        assert!(!next.take(Timestamp(1_010)), "once");
        assert!(!next.is_ahead(Timestamp(1_010)));
        assert!(next.add(Timestamp(1_500)), "of an item that was pushed meanwhile");
        assert!(!next.is_ahead(Timestamp(1_010)));
        let again = ASKED + INTERVAL_UNKNOWN;
        assert!(!next.may_ask(Timestamp(1_010)));
        assert_eq!(next.at(), Some(again), "looks again when it may ask");
        assert!(next.take(again));
        assert!(next.may_ask(again));
        next.told(None, again, again);
        assert!(next.is_ahead(again));
        assert_eq!(next.at(), Some(Timestamp(1_500)));
    }

    #[test]
    fn an_answer_that_has_come_leaves_unknown_what_follows_it() {
        let mut next = told(Some(1_003));
        assert!(!next.is_ahead(NOW));
        assert!(next.take(NOW));
        assert!(!next.is_ahead(NOW));
        assert!(!next.may_ask(NOW));
        assert_eq!(next.at(), Some(ASKED + INTERVAL_UNKNOWN));
    }

    #[test]
    fn what_is_known_stays_known_until_the_store_is_asked_again() {
        let mut next = told(None);
        assert_eq!(next.at(), None);
        assert!(!next.may_ask(Timestamp(1_010)));
        let again = ASKED + INTERVAL;
        assert_eq!(next.at(), Some(again));
        assert!(!next.add(Timestamp(1_300)), "looks before that");
        assert!(next.take(again));
        assert!(!next.take(again), "once");
        assert!(next.is_ahead(again));
        assert!(next.may_ask(again));
        assert_eq!(next.at(), Some(Timestamp(1_300)));
    }

    #[test]
    fn a_clock_that_was_set_back_holds_up_no_question() {
        let mut next = told(Some(1_010));
        let back = Timestamp(200);
        assert!(!next.take(back));
        assert!(next.is_ahead(back), "an item that becomes eligible later than it seemed");
        assert!(!next.may_ask(back));
        assert_eq!(next.at(), Some(back + INTERVAL));
        assert!(next.take(back + INTERVAL));
        assert!(next.may_ask(back + INTERVAL));

        let mut next = told(None);
        assert!(!next.may_ask(back), "set back since the last timer");
        assert_eq!(next.at(), Some(back + INTERVAL));
    }

    #[test]
    fn the_first_of_several_times_counts() {
        let mut next = NextDue::default();
        assert!(next.add(Timestamp(1_500)));
        assert!(!next.add(Timestamp(1_500)));
        assert!(!next.add(Timestamp(1_600)));
        next.told(Some(Timestamp(1_700)), ASKED, NOW);
        assert_eq!(next.at(), Some(Timestamp(1_500)));
    }
}
