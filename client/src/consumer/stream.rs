//! Feeds from `ConsumeStream`, and settles on it while it lives.
//!
//! Settles that were not answered when the stream broke, and moves and forks, go to the settler.

use std::collections::VecDeque;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::{
    Decision, Event,
    decision::{Settle, rollback_item},
    feed::{Attempts, Feed},
    settle::{Counters, Kind, MAX_SETTLES},
};
use crate::proto::{
    CommitRequest, ConsumeStreamRequest, ConsumeStreamResponse, Flow, RollbackRequest,
    consume_stream_request::Action, consume_stream_response::Event as Answer,
};

/// How many settle requests may be unanswered on the stream; what is decided meanwhile gathers into the next one.
const MAX_UNANSWERED: usize = 8;

/// What one settle request was about, to be handed on if its answer is lost.
type Sent = (Kind, Vec<Settle>);

pub(super) struct StreamFeed {
    pub(super) feed: Feed,
    /// Decisions of the runner.
    pub(super) settles: mpsc::Receiver<Settle>,
    /// The settler, for what this stream can not do.
    pub(super) fallback: mpsc::Sender<Settle>,
    pub(super) counters: std::sync::Arc<Counters>,
}

/// How one stream ended.
enum End {
    /// The runner has settled everything, and it is answered.
    Done,
    Broken(Status),
}

impl StreamFeed {
    /// Feeds until the runner has closed its side and everything is settled.
    pub(super) async fn run(mut self) {
        let mut attempts = Attempts::new();
        loop {
            attempts.begin(&self.feed);
            let mut unanswered = VecDeque::new();
            let end = self.serve(&mut attempts, &mut unanswered).await;
            // Whether the broker did these before the stream broke is unknown; asking again tells.
            for settle in unanswered.into_iter().flat_map(|(_, settles)| settles) {
                self.hand_on(settle).await;
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
                    self.hand_on(settle).await;
                }
                return;
            }
        }
    }

    /// The settler ends only after this feed, so handing on does not fail.
    async fn hand_on(&self, settle: Settle) {
        let _ = self.fallback.send(settle).await;
    }

    /// One stream.
    async fn serve(&mut self, attempts: &mut Attempts, unanswered: &mut VecDeque<Sent>) -> End {
        let (requests, outgoing) = mpsc::channel(MAX_UNANSWERED + 2);
        let open = Action::Open(self.feed.options.open_request());
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
                        self.answered(answer, unanswered, halted).await;
                    }
                    Ok(None) => return End::Broken(Status::unavailable("the broker ended the stream")),
                    Err(status) => return End::Broken(status),
                },
                () = self.feed.halt.cancelled(), if !halted => {
                    halted = true;
                    if requests.send(request(Action::Flow(Flow { max_in_flight: 0 }))).await.is_err() {
                        return End::Broken(last_word(&mut answers).await);
                    }
                }
                n = self.settles.recv_many(&mut gathered, MAX_SETTLES), if unanswered.len() < MAX_UNANSWERED => {
                    if n == 0 {
                        return self.finish(answers, requests, unanswered).await;
                    }
                    for (action, sent) in self.sort(&mut gathered).await {
                        unanswered.push_back(sent);
                        if requests.send(request(action)).await.is_err() {
                            return End::Broken(last_word(&mut answers).await);
                        }
                    }
                }
            }
        }
    }

    /// Makes at most two requests of what was decided; moves and forks go to the settler.
    async fn sort(&self, gathered: &mut Vec<Settle>) -> Vec<(Action, Sent)> {
        let (mut commits, mut rollbacks) = (Vec::new(), Vec::new());
        for settle in gathered.drain(..) {
            match settle.decision {
                Decision::Commit => commits.push(settle),
                Decision::Rollback(_) => rollbacks.push(settle),
                Decision::Move(_) | Decision::Fork(_) => self.hand_on(settle).await,
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
            Some(Answer::Flow(_)) if halted => Event::Halted,
            Some(Answer::Flow(_) | Answer::Extended(_)) | None => return,
        };
        // The runner takes events until this feed has ended; if it was dropped, so is this.
        let _ = self.feed.events.send(event).await;
    }

    /// The runner has decided everything: wait for the answers still out.
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

/// Why a stream that takes no more requests has ended.
async fn last_word(answers: &mut Streaming<ConsumeStreamResponse>) -> Status {
    loop {
        match answers.message().await {
            Ok(Some(_)) => {}
            Ok(None) => return Status::unavailable("the broker ended the stream"),
            Err(status) => return status,
        }
    }
}
