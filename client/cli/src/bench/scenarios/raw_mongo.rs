//! The database alone: batches are inserted, claimed and deleted as the broker does it, but without a broker. Two tasks
//! insert; one claims from the last position on and, at the same time, deletes what it claimed before.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::TryStreamExt;
use mongodb::{
    Client, Collection, IndexModel,
    bson::{Binary, Bson, DateTime, Document, doc, oid::ObjectId, spec::BinarySubtype},
    options::{Acknowledgment, CollectionOptions, WriteConcern},
};

use crate::{
    bench::{
        args::Args,
        measure::{
            figures::{Figures, Window},
            processor::ProcessorTime,
            report::Report,
            tracker::Tracker,
        },
        settings::backlog,
        workers::backlog_limit::BacklogLimit,
    },
    failure::Failure,
};

/// Milliseconds until a claim lapses: long enough that the entries of claimed documents are far behind those that are due.
const LEASE: i64 = 24 * 3_600_000;

/// Documents that are claimed and not deleted yet.
struct Claim {
    ids: Vec<Bson>,
    lock: ObjectId,
}

/// What the tasks have in common.
#[derive(Clone)]
struct Raw {
    items: Collection<Document>,
    tracker: Arc<Tracker>,
    /// Keeps inserts from running ahead of claims.
    backlog: BacklogLimit,
    window: Window,
    batch: u16,
    inserting: Arc<AtomicBool>,
}

pub(super) async fn run(args: &Args) -> Result<Report, Failure> {
    drive(args).await.map_err(|error| Failure::Io(std::io::Error::other(error)))
}

async fn drive(args: &Args) -> mongodb::error::Result<Report> {
    let database = Client::with_uri_str(&args.mongodb).await?.database("sluicegate_bench");
    let durable = WriteConcern::builder().w(Acknowledgment::Majority).journal(true).build();
    let options = CollectionOptions::builder().write_concern(durable).build();
    let items = database.collection_with_options::<Document>("raw", options);
    items.drop().await?;
    let keys = doc! { "q": 1, "priority": -1, "when": 1, "_id": 1 };
    items.create_index(IndexModel::builder().keys(keys).build()).await?;

    let batch = args.batch.unwrap_or(500);
    let tracker = Arc::new(Tracker::new());
    let backlog = BacklogLimit::new(backlog(args, 2 * u32::from(batch)));
    let inserting = Arc::new(AtomicBool::new(true));
    let raw = Raw { items, tracker, backlog, window: Window::none(), batch, inserting };
    if args.churn > 0 {
        raw.load(args.size, args.churn, None).await?;
    }
    let from = Instant::now() + args.warm_up;
    let to = from + args.duration.unwrap_or(Duration::from_secs(10));
    let measured = Raw { window: Window { from, to: Some(to) }, ..raw };
    let servers = ProcessorTime::start(&args.server_pid, measured.window);
    let mut figures = measured.load(args.size, u64::MAX, Some(to)).await?;
    figures.server_seconds = servers.finish().await;
    measured.items.drop().await?;
    let mut verdict = measured.tracker.verdict();
    // What was claimed and not deleted would be claimed again when the claim lapses.
    verdict.doubled +=
        measured.tracker.count_pushed().saturating_sub(measured.tracker.count_committed());
    figures.errors += verdict.doubled;
    Ok(figures.into_report(&args.scenario.name(), verdict))
}

impl Raw {
    /// Runs two tasks that insert and one that claims, until all numbers below `limit` are used or `until` has passed.
    async fn load(
        &self,
        size: usize,
        limit: u64,
        until: Option<Instant>,
    ) -> mongodb::error::Result<Figures> {
        self.inserting.store(true, Ordering::Relaxed);
        let inserts = async {
            let one = || self.insert(size, limit, until);
            let both = tokio::try_join!(one(), one());
            self.inserting.store(false, Ordering::Relaxed);
            both
        };
        let ((mut figures, second), claimed) = tokio::try_join!(inserts, self.claim())?;
        figures.merge(&second);
        figures.merge(&claimed);
        Ok(figures)
    }

