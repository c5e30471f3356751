//! Operations: long work of operators that survives its caller and the broker that runs it.
//!
//! Each broker asks the store again and again for an operation that nobody runs. It claims the operation for [`CLAIM`], prolongs the
//! claim once a second, with how far the work is, and begins the work from the start: what is done already is not met again. A broker
//! that dies does not prolong its claim, and another one continues. A broker that could not prolong its claim in time stops, because
//! another one may have begun.

use std::{future::Future, pin::pin, sync::Arc, time::Duration};

use sha2::{Digest, Sha256};
use sluicegate_proto::backoff::Backoff;
use tokio::time::{Instant, timeout_at};

use crate::{
    domain::{ItemState, OperationId, QueueName, Timestamp},
    engine::{
        Engine, EngineError, Result,
        admin::bulk::Redrive,
        batches::{Batches, Progress},
    },
    store::{
        Advance, Claim, Created, Operation, OperationPlace, OperationState, Selection, StoreError,
        Work,
    },
};

/// How long a claim lasts unless it is prolonged: about as long after the death of its broker another one continues.
const CLAIM: Duration = Duration::from_secs(15);
/// How often the broker that runs an operation says how far it is, and learns whether it was cancelled.
const REPORT: Duration = Duration::from_secs(1);
/// How often a broker asks for an operation that nobody runs.
const POLL: Duration = Duration::from_secs(2);
/// The most running operations of all brokers. One broker may run all of them: an operation with a low rate lasts for hours, and must not
/// hold up others.
pub(crate) const MAX_RUNNING: u64 = 100;
/// How long operations that have ended are kept.
const KEPT: Duration = Duration::from_hours(7 * 24);
/// The most operations that have ended and are kept.
const MAX_KEPT: usize = 1_000;
/// How often older ones are deleted.
pub(super) const CLEANING: Duration = Duration::from_mins(10);
/// Pauses after failures that may pass.
const RETRY: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));

/// What is asked of a broker that starts an operation.
#[derive(Debug, Clone)]
pub(crate) struct NewOperation {
    /// What to do.
    pub(crate) work: Work,
    /// Only count the items.
    pub(crate) dry_run: bool,
    /// Chosen by the client; may be empty.
    pub(crate) request_id: String,
    /// The name of the client's token; may be empty.
    pub(crate) started_by: String,
}

impl Engine {
    /// Stores an operation, for this broker or another one to run.
    pub(crate) async fn start_operation(&self, new: NewOperation) -> Result<Operation> {
        self.check_open()?;
        let NewOperation { work, dry_run, request_id, started_by } = new;
        let id = operation_id(work.queue(), &request_id);
        let started = async || {
            if request_id.is_empty() {
                return Ok(None);
            }
            self.store.get_operation(id).await
        };
        if let Some(there) = started().await? {
            return same_operation(there, &work, dry_run);
        }
        let total = self.estimate(&work).await?;
        let _turn = self.turn_to_add().await?;
        if self.store.running_operations().await? >= MAX_RUNNING {
            // The same call may have been made twice, and the other was faster.
            return match started().await? {
                Some(there) => same_operation(there, &work, dry_run),
                None => Err(EngineError::TooManyOperations(MAX_RUNNING)),
            };
        }
        let now = self.now();
        let operation = Operation {
            id,
            work,
            dry_run,
            started_by,
            create_time: now,
            total,
            state: OperationState::Running,
            processed: 0,
            error: String::new(),
            update_time: now,
            claim: None,
        };
        match self.store.create_operation(&operation).await? {
            Created::New(operation) => {
                self.operation_started.notify_one();
                Ok(operation)
            }
            Created::Existing(there) => same_operation(there, &operation.work, dry_run),
        }
    }

    /// Returns an operation.
    pub(crate) async fn get_operation(&self, id: OperationId) -> Result<Operation> {
        let operation = self.store.get_operation(id).await?;
        operation.ok_or(EngineError::OperationNotFound(id))
    }

    /// Returns operations, the newest first.
    pub(crate) async fn list_operations(
        &self,
        after: Option<OperationPlace>,
        limit: usize,
    ) -> Result<Vec<Operation>> {
        Ok(self.store.list_operations(after, limit).await?)
    }

    /// Cancels an operation, if it is running.
    pub(crate) async fn cancel_operation(&self, id: OperationId) -> Result<Operation> {
        let operation = self.store.cancel_operation(id).await?;
        operation.ok_or(EngineError::OperationNotFound(id))
    }

    /// Deletes operations that ended long ago.
    pub(super) async fn clean_operations(&self) -> Result<()> {
        let before = Timestamp(self.now().0 - KEPT.as_millis() as i64);
        Ok(self.store.delete_operations(before, MAX_KEPT).await?)
    }

