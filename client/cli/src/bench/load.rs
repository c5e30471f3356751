//! Producers and consumers.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::{StreamExt, stream::FuturesUnordered};
use sluicegate_client::{
    CancellationToken, Client, Error, NewItem,
    producer::StreamOptions,
    proto::{
        CommitRequest, ConsumeRequest, ConsumeStreamRequest, Delivery, Outcome, PushResult,
        ReserveRequest, SettleResult, consume_stream_request::Action,
        consume_stream_response::Event,
    },
    tonic::Status,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::{
    report::{Figures, Window},
    room::Room,
    track::Track,
};
use crate::duration::to_proto;

/// The runtime's timer is late by up to this much: too coarse where a millisecond counts.
const TIMER_STEP: Duration = Duration::from_millis(2);

/// So long before its time a thread wakes up, to be there when it comes.
const WAKE_UP: Duration = Duration::from_micros(300);

/// Waits until then, and no longer: what it is late counts as the broker's latency.
pub(super) async fn sleep_until(due: Instant) {
    if let Some(early) = due.checked_sub(TIMER_STEP) {
        tokio::time::sleep_until(early.into()).await;
    }
    let rest = due.saturating_duration_since(Instant::now()).saturating_sub(WAKE_UP);
    if !rest.is_zero() {
        // It fails only if the runtime ends.
        let _ = tokio::task::spawn_blocking(move || std::thread::sleep(rest)).await;
    }
    while Instant::now() < due {
        std::hint::spin_loop();
    }
}

/// What all producers of a run share.
#[derive(Debug, Clone)]
pub(super) struct ProducerPlan {
    pub(super) track: Arc<Track>,
    pub(super) room: Room,
    pub(super) window: Window,
    pub(super) size: usize,
    pub(super) batch: u32,
    /// Numbers below this are pushed.
    pub(super) limit: u64,
    /// No push begins after this.
    pub(super) until: Option<Instant>,
    /// Time between two pushes of one producer; zero: none.
    pub(super) interval: Duration,
    pub(super) delay: Option<Duration>,
}

impl ProducerPlan {
    /// The next batch, when it is due; None at the end.
    async fn next(&self, due: &mut Instant) -> Option<(std::ops::Range<u64>, Vec<NewItem>)> {
        if !self.interval.is_zero() {
            // A producer that is late does not wait, and its items are as late as they are.
            sleep_until(*due).await;
        }
        if !self.room.take(self.batch, self.until).await {
            return None;
        }
        if self.interval.is_zero() {
            *due = Instant::now();
        }
        let over = self.until.is_some_and(|until| *due >= until);
        let limit = if over { 0 } else { self.limit };
        let numbers = self.track.claim(u64::from(self.batch), limit);
        self.room.give(self.batch as usize - numbers.clone().count());
        if numbers.is_empty() {
            return None;
        }
        let items = numbers.clone().map(|number| {
            let item = NewItem::new(self.track.payload(number, *due, self.size));
            match self.delay {
                Some(delay) => item.delay(delay),
                None => item,
            }
        });
        let batch = (numbers.clone(), items.collect());
        *due += self.interval;
        Some(batch)
    }

    fn answered(&self, numbers: std::ops::Range<u64>, figures: &mut Figures) {
        figures.pushed(numbers.end - numbers.start, Instant::now());
        self.track.acknowledged(numbers);
    }

    async fn took(
        &self,
        numbers: std::ops::Range<u64>,
        answer: Result<Vec<PushResult>, Error>,
        figures: &mut Figures,
    ) {
        match answer {
            Ok(_) => self.answered(numbers, figures),
            Err(error) => self.failed(numbers, figures, &error).await,
        }
    }

    async fn failed(&self, numbers: std::ops::Range<u64>, figures: &mut Figures, error: &Fault) {
        self.room.give(numbers.count());
        fail(figures, error).await;
    }
}

/// One push after the other. `first` is when the first one is due.
pub(super) async fn produce_unary(
    plan: ProducerPlan,
    client: Client,
    queue: String,
    first: Instant,
) -> Figures {
    let producer = client.producer(queue);
    let mut figures = Figures::new(plan.window);
    let mut due = first;
    while let Some((numbers, items)) = plan.next(&mut due).await {
        plan.took(numbers, producer.push_all(items).await, &mut figures).await;
    }
    figures
}

/// Many batches in flight on one stream.
pub(super) async fn produce_stream(
    plan: ProducerPlan,
    client: Client,
    queue: String,
    first: Instant,
    in_flight: usize,
) -> Figures {
    let options = StreamOptions { max_in_flight: in_flight, ..StreamOptions::default() };
    let stream = client.producer(queue).stream(options);
    let mut figures = Figures::new(plan.window);
    let mut unanswered = FuturesUnordered::new();
    let mut due = first;
    loop {
        let mut batch = None;
        if unanswered.len() < in_flight {
            let next = plan.next(&mut due);
            tokio::pin!(next);
            // Answers count when they come, also while there is no room for more.
            batch = loop {
                tokio::select! {
                    batch = &mut next => break batch,
                    Some((numbers, answer)) = unanswered.next() => {
                        plan.took(numbers, answer, &mut figures).await;
                    }
                }
            };
            if batch.is_none() {
                break;
            }
        } else if let Some((numbers, answer)) = unanswered.next().await {
            plan.took(numbers, answer, &mut figures).await;
        }
        if let Some((numbers, items)) = batch {
            match stream.send(items).await {
                Ok(ticket) => unanswered.push(async move { (numbers, ticket.await) }),
                Err(error) => plan.failed(numbers, &mut figures, &error).await,
            }
        }
    }
    while let Some((numbers, answer)) = unanswered.next().await {
        plan.took(numbers, answer, &mut figures).await;
    }
    figures
}

type Fault = dyn std::error::Error + Sync;

/// Counts an error; a moment's pause keeps a dead broker from being hammered.
async fn fail(figures: &mut Figures, error: &Fault) {
    figures.errors += 1;
    if figures.errors == 1 {
        tracing::warn!(%error, "the first error");
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
}

/// What all consumers of a run share.
#[derive(Debug, Clone)]
pub(super) struct ConsumerPlan {
    pub(super) track: Arc<Track>,
    pub(super) room: Room,
    pub(super) window: Window,
    pub(super) batch: i32,
    pub(super) in_flight: u32,
    pub(super) stop: CancellationToken,
}

impl ConsumerPlan {
    /// Counts deliveries and answers their receipts.
    fn delivered(&self, deliveries: Vec<Delivery>, figures: &mut Figures) -> Vec<String> {
        let now = Instant::now();
        let payloads = deliveries.iter().filter_map(|d| d.item.as_ref()).map(|item| &item.payload);
        let latencies = self.track.delivered(payloads, now);
        figures.delivered(&latencies, now);
        self.room.give(deliveries.len());
        deliveries.into_iter().map(|delivery| delivery.receipt).collect()
    }

    fn settled(&self, results: &[SettleResult], figures: &mut Figures) {
        let good = results.iter().filter(|result| result.outcome() == Outcome::Ok).count() as u64;
        figures.committed(good, Instant::now());
        figures.errors += results.len() as u64 - good;
        self.track.settled(good);
    }
}

/// Reserve, commit, and again.
pub(super) async fn consume_unary(plan: ConsumerPlan, client: Client, queue: String) -> Figures {
    let mut figures = Figures::new(plan.window);
    let mut stub = client.queue_service();
    let wait = Duration::from_secs(1);
    let reserve = ReserveRequest {
        queue,
        max_items: plan.batch,
        wait: Some(to_proto(wait)),
        ..Default::default()
    };
    loop {
        let taken = tokio::select! {
            () = plan.stop.cancelled() => return figures,
            taken = stub.reserve(client.waiting_request(reserve.clone(), wait)) => taken,
        };
        let deliveries = match taken {
            Ok(answer) => answer.into_inner().deliveries,
            Err(status) => {
                fail(&mut figures, &status).await;
                continue;
            }
        };
        if deliveries.is_empty() {
            continue;
        }
        let receipts = plan.delivered(deliveries, &mut figures);
        match stub.commit(client.request(CommitRequest { receipts })).await {
            Ok(answer) => plan.settled(&answer.into_inner().results, &mut figures),
            Err(status) => fail(&mut figures, &status).await,
        }
    }
}

/// One ConsumeStream, commits as items come.
pub(super) async fn consume_stream(plan: ConsumerPlan, client: Client, queue: String) -> Figures {
    let mut figures = Figures::new(plan.window);
    while !plan.stop.is_cancelled() {
        if let Err(status) = consume_one_stream(&plan, &client, &queue, &mut figures).await {
            fail(&mut figures, &status).await;
        }
    }
    figures
}

async fn consume_one_stream(
    plan: &ConsumerPlan,
    client: &Client,
    queue: &str,
    figures: &mut Figures,
) -> Result<(), Status> {
    // At most `in_flight` commits can be unanswered, so sending one never waits for the broker to read.
    let (requests, outgoing) = mpsc::channel(plan.in_flight as usize + 2);
    let open = ConsumeRequest {
        queue: queue.to_owned(),
        max_in_flight: plan.in_flight as i32,
        ..Default::default()
    };
    let request = |action| ConsumeStreamRequest { action: Some(action) };
    let ended = || Status::unavailable("the broker ended the stream");
    requests.send(request(Action::Open(open))).await.map_err(|_| ended())?;
    let opening = client.queue_service().consume_stream(ReceiverStream::new(outgoing)).await;
    let mut answers = opening?.into_inner();
    let (mut unsettled, mut stopping) = (0, false);
    // Once told to stop, it waits for the answers to its commits, so that it is known what is left in the queue.
    while !stopping || unsettled > 0 {
        let answer = tokio::select! {
            () = plan.stop.cancelled(), if !stopping => {
                stopping = true;
                continue;
            }
            answer = answers.message() => answer?.ok_or_else(ended)?,
        };
        match answer.event {
            // They go back when the stream ends.
            Some(Event::Deliveries(_)) if stopping => {}
            Some(Event::Deliveries(message)) => {
                let receipts = plan.delivered(message.deliveries, figures);
                unsettled += receipts.len();
                let commit = request(Action::Commit(CommitRequest { receipts }));
                requests.send(commit).await.map_err(|_| ended())?;
            }
            Some(Event::Settled(answer)) => {
                unsettled -= answer.results.len().min(unsettled);
                plan.settled(&answer.results, figures);
            }
            Some(Event::Error(error)) => {
                return Err(Status::new(error.code.into(), error.message));
            }
            _ => {}
        }
    }
    Ok(())
}
