//! The database alone: batched insert, claim and delete, the way the broker does it, without a broker. Two tasks insert,
//! one claims from the last position on and deletes.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::TryStreamExt;
use mongodb::{
    Client, Collection, IndexModel,
    bson::{Binary, Bson, DateTime, Document, doc, oid::ObjectId, spec::BinarySubtype},
    options::{Acknowledgment, CollectionOptions, WriteConcern},
};

use super::{
    Args,
    report::{Figures, Report, Window},
};
use crate::failure::Failure;

/// Items waiting at most, so that inserts do not run away from claims.
const MAX_WAITING: i64 = 20_000;

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
    let from = Instant::now() + args.warm_up;
    let to = from + args.duration.unwrap_or(Duration::from_secs(10));
    let window = Window { from, to: Some(to) };
    let waiting = Arc::new(AtomicI64::new(0));
    let inserting = Arc::new(AtomicBool::new(true));
    let inserts = async {
        let one = || insert(items.clone(), batch, args.size, window, to, waiting.clone());
        let both = tokio::try_join!(one(), one());
        inserting.store(false, Ordering::Relaxed);
        both
    };
    let claims = claim(items.clone(), batch, window, waiting.clone(), inserting.clone());
    let ((mut figures, second), claimed) = tokio::try_join!(inserts, claims)?;
    figures.merge(&second);
    figures.merge(&claimed);
    items.drop().await?;
    Ok(figures.into_report("raw-mongo", None))
}

async fn insert(
    items: Collection<Document>,
    batch: u16,
    size: u32,
    window: Window,
    until: Instant,
    waiting: Arc<AtomicI64>,
) -> mongodb::error::Result<Figures> {
    let mut figures = Figures::new(window);
    let payload = Binary { subtype: BinarySubtype::Generic, bytes: vec![b'.'; size as usize] };
    while Instant::now() < until {
        if waiting.load(Ordering::Relaxed) > MAX_WAITING {
            tokio::time::sleep(Duration::from_millis(1)).await;
            continue;
        }
        let now = DateTime::now();
        let documents = (0..batch).map(|_| {
            doc! {
                "_id": ObjectId::new(), "q": "bench", "when": now, "priority": 0, "attempt": 1, "deliveries": 0,
                "payload": payload.clone(), "created": now,
            }
        });
        items.insert_many(documents).ordered(false).await?;
        waiting.fetch_add(i64::from(batch), Ordering::Relaxed);
        figures.pushed(u64::from(batch), Instant::now());
    }
    Ok(figures)
}

async fn claim(
    items: Collection<Document>,
    batch: u16,
    window: Window,
    waiting: Arc<AtomicI64>,
    inserting: Arc<AtomicBool>,
) -> mongodb::error::Result<Figures> {
    let mut figures = Figures::new(window);
    let mut head = DateTime::MIN;
    loop {
        let ended = !inserting.load(Ordering::Relaxed);
        let due =
            doc! { "q": "bench", "priority": 0, "when": { "$gte": head, "$lte": DateTime::now() } };
        let found: Vec<Document> = items
            .find(due)
            .sort(doc! { "priority": -1, "when": 1, "_id": 1 })
            .limit(i64::from(batch))
            .await?
            .try_collect()
            .await?;
        if found.is_empty() {
            // Two inserters' clocks interleave: what came in behind the head is found from the start.
            if head != DateTime::MIN {
                head = DateTime::MIN;
            } else if ended {
                return Ok(figures);
            } else {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            continue;
        }
        if let Some(Ok(when)) = found.last().map(|document| document.get_datetime("when")) {
            head = *when;
        }
        let ids: Vec<Bson> =
            found.iter().filter_map(|document| document.get("_id").cloned()).collect();
        let lease = DateTime::from_millis(DateTime::now().timestamp_millis() + 30_000);
        let lock = ObjectId::new();
        let unclaimed = doc! { "_id": { "$in": &ids }, "when": { "$lte": DateTime::now() } };
        let set = doc! { "$set": { "lock": lock, "when": lease }, "$inc": { "deliveries": 1 } };
        let claimed = items.update_many(unclaimed, set).await?.modified_count;
        figures.delivered_untimed(claimed, Instant::now());
        let deleted =
            items.delete_many(doc! { "_id": { "$in": ids }, "lock": lock }).await?.deleted_count;
        waiting.fetch_sub(deleted as i64, Ordering::Relaxed);
        figures.committed(deleted, Instant::now());
    }
}
