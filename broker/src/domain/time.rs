//! Times and the clock. Time is that of the store: all brokers on one store agree on it.

use std::{
    ops::{Add, Sub},
    sync::atomic::{AtomicI64, Ordering},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use parking_lot::RwLock;

/// A time in milliseconds since the Unix epoch, UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(pub i64);

/// A time after all others: 4999-12-31T00:00:00Z. For entries without a time of their own, stores
/// may use later years up to 9999, which every language can read.
pub const FOREVER: Timestamp = Timestamp(95_617_497_600_000);

impl Timestamp {
    /// Returns the milliseconds since the Unix epoch.
    pub const fn millis(self) -> i64 {
        self.0
    }

    /// Returns the duration until `later`; zero if that time is past.
    pub fn until(self, later: Self) -> Duration {
        Duration::from_millis(u64::try_from(later.0.saturating_sub(self.0)).unwrap_or(0))
    }
}

impl Add<Duration> for Timestamp {
    type Output = Self;
    /// Saturates at [`FOREVER`]. Parts of a millisecond are rounded up, so that nothing is early.
    fn add(self, span: Duration) -> Self {
        let millis = span.as_nanos().div_ceil(1_000_000);
        let millis = i64::try_from(millis).unwrap_or(i64::MAX);
        Self(self.0.saturating_add(millis).min(FOREVER.0))
    }
}

impl Sub<Duration> for Timestamp {
    type Output = Self;
    fn sub(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(i64::try_from(span.as_millis()).unwrap_or(i64::MAX)))
    }
}

/// A clock that follows the time of a server or of this machine. The clock runs evenly between
/// corrections, also while the machine is suspended, and tests can advance it.
#[derive(Debug)]
pub struct Clock {
    /// The machine's uptime when the clock was made.
    origin: Duration,
    setting: RwLock<Setting>,
    /// By how much tests have shifted this machine's time, in milliseconds.
    machine_shift: AtomicI64,
}

/// The reading of the clock, in milliseconds; `elapsed` counts from the origin of the clock.
#[derive(Debug, Clone, Copy)]
struct Setting {
    /// Unix time at the origin, according to the last correction.
    epoch: i64,
    /// By how much the clock is ahead, which it loses by running at half its speed.
    lag: i64,
    /// When it began to lose time, in milliseconds since the origin.
    slow_from: i64,
}

impl Setting {
    const fn even(epoch: i64) -> Self {
        Self { epoch, lag: 0, slow_from: 0 }
    }

    fn at(self, elapsed: i64) -> i64 {
        self.epoch + elapsed - self.lag.min((elapsed - self.slow_from) / 2)
    }

    /// Returns the reading that the clock would have if it were not ahead.
    fn target(self, elapsed: i64) -> i64 {
        self.epoch + elapsed - self.lag
    }
}

impl Clock {
    /// Returns a clock that is set to this machine's time.
    pub fn system() -> Self {
        Self {
            origin: machine_uptime(),
            setting: RwLock::new(Setting::even(system_millis())),
            machine_shift: AtomicI64::new(0),
        }
    }

    /// Returns the time.
    pub fn now(&self) -> Timestamp {
        Timestamp(self.setting.read().at(self.elapsed()))
    }

    /// Sets the clock: it is `now` at this instant.
    pub fn set(&self, now: Timestamp) {
        *self.setting.write() = Setting::even(now.0 - self.elapsed());
    }

    /// Returns the time, following this machine's clock and never going back.
    ///
    /// If the machine's clock is ahead, this clock is set to the same time immediately: after a
    /// suspend that time has passed for everyone else, and a corrected clock determines when
    /// delayed items are due. If the machine's clock was set back, this clock runs at half its
    /// speed until both agree. Ready items stay ready, and meanwhile leases and delays last up to
    /// twice as long, however far the clock was set back.
    pub fn now_by_machine(&self) -> Timestamp {
        let (machine, elapsed, setting) =
            (self.machine_now(), self.elapsed(), *self.setting.read());
        if (machine.0 - setting.target(elapsed)).abs() <= JITTER_MS {
            return Timestamp(setting.at(elapsed));
        }
        let mut setting = self.setting.write();
        let elapsed = self.elapsed();
        let now = setting.at(elapsed);
        *setting = if machine.0 >= now {
            Setting::even(machine.0 - elapsed)
        } else {
            Setting { epoch: now - elapsed, lag: now - machine.0, slow_from: elapsed }
        };
        Timestamp(now.max(machine.0))
    }

