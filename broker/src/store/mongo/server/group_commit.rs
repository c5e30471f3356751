//! Group commit: concurrent calls share a write. None waits for time to pass so that others may join it.

use std::{
    collections::{HashSet, VecDeque},
    future::Future,
    hash::{DefaultHasher, Hash, Hasher},
    panic::AssertUnwindSafe,
    sync::Arc,
    time::Duration,
};

use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::{sync::oneshot, time::Instant};

use crate::{
    long_work::OnBytes,
    store::{
        Result,
        mongo::server::error::{broken, repeat, unavailable},
    },
    tasks::Tasks,
};

/// The size of one write, and the number of concurrent writes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Limit of concurrent writes.
    pub(crate) writes: usize,
    /// In the first [`PATIENCE`] of a write, another one begins only for so many calls, or for a call of so many items: a write
    /// costs the server the same whether it is for one item or for many.
    pub(crate) worthwhile: usize,
    /// Limit of items of one write. The items of a single call are never split.
    pub(crate) items: usize,
    /// Limit of bytes of one write.
    pub(crate) bytes: usize,
}

/// How long a few calls wait for a write in flight.
const PATIENCE: Duration = Duration::from_millis(10);
/// How often a write gives way, to all else that is ready to run, before it begins without those that the one before has answered; and
/// for how long, if there is much to run.
const GIVES_WAY: usize = 16;
const GIVES_WAY_FOR: Duration = Duration::from_millis(1);
/// Time after which the outcome of a write counts as unknown.
pub(crate) const WRITE_LIMIT: Duration = Duration::from_secs(20);

/// A set of items that must become visible in the order of the calls. Writes that share a lane never run concurrently,
/// because the server makes concurrent writes visible in any order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Lane(u64);

impl Lane {
    /// Returns the lane of a name. Two names may share a lane, which costs time, never correctness.
    pub(crate) fn of(name: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        Self(hasher.finish())
    }
}

type Answer<R> = oneshot::Sender<Result<Vec<R>>>;

struct Job<T, R> {
    items: Vec<T>,
    bytes: usize,
    lane: Option<Lane>,
    answer: Answer<R>,
}

/// A write that begins, and how many of its results belong to each call.
struct Begun<R, F> {
    answers: Vec<(usize, Answer<R>)>,
    lanes: HashSet<Lane>,
    bytes: usize,
    writing: F,
}

struct State<T, R> {
    /// One entry per waiting call, whose number bounds the queue.
    waiting: VecDeque<Job<T, R>>,
    writes: usize,
    /// Those of them for which a few calls wait.
    young: usize,
    /// Lanes of the writes in flight.
    busy: HashSet<Lane>,
}

/// Collects calls while a write is in flight, and writes them together.
pub(crate) struct Batcher<T, R> {
    limits: Limits,
    state: Mutex<State<T, R>>,
}

impl<T: Send + 'static, R: Send + 'static> Batcher<T, R> {
    pub(crate) fn new(limits: Limits) -> Arc<Self> {
        let state = State { waiting: VecDeque::new(), writes: 0, young: 0, busy: HashSet::new() };
        Arc::new(Self { limits, state: Mutex::new(state) })
    }

    /// Writes the items, together with those of other calls, by `write`, which returns one result per item, in order.
    /// All callers of one batcher must pass the same function.
    ///
    /// Calls queue in the order in which they are first polled. Calls that share a lane do not overtake each other,
    /// neither in the queue nor in writing. `write` is called for one batch after the other: its work before it returns
    /// the future is done in order. A call whose caller has gone is left out when its turn comes.
    pub(crate) async fn submit<W, F>(
        self: &Arc<Self>,
        tracker: &Tasks,
        items: Vec<T>,
        bytes: usize,
        lane: Option<Lane>,
        write: W,
    ) -> Result<Vec<R>>
    where
        W: Fn(Vec<T>) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Vec<Result<R>>> + Send + 'static,
    {
        // Nothing may be awaited before the call is in the queue.
        let (answer, answered) = oneshot::channel();
        let start = {
            let mut state = self.state.lock();
            let free = lane.is_none_or(|lane| !state.busy.contains(&lane));
            state.waiting.push_back(Job { items, bytes, lane, answer });
            free && self.start(&mut state)
        };
        if start {
            self.spawn(tracker, write);
        }
        answered.await.unwrap_or_else(|_| Err(unavailable("the write was abandoned")))
    }

