//! Group commit: concurrent calls share a write, without waiting for company.

use std::{collections::VecDeque, future::Future, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::sync::{Semaphore, oneshot};
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

/// Most items waiting in one batcher; callers past that wait for room.
const MAX_WAITING: usize = 50_000;
/// After this long a write's outcome counts as unknown.
pub(super) const WRITE_LIMIT: Duration = Duration::from_secs(20);

struct Job<T, R> {
    items: Vec<T>,
    bytes: usize,
    answer: oneshot::Sender<Result<Vec<R>>>,
}

struct State<T, R> {
    waiting: VecDeque<Job<T, R>>,
    writes: usize,
}

/// Whatever arrives while a write is in flight forms the next one.
pub(super) struct Batcher<T, R> {
    limits: Limits,
    room: Semaphore,
    state: Mutex<State<T, R>>,
}

impl<T: Send + 'static, R: Send + 'static> Batcher<T, R> {
    pub(super) fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            room: Semaphore::new(MAX_WAITING),
            state: Mutex::new(State { waiting: VecDeque::new(), writes: 0 }),
        })
    }

    /// Writes the items by `write`, which answers for each in order, together with those of other
    /// calls. All callers of one batcher must pass the same function.
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
        let permits = items.len().min(MAX_WAITING) as u32;
        let permit = self.room.acquire_many(permits).await;
        let _room = permit.map_err(|_| unavailable("the store is closing"))?;
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
        while let Some(jobs) = self.take() {
            let mut answers = Vec::with_capacity(jobs.len());
            let mut items = Vec::new();
            for job in jobs {
                answers.push((job.items.len(), job.answer));
                items.extend(job.items);
            }
            let count = items.len();
            let writing = tracker.spawn(write(items));
            // The write goes on after the limit, in its own task: the driver minds being dropped.
            let results = match tokio::time::timeout(WRITE_LIMIT, writing).await {
                Ok(Ok(results)) if results.len() == count => Ok(results),
                Ok(Ok(_)) => Err(broken("a batch was answered in part")),
                Ok(Err(_)) => Err(broken("a batch write failed badly")),
                Err(_) => Err(unavailable("MongoDB did not answer in time")),
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

    /// The next batch; `None` ends the worker.
    fn take(&self) -> Option<Vec<Job<T, R>>> {
        let mut state = self.state.lock();
        let (mut items, mut bytes) = (0, 0);
        let mut jobs = Vec::new();
        while let Some(job) = state.waiting.front() {
            let fits = items + job.items.len() <= self.limits.items
                && bytes + job.bytes <= self.limits.bytes;
            if !jobs.is_empty() && !fits {
                break;
            }
            items += job.items.len();
            bytes += job.bytes;
            jobs.extend(state.waiting.pop_front());
        }
        if jobs.is_empty() {
            state.writes -= 1;
            return None;
        }
        Some(jobs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