    /// Advances the clock, and what it takes for this machine's time; for tests.
    pub fn advance(&self, by: Duration) {
        self.step_machine(by.as_millis() as i64);
        self.setting.write().epoch += by.as_millis() as i64;
    }

    /// Shifts what this clock takes for this machine's time, forward or back; for tests.
    pub fn step_machine(&self, millis: i64) {
        self.machine_shift.fetch_add(millis, Ordering::Relaxed);
    }

    /// Returns this machine's time, independently of any [`Clock`].
    pub fn machine_time() -> Timestamp {
        Timestamp(system_millis())
    }

    fn machine_now(&self) -> Timestamp {
        Timestamp(system_millis() + self.machine_shift.load(Ordering::Relaxed))
    }

    fn elapsed(&self) -> i64 {
        machine_uptime().saturating_sub(self.origin).as_millis() as i64
    }
}

/// Differences up to this value come from reading two clocks one after the other.
const JITTER_MS: i64 = 2;

/// Returns the time since the start of the machine, with the time in which it was suspended.
/// [`std::time::Instant`] does not count that time on Linux, so after a suspend a broker would take
/// leases for valid that have lapsed for everybody else.
#[cfg(target_os = "linux")]
fn machine_uptime() -> Duration {
    let uptime = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(uptime.tv_sec as u64, uptime.tv_nsec as u32)
}

/// Returns the time since the first call.
#[cfg(not(target_os = "linux"))]
fn machine_uptime() -> Duration {
    static FIRST: std::sync::LazyLock<std::time::Instant> =
        std::sync::LazyLock::new(std::time::Instant::now);
    FIRST.elapsed()
}

