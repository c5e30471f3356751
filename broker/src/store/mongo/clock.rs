//! Keeps the clock on the server's time: all brokers on one deployment agree on it, whatever their
//! machines think.

use std::time::{Duration, Instant};

use mongodb::{Database, bson::doc};
use tokio_util::sync::CancellationToken;

use super::errors::{broken, failed};
use crate::{
    domain::{Clock, Timestamp},
    store::Result,
};

/// How often the server is asked.
const EVERY: Duration = Duration::from_secs(3);
/// Samples for a correction.
const SAMPLES: usize = 5;
/// Differences up to this plus half the round trip are the measurement's, not the clock's.
const TOLERANCE_MS: i64 = 2;

struct Sample {
    /// What the clock lacks, in milliseconds.
    offset: i64,
    round_trip: Duration,
}

async fn sample(db: &Database, clock: &Clock) -> Result<Sample> {
    let asked = Instant::now();
    let reply = db.run_command(doc! { "hello": 1 }).await.map_err(failed)?;
    let (now, round_trip) = (clock.now(), asked.elapsed());
    let server = reply.get_datetime("localTime").map_err(|_| broken("hello tells no time"))?;
    let server = server.timestamp_millis() + (round_trip / 2).as_millis() as i64;
    Ok(Sample { offset: server - now.0, round_trip })
}

/// Sets the clock by the quickest of several answers.
pub(super) async fn set(db: &Database, clock: &Clock) -> Result<()> {
    let mut best = sample(db, clock).await?;
    for _ in 1..SAMPLES {
        let next = sample(db, clock).await?;
        if next.round_trip < best.round_trip {
            best = next;
        }
    }
    if best.offset.abs() > TOLERANCE_MS / 2 {
        clock.set(Timestamp(clock.now().0 + best.offset));
    }
    Ok(())
}

/// Keeps the clock right until stopped. Between answers it runs on by itself.
pub(super) async fn discipline(
    db: Database,
    clock: std::sync::Arc<Clock>,
    stop: CancellationToken,
) {
    while stop.run_until_cancelled(tokio::time::sleep(EVERY)).await.is_some() {
        let Ok(sample) = sample(&db, &clock).await else { continue };
        let tolerance = TOLERANCE_MS + (sample.round_trip / 2).as_millis() as i64;
        if sample.offset.abs() <= tolerance {
            continue;
        }
        if sample.offset.abs() > 1_000 {
            tracing::warn!(offset_ms = sample.offset, "the server's clock has stepped; following");
        }
        if let Err(error) = set(&db, &clock).await {
            tracing::debug!(%error, "the clock could not be set");
        }
    }
}
