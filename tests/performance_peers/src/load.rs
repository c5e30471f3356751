//! Makes the load and measures it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures_util::{StreamExt, future::try_join_all, stream::FuturesUnordered};
use hdrhistogram::Histogram;
use parking_lot::Mutex;
use serde_json::{Map, Value};
use tokio::sync::{Semaphore, watch};

use crate::{
    Measurement,
    ledger::Ledger,
    processes::cpu_seconds,
    systems::{BATCH, Consumer, PREFETCH, System, UNCONFIRMED},
};

/// Callers of single items.
const CALLERS: usize = 50;
/// Items that the workers take.
const WORKED: u64 = 30_000;
/// Items a second where latency is measured.
const RATE: u32 = 200;
/// How long a load runs before it is measured.
const WARM_UP: Duration = Duration::from_secs(1);
/// Where nothing arrives for this long, what is missing is lost.
const STALLED: Duration = Duration::from_mins(1);
/// The runtime's timer is late by up to this much, which is too coarse here.
const TIMER_STEP: Duration = Duration::from_millis(2);
/// A thread wakes up this long before an instant and spins until then.
const WAKE_UP: Duration = Duration::from_micros(150);

/// Sizes and bounds of a load.
#[derive(Debug, Clone, Copy)]
struct Shape {
    size: usize,
    batch: usize,
    unconfirmed: usize,
    prefetch: u16,
    /// Items that are pushed and have not arrived, at most; producers wait.
    backlog: usize,
}

const SMALL: Shape =
    Shape { size: 256, batch: BATCH, unconfirmed: UNCONFIRMED, prefetch: PREFETCH, backlog: 5_000 };
/// A batch is 1 MiB.
const LARGE: Shape =
    Shape { size: 64 << 10, batch: 16, unconfirmed: 64, prefetch: 128, backlog: 256 };

/// When a producer ends.
#[derive(Debug, Clone, Copy)]
enum End {
    At(Instant),
    After(u64),
}

/// Counts and processor time at an instant.
#[derive(Debug, Clone, Copy)]
struct Reading {
    at: Instant,
    stored: u64,
    arrived: u64,
    servers: f64,
    own: f64,
}

/// A system under load.
pub(crate) struct Load {
    system: Box<dyn System>,
    servers: Vec<u32>,
    span: Duration,
    churn: u64,
    ledger: Ledger,
}

impl Load {
    pub(crate) fn new(
        system: Box<dyn System>,
        servers: Vec<u32>,
        seconds: f64,
        churn: u64,
    ) -> Self {
        let span = Duration::from_secs_f64(seconds);
        Self { system, servers, span, churn, ledger: Ledger::new() }
    }

    /// Runs one measurement. All items it has pushed have arrived when it returns, but those of `push` and `confirm`.
    pub(crate) async fn run(&self, measurement: Measurement) -> Result<Map<String, Value>> {
        let mut figures = match measurement {
            Measurement::Churn => self.flow(SMALL, End::After(self.churn)).await?,
            Measurement::Push => return self.push().await,
            Measurement::Drain => self.drain().await?,
            Measurement::Steady => self.steady(SMALL).await?,
            Measurement::Large => self.steady(LARGE).await?,
            Measurement::Singles => self.singles().await?,
            Measurement::Workers => self.workers(self.system.workers(CALLERS)).await?,
            Measurement::Pollers => self.workers(self.system.pollers(CALLERS)).await?,
            Measurement::Latency => self.latency().await?,
            Measurement::Confirm => return self.confirm().await,
        };
        figures.insert("missing".to_owned(), self.ledger.missing().into());
        figures.insert("doubled".to_owned(), self.ledger.doubled().into());
        Ok(figures)
    }

    async fn push(&self) -> Result<Map<String, Value>> {
        let before = self.read();
        self.produce(SMALL, End::At(before.at + self.span), None).await?;
        Ok(self.figures(before, self.read()))
    }

    async fn drain(&self) -> Result<Map<String, Value>> {
        let before = self.read();
        self.consume(SMALL.prefetch, None, &produced()).await?;
        Ok(self.figures(before, self.read()))
    }

    async fn flow(&self, shape: Shape, end: End) -> Result<Map<String, Value>> {
        let before = self.read();
        let backlog = Semaphore::new(shape.backlog);
        let (ended, has_ended) = watch::channel(false);
        let produce = async {
            self.produce(shape, end, Some(&backlog)).await?;
            ended.send_replace(true);
            Ok(())
        };
        tokio::try_join!(produce, self.consume(shape.prefetch, Some(&backlog), &has_ended))?;
        Ok(self.figures(before, self.read()))
    }

    async fn steady(&self, shape: Shape) -> Result<Map<String, Value>> {
        let until = Instant::now() + WARM_UP + self.span;
        let (window, _) = tokio::try_join!(self.window(), self.flow(shape, End::At(until)))?;
        let mut figures = self.figures(window.0, window.1);
        figures.insert("size".to_owned(), shape.size.into());
        Ok(figures)
    }

