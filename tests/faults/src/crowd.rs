//! A crowd beside the load: queues and streams by the thousand, and items that nobody takes. It goes through all faults, and
//! nothing of it may be lost or stuck.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use clap::Args;
use futures_util::{StreamExt as _, future::join_all, stream};
use parking_lot::Mutex;
use sluicegate_client::Client;
use sluicegate_proto::v1 as pb;
use tokio_util::task::AbortOnDropHandle;

use crate::{dice::Dice, world::World};

/// How many streams share a connection.
const PER_CONNECTION: u64 = 500;
/// How many queues are created at a time.
const AT_A_TIME: usize = 32;
/// How many queues are tried after each cycle.
const TRIED: u64 = 200;
/// How long a stream may take to have what was pushed, after all faults.
const LIMIT: Duration = Duration::from_mins(1);
const PAUSE: Duration = Duration::from_millis(100);
/// The queue of the items that nobody takes, their size, and how many are pushed in one call.
const BALLAST: &str = "ballast";
const BALLAST_BYTES: usize = 100_000;
const BALLAST_ITEMS: u64 = 30;

/// How large the crowd is.
#[derive(Debug, Clone, Args)]
pub(crate) struct Size {
    /// So many queues, which are idle most of the time
    #[arg(long, default_value = "0")]
    pub(crate) queues: u64,
    /// So many streams of these queues
    #[arg(long, default_value = "0")]
    pub(crate) streams: u64,
    /// So many megabytes of items that nobody takes
    #[arg(long, default_value = "0")]
    pub(crate) megabytes: u64,
}

/// The queues, streams and items beside the load.
pub(crate) struct Crowd {
    world: Arc<World>,
    size: Size,
    received: Arc<Mutex<HashSet<Vec<u8>>>>,
    /// How many items nobody takes.
    ballast: u64,
    _streams: Vec<AbortOnDropHandle<()>>,
}

fn queue(number: u64) -> String {
    format!("crowd-{number}")
}

impl Crowd {
    /// Creates the queues, opens the streams and pushes the items.
    pub(crate) async fn start(world: Arc<World>, size: Size) -> Self {
        let begun = Instant::now();
        let create = |number| {
            let client = world.next().client.clone();
            async move {
                let queue = pb::Queue { name: queue(number), ..pb::Queue::default() };
                let request = pb::CreateQueueRequest { queue: Some(queue) };
                client.admin_service().create_queue(client.request(request)).await.expect("a queue")
            }
        };
        stream::iter(0..size.queues).map(create).buffer_unordered(AT_A_TIME).count().await;
        let received = Arc::<Mutex<HashSet<Vec<u8>>>>::default();
        let mut streams = Vec::new();
        for first in (0..size.streams).step_by(PER_CONNECTION as usize) {
            let client = world.next().connect();
            for number in first..size.streams.min(first + PER_CONNECTION) {
                let queue = queue(number % size.queues);
                let consumer = consume(client.clone(), queue, Arc::clone(&received));
                streams.push(AbortOnDropHandle::new(tokio::spawn(consumer)));
            }
        }
        let mut ballast = 0;
        while ballast * (BALLAST_BYTES as u64) < size.megabytes * 1_000_000 {
            let payload = vec![ballast as u8; BALLAST_BYTES];
            let item = pb::NewItem { payload: payload.into(), ..pb::NewItem::default() };
            let items = vec![item; BALLAST_ITEMS as usize];
            push(&world.client, BALLAST, items).await.expect("a push");
            ballast += BALLAST_ITEMS;
        }
        if !size.is_empty() {
            let Size { queues, streams, .. } = size;
            let took = begun.elapsed().as_secs_f64();
            println!(
                "{queues} queues, {streams} streams, {ballast} items at rest after {took:.0} s"
            );
        }
        Self { world, size, received, ballast, _streams: streams }
    }

