//! Feeds from `ConsumeStream`, and settles over it while it lives.
//!
//! Moves and forks, and settles that were unanswered when the stream broke, go to the settler.

use std::{
    collections::{HashSet, VecDeque},
    sync::{Arc, atomic::Ordering},
};

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::{
    decision::{Decision, Settle, rollback_item},
    feed::{Attempts, Event, Feed},
    settle::{Counters, Kind, MAX_SETTLES},
};
use crate::proto::{
    CommitRequest, ConsumeResponse, ConsumeStreamRequest, ConsumeStreamResponse, Flow,
    RollbackRequest, consume_stream_request::Action, consume_stream_response::Event as Answer,
};

/// How many settle requests may be unanswered on the stream; decisions made meanwhile go into the next request.
const MAX_UNANSWERED: usize = 8;

/// What one settle request was about, to be passed to the settler if its answer is lost.
type Sent = (Kind, Vec<Settle>);

pub(super) struct StreamFeed {
    pub(super) feed: Feed,
    /// The decisions of the runner.
    pub(super) settles: mpsc::Receiver<Settle>,
    /// The settler, for what cannot be done over this stream.
    pub(super) fallback: mpsc::Sender<Settle>,
    pub(super) counters: Arc<Counters>,
}

/// Keeps the broker from delivering more than a consumer with a limit will start: items that are rolled back without need
/// would have lost their place in the queue.
///
/// The broker delivers while fewer than `flow` items are unsettled, so in all it delivers at most what was settled
/// and `flow`. Before each settle, `flow` is lowered to keep that sum within the budget.
struct Budget {
    /// Items that may still be settled on this stream within the limit.
    left: u64,
    flow: u64,
    /// The receipts of this stream that are not settled; those of earlier streams do not count.
    unsettled: HashSet<String>,
}

impl Budget {
    fn delivered(&mut self, message: &ConsumeResponse) {
        self.unsettled.extend(message.deliveries.iter().map(|delivery| delivery.receipt.clone()));
    }

    /// Returns the flow to ask for before these are settled, if it changes.
    fn settling(&mut self, settles: &[Settle]) -> Option<Flow> {
        let ours = settles.iter().filter(|settle| self.unsettled.remove(&settle.receipt)).count();
        self.left = self.left.saturating_sub(ours as u64);
        if self.left >= self.flow {
            return None;
        }
        self.flow = self.left;
        Some(Flow { max_in_flight: self.flow.try_into().unwrap_or(i32::MAX) })
    }
}

/// How one stream ended.
enum End {
    /// The runner has settled everything, and it is answered.
    Done,
    Broken(Status),
}

impl StreamFeed {
    /// Feeds until the runner has closed the channel of settles and everything is settled.
    pub(super) async fn run(mut self) {
        let mut attempts = Attempts::new();
        loop {
            attempts.begin(&self.feed);
            let mut unanswered = VecDeque::new();
            let end = self.serve(&mut attempts, &mut unanswered).await;
            // It is unknown whether the broker did these before the stream broke; the settler repeats them.
            for settle in unanswered.into_iter().flat_map(|(_, settles)| settles) {
                self.pass_on(settle).await;
            }
            let End::Broken(status) = end else { return };
            // Decisions made while there is no stream must not wait for the next one.
            let again = {
                let waiting = attempts.failed(&self.feed, status);
                tokio::pin!(waiting);
                loop {
                    tokio::select! {
                        again = &mut waiting => break again,
                        Some(settle) = self.settles.recv() => {
                            let _ = self.fallback.send(settle).await;
                        }
                    }
                }
            };
            if !again {
                // Shutting down, or refused: there will be no further stream.
                let _ = self.feed.events.send(Event::Halted).await;
                while let Some(settle) = self.settles.recv().await {
                    self.pass_on(settle).await;
                }
                return;
            }
        }
    }

    /// Passes a settle to the settler, which ends only after this feed, so that this does not fail.
    async fn pass_on(&self, settle: Settle) {
        let _ = self.fallback.send(settle).await;
    }

    /// Serves one stream until it ends.
    async fn serve(&mut self, attempts: &mut Attempts, unanswered: &mut VecDeque<Sent>) -> End {
        let (requests, outgoing) = mpsc::channel(MAX_UNANSWERED + 4);
        let mut budget = self.budget();
        let mut open = self.feed.options.open_request();
        if let Some(budget) = &budget {
            open.max_in_flight = budget.flow.try_into().unwrap_or(i32::MAX);
        }
        let open = Action::Open(open);
        // The channel is empty and has room.
        let _ = requests.send(request(open)).await;
        let opened =
            self.feed.client.queue_service().consume_stream(ReceiverStream::new(outgoing)).await;
        let mut answers = match opened {
            Ok(response) => response.into_inner(),
            Err(status) => return End::Broken(status),
        };
        let mut halted = false;
        let mut gathered = Vec::new();
        loop {
            tokio::select! {
                answer = answers.message() => match answer {
                    Ok(Some(answer)) => {
                        attempts.succeeded();
                        if let (Some(budget), Some(Answer::Deliveries(message))) = (&mut budget, &answer.event) {
                            budget.delivered(message);
                        }
                        self.answered(answer, unanswered, halted).await;
                    }
                    Ok(None) => return End::Broken(Status::unavailable("the broker ended the stream")),
                    Err(status) => return End::Broken(status),
                },
                () = self.feed.halt.cancelled(), if !halted => {
                    halted = true;
                    if requests.send(request(Action::Flow(Flow { max_in_flight: 0 }))).await.is_err() {
                        return End::Broken(final_status(&mut answers).await);
                    }
                }
                n = self.settles.recv_many(&mut gathered, MAX_SETTLES), if unanswered.len() < MAX_UNANSWERED => {
                    if n == 0 {
                        return self.finish(answers, requests, unanswered).await;
                    }
                    let lower = budget.as_mut().and_then(|budget| budget.settling(&gathered));
                    if let Some(flow) = lower.filter(|_| !halted)
                        && requests.send(request(Action::Flow(flow))).await.is_err()
                    {
                        return End::Broken(final_status(&mut answers).await);
                    }
                    for (action, sent) in self.sort(&mut gathered).await {
                        unanswered.push_back(sent);
                        if requests.send(request(action)).await.is_err() {
                            return End::Broken(final_status(&mut answers).await);
                        }
                    }
                }
            }
        }
    }