    async fn singles(&self) -> Result<Map<String, Value>> {
        let until = Instant::now() + WARM_UP + self.span;
        let callers =
            self.system.callers(CALLERS).await?.into_iter().map(|mut caller| async move {
                while Instant::now() < until {
                    let payloads = self.ledger.payloads(1, SMALL.size, Instant::now());
                    caller.send(payloads).await?.await?;
                    self.ledger.stored(1);
                }
                anyhow::Ok(())
            });
        let (window, _) = tokio::try_join!(self.window(), try_join_all(callers))?;
        self.drain().await?;
        Ok(self.figures(window.0, window.1))
    }

    async fn workers(
        &self,
        workers: impl Future<Output = Result<Vec<Box<dyn Consumer>>>>,
    ) -> Result<Map<String, Value>> {
        self.produce(SMALL, End::After(WORKED), None).await?;
        let workers = workers.await?;
        let before = self.read();
        let (ended, has_ended) = watch::channel(self.ledger.missing() == 0);
        let ended = &ended;
        try_join_all(workers.into_iter().map(|mut worker| {
            let mut has_ended = has_ended.clone();
            async move {
                while !*has_ended.borrow() {
                    let items = tokio::select! {
                        items = worker.next() => items?,
                        _ = has_ended.changed() => break,
                        () = tokio::time::sleep(STALLED) => anyhow::bail!("no item for a worker"),
                    };
                    self.ledger.arrived(&items);
                    worker.settle().await?;
                    if self.ledger.missing() == 0 {
                        ended.send_replace(true);
                    }
                }
                worker.finish().await
            }
        }))
        .await?;
        Ok(self.figures(before, self.read()))
    }

    async fn latency(&self) -> Result<Map<String, Value>> {
        let latencies = Mutex::new(histogram());
        let (ended, mut has_ended) = watch::channel(false);
        let mut consumer = self.system.consumer(SMALL.prefetch).await?;
        let produce = async {
            let confirmed = |_| ();
            let window = self.paced(confirmed).await?;
            ended.send_replace(true);
            Ok(window)
        };
        let consume = async {
            while let Some(payloads) = self.next(consumer.as_mut(), &mut has_ended).await? {
                for latency in self.ledger.arrived(&payloads) {
                    latencies.lock().saturating_record(latency.as_micros() as u64);
                }
                consumer.settle().await?;
            }
            consumer.finish().await
        };
        let (window, ()) = tokio::try_join!(produce, consume)?;
        Ok(self.latencies(window, &latencies.into_inner()))
    }

    /// Measures until the system says that an item is stored, without a consumer.
    async fn confirm(&self) -> Result<Map<String, Value>> {
        let latencies = Mutex::new(histogram());
        let record = |due: Instant| {
            latencies.lock().saturating_record(due.elapsed().as_micros() as u64);
        };
        let window = self.paced(record).await?;
        Ok(self.latencies(window, &latencies.into_inner()))
    }

    /// Pushes single items at [`RATE`], without waiting for confirmations, for twice the span.
    async fn paced(&self, confirmed: impl Fn(Instant)) -> Result<(Reading, Reading)> {
        let mut caller = self.system.callers(1).await?.remove(0);
        let mut unconfirmed = FuturesUnordered::new();
        tokio::time::sleep(WARM_UP).await;
        let before = self.read();
        let interval = Duration::from_secs(1) / RATE;
        let items = (2.0 * self.span.as_secs_f64() * f64::from(RATE)) as u32;
        for n in 0..items {
            let due = before.at + interval * n;
            let waited = sleep_until(due);
            tokio::pin!(waited);
            loop {
                tokio::select! {
                    () = &mut waited => break,
                    Some(answer) = unconfirmed.next() => confirmed(answer?),
                }
            }
            let sent = caller.send(self.ledger.payloads(1, SMALL.size, due)).await?;
            unconfirmed.push(async move {
                sent.await?;
                self.ledger.stored(1);
                anyhow::Ok(due)
            });
        }
        while let Some(answer) = unconfirmed.next().await {
            confirmed(answer?);
        }
        Ok((before, self.read()))
    }

    /// Pushes batches until `end`, and waits until all are confirmed.
    async fn produce(&self, shape: Shape, end: End, backlog: Option<&Semaphore>) -> Result<()> {
        let mut producer = self.system.producer().await?;
        let mut unconfirmed = FuturesUnordered::new();
        let mut sent = 0;
        let stored = |answer: Result<usize>| answer.map(|n| self.ledger.stored(n));
        loop {
            let n = match end {
                End::At(until) if Instant::now() >= until => 0,
                End::At(_) => shape.batch,
                End::After(items) => shape.batch.min((items - sent) as usize),
            };
            if n == 0 {
                break;
            }
            while (unconfirmed.len() + 1) * shape.batch > shape.unconfirmed {
                stored(unconfirmed.next().await.context("nothing is unconfirmed")?)?;
            }
            if let Some(backlog) = backlog {
                let room = backlog.acquire_many(n as u32);
                tokio::pin!(room);
                loop {
                    tokio::select! {
                        room = &mut room => break room?.forget(),
                        Some(answer) = unconfirmed.next() => stored(answer)?,
                    }
                }
            }
            let payloads = self.ledger.payloads(n, shape.size, Instant::now());
            let confirmation = producer.send(payloads).await?;
            unconfirmed.push(async move { confirmation.await.map(|()| n) });
            sent += n as u64;
        }
        while let Some(answer) = unconfirmed.next().await {
            stored(answer)?;
        }
        Ok(())
    }