    /// Pushes items to some of the queues with streams. Returns those that do not arrive.
    pub(crate) async fn try_out(&self, seed: u64, cycle: u64) -> Vec<String> {
        let served = self.size.queues.min(self.size.streams);
        if served == 0 {
            return Vec::new();
        }
        let dice = Dice::new(seed, cycle, 3);
        let tries = (0..TRIED).map(|number| {
            let (queue, payload) = (queue(dice.number(0, served - 1)), format!("{cycle}-{number}"));
            async move {
                let begun = Instant::now();
                let item = pb::NewItem {
                    payload: payload.clone().into(),
                    dedup_id: payload.clone(),
                    ..pb::NewItem::default()
                };
                while begun.elapsed() < LIMIT {
                    if push(&self.world.client, &queue, vec![item.clone()]).await.is_ok() {
                        break;
                    }
                    tokio::time::sleep(PAUSE).await;
                }
                while begun.elapsed() < LIMIT {
                    if self.received.lock().remove(payload.as_bytes()) {
                        return None;
                    }
                    tokio::time::sleep(PAUSE).await;
                }
                Some(format!("nobody has received {payload} of {queue} after {LIMIT:?}"))
            }
        });
        join_all(tries).await.into_iter().flatten().collect()
    }

    /// Returns what is wrong with the items that nobody takes.
    pub(crate) async fn at_rest(&self) -> Option<String> {
        if self.ballast == 0 {
            return None;
        }
        let begun = Instant::now();
        let client = &self.world.client;
        loop {
            let request = pb::GetQueueStatsRequest { queue: BALLAST.to_owned() };
            let answer = client.admin_service().get_queue_stats(client.request(request)).await;
            let stats = answer.ok().and_then(|answer| answer.into_inner().stats);
            let ready = stats.map(|stats| stats.ready);
            if ready == Some(self.ballast.cast_signed()) {
                return None;
            }
            if begun.elapsed() > LIMIT {
                return Some(format!(
                    "{} items are at rest, and {ready:?} are there",
                    self.ballast
                ));
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

impl Size {
    pub(crate) fn is_empty(&self) -> bool {
        (self.queues, self.streams, self.megabytes) == (0, 0, 0)
    }

    /// Returns what is wrong with the size, if anything is.
    pub(crate) fn wrong(&self) -> Option<&'static str> {
        let has_no_queues = self.streams > 0 && self.queues == 0;
        has_no_queues.then_some("--streams needs --queues: the streams are of these queues")
    }
}

async fn push(client: &Client, queue: &str, items: Vec<pb::NewItem>) -> Result<(), tonic::Status> {
    let push = pb::PushRequest { queue: queue.to_owned(), items, producer: String::new() };
    client.queue_service().push(client.request(push)).await.map(drop)
}

/// Consumes for ever, by one stream after the other, and notes what it receives.
async fn consume(client: Client, queue: String, received: Arc<Mutex<HashSet<Vec<u8>>>>) {
    loop {
        let request = pb::ConsumeRequest {
            queue: queue.clone(),
            max_in_flight: 10,
            ..pb::ConsumeRequest::default()
        };
        if let Ok(stream) = client.queue_service().consume(request).await {
            let mut stream = stream.into_inner();
            while let Ok(Some(message)) = stream.message().await {
                let mut receipts = Vec::new();
                for delivery in message.deliveries {
                    receipts.push(delivery.receipt);
                    let payload = delivery.item.unwrap_or_default().payload;
                    received.lock().insert(payload.to_vec());
                }
                let commit = pb::CommitRequest { receipts };
                // What is not committed comes again.
                let _ = client.queue_service().commit(client.request(commit)).await;
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_need_queues() {
        let size = |queues, streams| Size { queues, streams, megabytes: 0 };
        assert!(size(0, 10).wrong().is_some_and(|wrong| wrong.contains("--queues")));
        assert_eq!([size(0, 0), size(10, 0), size(1, 10)].map(|size| size.wrong()), [None; 3]);
    }
}