    /// Counts one more write if there may be one now.
    fn start(&self, state: &mut State<T, R>) -> bool {
        let start = state.writes < self.limits.writes && self.is_worthwhile(state);
        state.writes += usize::from(start);
        state.young += usize::from(start);
        start
    }

    fn spawn<W, F>(self: &Arc<Self>, tracker: &Tasks, write: W)
    where
        W: Fn(Vec<T>) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Vec<Result<R>>> + Send + 'static,
    {
        let (this, owner) = (Arc::clone(self), tracker.clone());
        tracker.spawn(async move { this.work(&owner, write).await });
    }

    /// Returns true if there is no write to wait for, or enough waits for one more.
    fn is_worthwhile(&self, state: &State<T, R>) -> bool {
        let enough = self.limits.worthwhile;
        state.young == 0
            || state.waiting.len() >= enough
            || state.waiting.iter().any(|job| job.items.len() >= enough)
    }

    /// Writes until no call waits.
    async fn work<W, F>(self: Arc<Self>, tracker: &Tasks, write: W)
    where
        W: Fn(Vec<T>) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Vec<Result<R>>> + Send + 'static,
    {
        let mut written = HashSet::new();
        while let Some(Begun { answers, lanes, bytes, writing }) = self.begin(&written, &write) {
            written = lanes;
            let calls = answers.len();
            let count: usize = answers.iter().map(|(count, _)| count).sum();
            // A panic must not end the worker: it would count as a running write for ever.
            let writing = Box::pin(AssertUnwindSafe(writing).catch_unwind());
            let mut writing = OnBytes::new(bytes, writing);
            let mut written_now = tokio::time::timeout(PATIENCE, &mut writing).await;
            if written_now.is_err() {
                let begins = {
                    let mut state = self.state.lock();
                    state.young -= 1;
                    !state.waiting.is_empty() && self.start(&mut state)
                };
                if begins {
                    self.spawn(tracker, write.clone());
                }
                written_now = tokio::time::timeout(WRITE_LIMIT, &mut writing).await;
                self.state.lock().young += 1; // until the next batch is taken
            }
            let results = match written_now {
                Ok(Ok(results)) if results.len() == count => Ok(results),
                Ok(Ok(_)) => Err(broken("a batch has too few results")),
                Ok(Err(_)) => Err(broken("a batch write panicked")),
                Err(_) => {
                    // The write goes on: the driver closes the connection of an operation that is dropped.
                    tracker.spawn(writing);
                    Err(unavailable("MongoDB did not answer in time"))
                }
            };
            match results {
                Ok(results) => {
                    let mut results = results.into_iter();
                    for (count, answer) in answers {
                        let own: Vec<_> = results.by_ref().take(count).collect();
                        let _ = answer.send(own.into_iter().collect()); // the caller may be gone
                    }
                }
                Err(error) => {
                    for (_, answer) in answers {
                        let _ = answer.send(Err(repeat(&error)));
                    }
                }
            }
            self.give_way(calls).await;
        }
    }

    /// Lets callers that were answered come with their next calls, which then share a write.
    async fn give_way(&self, answered: usize) {
        if answered <= 1 {
            return;
        }
        let begun = Instant::now();
        for _ in 0..GIVES_WAY {
            if self.state.lock().waiting.len() >= answered || begun.elapsed() > GIVES_WAY_FOR {
                return;
            }
            tokio::task::yield_now().await;
        }
    }

