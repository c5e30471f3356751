//! The settler: unary calls, each with whatever was decided while the call before it was in progress.
//!
//! A settle can be repeated safely: a receipt is valid for one settle only. The second one is answered `GONE` or
//! `LEASE_LOST` and changes nothing.

use std::{
    future::Future,
    sync::Arc,
    sync::atomic::{AtomicU64, Ordering},
};

use tokio::{sync::mpsc, task::JoinSet, time::Instant};
use tonic::{Response, Status};

use super::{
    decision::{Decision, Settle, rollback_item},
    options::Options,
};
use crate::{
    client::Client,
    error::is_transient,
    proto::{
        CommitAndPushRequest, CommitRequest, MoveRequest, Outcome, PushEntry, RollbackItem,
        RollbackRequest, SettleResult,
    },
    retry::Retry,
};

/// The broker accepts at most this many receipts in one call.
pub(super) const MAX_SETTLES: usize = sluicegate_proto::codec::MAX_ENTRIES;
/// Each move and each fork is a call of its own; at most this many run at a time.
const MAX_SINGLES: usize = 64;

/// What a consumer has done by its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Summary {
    /// Items whose handler was started.
    pub started: u64,
    /// Items committed, and those committed on delivery.
    pub committed: u64,
    /// Items rolled back, dead-lettered ones included.
    pub rolled_back: u64,
    /// Items that were dead-lettered when they were rolled back.
    pub dead_lettered: u64,
    /// Items moved to another queue, or committed with pushes.
    pub forwarded: u64,
    /// Settles that changed nothing: the item had been delivered again or was gone.
    pub lost: u64,
    /// Settles of which it is unknown whether they took effect: not answered in time, or only after repetition.
    pub unknown: u64,
}

/// What was settled so far; the stream feed and the settler share it.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) started: AtomicU64,
    pub(super) committed: AtomicU64,
    rolled_back: AtomicU64,
    dead_lettered: AtomicU64,
    forwarded: AtomicU64,
    lost: AtomicU64,
    unknown: AtomicU64,
}

/// The kind of a settle, for counting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Commit,
    Rollback,
    Forward,
}

impl Counters {
    pub(super) fn add(counter: &AtomicU64, n: usize) {
        counter.fetch_add(n as u64, Ordering::Relaxed);
    }

    /// Counts one answer. If the settle was repeated, a receipt that is no longer valid may have been used by the first try.
    pub(super) fn count(&self, kind: Kind, outcome: Outcome, receipt: &str, repeated: bool) {
        let counter = match (outcome, kind) {
            (Outcome::Ok, Kind::Commit) => &self.committed,
            (Outcome::Ok, Kind::Rollback) => &self.rolled_back,
            (Outcome::Ok, Kind::Forward) => &self.forwarded,
            (Outcome::DeadLettered, _) => {
                Self::add(&self.rolled_back, 1);
                &self.dead_lettered
            }
            (Outcome::LeaseLost | Outcome::Gone, _) if repeated => &self.unknown,
            (Outcome::LeaseLost | Outcome::Gone | Outcome::Unspecified, _) => {
                tracing::warn!(receipt, ?kind, ?outcome, "the item was no longer held");
                &self.lost
            }
        };
        Self::add(counter, 1);
    }

    pub(super) fn count_all(&self, kind: Kind, results: &[SettleResult], repeated: bool) {
        for result in results {
            self.count(kind, result.outcome(), &result.receipt, repeated);
        }
    }

    pub(super) fn count_unknown(&self, n: usize) {
        Self::add(&self.unknown, n);
    }

    pub(super) fn summary(&self) -> Summary {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Summary {
            started: read(&self.started),
            committed: read(&self.committed),
            rolled_back: read(&self.rolled_back),
            dead_lettered: read(&self.dead_lettered),
            forwarded: read(&self.forwarded),
            lost: read(&self.lost),
            unknown: read(&self.unknown),
        }
    }
}

#[derive(Clone)]
pub(super) struct Settler {
    pub(super) client: Client,
    pub(super) options: Arc<Options>,
    pub(super) counters: Arc<Counters>,
}

