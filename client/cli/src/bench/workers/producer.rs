//! Producers.

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::{StreamExt, stream::FuturesUnordered};
use sluicegate_client::{Client, Error, NewItem, producer::StreamOptions, proto::PushResult};

use super::{
    backlog_limit::BacklogLimit,
    pace::{pause_after, sleep_until},
};
use crate::bench::measure::{
    figures::{Figures, Window},
    tracker::Tracker,
};

/// What all producers of a run have in common.
#[derive(Debug, Clone)]
pub(crate) struct ProducerPlan {
    pub(crate) tracker: Arc<Tracker>,
    pub(crate) backlog: BacklogLimit,
    pub(crate) window: Window,
    pub(crate) size: usize,
    pub(crate) batch: u32,
    /// Items with numbers below this are pushed.
    pub(crate) limit: u64,
    /// No push begins after this.
    pub(crate) until: Option<Instant>,
    /// Time between two pushes of one producer; zero: the next one follows immediately.
    pub(crate) interval: Duration,
    /// Delay given to each item.
    pub(crate) delay: Option<Duration>,
}

impl ProducerPlan {
    /// Returns the next batch when it is due, and `None` at the end.
    async fn next(&self, due: &mut Instant) -> Option<(Range<u64>, Vec<NewItem>)> {
        if !self.interval.is_zero() {
            // A producer that is late does not wait: latency is counted from when the push was due.
            sleep_until(*due).await;
        }
        if !self.backlog.acquire(self.batch, self.until).await {
            return None;
        }
        if self.interval.is_zero() {
            *due = Instant::now();
        }
        let over = self.until.is_some_and(|until| *due >= until);
        let limit = if over { 0 } else { self.limit };
        let numbers = self.tracker.next_numbers(u64::from(self.batch), limit);
        self.backlog.release(self.batch as usize - numbers.clone().count());
        if numbers.is_empty() {
            return None;
        }
        let items = numbers.clone().map(|number| {
            let item = NewItem::new(self.tracker.payload(number, *due, self.size));
            match self.delay {
                Some(delay) => item.delay(delay),
                None => item,
            }
        });
        let batch = (numbers.clone(), items.collect());
        *due += self.interval;
        Some(batch)
    }

    fn answered(&self, numbers: Range<u64>, figures: &mut Figures) {
        figures.pushed(numbers.end - numbers.start, Instant::now());
        self.tracker.acknowledged(numbers);
    }

    async fn record(
        &self,
        numbers: Range<u64>,
        answer: Result<Vec<PushResult>, Error>,
        figures: &mut Figures,
    ) {
        match answer {
            Ok(_) => self.answered(numbers, figures),
            Err(error) => self.failed(numbers, figures, &error).await,
        }
    }

    async fn failed(&self, numbers: Range<u64>, figures: &mut Figures, error: &Error) {
        self.backlog.release(numbers.count());
        pause_after(error, figures).await;
    }
}

/// Pushes by unary calls, one after the other. `first` is when the first push is due.
pub(crate) async fn produce_unary(
    plan: ProducerPlan,
    client: Client,
    queue: String,
    first: Instant,
) -> Figures {
    let producer = client.producer(queue);
    let mut figures = Figures::new(plan.window);
    let mut due = first;
    while let Some((numbers, items)) = plan.next(&mut due).await {
        plan.record(numbers, producer.push_all(items).await, &mut figures).await;
    }
    figures
}

/// Pushes over one stream, with many batches in flight.
pub(crate) async fn produce_stream(
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
            // Answers are recorded when they arrive, also while the backlog is full.
            batch = loop {
                tokio::select! {
                    batch = &mut next => break batch,
                    Some((numbers, answer)) = unanswered.next() => {
                        plan.record(numbers, answer, &mut figures).await;
                    }
                }
            };
            if batch.is_none() {
                break;
            }
        } else if let Some((numbers, answer)) = unanswered.next().await {
            plan.record(numbers, answer, &mut figures).await;
        }
        if let Some((numbers, items)) = batch {
            match stream.send(items).await {
                Ok(ticket) => unanswered.push(async move { (numbers, ticket.await) }),
                Err(error) => plan.failed(numbers, &mut figures, &error).await,
            }
        }
    }
    while let Some((numbers, answer)) = unanswered.next().await {
        plan.record(numbers, answer, &mut figures).await;
    }
    figures
}
