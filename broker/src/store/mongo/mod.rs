//! Queues in MongoDB: one document per item, one collection per group, any number of brokers.
//!
//! # Layout
//! | folder | subject |
//! |---|---|
//! | `contract` | the traits of a store; each method calls the function of the folder that does it |
//! | [`push`] | stores items; repeated pushes |
//! | [`reserve`] | finds the items at the head of a queue, assigns and claims them; leases that ended |
//! | [`segment`] | items that share a document |
//! | [`settle`] | ends reservations: commit, roll back, move, extend |
//! | [`admin`] | items for administrators, replay, redrive, statistics |
//! | [`catalog`] | queues, schedules, deletion of queues |
//! | [`ordering`], [`priorities`] | ordering keys; priorities in use |
//! | [`migrations`] | the format of the database, and the way to it from earlier ones |
//! | [`cursor`] | where the head of a queue is: memory only |
//! | [`schema`] | documents, collections, indexes |
//! | [`server`] | connections, errors, transactions, group commit, the clock |
//!
//! Every operation runs in a task of its own, so that a caller that goes away harms nothing. Of a push, only the write
//! does: the caller itself queues for the write, so that calls keep their order.

mod admin;
#[doc(hidden)]
pub mod bench;
mod catalog;
mod contract;
mod cursor;
mod migrations;
mod ordering;
mod priorities;
mod push;
mod reserve;
mod schema;
mod segment;
mod server;
mod settle;
mod upkeep;

#[cfg(test)]
pub(crate) mod tests;

