//! Notifies watchers of queues of their changes.
//!
//! What is known of watched queues is kept once, however many watch them: who watches remembers only up to which change it was
//! told. So a watcher that reads nothing takes no memory, and is told the latest when it reads again. One task looks at all
//! watched queues once a second, for as long as somebody watches.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep},
};

use crate::domain::{Queue, QueueName};

use super::{Engine, EngineError, QueueStats, Result, depths::Seen, overview::TOTALS_AGE};

/// Number of watched queues that are counted at the same time.
const COUNTED_AT_A_TIME: usize = 8;
/// How often watched queues are looked at.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);
/// The shortest time between two looks, when new watchers do not want to wait for the next one.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(50);

/// What was last seen of a queue.
struct LastSeen {
    stats: QueueStats,
    seen: Seen,
    at: Instant,
}

/// What is known of watched queues.
#[derive(Default)]
pub(super) struct Watched {
    state: Mutex<State>,
    /// The end of each look.
    looks: watch::Sender<Look>,
    /// Notified when a new watcher wants a look.
    wanted: Notify,
}

#[derive(Default)]
struct State {
    /// How many watch all queues.
    of_all: usize,
    /// The number of the first look since somebody watches all.
    all_since: u64,
    /// How many watch each of these queues.
    named: HashMap<QueueName, usize>,
    /// True while the task runs that looks.
    is_watched: bool,
    /// The number of looks that were begun.
    begun: u64,
    /// Each queue, and the number of its last change.
    last: HashMap<QueueName, (LastSeen, u64)>,
    /// The queue of each last change.
    changes: BTreeMap<u64, QueueName>,
    /// The number of changes so far.
    changed: u64,
    /// How many queues have gone so far.
    gone: u64,
}

#[cfg(test)]
impl Watched {
    /// Returns true while the task runs that looks.
    pub(super) fn is_in_use(&self) -> bool {
        let state = self.state.lock();
        state.is_watched || !state.last.is_empty()
    }
}

/// A look that has ended.
#[derive(Debug, Clone, Default)]
struct Look {
    /// The number of the last one that succeeded.
    number: u64,
    /// Why it failed.
    failed: Option<EngineError>,
}

impl State {
    fn note(&mut self, name: &QueueName, seen: LastSeen) {
        let before = self.last.get(name);
        let is_new = before.is_none_or(|(before, _)| before.stats != seen.stats);
        let mut number = before.map_or(0, |(_, number)| *number);
        if is_new {
            self.changes.remove(&number);
            self.changed += 1;
            number = self.changed;
            self.changes.insert(number, name.clone());
        }
        self.last.insert(name.clone(), (seen, number));
    }

    fn forget(&mut self, name: &QueueName) {
        if let Some((_, number)) = self.last.remove(name) {
            self.changes.remove(&number);
        }
        self.gone += 1;
    }
}

/// Watches some queues, or all.
pub(crate) struct Watch {
    engine: Arc<Engine>,
    /// Empty: all.
    queues: HashSet<QueueName>,
    looks: watch::Receiver<Look>,
    /// The number of the first look that tells of all that is watched.
    first: u64,
    /// The number of the last change that was told.
    told: u64,
    /// How many queues had gone when this was last seen.
    gone: u64,
}

impl Watch {
    /// Returns the stats of at most `most` queues that have changed since they were last told, if `is_shown`: at first of each. Waits
    /// until there are any. Nothing is lost if the future is dropped.
    pub(crate) async fn next(
        &mut self,
        most: usize,
        is_shown: impl Fn(&QueueName) -> bool,
    ) -> Result<Vec<QueueStats>> {
        loop {
            let engine = Arc::clone(&self.engine);
            if engine.draining.is_cancelled() {
                return Err(EngineError::ShuttingDown);
            }
            let looked = self.looks.borrow_and_update().number;
            if looked >= self.first {
                let changed = self.changed(most, &is_shown)?;
                if !changed.is_empty() {
                    return Ok(changed);
                }
            }
            tokio::select! {
                biased;
                () = engine.draining.cancelled() => {}
                // The sender is in the engine, so that there is always another look to wait for.
                _ = self.looks.changed() => {
                    if let Some(error) = &self.looks.borrow().failed {
                        return Err(error.clone());
                    }
                }
            }
        }
    }