    async fn insert(
        &self,
        size: usize,
        limit: u64,
        until: Option<Instant>,
    ) -> mongodb::error::Result<Figures> {
        let mut figures = Figures::new(self.window);
        let batch = u32::from(self.batch);
        while until.is_none_or(|until| Instant::now() < until) {
            if !self.backlog.acquire(batch, until).await {
                break;
            }
            let numbers = self.tracker.next_numbers(u64::from(batch), limit);
            self.backlog.release(batch as usize - numbers.clone().count());
            if numbers.is_empty() {
                break;
            }
            let (due, now) = (Instant::now(), DateTime::now());
            let documents = numbers.clone().map(|number| {
                let payload = self.tracker.payload(number, due, size).to_vec();
                doc! {
                    "_id": ObjectId::new(), "q": "bench", "when": now, "priority": 0, "attempt": 1, "deliveries": 0,
                    "payload": Binary { subtype: BinarySubtype::Generic, bytes: payload }, "created": now,
                }
            });
            self.items.insert_many(documents).ordered(false).await?;
            figures.pushed(numbers.end - numbers.start, Instant::now());
            self.tracker.acknowledged(numbers);
        }
        Ok(figures)
    }

    /// Claims one batch after the other; each batch is deleted while the next one is being claimed.
    async fn claim(&self) -> mongodb::error::Result<Figures> {
        let mut figures = Figures::new(self.window);
        let mut cursor = DateTime::MIN;
        let mut held = None;
        loop {
            let ended = !self.inserting.load(Ordering::Relaxed);
            let (deleted, claimed) =
                tokio::try_join!(self.delete(held.take()), self.claim_one(&mut cursor))?;
            self.tracker.settled(deleted);
            figures.committed(deleted, Instant::now());
            if let Some((claim, payloads, n)) = claimed {
                let now = Instant::now();
                // No other task claims, so what was found must have been claimed.
                figures.errors += (payloads.len() as u64).abs_diff(n);
                figures.delivered(&self.tracker.delivered(payloads.iter(), now), now);
                self.backlog.release(payloads.len());
                held = Some(claim);
            } else if cursor != DateTime::MIN {
                // Both inserting tasks take the time themselves, so a document can land behind the cursor: scan from the start.
                cursor = DateTime::MIN;
            } else if ended {
                return Ok(figures);
            } else {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }

    /// Claims a batch. Returns the claim, the payloads, and how many documents the update changed; `None` if nothing is due.
    async fn claim_one(
        &self,
        cursor: &mut DateTime,
    ) -> mongodb::error::Result<Option<(Claim, Vec<Bytes>, u64)>> {
        let now = DateTime::now();
        let due = doc! { "q": "bench", "priority": 0, "when": { "$gte": *cursor, "$lte": now } };
        let found: Vec<Document> = self
            .items
            .find(due)
            .sort(doc! { "priority": -1, "when": 1, "_id": 1 })
            .limit(i64::from(self.batch))
            .await?
            .try_collect()
            .await?;
        let Some(last) = found.last() else { return Ok(None) };
        if let Ok(when) = last.get_datetime("when") {
            *cursor = *when;
        }
        let ids: Vec<Bson> =
            found.iter().filter_map(|document| document.get("_id").cloned()).collect();
        let lock = ObjectId::new();
        let unclaimed = doc! { "_id": { "$in": &ids }, "when": { "$lte": now } };
        let lease = DateTime::from_millis(now.timestamp_millis() + LEASE);
        let set = doc! { "$set": { "lock": lock, "when": lease }, "$inc": { "deliveries": 1 } };
        let n = self.items.update_many(unclaimed, set).await?.modified_count;
        let payloads = found
            .iter()
            .filter_map(|document| document.get_binary_generic("payload").ok())
            .map(|payload| Bytes::copy_from_slice(payload))
            .collect();
        Ok(Some((Claim { ids, lock }, payloads, n)))
    }

    async fn delete(&self, held: Option<Claim>) -> mongodb::error::Result<u64> {
        let Some(Claim { ids, lock }) = held else { return Ok(0) };
        let held = doc! { "_id": { "$in": ids }, "lock": lock };
        Ok(self.items.delete_many(held).await?.deleted_count)
    }
}