use std::{
    collections::HashMap,
    future::Future,
    sync::{Arc, OnceLock},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;

use super::{Result, unblocked::Unblocked};
use crate::{
    domain::{Clock, GroupName, IdSource, QueueName, Timestamp},
    essential::essential,
    metrics::Metrics,
    store::mongo::{
        cursor::{cursors::QueueCursors, lease_cache::LeaseCache, watermarks::QueueCursor},
        migrations::Format,
        schema::layout::Group,
        segment::known::KnownSegments,
        server::{
            error::{broken, unavailable},
            group_commit::WRITE_LIMIT,
            places::Db,
            time_limit::NO_ANSWER,
        },
    },
    tasks::Tasks,
};

pub use self::segment::form::SegmentSize;

/// Options of a connection.
#[derive(Debug, Clone)]
pub struct MongoOptions {
    /// Limit of connections to each server.
    pub pool_size: u32,
    /// The clock of the store.
    pub clock: Arc<Clock>,
    /// Whether to keep the clock on the server's time. False only in tests that move the clock.
    pub discipline: bool,
    /// How many items share a document.
    pub segments: SegmentSize,
}

impl Default for MongoOptions {
    fn default() -> Self {
        Self {
            pool_size: 64,
            clock: Arc::new(Clock::system()),
            discipline: true,
            segments: SegmentSize::default(),
        }
    }
}

/// Queues in a MongoDB database.
pub struct MongoStore {
    inner: Arc<Inner>,
    /// What the store does by itself, until `stop`.
    background: Tasks,
}

/// What the operations share.
struct Inner {
    db: Db,
    description: String,
    clock: Arc<Clock>,
    /// The last time that was used.
    given: server::clock::Given,
    broker: [u8; 4],
    ids: IdSource,
    lease_cache: LeaseCache,
    known_segments: KnownSegments,
    segment_size: SegmentSize,
    metrics: OnceLock<Arc<Metrics>>,
    format: Format,
    /// Why the database must not be used any more, once a newer version has said so.
    refusal: OnceLock<String>,
    groups: Mutex<HashMap<GroupName, Arc<Group>>>,
    cursors: QueueCursors,
    unblocked: Unblocked,
    /// Set once the collection of reports has its index.
    reports_indexed: OnceCell<()>,
    /// The same for past figures.
    figures_indexed: OnceCell<()>,
    /// Operations, which end by themselves.
    tracker: Tasks,
    stop: CancellationToken,
}

impl MongoStore {
    /// Connects to the deployment that `uri` names and uses `database` there.
    ///
    /// # Errors
    /// Within a few seconds, if the server cannot be reached or refuses the credentials.
    pub async fn connect(uri: &str, database: &str, options: MongoOptions) -> Result<Self> {
        Self::connect_as(migrations::THIS, uri, database, options).await
    }

    /// Like [`connect`](Self::connect), as a program with another format.
    async fn connect_as(
        format: Format,
        uri: &str,
        database: &str,
        options: MongoOptions,
    ) -> Result<Self> {
        let connection = server::connect::connect(uri, database, options.pool_size).await?;
        let (background, stop) = (Tasks::default(), CancellationToken::new());
        let failing = stop.clone().drop_guard(); // on an error, stops the tasks that were started here
        let end_all = server::orphaned_transactions::end_all(connection.db.clone(), stop.clone());
        background.spawn(essential("orphaned transactions", end_all));
        format.bring_up_to_date(&connection.db).await?;
        if options.discipline {
            let source =
                server::clock::Source { db: connection.db.clone(), sharded: connection.sharded };
            server::clock::set(&source, &options.clock).await?;
            let clock = Arc::clone(&options.clock);
            let discipline = server::clock::discipline(source, clock, stop.clone());
            background.spawn(essential("clock", discipline));
        }
        let inner = Inner {
            db: connection.db,
            description: connection.description,
            clock: options.clock,
            given: server::clock::Given::default(),
            broker: rand::random(),
            ids: IdSource::new(),
            lease_cache: LeaseCache::default(),
            known_segments: KnownSegments::default(),
            segment_size: options.segments,
            metrics: OnceLock::new(),
            format,
            refusal: OnceLock::new(),
            groups: Mutex::default(),
            cursors: QueueCursors::new(),
            unblocked: Unblocked::default(),
            reports_indexed: OnceCell::new(),
            figures_indexed: OnceCell::new(),
            tracker: Tasks::default(),
            stop,
        };
        catalog::queues::ensure_indexes(&inner).await?;
        catalog::deletion::ensure_collections(&inner).await?;
        let inner = Arc::new(inner);
        let recover =
            catalog::orphaned_items::recover_orphans(Arc::clone(&inner), inner.stop.clone());
        background.spawn(essential("orphaned items", recover));
        let upkeep = upkeep::run(Arc::clone(&inner), inner.stop.clone());
        background.spawn(essential("upkeep", upkeep));
        failing.disarm();
        Ok(Self { inner, background })
    }

    /// Returns the database, for signals that use the store's own.
    pub fn database(&self) -> mongodb::Database {
        mongodb::Database::clone(&self.inner.db)
    }

    async fn run<T, F>(&self, operation: impl FnOnce(Arc<Inner>) -> F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        self.inner.run(operation).await
    }

    async fn run_long<T, F>(&self, operation: impl FnOnce(Arc<Inner>) -> F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        self.inner.run_long(operation).await
    }
}

/// Runs an operation. Its outcome is unknown if it takes too long.
async fn in_time<T>(operation: impl Future<Output = Result<T>>) -> Result<T> {
    // Longer than the limit of a single write, whose error says more.
    let limit = WRITE_LIMIT + Duration::from_secs(5);
    tokio::time::timeout(limit, operation).await.unwrap_or_else(|_| Err(unavailable(NO_ANSWER)))
}

impl Drop for MongoStore {
    fn drop(&mut self) {
        self.inner.stop.cancel();
    }
}

impl Inner {
    /// Runs an operation in a task of its own. Its outcome is unknown if it takes too long.
    async fn run<T, F>(self: &Arc<Self>, operation: impl FnOnce(Arc<Inner>) -> F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        in_time(self.run_long(operation)).await
    }

    /// Like [`run`](Self::run), for operations without a time limit.
    async fn run_long<T, F>(self: &Arc<Self>, operation: impl FnOnce(Arc<Inner>) -> F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        self.check_format()?;
        let outcome = self.tracker.run(operation(Arc::clone(self))).await;
        outcome.unwrap_or_else(|_| Err(broken("an operation panicked")))
    }

    /// Returns the time, which does not go back when the clock is corrected a little.
    fn now(&self) -> Timestamp {
        self.given.next(self.clock.now())
    }

    /// Fails once a newer version of this program has taken over the database.
    fn check_format(&self) -> Result<()> {
        self.refusal.get().map_or(Ok(()), |refusal| Err(unavailable(refusal)))
    }

    /// Finds out whether a newer version of this program has taken over the database.
    async fn notice_format(&self) -> Result<()> {
        if let Some(refusal) = migrations::refusal(&self.db, self.format).await? {
            let refusal = self.refusal.get_or_init(|| refusal);
            tracing::error!("{refusal}; until then every call is refused");
            self.stop.cancel();
        }
        self.check_format()
    }

    /// Counts the items that share a write.
    fn note_batch(&self, call: &'static str, items: usize) {
        if let Some(metrics) = self.metrics.get() {
            metrics.batch(call, items);
        }
    }

    /// Returns a group and creates its indexes if necessary.
    async fn group(&self, name: &GroupName) -> Result<Arc<Group>> {
        let group = self.group_as_it_is(name);
        group.ensure_indexes(&self.db).await?;
        Ok(group)
    }

    /// Returns a group, whose indexes may not exist yet.
    fn group_as_it_is(&self, name: &GroupName) -> Arc<Group> {
        let mut groups = self.groups.lock();
        let new = || Arc::new(Group::new(&self.db, name));
        Arc::clone(groups.entry(name.clone()).or_insert_with(new))
    }

    fn cursor(&self, queue: &QueueName) -> Arc<QueueCursor> {
        self.cursors.get(queue)
    }
}
