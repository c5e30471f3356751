//! Group commit: concurrent calls share a write, without waiting for company.

use std::{
    collections::VecDeque, future::Future, panic::AssertUnwindSafe, sync::Arc, time::Duration,
};

use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio_util::task::TaskTracker;

use super::errors::{broken, repeat, unavailable};
use crate::store::Result;

/// How much goes into one write, and how many are under way at a time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Writes in flight.
    pub(super) writes: usize,
    /// Items of one write; a single call's items are never split.
    pub(super) items: usize,
    /// Bytes of one write.
    pub(super) bytes: usize,
}

/// After this long a write's outcome counts as unknown.
pub(super) const WRITE_LIMIT: Duration = Duration::from_secs(20);

type Answer<R> = oneshot::Sender<Result<Vec<R>>>;

struct Job<T, R> {
    items: Vec<T>,
    bytes: usize,
    answer: Answer<R>,
}

/// A write that begins, and how many of its results are whose.
struct Begun<R, F> {
    answers: Vec<(usize, Answer<R>)>,
    writing: F,
}

struct State<T, R> {
    /// One for each call that waits: bounded by those.
    waiting: VecDeque<Job<T, R>>,
    writes: usize,
}

/// Whatever arrives while a write is in flight forms the next one.
pub(super) struct Batcher<T, R> {
    limits: Limits,
    state: Mutex<State<T, R>>,
}

impl<T: Send + 'static, R: Send + 'static> Batcher<T, R> {
    pub(super) fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self { limits, state: Mutex::new(State { waiting: VecDeque::new(), writes: 0 }) })
    }

    /// Writes the items by `write`, which answers for each in order, together with those of other
    /// calls. All callers of one batcher must pass the same function.
    ///
    /// Calls stand in line from when they are first polled, and `write` is called for one batch after
    /// the other in that order, also if several writes are in flight: what it does before it returns
    /// its future is done in order. Whoever is no longer waited for when its turn comes is left out.
    pub(super) async fn submit<W, F>(
        self: &Arc<Self>,
        tracker: &TaskTracker,
        items: Vec<T>,
        bytes: usize,
        write: W,
    ) -> Result<Vec<R>>
    where
        W: Fn(Vec<T>) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Vec<Result<R>>> + Send + 'static,
    {
        // Nothing may be awaited before the call stands in line.
        let (answer, answered) = oneshot::channel();
        let start = {
            let mut state = self.state.lock();
            state.waiting.push_back(Job { items, bytes, answer });
            let start = state.writes < self.limits.writes;
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

    /// Writes until nothing waits.
    async fn work<W, F>(self: Arc<Self>, tracker: &TaskTracker, write: W)
    where
        W: Fn(Vec<T>) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Vec<Result<R>>> + Send + 'static,
    {
        while let Some(Begun { answers, writing }) = self.begin(&write) {
            let count: usize = answers.iter().map(|(count, _)| count).sum();
            // A panic must not take the worker along: its place would be lost for good.
            let mut writing = Box::pin(AssertUnwindSafe(writing).catch_unwind());
            let results = match tokio::time::timeout(WRITE_LIMIT, &mut writing).await {
                Ok(Ok(results)) if results.len() == count => Ok(results),
                Ok(Ok(_)) => Err(broken("a batch was answered in part")),
                Ok(Err(_)) => Err(broken("a batch write failed badly")),
                Err(_) => {
                    // It goes on: the driver minds being dropped.
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

    /// Takes the next batch and calls `write` for it, under the lock; `None` ends the worker.
    fn begin<W, F>(&self, write: &W) -> Option<Begun<R, F>>
    where
        W: Fn(Vec<T>) -> F,
    {
        let mut state = self.state.lock();
        // During an outage callers give up: what they left must not pile up.
        state.waiting.retain(|job| !job.answer.is_closed());
        let (mut items, mut bytes) = (Vec::new(), 0);
        let mut answers = Vec::new();
        while let Some(job) = state.waiting.front() {
            let fits = items.len() + job.items.len() <= self.limits.items
                && bytes + job.bytes <= self.limits.bytes;
            if !answers.is_empty() && !fits {
                break;
            }
            let Some(job) = state.waiting.pop_front() else { break };
            bytes += job.bytes;
            answers.push((job.items.len(), job.answer));
            items.extend(job.items);
        }
        if answers.is_empty() {
            state.writes -= 1;
            return None;
        }
        Some(Begun { answers, writing: write(items) })
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{future::join_all, poll};
    use tokio::sync::Semaphore;

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn writes_begin_in_the_order_of_the_calls() {
        let batcher = Batcher::<u32, ()>::new(Limits { writes: 2, items: 3, bytes: 1_000 });
        let tracker = TaskTracker::new();
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
        // Polled in this order, by this task.
        let calls = (0..1_000).map(|n| batcher.submit(&tracker, vec![n], 1, write.clone()));
        for answer in join_all(calls).await {
            answer.unwrap();
        }
        assert_eq!(*begun.lock(), (0..1_000).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn a_call_given_up_in_line_is_left_out() {
        let batcher = Batcher::<u32, u32>::new(Limits { writes: 1, items: 100, bytes: 1_000 });
        let tracker = TaskTracker::new();
        let written = Arc::new(Mutex::new(Vec::<u32>::new()));
        let write = {
            let written = Arc::clone(&written);
            move |items: Vec<u32>| {
                written.lock().extend(&items);
                async move { items.into_iter().map(Ok).collect::<Vec<_>>() }
            }
        };
        let call = |n| Box::pin(batcher.submit(&tracker, vec![n], 1, write.clone()));
        let (mut first, mut given_up, last) = (call(1), call(2), call(3));
        // This runtime has one thread: nothing is written before this task waits.
        assert!(poll!(&mut first).is_pending());
        assert!(poll!(&mut given_up).is_pending());
        drop(given_up);
        assert_eq!((last.await.unwrap(), first.await.unwrap()), (vec![3], vec![1]));
        assert_eq!(*written.lock(), [1, 3]);
    }

    #[tokio::test]
    async fn what_arrives_during_a_write_forms_the_next_one() {
        let batcher = Batcher::<u32, usize>::new(Limits { writes: 1, items: 100, bytes: 1_000 });
        let tracker = TaskTracker::new();
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
            tokio::spawn(async move { batcher.submit(&tracker, vec![n], 1, write).await })
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