    fn changed(
        &mut self,
        most: usize,
        is_shown: impl Fn(&QueueName) -> bool,
    ) -> Result<Vec<QueueStats>> {
        let state = self.engine.watched.state.lock();
        if self.gone != state.gone {
            self.gone = state.gone;
            if let Some(gone) = self.queues.iter().find(|name| !state.last.contains_key(*name)) {
                return Err(EngineError::QueueNotFound(gone.clone()));
            }
        }
        let mut changed = Vec::new();
        for (number, name) in state.changes.range(self.told + 1..) {
            if changed.len() == most {
                break;
            }
            self.told = *number;
            let is_watched = self.queues.is_empty() || self.queues.contains(name);
            if let Some((last, _)) = state.last.get(name).filter(|_| is_watched && is_shown(name)) {
                changed.push(last.stats.clone());
            }
        }
        Ok(changed)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut state = self.engine.watched.state.lock();
        if self.queues.is_empty() {
            state.of_all -= 1;
        }
        for name in &self.queues {
            if let Some(watchers) = state.named.get_mut(name) {
                *watchers -= 1;
                if *watchers == 0 {
                    state.named.remove(name);
                }
            }
        }
    }
}

impl Engine {
    /// Watches the given queues, or all queues if none are given. A queue in which nothing is known to have happened is not
    /// counted.
    pub(crate) async fn watch_queues(self: &Arc<Self>, queues: Vec<QueueName>) -> Result<Watch> {
        self.check_open()?;
        for name in &queues {
            self.queues.get(name).await?;
        }
        let queues: HashSet<_> = queues.into_iter().collect();
        let mut state = self.watched.state.lock();
        // What others watch is known already.
        let next = state.begun + 1;
        let first = if queues.is_empty() {
            if state.of_all == 0 {
                state.all_since = next;
            }
            state.of_all += 1;
            state.all_since
        } else {
            let is_known = queues.iter().all(|name| state.last.contains_key(name));
            if is_known { 0 } else { next }
        };
        for name in &queues {
            *state.named.entry(name.clone()).or_default() += 1;
        }
        let is_running = std::mem::replace(&mut state.is_watched, true);
        let gone = state.gone;
        drop(state);
        if !is_running {
            let engine = Arc::clone(self);
            self.tasks.spawn(async move { engine.look_at_watched().await });
        } else if first == next {
            self.watched.wanted.notify_one();
        }
        let looks = self.watched.looks.subscribe();
        Ok(Watch { engine: Arc::clone(self), queues, looks, first, told: 0, gone })
    }

    /// Looks at watched queues again and again, until nobody watches any more.
    async fn look_at_watched(&self) {
        loop {
            let looked = tokio::select! {
                looked = self.look() => looked,
                () = self.draining.cancelled() => return,
            };
            self.watched.looks.send_modify(|look| match looked {
                Ok(number) => *look = Look { number, failed: None },
                Err(error) => look.failed = Some(error),
            });
            tokio::select! {
                () = sleep(WATCH_INTERVAL) => {}
                () = async {
                    self.watched.wanted.notified().await;
                    sleep(SHORTEST_INTERVAL).await;
                } => {}
                () = self.draining.cancelled() => return,
            }
            let mut state = self.watched.state.lock();
            if state.of_all == 0 && state.named.is_empty() {
                state.is_watched = false;
                (state.last, state.changes) = Default::default();
                return;
            }
        }
    }