    /// Takes and settles items until the producer has ended and everything has arrived.
    async fn consume(
        &self,
        prefetch: u16,
        backlog: Option<&Semaphore>,
        has_ended: &watch::Receiver<bool>,
    ) -> Result<()> {
        let mut has_ended = has_ended.clone();
        let mut consumer = self.system.consumer(prefetch).await?;
        while let Some(payloads) = self.next(consumer.as_mut(), &mut has_ended).await? {
            self.ledger.arrived(&payloads);
            if let Some(backlog) = backlog {
                backlog.add_permits(payloads.len());
            }
            consumer.settle().await?;
        }
        consumer.finish().await
    }

    /// Returns the next items; `None` when the producer has ended and everything has arrived.
    async fn next(
        &self,
        consumer: &mut dyn Consumer,
        has_ended: &mut watch::Receiver<bool>,
    ) -> Result<Option<Vec<bytes::Bytes>>> {
        let mut items = consumer.next();
        loop {
            let ended = *has_ended.borrow_and_update();
            if ended && self.ledger.missing() == 0 {
                return Ok(None);
            }
            tokio::select! {
                items = &mut items => return Ok(Some(items?)),
                Ok(()) = has_ended.changed(), if !ended => {}
                () = tokio::time::sleep(STALLED) => {
                    anyhow::bail!("{} items have not arrived", self.ledger.missing())
                }
            }
        }
    }

    /// Reads at the begin and at the end of what is measured.
    async fn window(&self) -> Result<(Reading, Reading)> {
        tokio::time::sleep(WARM_UP).await;
        let before = self.read();
        tokio::time::sleep_until((before.at + self.span).into()).await;
        Ok((before, self.read()))
    }

    fn read(&self) -> Reading {
        Reading {
            stored: self.ledger.count_stored(),
            arrived: self.ledger.count_arrived(),
            servers: cpu_seconds(&self.servers),
            own: cpu_seconds(&[std::process::id()]),
            at: Instant::now(),
        }
    }

    fn figures(&self, before: Reading, after: Reading) -> Map<String, Value> {
        let seconds = (after.at - before.at).as_secs_f64();
        let (stored, arrived) = (after.stored - before.stored, after.arrived - before.arrived);
        let per_100k = 1e5 / stored.max(arrived).max(1) as f64;
        let mut figures = Map::new();
        let mut put = |key: &str, value: Value| figures.insert(key.to_owned(), value);
        put("seconds", seconds.into());
        put("stored_per_s", (stored as f64 / seconds).into());
        put("arrived_per_s", (arrived as f64 / seconds).into());
        put("generator_cpu_s_per_100k", ((after.own - before.own) * per_100k).into());
        if !self.servers.is_empty() {
            put("server_cpu_s_per_100k", ((after.servers - before.servers) * per_100k).into());
        }
        figures
    }

    fn latencies(
        &self,
        (before, after): (Reading, Reading),
        latencies: &Histogram<u64>,
    ) -> Map<String, Value> {
        let mut figures = self.figures(before, after);
        for (key, quantile) in [("p50_ms", 0.5), ("p99_ms", 0.99)] {
            let value = latencies.value_at_quantile(quantile) as f64 / 1_000.0;
            figures.insert(key.to_owned(), value.into());
        }
        figures
    }
}

/// Returns the signal of a producer that has ended.
fn produced() -> watch::Receiver<bool> {
    watch::channel(true).1
}

/// A histogram of microseconds, up to an hour, to three digits.
fn histogram() -> Histogram<u64> {
    // Cannot fail: the bounds are valid.
    Histogram::new_with_bounds(1, 3_600_000_000, 3).expect("valid bounds")
}

/// Waits until `due`, and hardly longer: a late return would be counted as latency of the system.
async fn sleep_until(due: Instant) {
    if let Some(early) = due.checked_sub(TIMER_STEP) {
        tokio::time::sleep_until(early.into()).await;
    }
    let rest = due.saturating_duration_since(Instant::now()).saturating_sub(WAKE_UP);
    if !rest.is_zero() {
        // Fails only if the runtime ends.
        let _ = tokio::task::spawn_blocking(move || std::thread::sleep(rest)).await;
    }
    while Instant::now() < due {
        // Leaves the thread to the tasks that read and write the connections.
        tokio::task::yield_now().await;
    }
}