impl Settler {
    /// Settles what is received until all senders are gone.
    pub(super) async fn run(self, mut incoming: mpsc::Receiver<Settle>) {
        let mut singles = JoinSet::new();
        let mut gathered = Vec::new();
        loop {
            tokio::select! {
                n = incoming.recv_many(&mut gathered, MAX_SETTLES), if singles.len() < MAX_SINGLES => {
                    if n == 0 {
                        break;
                    }
                }
                Some(_) = singles.join_next() => continue,
            }
            let (mut commits, mut rollbacks) = (Vec::new(), Vec::new());
            for Settle { receipt, decision } in gathered.drain(..) {
                match decision {
                    Decision::Commit => commits.push(receipt),
                    Decision::Rollback(retry) => rollbacks.push(rollback_item(receipt, retry)),
                    Decision::Move(mut request) => {
                        request.receipt = receipt;
                        let settler = self.clone();
                        singles.spawn(async move { settler.forward(request).await });
                    }
                    Decision::Fork(pushes) => {
                        let settler = self.clone();
                        singles.spawn(async move { settler.fork(receipt, pushes).await });
                    }
                }
            }
            tokio::join!(self.commit(commits), self.rollback(rollbacks));
        }
        while singles.join_next().await.is_some() {}
    }

    async fn commit(&self, receipts: Vec<String>) {
        if receipts.is_empty() {
            return;
        }
        let n = receipts.len();
        let message = CommitRequest { receipts };
        let answer = self
            .repeat(|client| {
                let request = client.request(message.clone());
                async move { client.queue_service().commit(request).await }
            })
            .await;
        match answer {
            Ok((answer, repeated)) => {
                self.counters.count_all(Kind::Commit, &answer.results, repeated);
            }
            Err(status) => self.give_up(n, "commit", &status),
        }
    }

    async fn rollback(&self, items: Vec<RollbackItem>) {
        if items.is_empty() {
            return;
        }
        let n = items.len();
        let message = RollbackRequest { items };
        let answer = self
            .repeat(|client| {
                let request = client.request(message.clone());
                async move { client.queue_service().rollback(request).await }
            })
            .await;
        match answer {
            Ok((answer, repeated)) => {
                self.counters.count_all(Kind::Rollback, &answer.results, repeated);
            }
            Err(status) => self.give_up(n, "rollback", &status),
        }
    }

    async fn forward(&self, message: MoveRequest) {
        let answer = self
            .repeat(|client| {
                let request = client.request(message.clone());
                async move { client.queue_service().r#move(request).await }
            })
            .await;
        match answer {
            Ok((answer, repeated)) => {
                self.counters.count(Kind::Forward, answer.outcome(), &message.receipt, repeated);
            }
            Err(status) => self.refused(message.receipt, "move", &status).await,
        }
    }

    async fn fork(&self, receipt: String, pushes: Vec<PushEntry>) {
        let message = CommitAndPushRequest { receipt, pushes };
        let answer = self
            .repeat(|client| {
                let request = client.request(message.clone());
                async move { client.queue_service().commit_and_push(request).await }
            })
            .await;
        match answer {
            Ok((answer, repeated)) => {
                self.counters.count(Kind::Forward, answer.outcome(), &message.receipt, repeated);
            }
            Err(status) => self.refused(message.receipt, "commit and push", &status).await,
        }
    }

    /// Rolls back an item whose move or fork the broker refused (another group, a bad queue name, too large): that is a
    /// failure of the handler, and the item must not stay reserved until its lease ends.
    async fn refused(&self, receipt: String, what: &str, status: &Status) {
        if is_transient(status) {
            return self.give_up(1, what, status);
        }
        let reason = format!("{what} was refused: {}", status.message());
        self.rollback(vec![rollback_item(receipt, Retry::new(reason))]).await;
    }

    fn give_up(&self, n: usize, what: &str, status: &Status) {
        tracing::error!(queue = self.options.queue, items = n, %status, "{what} failed");
        self.counters.count_unknown(n);
    }

    /// Repeats a call while that may help. Returns the answer, and whether the call was repeated.
    async fn repeat<T, F>(&self, call: impl Fn(Client) -> F) -> Result<(T, bool), Status>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let backoff = &self.options.backoff;
        let give_up = Instant::now() + backoff.give_up_after;
        let mut tries = 0;
        loop {
            let address = self.client.address_in_use();
            let status = match call(self.client.clone()).await {
                Ok(answer) => return Ok((answer.into_inner(), tries > 0)),
                Err(status) => status,
            };
            let delay = backoff.delay(tries, Some(&status));
            if !is_transient(&status) || Instant::now() + delay > give_up {
                return Err(status);
            }
            self.client.fail_over(&address);
            tokio::time::sleep(delay).await;
            tries += 1;
        }
    }
}
