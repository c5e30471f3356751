//! The tasks of one part of the broker, which are waited for together.
//!
//! All of them are of one type, a boxed future: tokio's code for a task would else be compiled again for each of a hundred
//! operations, twice, which was a sixth of the broker.

use std::pin::Pin;

use tokio::{runtime::Handle, sync::oneshot};
use tokio_util::task::TaskTracker;

/// Work that [`Tasks::wait`] waits for as for a task.
pub(crate) use tokio_util::task::task_tracker::TaskTrackerToken as Open;

/// A set of running tasks. Clones are the same set.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tasks(TaskTracker);

impl Tasks {
    /// Runs `work` in a task of its own.
    pub(crate) fn spawn<T>(&self, work: impl Future<Output = T> + Send + 'static) {
        self.0.spawn(boxed(work));
    }

    /// Runs `work` in a task of its own, from outside of the runtime as well.
    pub(crate) fn spawn_on<T>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
        runtime: &Handle,
    ) {
        self.0.spawn_on(boxed(work), runtime);
    }

    /// Runs `work` in a task of its own, to its end even if nobody waits for the outcome. The receiver fails if `work`
    /// panics.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> oneshot::Receiver<T> {
        let (answer, outcome) = oneshot::channel();
        let work = Box::pin(work); // often large, and moved once
        self.spawn(async move {
            let _ = answer.send(work.await); // whoever asked may have left
        });
        outcome
    }

    /// Makes [`Self::wait`] wait until the token is dropped.
    pub(crate) fn token(&self) -> Open {
        self.0.token()
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Lets [`Self::wait`] return once no task runs.
    pub(crate) fn close(&self) {
        self.0.close();
    }

    /// Waits until the set is closed and no task runs.
    pub(crate) async fn wait(&self) {
        self.0.wait().await;
    }
}

fn boxed<T>(
    work: impl Future<Output = T> + Send + 'static,
) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    Box::pin(async move {
        work.await;
    })
}
