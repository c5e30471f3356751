//! Peers that fail again and again wait longer and longer: for the answers to refused calls, so that nobody tries out tokens
//! quickly, and for new connections after others were ended because of what came over them.

use std::{collections::HashMap, net::IpAddr, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

/// Failures are counted for this long from the first one on.
const WINDOW: Duration = Duration::from_mins(1);
/// The first delay, which doubles with each failure.
const FIRST_DELAY: Duration = Duration::from_millis(50);
/// The longest delay.
const LONGEST_DELAY: Duration = Duration::from_secs(2);
/// The most peers whose failures are counted at a time.
const MAX_PEERS: usize = 4096;

/// How often peers failed of late.
pub(crate) struct Slowdown {
    /// How many failures in the window have no consequence; 0: none has.
    free: u32,
    peers: Mutex<HashMap<IpAddr, Failures>>,
}

struct Failures {
    count: u32,
    since: Instant,
}

impl Failures {
    fn are_recent(&self, now: Instant) -> bool {
        now - self.since < WINDOW
    }

    fn delay(&self, free: u32) -> Duration {
        match self.count.checked_sub(free + 1) {
            None => Duration::ZERO,
            Some(more) => FIRST_DELAY.saturating_mul(2_u32.saturating_pow(more)).min(LONGEST_DELAY),
        }
    }
}

impl Slowdown {
    /// Returns a slowdown that begins after so many failures in a minute; 0: never.
    pub(crate) fn new(free: u32) -> Self {
        Self { free, peers: Mutex::default() }
    }

    /// Returns how long this network has to wait because of its failures so far.
    pub(crate) fn delay(&self, peer: IpAddr) -> Duration {
        let now = Instant::now();
        let peers = self.peers.lock();
        let failures = peers.get(&peer).filter(|failures| failures.are_recent(now));
        failures.map_or(Duration::ZERO, |failures| failures.delay(self.free))
    }

    /// Counts a failure of this network and returns how long it has to wait from now on.
    pub(crate) fn failed(&self, peer: IpAddr) -> Duration {
        if self.free == 0 {
            return Duration::ZERO;
        }
        let now = Instant::now();
        let mut peers = self.peers.lock();
        if peers.len() >= MAX_PEERS && !peers.contains_key(&peer) {
            peers.retain(|_, failures| failures.are_recent(now));
            if peers.len() >= MAX_PEERS {
                return FIRST_DELAY; // so many at once are one attack
            }
        }
        let failures = peers.entry(peer).or_insert(Failures { count: 0, since: now });
        if !failures.are_recent(now) {
            *failures = Failures { count: 0, since: now };
        }
        failures.count += 1;
        failures.delay(self.free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn who_fails_often_waits_longer_until_a_minute_has_passed() {
        let slowdown = Slowdown::new(3);
        for _ in 0..3 {
            assert_eq!(slowdown.failed(peer("192.0.2.1")), Duration::ZERO);
        }
        let delays: Vec<_> =
            (0..8).map(|_| slowdown.failed(peer("192.0.2.1")).as_millis()).collect();
        assert_eq!(delays, [50, 100, 200, 400, 800, 1600, 2000, 2000]);
        assert_eq!(slowdown.failed(peer("192.0.2.2")), Duration::ZERO, "others do not wait");
        assert_eq!(slowdown.delay(peer("192.0.2.1")), LONGEST_DELAY);
        assert_eq!(slowdown.delay(peer("192.0.2.2")), Duration::ZERO);
        tokio::time::advance(WINDOW).await;
        assert_eq!(slowdown.delay(peer("192.0.2.1")), Duration::ZERO);
        assert_eq!(slowdown.failed(peer("192.0.2.1")), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_peers_that_are_remembered_is_bounded() {
        let slowdown = Slowdown::new(1);
        for n in 0..2 * MAX_PEERS as u32 {
            slowdown.failed(IpAddr::V4(n.into()));
        }
        assert_eq!(slowdown.peers.lock().len(), MAX_PEERS);
        tokio::time::advance(WINDOW).await;
        slowdown.failed(peer("192.0.2.1"));
        assert_eq!(slowdown.peers.lock().len(), 1);
    }

    #[tokio::test]
    async fn no_failures_are_counted_if_the_limit_is_zero() {
        let slowdown = Slowdown::new(0);
        assert!((0..100).all(|_| slowdown.failed(peer("192.0.2.1")).is_zero()));
    }
}
