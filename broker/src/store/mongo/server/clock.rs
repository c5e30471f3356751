//! Keeps the clock on the server's time. All brokers of one deployment agree on it, whatever the clocks of their
//! machines say.

use std::{
    sync::atomic::{AtomicI64, Ordering},
    time::{Duration, Instant},
};

use mongodb::{
    bson::{Document, doc},
    options::{ReturnDocument, WriteConcern},
};
use tokio_util::sync::CancellationToken;

use crate::{
    domain::{Clock, Timestamp},
    store::{
        Result,
        mongo::server::{
            error::{broken, failed},
            places::Db,
            time_limit::{ANSWER_LIMIT, within},
        },
    },
};

/// Pause between readings of the server's time.
const EVERY: Duration = Duration::from_secs(3);
/// Number of samples for a correction.
const SAMPLES: usize = 5;
/// Differences in milliseconds up to this plus half the round trip are errors of measurement.
const TOLERANCE_MS: i64 = 2;

/// Milliseconds by which the clock may be corrected backwards without being seen to go back: it stands still for as
/// long.
const HELD_BACK: i64 = 10_000;

/// The last time that a broker used. Items are handed out in the order of times, so an item that is pushed after a
/// correction must not come before one that was pushed before it.
#[derive(Default)]
pub(crate) struct Given(AtomicI64);

impl Given {
    /// Returns the time to use: not before the last one, unless the clock was far ahead.
    pub(crate) fn next(&self, now: Timestamp) -> Timestamp {
        let last = self.0.fetch_max(now.0, Ordering::Relaxed);
        if last - now.0 > HELD_BACK {
            self.0.store(now.0, Ordering::Relaxed);
            return now;
        }
        Timestamp(now.0.max(last))
    }
}

/// The server whose time counts.
pub(crate) struct Source {
    pub(crate) db: Db,
    /// True if `hello` is answered by any of several routers, each with a clock of its own.
    pub(crate) sharded: bool,
}

impl Source {
    async fn time(&self) -> Result<i64> {
        if self.sharded {
            return self.time_of_shard().await;
        }
        let reply = within(&self.db, ANSWER_LIMIT, self.db.run_command(doc! { "hello": 1 })).await;
        let reply = reply.map_err(failed)?;
        let server = reply.get_datetime("localTime").map_err(|_| broken("hello tells no time"))?;
        Ok(server.timestamp_millis())
    }

    /// Returns the time of the one shard that holds the counters, which is the same for all brokers. Even `$$NOW` is
    /// the time of the router; the time that `$currentDate` writes is that of the shard.
    async fn time_of_shard(&self) -> Result<i64> {
        let counters = self.db.collection::<Document>("counters");
        let update = counters
            .find_one_and_update(doc! { "_id": "clock" }, doc! { "$currentDate": { "at": true } })
            .upsert(true)
            .return_document(ReturnDocument::After)
            .write_concern(WriteConcern::nodes(1));
        let found = within(&self.db, ANSWER_LIMIT, update).await.map_err(failed)?;
        let at = found.as_ref().and_then(|found| found.get_datetime("at").ok());
        at.map(|at| at.timestamp_millis()).ok_or_else(|| broken("the shard tells no time"))
    }
}

struct Sample {
    /// Milliseconds to add to the clock.
    offset: i64,
    round_trip: Duration,
}

async fn sample(source: &Source, clock: &Clock) -> Result<Sample> {
    let asked = Instant::now();
    let server = source.time().await?;
    let (now, round_trip) = (clock.now(), asked.elapsed());
    let server = server + (round_trip / 2).as_millis() as i64;
    Ok(Sample { offset: server - now.0, round_trip })
}

/// Sets the clock by the quickest of several answers.
pub(crate) async fn set(source: &Source, clock: &Clock) -> Result<()> {
    let mut best = sample(source, clock).await?;
    for _ in 1..SAMPLES {
        let next = sample(source, clock).await?;
        if next.round_trip < best.round_trip {
            best = next;
        }
    }
    if best.offset.abs() > TOLERANCE_MS / 2 {
        clock.set(Timestamp(clock.now().0 + best.offset));
    }
    Ok(())
}

/// Corrects the clock until stopped. Between readings the clock runs on by itself.
pub(crate) async fn discipline(
    source: Source,
    clock: std::sync::Arc<Clock>,
    stop: CancellationToken,
) {
    while stop.run_until_cancelled(tokio::time::sleep(EVERY)).await.is_some() {
        let Ok(sample) = sample(&source, &clock).await else { continue };
        let tolerance = TOLERANCE_MS + (sample.round_trip / 2).as_millis() as i64;
        if sample.offset.abs() <= tolerance {
            continue;
        }
        if sample.offset.abs() > 1_000 {
            tracing::warn!(offset_ms = sample.offset, "the server's clock has stepped; following");
        }
        if let Err(error) = set(&source, &clock).await {
            tracing::debug!(%error, "the clock could not be set");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_given_out_does_not_go_back_over_a_correction() {
        let given = Given::default();
        let at = |ms| given.next(Timestamp(ms)).0;
        assert_eq!([at(100_000), at(99_000), at(99_500)], [100_000; 3]);
        assert_eq!(at(100_001), 100_001);
        // A clock that was far ahead is set back at once. Otherwise no lease would lapse for hours.
        assert_eq!([at(50_000), at(50_001)], [50_000, 50_001]);
    }
}