    /// Returns how many items there are for the work to look at.
    async fn estimate(&self, work: &Work) -> Result<u64> {
        let queue = self.get_queue(work.queue()).await?;
        let depth = self.store.depth(&queue).await?;
        let all = depth.unsettled() + depth.processed;
        let total = match work {
            Work::Redrive { filter, .. } if !filter.ids.is_empty() => filter.ids.len() as u64,
            Work::Redrive { .. } => depth.ready,
            Work::Replay { selection: Selection::Ids(ids), .. } => ids.len() as u64,
            Work::Replay { .. } => depth.processed,
            Work::Purge { .. } => all.saturating_sub(depth.reserved),
            Work::Delete { state, .. } => match state {
                None => all,
                Some(ItemState::Ready) => depth.ready,
                Some(ItemState::Delayed) => depth.delayed,
                Some(ItemState::Reserved) => depth.reserved,
                Some(ItemState::Blocked) => depth.blocked,
                Some(ItemState::Processed) => depth.processed,
            },
        };
        Ok(if work.max_items() == 0 { total } else { total.min(work.max_items()) })
    }

    /// Claims an operation that nobody runs.
    async fn claim_operation(&self) -> Result<Option<(Operation, Claim)>> {
        let claim = Claim { broker: self.store.broker_id(), number: rand::random() };
        let operation = self.store.claim_operation(claim, CLAIM).await?;
        Ok(operation.map(|operation| (operation, claim)))
    }

    /// Does the work of an operation from the start.
    async fn do_work(self: &Arc<Self>, operation: &Operation, progress: &Progress) -> Result<()> {
        let begun = operation.create_time;
        // A dry run counts at full speed.
        let rate = if operation.dry_run { 0 } else { operation.work.rate() };
        let mut batches = Batches::new(progress, operation.work.max_items(), rate);
        let batches = &mut batches;
        match (operation.work.clone(), operation.dry_run) {
            (Work::Redrive { queue, to, filter, .. }, dry_run) => {
                let redrive = Redrive { queue, to, filter };
                if dry_run {
                    return self.count_redrive(&redrive, begun, batches).await;
                }
                self.redrive(redrive, begun, batches).await?.map_or(Ok(()), Err)
            }
            (Work::Replay { queue, selection, .. }, true) => {
                self.count_replay(&queue, &selection, begun, batches).await
            }
            (Work::Replay { queue, selection, .. }, false) => {
                let selection = match selection {
                    // Those that an earlier broker replayed may have been processed again.
                    Selection::Ids(ids) => {
                        let settings = self.get_queue(&queue).await?;
                        Selection::Ids(self.processed_by(&settings, ids, begun).await?)
                    }
                    range @ Selection::Processed { .. } => range,
                };
                self.replay(&queue, selection, begun, batches).await
            }
            (Work::Purge { queue }, true) => self.count_purge(&queue, batches).await,
            (Work::Purge { queue }, false) => self.purge(&queue, begun, batches).await,
            (Work::Delete { queue, state, filter, .. }, true) => {
                self.count_delete(&queue, state, &filter, begun, batches).await
            }
            (Work::Delete { queue, state, filter, .. }, false) => {
                self.delete_items(&queue, state, &filter, begun, batches).await
            }
        }
    }
}

/// Claims and runs operations until the broker drains.
pub(super) async fn run_operations(engine: Arc<Engine>) {
    while !engine.is_draining() {
        match engine.claim_operation().await {
            Ok(Some((operation, claim))) => {
                let run = Run::new(Arc::clone(&engine), operation, claim);
                engine.tasks.spawn(run.run());
                continue;
            }
            Ok(None) => {}
            Err(error) => tracing::debug!(%error, "could not look for operations"),
        }
        tokio::select! {
            () = tokio::time::sleep(POLL) => {}
            () = engine.operation_started.notified() => {}
        }
    }
}

/// An operation that this broker runs.
struct Run {
    engine: Arc<Engine>,
    operation: Operation,
    claim: Claim,
    progress: Progress,
    /// When the claim was last known to be valid.
    claimed: Instant,
}

/// How the work of an operation ended here.
enum Ended {
    /// It is finished.
    Done(Result<()>),
    /// It was cancelled, or this broker drains, or another broker runs it.
    Stopped,
}

impl Run {
    fn new(engine: Arc<Engine>, operation: Operation, claim: Claim) -> Self {
        // The count of a dry run begins anew.
        let done = if operation.dry_run { 0 } else { operation.processed };
        let progress = Progress::new(done, engine.draining.child_token());
        Self { engine, operation, claim, progress, claimed: Instant::now() }
    }