fn system_millis() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: i64 = 60_000;

    /// How many milliseconds a test may take between two readings.
    const SLACK: i64 = 20_000;

    /// A lease or a delay that ended a moment too early would hand an item out too early.
    #[test]
    fn nothing_is_early() {
        let at = |span| (Timestamp(10) + span).millis();
        assert_eq!(at(Duration::from_millis(5)), 15);
        assert_eq!(at(Duration::from_nanos(1)), 11);
        assert_eq!(at(Duration::from_micros(5_001)), 16);
        assert_eq!((Timestamp(10) + Duration::MAX, FOREVER + Duration::MAX), (FOREVER, FOREVER));
    }

    #[test]
    fn the_time_of_the_machine_is_one_of_our_days() {
        let now = Clock::machine_time();
        assert!(Timestamp(1_700_000_000_000) < now && now < FOREVER, "{now:?}");
    }

    #[test]
    fn durations_between_times_are_never_negative() {
        assert_eq!(Timestamp(3).until(Timestamp(10)), Duration::from_millis(7));
        assert_eq!(Timestamp(10).until(Timestamp(3)), Duration::ZERO);
        assert_eq!(Timestamp(i64::MAX).until(Timestamp(i64::MIN)), Duration::ZERO);
        assert_eq!(Timestamp(10) - Duration::from_millis(7), Timestamp(3));
        assert_eq!(Timestamp(3) - Duration::from_millis(7), Timestamp(-4));
        assert_eq!(Timestamp(i64::MIN) - Duration::MAX, Timestamp(i64::MIN));
    }

    /// Returns a clock that was made when the machine was started: one whose age matters if it is not taken off somewhere.
    fn old_clock() -> Clock {
        let clock = Clock { origin: Duration::ZERO, ..Clock::system() };
        clock.set(Clock::machine_time());
        clock
    }

    /// Asserts that the clock shows this time, or that of a moment later.
    fn assert_shows(clock: &Clock, time: Timestamp) {
        let ahead = clock.now().0 - time.0;
        assert!((-JITTER_MS..SLACK).contains(&ahead), "{ahead} ms");
    }

    #[test]
    fn a_clock_goes_on_from_the_time_to_which_it_is_set() {
        let clock = old_clock();
        for time in [Timestamp(1_000_000), Timestamp(1_700_000_000_123), Timestamp(5)] {
            clock.set(time);
            assert_shows(&clock, time);
            clock.advance(Duration::from_millis(MINUTE as u64));
            assert_shows(&clock, Timestamp(time.0 + MINUTE));
        }
    }

    /// Whatever time is read next, at whatever age of the clock.
    #[test]
    fn a_clock_goes_on_from_where_the_machine_has_brought_it() {
        let clock = old_clock();
        let before = clock.now_by_machine();
        assert_shows(&clock, before);
        clock.step_machine(10 * MINUTE);
        let ahead = clock.now_by_machine();
        assert_shows(&clock, Timestamp(before.0 + 10 * MINUTE));
        assert_shows(&clock, ahead);
        clock.step_machine(-30 * MINUTE);
        let held = clock.now_by_machine();
        assert!(held >= ahead);
        assert_shows(&clock, held);
        let after_an_hour = clock.setting.read().at(clock.elapsed() + 60 * MINUTE) - held.0;
        let lost = 60 * MINUTE - after_an_hour;
        assert!((30 * MINUTE - SLACK..30 * MINUTE + SLACK).contains(&lost), "{lost} ms");
    }

    #[test]
    fn a_clock_that_tests_advance_has_the_machine_advance_too() {
        let clock = old_clock();
        let before = clock.now_by_machine();
        clock.advance(Duration::from_millis(10 * MINUTE as u64));
        assert_shows(&clock, Timestamp(before.0 + 10 * MINUTE));
        let now = clock.now_by_machine();
        assert!(now.0 - before.0 >= 10 * MINUTE && clock.setting.read().lag < SLACK);
    }

    #[test]
    fn a_clock_follows_the_machine_forward_immediately() {
        let clock = Clock::system();
        let before = clock.now_by_machine();
        clock.step_machine(10 * MINUTE);
        let ahead = clock.now_by_machine().0 - before.0;
        assert!((10 * MINUTE..10 * MINUTE + SLACK).contains(&ahead), "{ahead} ms");
    }

    #[test]
    fn a_clock_never_goes_back_and_runs_at_half_its_speed_until_the_machine_has_caught_up() {
        let clock = Clock::system();
        let before = clock.now_by_machine();
        clock.step_machine(-10 * MINUTE);
        let after = clock.now_by_machine();
        assert!((0..SLACK).contains(&(after.0 - before.0)), "{before:?}, {after:?}");

        let setting = Setting { epoch: 1_000_000, lag: 10 * MINUTE, slow_from: 500 };
        let readings = [500, 501, 502, 500 + MINUTE, 500 + 20 * MINUTE, 500 + 21 * MINUTE];
        let shown = readings.map(|elapsed| setting.at(elapsed) - setting.at(500));
        assert_eq!(shown, [0, 1, 1, MINUTE / 2, 10 * MINUTE, 11 * MINUTE]);
    }

    #[test]
    fn a_step_back_that_is_undone_has_no_lasting_effect() {
        let clock = Clock::system();
        clock.step_machine(-10 * MINUTE);
        let held = clock.now_by_machine();
        clock.step_machine(10 * MINUTE);
        let again = clock.now_by_machine().0 - held.0;
        assert!((0..SLACK).contains(&again), "{again} ms");
        assert!(clock.setting.read().lag < SLACK);
    }

    #[test]
    fn the_target_of_a_clock_is_what_it_shows_when_it_has_lost_its_lead() {
        let setting = Setting { epoch: 1_000_000, lag: MINUTE, slow_from: 500 };
        assert_eq!(setting.at(500) - setting.target(500), MINUTE);
        for elapsed in [500 + 2 * MINUTE, 500 + 9 * MINUTE] {
            assert_eq!(setting.at(elapsed), setting.target(elapsed));
            assert_eq!(setting.target(elapsed), 1_000_000 + elapsed - MINUTE);
        }
    }

    /// Half a millisecond is nothing: a clock that began to lose its lead anew with each reading would never lose it.
    #[test]
    fn a_clock_that_loses_its_lead_goes_on_losing_it_when_it_is_read() {
        let clock = Clock::system();
        clock.step_machine(-10 * MINUTE);
        clock.now_by_machine();
        // The machine may do something else between two readings of its own, but not each time.
        let goes_on = (0..1_000).any(|_| {
            let since = clock.setting.read().slow_from;
            while clock.elapsed() == since {}
            clock.now_by_machine();
            clock.setting.read().slow_from == since
        });
        assert!(goes_on);
    }

    #[test]
    fn a_clock_that_is_read_continuously_loses_its_lead() {
        let clock = Clock::system();
        clock.step_machine(-20);
        while clock.now_by_machine().0 - clock.machine_now().0 > JITTER_MS {}
    }
}