    fn budget(&self) -> Option<Budget> {
        let limit = self.feed.options.limit?;
        let left = limit.saturating_sub(self.counters.started.load(Ordering::Relaxed));
        let flow = left.min(self.feed.options.max_in_flight.into());
        Some(Budget { left, flow, unsettled: HashSet::new() })
    }

    /// Makes at most two requests of what was decided, and passes moves and forks to the settler.
    async fn sort(&self, gathered: &mut Vec<Settle>) -> Vec<(Action, Sent)> {
        let (mut commits, mut rollbacks) = (Vec::new(), Vec::new());
        for settle in gathered.drain(..) {
            match settle.decision {
                Decision::Commit => commits.push(settle),
                Decision::Rollback(_) => rollbacks.push(settle),
                Decision::Move(_) | Decision::Fork(_) => self.pass_on(settle).await,
            }
        }
        let mut requests = Vec::new();
        if !commits.is_empty() {
            let receipts = commits.iter().map(|settle| settle.receipt.clone()).collect();
            requests.push((Action::Commit(CommitRequest { receipts }), (Kind::Commit, commits)));
        }
        if !rollbacks.is_empty() {
            let items = rollbacks
                .iter()
                .filter_map(|settle| match &settle.decision {
                    Decision::Rollback(retry) => {
                        Some(rollback_item(settle.receipt.clone(), retry.clone()))
                    }
                    _ => None,
                })
                .collect();
            requests
                .push((Action::Rollback(RollbackRequest { items }), (Kind::Rollback, rollbacks)));
        }
        requests
    }

    async fn answered(
        &self,
        answer: ConsumeStreamResponse,
        unanswered: &mut VecDeque<Sent>,
        halted: bool,
    ) {
        let event = match answer.event {
            Some(Answer::Opened(opened)) => {
                let Some(lease) = opened.lease.and_then(|lease| lease.try_into().ok()) else {
                    return;
                };
                Event::Lease(lease)
            }
            Some(Answer::Deliveries(message)) => Event::Deliveries(message.deliveries),
            Some(Answer::Settled(settled)) => {
                // Answers come in the order of the requests.
                let Some((kind, _)) = unanswered.pop_front() else {
                    return;
                };
                return self.counters.count_all(kind, &settled.results, false);
            }
            Some(Answer::Error(_)) => {
                // One request failed, and the stream continues. The settler repeats the settles of the request.
                for settle in unanswered.pop_front().into_iter().flat_map(|(_, settles)| settles) {
                    self.pass_on(settle).await;
                }
                return;
            }
            Some(Answer::Flow(Flow { max_in_flight: 0 })) if halted => Event::Halted,
            Some(Answer::Revoked(revoked)) => Event::Revoked(revoked.receipt),
            Some(Answer::Flow(_) | Answer::Extended(_) | Answer::CommittedUpTo(_)) | None => return,
        };
        // The runner takes events until this feed has ended; if it was dropped, so is this.
        let _ = self.feed.events.send(event).await;
    }

    /// The runner has decided everything: waits for the outstanding answers.
    async fn finish(
        &self,
        mut answers: Streaming<ConsumeStreamResponse>,
        requests: mpsc::Sender<ConsumeStreamRequest>,
        unanswered: &mut VecDeque<Sent>,
    ) -> End {
        while !unanswered.is_empty() {
            match answers.message().await {
                Ok(Some(answer)) => self.answered(answer, unanswered, true).await,
                Ok(None) | Err(_) => break,
            }
        }
        drop(requests);
        End::Done
    }
}

fn request(action: Action) -> ConsumeStreamRequest {
    ConsumeStreamRequest { action: Some(action) }
}

/// Returns why a stream that accepts no more requests has ended.
async fn final_status(answers: &mut Streaming<ConsumeStreamResponse>) -> Status {
    loop {
        match answers.message().await {
            Ok(Some(_)) => {}
            Ok(None) => return Status::unavailable("the broker ended the stream"),
            Err(status) => return status,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_more_than_the_budget_is_handed_out() {
        let settle = |receipt: &str| Settle { receipt: receipt.into(), decision: Decision::Commit };
        let mut budget = Budget { left: 5, flow: 3, unsettled: HashSet::new() };
        budget.unsettled.extend(["a", "b", "c"].map(String::from));
        assert_eq!(budget.settling(&[settle("a"), settle("of an older stream")]), None);
        assert_eq!(budget.settling(&[settle("b")]), None);
        assert_eq!(budget.settling(&[settle("c")]), Some(Flow { max_in_flight: 2 }));
        budget.unsettled.extend(["d", "e"].map(String::from));
        assert_eq!(budget.settling(&[settle("d"), settle("e")]), Some(Flow { max_in_flight: 0 }));
    }
}
