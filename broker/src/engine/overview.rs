//! A broker's view of all queues: their names, and which of them have changed, on whatever broker.
//! One read returns all names and another one all changes, so that an idle queue costs nothing.
//!
//! Of all brokers one keeps the depth gauges for `/metrics` up to date. That broker counts a queue
//! after something has happened there, and its counts take at most one part in [`SHARE`] of the
//! time.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use crate::domain::{QueueName, Totals};

use super::{Engine, EngineError, MayCreate, Result, depths::Seen};

/// Name of the task of keeping the depth gauges.
const TASK: &str = "figures";
/// How long a broker has that task without a renewal.
const LEAD: Duration = Duration::from_secs(10);
/// How often the broker renews the task, and how often the others try to get it.
const RENEW: Duration = Duration::from_secs(3);
/// The names of queues are read again after this time even if no signal announced a new queue.
const NAMES_AGE: Duration = Duration::from_secs(5);
/// Shortest interval between two reads of totals.
pub(super) const TOTALS_AGE: Duration = Duration::from_secs(1);
/// Queues that are not empty are counted this often even if nothing is known to have changed,
/// because items expire and signals may be lost.
pub(super) const SLOW_POLL: Duration = Duration::from_mins(1);
/// Reads of totals and counts for gauges each take at most one part in this many of the time.
const SHARE: u32 = 200;
/// The same for queues that have no gauge yet.
const FIRST_SHARE: u32 = 10;
/// How often the gauges are updated.
const TICK: Duration = Duration::from_secs(1);
/// Page size for the list of queues.
const PAGE: usize = 500;

/// The names of all queues, and of those that are being created.
pub(crate) struct QueueNames {
    read: Arc<Vec<QueueName>>,
    created: Vec<QueueName>,
}

impl QueueNames {
    /// Returns all names.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &QueueName> {
        self.read.iter().chain(&self.created)
    }
}

/// A queue that is being created: nobody else gets its place meanwhile.
pub(crate) struct Creation<'a> {
    overview: &'a Overview,
    name: QueueName,
}

impl Drop for Creation<'_> {
    fn drop(&mut self) {
        let mut state = self.overview.state.lock();
        if let Some(calls) = state.creating.get_mut(&self.name) {
            *calls -= 1;
            if *calls == 0 {
                state.creating.remove(&self.name);
            }
        }
    }
}

/// When something was read, and how long the read took.
#[derive(Debug, Clone, Copy)]
struct Read {
    at: Instant,
    took: Duration,
}

pub(super) struct Overview {
    /// Allows one read at a time.
    reading: tokio::sync::Mutex<()>,
    /// True if this broker keeps the gauges, or was the last to do so.
    leads: AtomicBool,
    state: Mutex<State>,
    /// Changed whenever queues may have been created or deleted.
    names_changed: watch::Sender<()>,
}

impl Default for Overview {
    fn default() -> Self {
        Self {
            reading: tokio::sync::Mutex::default(),
            leads: AtomicBool::default(),
            state: Mutex::default(),
            names_changed: watch::Sender::new(()),
        }
    }
}

#[derive(Default)]
struct State {
    names: Arc<Vec<QueueName>>,
    /// `None`: the names may have changed.
    names_read: Option<Read>,
    /// When the names were read, whether or not they may have changed since.
    names_at: Option<Instant>,
    /// Queues that this broker has created since.
    created: Vec<QueueName>,
    /// Queues that this broker is creating, each with the number of calls that do.
    creating: HashMap<QueueName, u32>,
    /// The totals of all queues as last read from the store, plus what this broker has added since.
    totals: HashMap<QueueName, Totals>,
    totals_read: Option<Read>,
}

impl Overview {
    /// Records that queues may have been created or deleted.
    pub(super) fn names_changed(&self) {
        self.state.lock().names_read = None;
        self.names_changed.send_replace(());
    }

    /// Records that this broker has created a queue, which is one of those that are there from now on.
    pub(super) fn created(&self, queue: &QueueName) {
        let mut state = self.state.lock();
        state.creating.remove(queue);
        state.created.push(queue.clone());
    }

    fn has_names_of_late(&self) -> bool {
        self.state.lock().names_at.is_some_and(|at| at.elapsed() < NAMES_AGE)
    }

