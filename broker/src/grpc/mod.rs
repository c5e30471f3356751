//! The API `sluicegate.v1` over gRPC, and KEDA's protocol for scalers.
//!
//! * [`server`]: the server around the services: their limits, health, reflection, shutdown.
//! * `connections`: the connections it serves. `services`: which service a call is for.
//! * `middleware`: what every call passes first: [`crate::access`], the log, uniform errors.
//! * `queue_service`, `admin_service`, `schedule_service`, `template_service`, `operation_service`: one method per rpc, which parses, asks the engine and
//!   converts. The longer rpcs have files of their own: `push_stream` and `consume_stream`. `delivery_stream` holds what
//!   both consume calls send.
//! * `intake`: bounds how much of large requests is held in memory; `answers`: how much of answers that are not read.
//! * `concurrency`: bounds how many calls are under way.
//! * `brokers`: what operators see of brokers and consumers. `pages`: lists by name. `parse`: from requests to domain values, with every check. `convert`: from domain values to answers.
//! * `scaler`: answers KEDA, which scales the consumers of a queue.
//! * [`status`]: from errors to statuses.

#[doc(hidden)]
pub mod bench;
pub(crate) mod server;
pub(crate) mod status;

mod admin_service;
mod answers;
mod brokers;
mod concurrency;
mod connections;
mod consume_stream;
mod convert;
mod delivery_stream;
mod intake;
mod middleware;
mod operation_service;
mod pages;
mod parse;
mod push_stream;
mod queue_service;
mod scaler;
mod schedule_service;
mod services;
mod template_service;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{
        Semaphore,
        oneshot::{self, error::RecvError},
    },
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Status};

use crate::{
    access::Caller,
    domain::{Action, QueueName, Receipt},
    engine::{Engine, EngineError, QueueNames},
    tasks::Tasks,
    traces::Traces,
};

#[cfg(feature = "simulation")]
pub(crate) use self::intake::{Intake, PUSH_STREAM};
use self::{parse::Rules, status::ApiError};

/// How often a consumer that waits for its queue to be created looks whether it is there, if nobody announces a new queue.
const CREATION_POLL: Duration = Duration::from_secs(1);

/// Most pages of items that are read at a time: each may take 8 MiB, and more are not read faster.
const PAGES_AT_A_TIME: usize = 16;

/// The services. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Api {
    engine: Arc<Engine>,
    /// Owns the work of every call, so that a caller who hangs up never cuts a store call short.
    tasks: Tasks,
    /// Cancelled when streams and waiting calls have to end that the engine has not ended.
    shutdown: CancellationToken,
    /// Set by the server.
    max_connection_age: Duration,
    /// Set by the server.
    traces: Traces,
    /// One permit for each page of items that is being read.
    pages: Arc<Semaphore>,
}

impl Api {
    /// Returns services on an engine. Wait for `tasks` before the engine and its store end.
    pub(crate) fn new(engine: Arc<Engine>, tasks: Tasks, shutdown: CancellationToken) -> Self {
        let pages = Arc::new(Semaphore::new(PAGES_AT_A_TIME));
        Self {
            engine,
            tasks,
            shutdown,
            max_connection_age: Duration::ZERO,
            traces: Traces::default(),
            pages,
        }
    }

    /// Returns the age at which a stream is retired, or `None` for no limit. The age is greater
    /// than that at which connections are told to end, so that the next stream is on another
    /// connection.
    fn stream_age(&self) -> Option<Duration> {
        let age = self.max_connection_age;
        (!age.is_zero()).then(|| age.mul_f64(rand::random_range(1.1..=1.2)))
    }

    fn rules(&self) -> Rules {
        Rules::of(&self.engine)
    }

    /// Starts `work` in a task of its own, which runs to its end even if the caller hangs up.
    fn start<T, F>(&self, work: impl FnOnce(Arc<Engine>) -> F) -> Running<T>
    where
        F: Future<Output = Result<T, EngineError>> + Send + 'static,
        T: Send + 'static,
    {
        self.tasks.run(work(Arc::clone(&self.engine)))
    }

    /// Starts `work` as [`Self::start`] does, and waits for the outcome.
    async fn run<T, F>(&self, work: impl FnOnce(Arc<Engine>) -> F) -> Result<T, Status>
    where
        F: Future<Output = Result<T, EngineError>> + Send + 'static,
        T: Send + 'static,
    {
        joined(self.start(work).await)
    }