    /// Looks at all watched queues, and returns the number of the look.
    async fn look(&self) -> Result<u64> {
        let (number, of_all, named) = {
            let mut state = self.watched.state.lock();
            state.begun += 1;
            (state.begun, state.of_all > 0, state.named.keys().cloned().collect::<Vec<_>>())
        };
        self.notice_changes(TOTALS_AGE / 2).await?;
        self.notice_consumers().await;
        let mut names: HashSet<QueueName> = named.into_iter().collect();
        if of_all {
            names.extend(self.queue_names().await?.iter().cloned());
        }
        let outdated = self.look_without_counting(&names);
        let mut counted = stream::iter(outdated)
            .map(|name| async move { (self.watched_stats(&name).await, name) })
            .buffered(COUNTED_AT_A_TIME);
        while let Some((current, name)) = counted.next().await {
            match current {
                Ok(current) => self.watched.state.lock().note(&name, current),
                Err(EngineError::QueueNotFound(_)) => self.watched.state.lock().forget(&name),
                Err(error) => return Err(error),
            }
        }
        Ok(number)
    }

    /// Drops what is not watched, notes consumers that have come or gone, and returns the queues that have to be counted, in the
    /// order of their names.
    fn look_without_counting(&self, names: &HashSet<QueueName>) -> Vec<QueueName> {
        let mut state = self.watched.state.lock();
        let unwatched: Vec<_> =
            state.last.keys().filter(|name| !names.contains(*name)).cloned().collect();
        for name in unwatched {
            state.forget(&name);
        }
        let (mut outdated, mut told) = (Vec::new(), Vec::new());
        for name in names {
            match state.last.get(name) {
                Some((last, _)) if !last.seen.is_outdated(self, name, last.at) => {
                    // Consumers that come and go are no reason to count the items.
                    if self.has_other_consumers(&last.stats) {
                        let stats = self.stats_of(name, &last.seen);
                        told.push((name, LastSeen { stats, seen: last.seen, at: last.at }));
                    }
                }
                _ => outdated.push(name.clone()),
            }
        }
        for (name, seen) in told {
            state.note(name, seen);
        }
        outdated.sort();
        outdated
    }

    /// Returns the stats of the queues that exist, in the order of the names, and the names of the others. Totals are at most
    /// [`TOTALS_AGE`] old. A queue in which nothing is known to have happened is not counted.
    pub(crate) async fn batch_stats(
        &self,
        names: &[QueueName],
    ) -> Result<(Vec<QueueStats>, Vec<QueueName>)> {
        self.notice_changes(TOTALS_AGE).await?;
        self.notice_consumers().await;
        let queues = self.queues.get_all(names).await?;
        let there: Vec<Arc<Queue>> =
            names.iter().filter_map(|name| queues.get(name).cloned()).collect();
        let missing = names.iter().filter(|name| !queues.contains_key(*name)).cloned().collect();
        let mut counted = stream::iter(there)
            .map(|queue| async move { self.stats_if_changed(&queue).await })
            .buffered(COUNTED_AT_A_TIME);
        let mut stats = Vec::with_capacity(names.len());
        while let Some(counted) = counted.next().await {
            stats.push(counted?);
        }
        Ok((stats, missing))
    }

    /// Returns the queue's stats. The queue is counted if something is known to have happened since the last count.
    async fn stats_if_changed(&self, queue: &Arc<Queue>) -> Result<QueueStats> {
        let last = self.stats.depths.last_count(&queue.name);
        let seen = match last.filter(|(seen, at)| !seen.is_outdated(self, &queue.name, *at)) {
            Some((seen, _)) => seen,
            None => self.stats.depths.watched(queue).await?,
        };
        Ok(self.stats_of(&queue.name, &seen))
    }

    fn has_other_consumers(&self, sent: &QueueStats) -> bool {
        sent.consumers != self.consumers(&sent.queue)
            || sent.consumers_of_all_brokers != self.consumers_of_all_brokers(&sent.queue)
    }

    async fn watched_stats(&self, name: &QueueName) -> Result<LastSeen> {
        let queue = self.queues.get(name).await?;
        let seen = self.stats.depths.watched(&queue).await?;
        Ok(LastSeen { stats: self.stats_of(name, &seen), seen, at: Instant::now() })
    }

    fn stats_of(&self, name: &QueueName, seen: &Seen) -> QueueStats {
        let totals = self.stats.with_pending(name, || self.overview.totals(name));
        self.stats_with(name, seen.depth, totals)
    }
}
