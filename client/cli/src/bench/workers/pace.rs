//! Waiting for an instant more precisely than the runtime's timer does, and pausing after errors.

use std::{
    error::Error,
    time::{Duration, Instant},
};

use crate::bench::measure::figures::Figures;

/// The runtime's timer is late by up to this much, which is too coarse where a millisecond counts.
const TIMER_STEP: Duration = Duration::from_millis(2);

/// A thread wakes up this long before the instant and spins until then.
const WAKE_UP: Duration = Duration::from_micros(300);

/// Waits until `due`, and hardly longer: a late return would be counted as latency of the broker.
pub(crate) async fn sleep_until(due: Instant) {
    if let Some(early) = due.checked_sub(TIMER_STEP) {
        tokio::time::sleep_until(early.into()).await;
    }
    let rest = due.saturating_duration_since(Instant::now()).saturating_sub(WAKE_UP);
    if !rest.is_zero() {
        // Fails only if the runtime ends.
        let _ = tokio::task::spawn_blocking(move || std::thread::sleep(rest)).await;
    }
    while Instant::now() < due {
        std::hint::spin_loop();
    }
}

/// Counts an error, and pauses so that a broker that is down is not flooded with calls.
pub(crate) async fn pause_after(error: &(dyn Error + Sync + 'static), figures: &mut Figures) {
    figures.failed(error);
    tokio::time::sleep(Duration::from_millis(50)).await;
}