    /// Begins to create a queue if `check` allows it, beside all others and those that are being created.
    fn begin_creation(
        &self,
        name: &QueueName,
        check: impl FnOnce(&QueueNames) -> Result<()>,
    ) -> Result<Creation<'_>> {
        let mut state = self.state.lock();
        let since =
            state.created.iter().chain(state.creating.keys().filter(|other| *other != name));
        let since = since.filter(|other| state.names.binary_search(other).is_err());
        check(&QueueNames { read: Arc::clone(&state.names), created: since.cloned().collect() })?;
        *state.creating.entry(name.clone()).or_default() += 1;
        Ok(Creation { overview: self, name: name.clone() })
    }

    /// Drops a queue that no longer exists.
    pub(super) fn forget(&self, queue: &QueueName) {
        let mut state = self.state.lock();
        state.totals.remove(queue);
        state.names_read = None;
    }

    /// Records the totals that this broker has added to those in the store.
    pub(super) fn flushed(&self, changes: &[(QueueName, Totals)]) {
        let mut state = self.state.lock();
        for (queue, change) in changes {
            state.totals.entry(queue.clone()).or_default().add(change);
        }
    }

    /// Returns a queue's totals in the store, as of a moment ago.
    pub(super) fn totals(&self, queue: &QueueName) -> Totals {
        self.state.lock().totals.get(queue).copied().unwrap_or_default()
    }
}

impl Engine {
    /// Returns true if the settings of the queue are at hand, which are at most a second old.
    pub(crate) fn knows_queue(&self, name: &QueueName) -> bool {
        self.queues.known(name).is_some()
    }