    /// Takes the next batch and calls `write` for it, under the lock. `None` ends the worker. `written` are the lanes
    /// of its last batch.
    fn begin<W, F>(&self, written: &HashSet<Lane>, write: &W) -> Option<Begun<R, F>>
    where
        W: Fn(Vec<T>) -> F,
    {
        let mut state = self.state.lock();
        state.busy.retain(|lane| !written.contains(lane));
        // During an outage callers give up, and their calls must not pile up.
        state.waiting.retain(|job| !job.answer.is_closed());
        state.writes -= 1;
        state.young -= 1;
        if !self.is_worthwhile(&state) {
            return None;
        }
        let State { waiting, busy, .. } = &mut *state;
        let (mut items, mut bytes) = (Vec::new(), 0);
        let (mut answers, mut lanes) = (Vec::new(), HashSet::new());
        // Calls that must wait for a write in flight, and calls behind them in a lane.
        let (mut kept, mut passed) = (VecDeque::new(), HashSet::new());
        while let Some(job) = waiting.pop_front() {
            if job.lane.is_some_and(|lane| busy.contains(&lane) || passed.contains(&lane)) {
                passed.extend(job.lane);
                kept.push_back(job);
                continue;
            }
            let fits = items.len() + job.items.len() <= self.limits.items
                && bytes + job.bytes <= self.limits.bytes;
            if !answers.is_empty() && !fits {
                kept.push_back(job);
                break;
            }
            bytes += job.bytes;
            answers.push((job.items.len(), job.answer));
            lanes.extend(job.lane);
            items.extend(job.items);
        }
        if waiting.is_empty() {
            *waiting = kept;
        } else {
            kept.into_iter().rev().for_each(|job| waiting.push_front(job));
        }
        if answers.is_empty() {
            return None;
        }
        busy.extend(lanes.iter().copied());
        state.writes += 1;
        state.young += 1;
        Some(Begun { answers, lanes, bytes, writing: write(items) })
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{
        future::{join, join_all},
        poll,
    };
    use tokio::sync::{Barrier, Semaphore};

    use super::*;
    use crate::{long_work::tests::keep_the_thread, tasks::Tasks};

    const SMALL: Limits = Limits { writes: 1, worthwhile: 1, items: 3, bytes: 1_000 };

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn writes_begin_in_the_order_of_the_calls() {
        let batcher = Batcher::<u32, ()>::new(Limits { writes: 2, items: 3, ..SMALL });
        let tracker = Tasks::default();
        let begun = Arc::new(Mutex::new(Vec::<u32>::new()));
        let write = {
            let begun = Arc::clone(&begun);
            move |items: Vec<u32>| {
                begun.lock().extend(&items);
                async move {
                    tokio::task::yield_now().await;
                    items.into_iter().map(|_| Ok(())).collect::<Vec<_>>()
                }
            }
        };
        // The calls are polled in this order, by this task.
        let calls = (0..1_000).map(|n| batcher.submit(&tracker, vec![n], 1, None, write.clone()));
        for answer in join_all(calls).await {
            answer.unwrap();
        }
        assert_eq!(*begun.lock(), (0..1_000).collect::<Vec<_>>());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn writes_of_one_lane_are_never_under_way_together() {
        let batcher = Batcher::<(u64, u32), ()>::new(Limits { writes: 2, items: 3, ..SMALL });
        let tracker = Tasks::default();
        let (begun, ended) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
        let being_written = Arc::new(Mutex::new(HashSet::<u64>::new()));
        let write = {
            let (begun, ended) = (begun.clone(), ended.clone());
            let being_written = being_written.clone();
            move |items: Vec<(u64, u32)>| {
                begun.lock().extend(&items);
                let lanes: HashSet<u64> = items.iter().map(|(lane, _)| *lane).collect();
                for lane in &lanes {
                    assert!(being_written.lock().insert(*lane), "lane {lane} is being written");
                }
                let (ended, being_written) = (ended.clone(), being_written.clone());
                async move {
                    for _ in 0..items[0].1 % 7 {
                        tokio::task::yield_now().await;
                    }
                    being_written.lock().retain(|lane| !lanes.contains(lane));
                    ended.lock().extend(&items);
                    items.into_iter().map(|_| Ok(())).collect::<Vec<_>>()
                }
            }
        };
        let calls = (0..1_000_u32).map(|n| {
            let lane = u64::from(n / 4 % 5);
            batcher.submit(&tracker, vec![(lane, n)], 1, Some(Lane(lane)), write.clone())
        });
        for answer in join_all(calls).await {
            answer.unwrap();
        }
        for of in [begun.lock(), ended.lock()] {
            for lane in 0..5 {
                let own = of.iter().filter(|(of, _)| *of == lane).map(|(_, n)| *n);
                assert!(own.clone().is_sorted(), "of lane {lane}: {:?}", own.collect::<Vec<_>>());
            }
        }
    }

    #[tokio::test(start_paused = true)] // or a busy machine lets a write give way for too short
    async fn callers_that_come_back_share_their_next_write() {
        let batcher = Batcher::<u32, ()>::new(Limits { items: 100, ..SMALL });
        let tracker = Tasks::default();
        let sizes = Arc::new(Mutex::new(Vec::new()));
        let write = {
            let sizes = Arc::clone(&sizes);
            move |items: Vec<u32>| {
                sizes.lock().push(items.len());
                async move {
                    tokio::task::yield_now().await;
                    items.into_iter().map(|_| Ok(())).collect::<Vec<_>>()
                }
            }
        };
        let callers = (0..8_u32).map(|n| {
            let (batcher, tracker, write) = (Arc::clone(&batcher), tracker.clone(), write.clone());
            tokio::spawn(async move {
                for _ in 0..3 {
                    batcher.submit(&tracker, vec![n], 1, None, write.clone()).await.unwrap();
                    for _ in 0..n {
                        tokio::task::yield_now().await; // not all come back at the same time
                    }
                }
            })
        });
        for caller in callers.collect::<Vec<_>>() {
            caller.await.unwrap();
        }
        assert_eq!(*sizes.lock(), [8, 8, 8]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_large_write_is_long_work() {
        let batcher = Batcher::<u32, ()>::new(Limits { bytes: 8 << 20, ..SMALL });
        let write = |items: Vec<u32>| async move {
            keep_the_thread();
            items.into_iter().map(|_| Ok(())).collect::<Vec<_>>()
        };
        let tracker = Tasks::default();
        let written = batcher.submit(&tracker, vec![1], 4 << 20, None, write);
        written.await.unwrap();
    }

    #[tokio::test]
    async fn writes_of_different_lanes_are_under_way_together() {
        let batcher = Batcher::<u64, ()>::new(Limits { writes: 2, items: 1, ..SMALL });
        let (tracker, both) = (Tasks::default(), Arc::new(Barrier::new(2)));
        let write = move |items: Vec<u64>| {
            let both = Arc::clone(&both);
            async move {
                both.wait().await;
                items.into_iter().map(|_| Ok(())).collect::<Vec<_>>()
            }
        };
        let call = |lane| batcher.submit(&tracker, vec![lane], 1, Some(Lane(lane)), write.clone());
        let both_end = tokio::time::timeout(WRITE_LIMIT, join(call(1), call(2))).await;
        assert!(matches!(both_end, Ok((Ok(_), Ok(_)))), "each waits for the other");
    }

    #[tokio::test]
    async fn a_call_that_is_dropped_in_the_queue_is_left_out() {
        let batcher = Batcher::<u32, u32>::new(Limits { writes: 1, items: 100, ..SMALL });
        let tracker = Tasks::default();
        let written = Arc::new(Mutex::new(Vec::<u32>::new()));
        let write = {
            let written = Arc::clone(&written);
            move |items: Vec<u32>| {
                written.lock().extend(&items);
                async move { items.into_iter().map(Ok).collect::<Vec<_>>() }
            }
        };
        let call = |n| Box::pin(batcher.submit(&tracker, vec![n], 1, None, write.clone()));
        let (mut first, mut given_up, last) = (call(1), call(2), call(3));
        // This runtime has one thread: no write starts before this task waits.
        assert!(poll!(&mut first).is_pending());
        assert!(poll!(&mut given_up).is_pending());
        drop(given_up);
        assert_eq!((last.await.unwrap(), first.await.unwrap()), (vec![3], vec![1]));
        assert_eq!(*written.lock(), [1, 3]);
    }

    /// Writes that wait until the test lets them go on. Each result is the number of items that were written together.
    struct Gated {
        batcher: Arc<Batcher<u32, usize>>,
        tracker: Tasks,
        gate: Arc<Semaphore>,
    }

    impl Gated {
        fn new(limits: Limits) -> Self {
            let gate = Arc::new(Semaphore::new(0));
            Self { batcher: Batcher::new(limits), tracker: Tasks::default(), gate }
        }

        fn call(&self, items: u32) -> tokio::task::JoinHandle<Result<Vec<usize>>> {
            let (batcher, tracker) = (self.batcher.clone(), self.tracker.clone());
            let gate = Arc::clone(&self.gate);
            let write = move |items: Vec<u32>| {
                let gate = Arc::clone(&gate);
                async move {
                    gate.acquire().await.unwrap().forget();
                    let size = items.len();
                    items.into_iter().map(|_| Ok(size)).collect::<Vec<_>>()
                }
            };
            let items = (0..items).collect();
            tokio::spawn(async move { batcher.submit(&tracker, items, 1, None, write).await })
        }

        /// Waits until so many writes are in flight and so many calls wait.
        async fn until(&self, writes: usize, waiting: usize) {
            let is_so = || {
                let state = self.batcher.state.lock();
                (state.writes, state.waiting.len()) == (writes, waiting)
            };
            while !is_so() {
                tokio::task::yield_now().await;
            }
        }
    }

    /// Returns the results of all calls, sorted.
    async fn sizes(
        calls: impl IntoIterator<Item = tokio::task::JoinHandle<Result<Vec<usize>>>>,
    ) -> Vec<usize> {
        let mut sizes = Vec::new();
        for call in calls {
            sizes.extend(call.await.unwrap().unwrap());
        }
        sizes.sort_unstable();
        sizes
    }

    #[tokio::test]
    async fn calls_that_arrive_during_a_write_form_the_next_one() {
        let gated = Gated::new(Limits { items: 100, ..SMALL });
        let mut calls = vec![gated.call(1)];
        gated.until(1, 0).await;
        calls.extend((1..10).map(|_| gated.call(1)));
        gated.until(1, 9).await;
        gated.gate.add_permits(2);
        assert_eq!(sizes(calls).await, [1, 9, 9, 9, 9, 9, 9, 9, 9, 9]);
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_long_for_a_write_that_stalls() {
        let gated = Gated::new(Limits { writes: 2, worthwhile: 3, items: 100, ..SMALL });
        let first = gated.call(1);
        gated.until(1, 0).await;
        let second = gated.call(1);
        gated.until(1, 1).await;
        tokio::time::sleep(PATIENCE).await;
        gated.until(2, 0).await;
        let late = gated.call(1);
        gated.until(2, 1).await;
        tokio::time::sleep(PATIENCE).await;
        gated.until(2, 1).await; // there are no more than two
        gated.gate.add_permits(3);
        assert_eq!(sizes([first, second, late]).await, [1, 1, 1]);
        gated.until(0, 0).await;
        assert_eq!(gated.batcher.state.lock().young, 0);
    }

    #[tokio::test]
    async fn a_second_write_begins_when_enough_calls_or_items_wait() {
        let gated = Gated::new(Limits { writes: 2, worthwhile: 3, items: 100, ..SMALL });
        let mut calls = vec![gated.call(1)];
        gated.until(1, 0).await;
        calls.extend([gated.call(1), gated.call(1)]);
        gated.until(1, 2).await;
        calls.push(gated.call(1));
        gated.until(2, 0).await;
        gated.gate.add_permits(2);
        assert_eq!(sizes(calls.drain(..)).await, [1, 3, 3, 3]);
        gated.until(0, 0).await;

        calls.push(gated.call(1));
        gated.until(1, 0).await;
        calls.push(gated.call(3));
        gated.until(2, 0).await;
        // Few calls wait for both writes, and are written when the last of these has ended.
        calls.extend([gated.call(1), gated.call(1)]);
        gated.until(2, 2).await;
        gated.gate.add_permits(1);
        gated.until(1, 2).await;
        gated.gate.add_permits(2);
        assert_eq!(sizes(calls).await, [1, 2, 2, 3, 3, 3]);
        gated.until(0, 0).await;
    }
}
