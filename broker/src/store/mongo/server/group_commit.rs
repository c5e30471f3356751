//! Group commit: concurrent calls share a write, and none waits for others to join it.

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
use tokio::sync::oneshot;

use crate::{
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
    /// Limit of items of one write. The items of a single call are never split.
    pub(crate) items: usize,
    /// Limit of bytes of one write.
    pub(crate) bytes: usize,
}

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
    lanes: Vec<Lane>,
    answer: Answer<R>,
}

/// A write that begins, and how many of its results belong to each call.
struct Begun<R, F> {
    answers: Vec<(usize, Answer<R>)>,
    lanes: HashSet<Lane>,
    writing: F,
}

struct State<T, R> {
    /// One entry per waiting call, whose number bounds the queue.
    waiting: VecDeque<Job<T, R>>,
    writes: usize,
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
        let state = State { waiting: VecDeque::new(), writes: 0, busy: HashSet::new() };
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
        lanes: Vec<Lane>,
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
            let free = lanes.iter().all(|lane| !state.busy.contains(lane));
            state.waiting.push_back(Job { items, bytes, lanes, answer });
            let start = state.writes < self.limits.writes && free;
            state.writes += usize::from(start);
            start
        };
        if start {
            let this = Arc::clone(self);
            let owner = tracker.clone();
            tracker.spawn(async move { this.work(&owner, write).await });
        }
        answered.await.unwrap_or_else(|_| Err(unavailable("the write was abandoned")))
    }

    /// Writes until no call waits.
    async fn work<W, F>(self: Arc<Self>, tracker: &Tasks, write: W)
    where
        W: Fn(Vec<T>) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Vec<Result<R>>> + Send + 'static,
    {
        let mut written = HashSet::new();
        while let Some(Begun { answers, lanes, writing }) = self.begin(&written, &write) {
            written = lanes;
            let count: usize = answers.iter().map(|(count, _)| count).sum();
            // A panic must not end the worker: it would count as a running write for ever.
            let mut writing = Box::pin(AssertUnwindSafe(writing).catch_unwind());
            let results = match tokio::time::timeout(WRITE_LIMIT, &mut writing).await {
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
        }
    }

    /// Takes the next batch and calls `write` for it, under the lock. `None` ends the worker. `written` are the lanes
    /// of its last batch.
    fn begin<W, F>(&self, written: &HashSet<Lane>, write: &W) -> Option<Begun<R, F>>
    where
        W: Fn(Vec<T>) -> F,
    {
        let mut state = self.state.lock();
        let State { waiting, busy, .. } = &mut *state;
        busy.retain(|lane| !written.contains(lane));
        // During an outage callers give up, and their calls must not pile up.
        waiting.retain(|job| !job.answer.is_closed());
        let (mut items, mut bytes) = (Vec::new(), 0);
        let (mut answers, mut lanes) = (Vec::new(), HashSet::new());
        // Calls that must wait for a write in flight, and calls behind them in a lane.
        let (mut kept, mut passed) = (VecDeque::new(), HashSet::new());
        while let Some(job) = waiting.pop_front() {
            if job.lanes.iter().any(|lane| busy.contains(lane) || passed.contains(lane)) {
                passed.extend(job.lanes.iter().copied());
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
            lanes.extend(job.lanes);
            items.extend(job.items);
        }
        if waiting.is_empty() {
            *waiting = kept;
        } else {
            kept.into_iter().rev().for_each(|job| waiting.push_front(job));
        }
        if answers.is_empty() {
            state.writes -= 1;
            return None;
        }
        busy.extend(lanes.iter().copied());
        Some(Begun { answers, lanes, writing: write(items) })
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{future::join_all, poll};
    use tokio::sync::Semaphore;

    use super::*;
    use crate::tasks::Tasks;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn writes_begin_in_the_order_of_the_calls() {
        let batcher = Batcher::<u32, ()>::new(Limits { writes: 2, items: 3, bytes: 1_000 });
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
        let calls =
            (0..1_000).map(|n| batcher.submit(&tracker, vec![n], 1, Vec::new(), write.clone()));
        for answer in join_all(calls).await {
            answer.unwrap();
        }
        assert_eq!(*begun.lock(), (0..1_000).collect::<Vec<_>>());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn writes_of_one_lane_are_never_under_way_together_and_those_of_others_are() {
        let batcher = Batcher::<(u64, u32), ()>::new(Limits { writes: 2, items: 3, bytes: 1_000 });
        let tracker = Tasks::default();
        let (begun, ended) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
        // The lanes being written, the number of running writes, and its maximum.
        let together = Arc::new(Mutex::new((HashSet::<u64>::new(), 0, 0)));
        let write = {
            let (begun, ended, together) = (begun.clone(), ended.clone(), together.clone());
            move |items: Vec<(u64, u32)>| {
                begun.lock().extend(&items);
                let lanes: HashSet<u64> = items.iter().map(|(lane, _)| *lane).collect();
                {
                    let mut together = together.lock();
                    for lane in &lanes {
                        assert!(together.0.insert(*lane), "lane {lane} is being written");
                    }
                    together.1 += 1;
                    together.2 = together.2.max(together.1);
                }
                let (ended, together) = (ended.clone(), together.clone());
                async move {
                    for _ in 0..items[0].1 % 7 {
                        tokio::task::yield_now().await;
                    }
                    {
                        let mut together = together.lock();
                        together.0.retain(|lane| !lanes.contains(lane));
                        together.1 -= 1;
                    }
                    ended.lock().extend(&items);
                    items.into_iter().map(|_| Ok(())).collect::<Vec<_>>()
                }
            }
        };
        let calls = (0..1_000_u32).map(|n| {
            let lane = u64::from(n / 4 % 5);
            batcher.submit(&tracker, vec![(lane, n)], 1, vec![Lane(lane)], write.clone())
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
        assert_eq!(together.lock().2, 2, "writes of different lanes did not run concurrently");
    }

    #[tokio::test]
    async fn a_call_that_is_dropped_in_the_queue_is_left_out() {
        let batcher = Batcher::<u32, u32>::new(Limits { writes: 1, items: 100, bytes: 1_000 });
        let tracker = Tasks::default();
        let written = Arc::new(Mutex::new(Vec::<u32>::new()));
        let write = {
            let written = Arc::clone(&written);
            move |items: Vec<u32>| {
                written.lock().extend(&items);
                async move { items.into_iter().map(Ok).collect::<Vec<_>>() }
            }
        };
        let call = |n| Box::pin(batcher.submit(&tracker, vec![n], 1, Vec::new(), write.clone()));
        let (mut first, mut given_up, last) = (call(1), call(2), call(3));
        // This runtime has one thread: no write starts before this task waits.
        assert!(poll!(&mut first).is_pending());
        assert!(poll!(&mut given_up).is_pending());
        drop(given_up);
        assert_eq!((last.await.unwrap(), first.await.unwrap()), (vec![3], vec![1]));
        assert_eq!(*written.lock(), [1, 3]);
    }

    #[tokio::test]
    async fn calls_that_arrive_during_a_write_form_the_next_one() {
        let batcher = Batcher::<u32, usize>::new(Limits { writes: 1, items: 100, bytes: 1_000 });
        let tracker = Tasks::default();
        let gate = Arc::new(Semaphore::new(0));
        let write = {
            let gate = Arc::clone(&gate);
            move |items: Vec<u32>| {
                let gate = Arc::clone(&gate);
                async move {
                    gate.acquire().await.unwrap().forget();
                    let size = items.len();
                    items.into_iter().map(|_| Ok(size)).collect::<Vec<_>>()
                }
            }
        };
        let call = |n| {
            let (batcher, tracker, write) = (batcher.clone(), tracker.clone(), write.clone());
            tokio::spawn(
                async move { batcher.submit(&tracker, vec![n], 1, Vec::new(), write).await },
            )
        };
        let is = |writes: usize, waiting: usize| {
            let state = batcher.state.lock();
            (state.writes, state.waiting.len()) == (writes, waiting)
        };
        let mut calls = vec![call(0)];
        while !is(1, 0) {
            tokio::task::yield_now().await;
        }
        calls.extend((1..10).map(call));
        while !is(1, 9) {
            tokio::task::yield_now().await;
        }
        gate.add_permits(2);
        let mut sizes = Vec::new();
        for call in calls {
            sizes.extend(call.await.unwrap().unwrap());
        }
        sizes.sort_unstable();
        assert_eq!(sizes, [1, 9, 9, 9, 9, 9, 9, 9, 9, 9]);
    }
}
