//! Work that takes long, beside the threads that serve calls.
//!
//! A thread that decodes a batch of megabytes, or makes documents of it, serves nobody else for milliseconds. So such work is
//! announced: the other tasks of the thread go on in another thread meanwhile. That costs some ten microseconds, memory that
//! is not at hand in the other thread, and now and then a new thread, so short work is done where it is.

use std::{
    pin::Pin,
    sync::atomic::{AtomicUsize, Ordering},
    task::{Context, Poll},
};

use tokio::{
    runtime::{Handle, RuntimeFlavor},
    task::block_in_place,
};

/// Work on so many bytes takes long: a millisecond and more.
const LONG: usize = 3 << 20;
/// So many pieces are done beside the threads at a time at most, because each takes a thread. What comes on top is done where it is.
const MOST: usize = 16;

static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

/// Returns true if work on so many bytes takes long.
pub(crate) fn is_long(bytes: usize) -> bool {
    bytes >= LONG
}

/// Does `work` on so many bytes.
pub(crate) fn on_bytes<R>(bytes: usize, work: impl FnOnce() -> R) -> R {
    let place = if is_long(bytes) { Place::take() } else { None };
    if place.is_some() && has_threads() { block_in_place(work) } else { work() }
}

/// A future that works on so many bytes when it is polled first, and when it goes on for the first time.
pub(crate) struct OnBytes<F> {
    bytes: usize,
    /// How many of its polls are long.
    polls: u8,
    work: F,
}

impl<F> OnBytes<F> {
    pub(crate) fn new(bytes: usize, work: F) -> Self {
        Self { bytes, polls: 2, work }
    }
}

impl<F: Future + Unpin> Future for OnBytes<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let Self { bytes, polls, work } = &mut *self;
        let bytes = if *polls > 0 { *bytes } else { 0 };
        *polls = polls.saturating_sub(1);
        on_bytes(bytes, || Pin::new(work).poll(context))
    }
}

/// A place among what is under way.
struct Place;

impl Place {
    fn take() -> Option<Self> {
        let place = Self; // gives itself back if there are too many
        (UNDER_WAY.fetch_add(1, Ordering::Relaxed) < MOST).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        UNDER_WAY.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns true if tasks may go on in other threads.
fn has_threads() -> bool {
    Handle::try_current()
        .is_ok_and(|runtime| runtime.runtime_flavor() == RuntimeFlavor::MultiThread)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{future::poll_fn, sync::mpsc::channel, time::Duration};

    use super::*;

    /// Does what long work does: keeps the thread until another task has run. Panics if none does.
    pub(crate) fn keep_the_thread() {
        let (done, other) = channel();
        tokio::spawn(async move { done.send(()).unwrap() });
        let ran = other.recv_timeout(Duration::from_secs(20));
        ran.expect("the other tasks wait for the work");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn other_tasks_of_the_thread_go_on_during_long_work() {
        tokio::spawn(async { on_bytes(LONG, keep_the_thread) }).await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_future_is_long_work_when_it_begins_and_when_it_goes_on() {
        let work = tokio::spawn(async {
            let mut polls = 0;
            let polled = poll_fn(move |context| {
                polls += 1;
                keep_the_thread();
                context.waker().wake_by_ref();
                if polls == 2 { Poll::Ready(()) } else { Poll::Pending }
            });
            OnBytes::new(LONG, polled).await;
        });
        work.await.unwrap();
    }

    #[tokio::test]
    async fn a_runtime_of_one_thread_does_long_work_itself() {
        assert_eq!(on_bytes(LONG, || 7), 7);
        assert_eq!(OnBytes::new(LONG, Box::pin(async { 7 })).await, 7);
    }
}