    /// Returns true if the queue is there. One read of all names, at most a few seconds old, serves everyone who asks.
    pub(crate) async fn has_queue(&self, name: &QueueName) -> Result<bool> {
        if self.queue_names().await?.binary_search(name).is_err() {
            return Ok(false);
        }
        match self.queues.get(name).await {
            Ok(_) => Ok(true),
            Err(EngineError::QueueNotFound(_)) => {
                self.overview.names_changed(); // deleted since the names were read
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns a receiver that is notified when queues may have been created.
    pub(crate) fn queue_changes(&self) -> watch::Receiver<()> {
        self.overview.names_changed.subscribe()
    }

    /// Returns the names of all queues, at most a few seconds old.
    pub(super) async fn queue_names(&self) -> Result<Arc<Vec<QueueName>>> {
        let known = || {
            let state = self.overview.state.lock();
            // While the names are being read, those at hand are of an earlier read.
            let fit = |read: &Read| {
                state.names_at == Some(read.at)
                    && read.at.elapsed() < NAMES_AGE.max(read.took * SHARE)
            };
            state.names_read.as_ref().is_some_and(fit).then(|| Arc::clone(&state.names))
        };
        if let Some(names) = known() {
            return Ok(names);
        }
        let _turn = self.overview.reading.lock().await;
        if let Some(names) = known() {
            return Ok(names);
        }
        let at = Instant::now();
        // The read is recorded before it begins, so that a change meanwhile makes the next call
        // read again.
        let created = {
            let mut state = self.overview.state.lock();
            state.names_read = Some(Read { at, took: Duration::ZERO });
            state.created.len()
        };
        let names = self.read_names().await.inspect_err(|_| self.overview.names_changed())?;
        let names = Arc::new(names);
        {
            let mut state = self.overview.state.lock();
            state.names = Arc::clone(&names);
            state.names_at = Some(at);
            state.created.drain(..created);
            if let Some(read) = &mut state.names_read {
                read.took = at.elapsed();
            }
        }
        self.forget_deleted(&names).await;
        Ok(names)
    }

    /// Refuses to create one queue more than there may be, and what `may_create` refuses. The queue has its place among them
    /// from now on, until the result is dropped. The names were read a few seconds ago; a queue that is created makes the next
    /// call read nothing, so that creating many queues costs no more than their number.
    pub(super) async fn check_create<'a>(
        &'a self,
        name: &QueueName,
        may_create: MayCreate<'_>,
    ) -> Result<Creation<'a>> {
        let check = |names: &QueueNames| {
            may_create(name, names)?;
            let most = self.limits.max_queues;
            if most > 0 && names.iter().count() >= most as usize {
                return Err(EngineError::TooManyQueues { setting: "max_queues", most });
            }
            Ok(())
        };
        if !self.overview.has_names_of_late() {
            self.queue_names().await?;
        }
        match self.overview.begin_creation(name, check) {
            // Some may have been deleted since.
            Err(EngineError::TooManyQueues { .. }) => {
                self.queue_names().await?;
                self.overview.begin_creation(name, check)
            }
            begun => begun,
        }
    }

    /// Keeps a place for a queue that a call names and creates unless it is there, until the result is dropped.
    pub(crate) async fn place_for<'a>(
        &'a self,
        name: Option<&QueueName>,
        may_create: MayCreate<'_>,
    ) -> Result<Option<Creation<'a>>> {
        let Some(name) = name else { return Ok(None) };
        match self.queues.get(name).await {
            Ok(_) => Ok(None),
            Err(EngineError::QueueNotFound(_)) => {
                self.check_create(name, may_create).await.map(Some)
            }
            Err(error) => Err(error),
        }
    }

    /// Does the same for a queue that comes into being by use, now or later. For work that outlives its call this is the time to ask:
    /// later nobody is there to be asked.
    pub(crate) async fn place_by_use<'a>(
        &'a self,
        name: Option<&QueueName>,
        may_create: MayCreate<'_>,
    ) -> Result<Option<Creation<'a>>> {
        if self.limits.auto_create_queues {
            self.place_for(name, may_create).await
        } else {
            Ok(None)
        }
    }

    async fn read_names(&self) -> Result<Vec<QueueName>> {
        let mut names: Vec<QueueName> = Vec::new();
        loop {
            let page = self.store.list_queues("", names.last(), PAGE).await?;
            let more = page.len() == PAGE;
            names.extend(page.into_iter().map(|queue| queue.name));
            if !more {
                return Ok(names);
            }
        }
    }

    /// Drops the remembered state of queues that were deleted on this broker or another one.
    async fn forget_deleted(&self, names: &[QueueName]) {
        let there: HashSet<&QueueName> = names.iter().collect();
        let mut gone = self.metrics.queues();
        gone.extend(self.stats.depths.queues());
        gone.retain(|queue| !there.contains(queue));
        for queue in gone {
            // The queue may have been created since the names were read.
            if let Ok(None) = self.store.get_queue(&queue).await {
                self.queues.forget(&queue);
                self.forget_stats(&queue);
            }
        }
    }

    /// Drops all figures of a deleted queue.
    pub(super) fn forget_stats(&self, queue: &QueueName) {
        self.stats.forget(queue);
        self.overview.forget(queue);
        self.metrics.forget(queue);
    }

    /// Reads all totals, unless they were read within `max_age`. The version of every queue whose
    /// totals have changed increases ([`super::depths::Depths::version`]).
    pub(super) async fn notice_changes(&self, max_age: Duration) -> Result<()> {
        let known = || {
            let read = self.overview.state.lock().totals_read;
            read.is_some_and(|read| read.at.elapsed() < max_age)
        };
        if known() {
            return Ok(());
        }
        let _turn = self.overview.reading.lock().await;
        if known() {
            return Ok(());
        }
        let _settled = self.stats.not_flushing().await;
        let at = Instant::now();
        let totals: HashMap<_, _> = self.store.all_totals().await?.into_iter().collect();
        let mut state = self.overview.state.lock();
        for (queue, found) in &totals {
            if state.totals.get(queue) != Some(found) {
                self.stats.depths.stirred(queue);
            }
        }
        state.totals = totals;
        state.totals_read = Some(Read { at, took: at.elapsed() });
        Ok(())
    }

    /// Returns the pause between two reads of totals for the gauges.
    fn totals_pause(&self) -> Duration {
        let read = self.overview.state.lock().totals_read;
        read.map_or(TOTALS_AGE, |read| TOTALS_AGE.max(read.took * SHARE))
    }

    /// Gives up the task of keeping the gauges if this broker has it, so that another broker can
    /// take it over immediately. If the store does not respond soon, another broker takes the task
    /// over when its time has passed.
    pub(super) async fn stop_counting(&self) {
        if self.overview.leads.load(Ordering::Relaxed) {
            let given_up = self.store.lead(TASK, Duration::ZERO);
            let _ = tokio::time::timeout(TICK, given_up).await;
        }
    }
}