    /// Runs work that waits and takes items out of a queue. The work ends early when the caller
    /// hangs up or the broker shuts down, and the engine then keeps no items from others. Items
    /// taken at that very moment go to `roll_back`.
    async fn take<T, F, G>(
        &self,
        work: impl FnOnce(Arc<Engine>) -> F,
        roll_back: impl FnOnce(Arc<Engine>, T) -> G + Send + 'static,
    ) -> Result<T, Status>
    where
        F: Future<Output = Result<T, EngineError>> + Send + 'static,
        G: Future<Output = ()> + Send + 'static,
        T: Send + 'static,
    {
        let (mut answer, caller) = oneshot::channel();
        let work = work(Arc::clone(&self.engine));
        let api = self.clone();
        self.tasks.spawn(async move {
            let result = tokio::select! {
                biased;
                result = work => result,
                () = answer.closed() => return,
                () = api.abandoned() => Err(EngineError::ShuttingDown),
            };
            // If nobody receives the parcel, or it is dropped unread, it rolls its items back.
            let _ =
                answer.send(result.map(|taken| Parcel { content: Some((taken, roll_back)), api }));
        });
        let mut parcel = caller.await.map_err(|_| ApiError::TaskDied)??;
        let (taken, _) = parcel.content.take().ok_or(ApiError::TaskDied)?;
        Ok(taken)
    }
}

impl Api {
    /// Waits until a queue is there: consuming from a queue does not create it. Returns what is left of `wait`; `None` if the
    /// queue was not created in this time.
    async fn until_created(
        &self,
        caller: &Caller,
        queue: &QueueName,
        wait: Duration,
    ) -> Result<Option<Duration>, Status> {
        if self.engine.knows_queue(queue) {
            return Ok(Some(wait));
        }
        let begun = Instant::now();
        let mut changes = self.engine.queue_changes();
        loop {
            changes.mark_unchanged();
            let name = queue.clone();
            let is_there = self.run(|engine| async move { engine.has_queue(&name).await }).await?;
            let left = wait.saturating_sub(begun.elapsed());
            if is_there {
                return Ok(Some(left));
            }
            if left.is_zero() {
                return Ok(None);
            }
            tokio::select! {
                biased;
                // The sender is in the engine, so that there is always another change to wait for.
                _ = changes.changed() => {}
                () = sleep(left.min(CREATION_POLL)) => {}
                () = self.engine.until_draining() => return Err(EngineError::ShuttingDown.into()),
                () = self.shutdown.cancelled() => return Err(EngineError::ShuttingDown.into()),
            }
            // The token may be withdrawn meanwhile.
            caller.may(Action::Consume, queue.as_str())?;
        }
    }

    /// Waits until calls that the engine does not end have to end. An engine that drains ends its
    /// calls itself, because only the engine knows whose items are being committed at this moment.
    async fn abandoned(&self) {
        self.shutdown.cancelled().await;
        if self.engine.is_draining() {
            std::future::pending::<()>().await;
        }
    }
}

/// Returns who makes a call.
fn caller<T>(request: &Request<T>) -> Result<Caller, Status> {
    // Every call has one: the middleware puts it in.
    let caller = request.extensions().get::<Caller>();
    caller.cloned().ok_or_else(|| Status::internal("the call came past the check of its token"))
}

/// Allows or refuses to create a queue that a push needs; a refusal for want of a permission is counted and logged.
fn may_create(
    caller: &Caller,
) -> impl Fn(&QueueName, &QueueNames) -> Result<(), EngineError> + Send + Sync {
    |queue, names| {
        if caller.may(Action::Create, queue.as_str()).is_err() {
            return Err(EngineError::MayNotCreate(queue.clone()));
        }
        match caller.max_queues(queue.as_str(), names.iter().map(QueueName::as_str)) {
            Some(most) => {
                Err(EngineError::TooManyQueues { setting: "max_queues of the token", most })
            }
            None => Ok(()),
        }
    }
}

/// Allows or refuses to settle what was taken from the queues of these receipts.
fn may_settle<'a>(
    caller: &Caller,
    receipts: impl IntoIterator<Item = &'a Receipt>,
) -> Result<(), ApiError> {
    // Most batches are of one queue, which is checked once.
    let mut last = None;
    for receipt in receipts {
        if last != Some(&receipt.queue) {
            caller.may(Action::Consume, receipt.queue.as_str())?;
            last = Some(&receipt.queue);
        }
    }
    Ok(())
}

/// Items taken out of a queue, on their way to the caller.
struct Parcel<T, F, G>
where
    F: FnOnce(Arc<Engine>, T) -> G,
    G: Future<Output = ()> + Send + 'static,
{
    content: Option<(T, F)>,
    api: Api,
}

impl<T, F, G> Drop for Parcel<T, F, G>
where
    F: FnOnce(Arc<Engine>, T) -> G,
    G: Future<Output = ()> + Send + 'static,
{
    fn drop(&mut self) {
        if let Some((taken, roll_back)) = self.content.take() {
            self.api.tasks.spawn(roll_back(Arc::clone(&self.api.engine), taken));
        }
    }
}

/// Work in a task of its own, which runs to its end if this is dropped.
type Running<T> = oneshot::Receiver<Result<T, EngineError>>;

/// Returns the outcome of [`Api::start`]. A task that died is an error like any other.
fn joined<T>(result: Result<Result<T, EngineError>, RecvError>) -> Result<T, Status> {
    if result.is_err() {
        tracing::error!("the task of a call died");
    }
    Ok(result.map_err(|_| ApiError::TaskDied)??)
}
