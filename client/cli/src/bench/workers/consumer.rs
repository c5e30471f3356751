//! Consumers.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use sluicegate_client::{
    CancellationToken, Client,
    proto::{
        CommitRequest, ConsumeRequest, ConsumeStreamRequest, Delivery, Outcome, ReserveRequest,
        SettleResult, consume_stream_request::Action, consume_stream_response::Event,
    },
    tonic::Status,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::{backlog_limit::BacklogLimit, pace::pause_after};
use crate::{
    bench::measure::{
        figures::{Figures, Window},
        tracker::Tracker,
    },
    values::to_proto,
};

/// What all consumers of a run have in common.
#[derive(Debug, Clone)]
pub(crate) struct ConsumerPlan {
    pub(crate) tracker: Arc<Tracker>,
    pub(crate) backlog: BacklogLimit,
    pub(crate) window: Window,
    pub(crate) batch: i32,
    pub(crate) in_flight: u32,
    pub(crate) stop: CancellationToken,
}

impl ConsumerPlan {
    /// Counts deliveries and returns their receipts.
    fn delivered(&self, deliveries: Vec<Delivery>, figures: &mut Figures) -> Vec<String> {
        let now = Instant::now();
        let payloads = deliveries.iter().filter_map(|d| d.item.as_ref()).map(|item| &item.payload);
        let latencies = self.tracker.delivered(payloads, now);
        figures.delivered(&latencies, now);
        self.backlog.release(deliveries.len());
        deliveries.into_iter().map(|delivery| delivery.receipt).collect()
    }

    fn settled(&self, results: &[SettleResult], figures: &mut Figures) {
        let good = results.iter().filter(|result| result.outcome() == Outcome::Ok).count() as u64;
        figures.committed(good, Instant::now());
        figures.errors += results.len() as u64 - good;
        self.tracker.settled(good);
    }
}

/// Consumes by unary calls: reserves, commits, and starts again, until told to stop.
pub(crate) async fn consume_unary(plan: ConsumerPlan, client: Client, queue: String) -> Figures {
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
                pause_after(&status, &mut figures).await;
                continue;
            }
        };
        if deliveries.is_empty() {
            continue;
        }
        let receipts = plan.delivered(deliveries, &mut figures);
        match stub.commit(client.request(CommitRequest { receipts })).await {
            Ok(answer) => plan.settled(&answer.into_inner().results, &mut figures),
            Err(status) => pause_after(&status, &mut figures).await,
        }
    }
}

/// Consumes over `ConsumeStream` and commits items as they arrive, until told to stop.
pub(crate) async fn consume_stream(plan: ConsumerPlan, client: Client, queue: String) -> Figures {
    let mut figures = Figures::new(plan.window);
    while !plan.stop.is_cancelled() {
        if let Err(status) = consume_one_stream(&plan, &client, &queue, &mut figures).await {
            pause_after(&status, &mut figures).await;
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
    // A stopping consumer waits for the answers to its commits, so that the items left in the queue are known.
    while !stopping || unsettled > 0 {
        let answer = tokio::select! {
            () = plan.stop.cancelled(), if !stopping => {
                stopping = true;
                continue;
            }
            answer = answers.message() => answer?.ok_or_else(ended)?,
        };
        match answer.event {
            // The broker rolls these back when the stream ends.
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