    async fn run(self) {
        let (id, queue) = (self.operation.id, self.operation.work.queue());
        tracing::info!(operation = %id, %queue, dry_run = self.operation.dry_run, "running an operation");
        let ended = {
            let (work, reports) = (pin!(self.work()), pin!(self.report()));
            tokio::select! {
                biased;
                ended = work => ended,
                never = reports => match never {},
            }
        };
        let (state, error) = match ended {
            Ended::Done(Ok(())) => (OperationState::Succeeded, String::new()),
            Ended::Done(Err(error)) => {
                if matches!(error, EngineError::Store(_)) {
                    tracing::error!(operation = %id, %error, "an operation failed");
                }
                (OperationState::Failed, error.in_words())
            }
            // Somebody else goes on, unless the operation was cancelled, which stays so.
            Ended::Stopped => (OperationState::Running, String::new()),
        };
        let advance = Advance { processed: self.progress.done(), state, error };
        if let Some(operation) = self.finish(&advance).await {
            let (state, items) = (operation.state.as_str(), operation.processed);
            tracing::info!(operation = %id, %queue, state, items, error = operation.error, "left an operation");
        }
    }

    /// Does the work, again and again while it fails for reasons that may pass.
    async fn work(&self) -> Ended {
        let mut failures = 0;
        loop {
            let result = self.engine.do_work(&self.operation, &self.progress).await;
            if self.progress.is_stopped() {
                return Ended::Stopped;
            }
            match result {
                Err(EngineError::ShuttingDown) => return Ended::Stopped,
                Err(error) if may_pass(&error) => {
                    tracing::warn!(operation = %self.operation.id, %error, "an operation has to wait");
                    self.progress.pause(RETRY.delay(failures)).await;
                    failures += 1;
                    if self.progress.is_stopped() {
                        return Ended::Stopped;
                    }
                    if self.operation.dry_run {
                        self.progress.restart();
                    }
                }
                result => return Ended::Done(result),
            }
        }
    }

    /// Says once a second how far the work is. Stops it if the operation was cancelled or the claim is lost.
    async fn report(&self) -> std::convert::Infallible {
        let mut claimed = self.claimed;
        loop {
            tokio::time::sleep(REPORT).await;
            let advance = Advance {
                processed: self.progress.done(),
                state: OperationState::Running,
                error: String::new(),
            };
            let asked = Instant::now();
            match timeout_at(claimed + CLAIM, self.advance(&advance, CLAIM)).await {
                Ok(Ok(Some(operation))) if operation.state == OperationState::Running => {
                    claimed = asked;
                }
                Ok(Ok(None)) => {
                    tracing::warn!(operation = %self.operation.id, "another broker runs this operation now");
                    self.progress.stop();
                }
                Ok(Err(error)) => tracing::debug!(%error, "could not say how far an operation is"),
                // It was cancelled, or the claim has ended.
                Ok(Ok(Some(_))) | Err(_) => self.progress.stop(),
            }
        }
    }

    fn advance<'a>(
        &'a self,
        advance: &'a Advance,
        lasting: Duration,
    ) -> impl Future<Output = Result<Option<Operation>, StoreError>> + 'a {
        self.engine.store.advance_operation(self.operation.id, self.claim, advance, lasting)
    }

    /// Says how the work ended, and gives up the claim. Where this fails the claim ends by itself, and another broker finds that there
    /// is nothing left to do.
    async fn finish(&self, advance: &Advance) -> Option<Operation> {
        let begun = Instant::now();
        let mut failures = 0;
        loop {
            match self.advance(advance, Duration::ZERO).await {
                Ok(operation) => return operation,
                Err(error) if begun.elapsed() >= CLAIM || self.engine.is_draining() => {
                    tracing::warn!(operation = %self.operation.id, %error, "could not say how an operation ended");
                    return None;
                }
                Err(_) => tokio::time::sleep(RETRY.delay(failures)).await,
            }
            failures += 1;
        }
    }
}

/// Returns true for failures after which the same work may succeed.
fn may_pass(error: &EngineError) -> bool {
    match error {
        EngineError::Conflict(_) => true,
        EngineError::Store(error) => {
            matches!(&**error, StoreError::Unavailable { .. } | StoreError::Full { .. })
        }
        _ => false,
    }
}

/// Returns a random id, or the one that belongs to this request for this queue.
fn operation_id(queue: &QueueName, request_id: &str) -> OperationId {
    if request_id.is_empty() {
        return OperationId(rand::random());
    }
    let digest =
        Sha256::new().chain_update(queue.as_str()).chain_update([0]).chain_update(request_id);
    let mut id = [0; 12];
    id.copy_from_slice(&digest.finalize()[..12]);
    OperationId(id)
}

fn same_operation(there: Operation, work: &Work, dry_run: bool) -> Result<Operation> {
    if there.work == *work && there.dry_run == dry_run {
        Ok(there)
    } else {
        Err(EngineError::OperationExists(there.id))
    }
}