/// Keeps the depth gauges up to date on the one broker that has this task.
#[derive(Default)]
pub(crate) struct Gauges {
    /// When this broker's hold on the task ends.
    leads_until: Option<Instant>,
    /// When the store was last asked for the task.
    asked: Option<Instant>,
    /// When the next count may begin.
    pause_until: Option<Instant>,
    shown: HashMap<QueueName, Shown>,
}

struct Shown {
    seen: Seen,
    at: Instant,
}

impl Gauges {
    /// Keeps the gauges up to date for one [`TICK`].
    pub(crate) async fn keep(&mut self, engine: &Engine) -> Result<()> {
        let end = Instant::now() + TICK;
        let kept = self.refresh(engine, end).await;
        sleep_until(end).await;
        kept
    }

    async fn refresh(&mut self, engine: &Engine, end: Instant) -> Result<()> {
        // Every broker reads the names, because every broker has labels of deleted queues to drop.
        let names = engine.queue_names().await?;
        let leads = self.leads(engine).await;
        engine.overview.leads.store(leads, Ordering::Relaxed);
        engine.metrics.counts_queues(leads);
        if !leads {
            self.shown.clear();
            engine.metrics.forget_depths();
            return Ok(());
        }
        engine.notice_changes(engine.totals_pause()).await?;
        let there: HashSet<&QueueName> = names.iter().collect();
        self.shown.retain(|queue, _| there.contains(queue));
        let mut wanting: Vec<_> =
            names.iter().filter(|name| self.is_outdated(engine, name)).collect();
        wanting.sort_by_key(|name| self.shown.get(*name).map(|shown| shown.at));
        for name in &wanting {
            // This broker's own changes are shown immediately.
            if let Some(depth) = engine.stats.depths.last(name) {
                engine.metrics.depth(name, &depth);
            }
        }
        for name in wanting {
            if let Some(until) = self.pause_until {
                if until >= end {
                    break;
                }
                sleep_until(until).await;
            }
            self.count(engine, name).await?;
            if Instant::now() >= end {
                break;
            }
        }
        Ok(())
    }

    fn is_outdated(&self, engine: &Engine, name: &QueueName) -> bool {
        self.shown.get(name).is_none_or(|shown| shown.seen.is_outdated(engine, name, shown.at))
    }

    async fn count(&mut self, engine: &Engine, name: &QueueName) -> Result<()> {
        let queue = match engine.queues.get(name).await {
            Ok(queue) => queue,
            Err(EngineError::QueueNotFound(_)) => return Ok(()),
            Err(error) => return Err(error),
        };
        let seen = engine.stats.depths.watched(&queue).await?;
        engine.metrics.depth(name, &seen.depth);
        let at = Instant::now();
        let first = self.shown.insert(name.clone(), Shown { seen, at }).is_none();
        self.pause_until = Some(at + seen.took * if first { FIRST_SHARE } else { SHARE });
        Ok(())
    }

    /// Returns true if this broker has the task of keeping the gauges.
    async fn leads(&mut self, engine: &Engine) -> bool {
        let now = Instant::now();
        if self.asked.is_none_or(|asked| now >= asked + RENEW) {
            self.asked = Some(now);
            match engine.store.lead(TASK, LEAD).await {
                Ok(true) => self.leads_until = Some(now + LEAD),
                Ok(false) => self.leads_until = None,
                Err(error) => tracing::debug!(%error, "could not ask who counts the queues"),
            }
        }
        self.leads_until.is_some_and(|until| Instant::now() < until)
    }
}

impl Seen {
    /// Returns true if something may have changed in the queue since it was last reported, at `at`.
    pub(super) fn is_outdated(&self, engine: &Engine, queue: &QueueName, at: Instant) -> bool {
        let depth = &self.depth;
        engine.stats.depths.version(queue) != Some(self.version)
            || depth.next_eligible.is_some_and(|next| next <= engine.now())
            || (depth.unsettled() + depth.processed > 0 && at.elapsed() >= SLOW_POLL)
    }
}
