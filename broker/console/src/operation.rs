//! Actions of this broker that may take longer than a browser waits, and are one step. They go on when the browser leaves, and end
//! with the broker. What is done in many steps is an operation of all brokers instead (`pages::operations`).

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::sync::watch;
use tonic::Status;

/// How long a request waits for an action before the browser is shown its progress.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);
/// The most operations that are remembered. The oldest ones that have ended are forgotten first.
const REMEMBERED: usize = 100;
/// The most operations under way.
const MAX_RUNNING: usize = 20;

/// One action.
pub(crate) struct Operation {
    pub(crate) id: String,
    pub(crate) title: String,
    /// Where the browser goes when it is done, and the word for what was done.
    pub(crate) back: String,
    pub(crate) notice: &'static str,
    pub(crate) began: Instant,
    /// Whose it is: nobody else sees it.
    token: Option<String>,
    result: watch::Sender<Option<Result<i64, Status>>>,
}

impl Operation {
    /// Returns the number of items it was done to, or why it failed; `None` while it runs.
    pub(crate) fn result(&self) -> Option<Result<i64, Status>> {
        self.result.borrow().clone()
    }

    /// Waits for the result for a moment.
    pub(crate) async fn settled(&self) {
        let mut result = self.result.subscribe();
        // Without a result in time the browser is shown the progress.
        let _ = tokio::time::timeout(PATIENCE, result.wait_for(Option::is_some)).await;
    }
}

/// The operations of all visitors.
#[derive(Default)]
pub(crate) struct Operations(Mutex<VecDeque<Arc<Operation>>>);

/// What an operation is called.
pub(crate) struct Name {
    pub(crate) title: String,
    pub(crate) back: String,
    pub(crate) notice: &'static str,
}

impl Operations {
    /// Begins an operation in a task of its own.
    pub(crate) fn begin(
        &self,
        name: Name,
        token: Option<String>,
        work: impl Future<Output = Result<i64, Status>> + Send + 'static,
    ) -> Result<Arc<Operation>, Status> {
        let Name { title, back, notice } = name;
        let id = format!("{:016x}", rand::random::<u64>());
        let (began, result) = (Instant::now(), watch::Sender::new(None));
        let operation = Operation { id, title, back, notice, began, token, result };
        let operation = Arc::new(operation);
        let mut all = self.0.lock();
        let running = all.iter().filter(|operation| operation.result.borrow().is_none()).count();
        if running >= MAX_RUNNING {
            return Err(Status::resource_exhausted("too many actions are under way"));
        }
        if all.len() >= REMEMBERED {
            let oldest = all.iter().position(|operation| operation.result.borrow().is_some());
            oldest.map(|at| all.remove(at));
        }
        all.push_back(Arc::clone(&operation));
        drop(all);
        let running = Arc::clone(&operation);
        tokio::spawn(async move {
            // A task of its own, so that a panic is a result too.
            let result = tokio::spawn(work).await;
            let result = result.unwrap_or_else(|_| Err(Status::internal("the action failed")));
            running.result.send_replace(Some(result));
        });
        Ok(operation)
    }

    /// Returns an operation of the bearer of this token.
    pub(crate) fn get(&self, id: &str, token: Option<&str>) -> Option<Arc<Operation>> {
        let all = self.0.lock();
        all.iter().find(|one| one.id == id && one.token.as_deref() == token).cloned()
    }
}

#[cfg(test)]
mod tests {
    use tokio_util::sync::CancellationToken;

    use super::*;

    fn name() -> Name {
        Name { title: "Purge".to_owned(), back: "/".to_owned(), notice: "purged" }
    }

    #[tokio::test]
    async fn operations_end_with_a_result_and_are_their_owners_alone() {
        let operations = Operations::default();
        let operation = operations.begin(name(), Some("a".to_owned()), async { Ok(7) }).unwrap();
        operation.settled().await;
        assert_eq!(operation.result().unwrap().unwrap(), 7);
        assert!(operations.get(&operation.id, Some("a")).is_some());
        assert!(operations.get(&operation.id, Some("b")).is_none());
        assert!(operations.get(&operation.id, None).is_none());
    }

    #[tokio::test]
    async fn operations_are_bounded() {
        let operations = Operations::default();
        let end = CancellationToken::new();
        let wait = || {
            let end = end.clone();
            async move {
                end.cancelled().await;
                Ok(3)
            }
        };
        let running: Vec<_> =
            (0..MAX_RUNNING).map(|_| operations.begin(name(), None, wait()).unwrap()).collect();
        assert!(operations.begin(name(), None, wait()).is_err(), "too many");
        end.cancel();
        for operation in &running {
            operation.settled().await;
            assert_eq!(operation.result().unwrap().unwrap(), 3);
        }
        for _ in 0..2 * REMEMBERED {
            operations.begin(name(), None, async { Ok(0) }).unwrap().settled().await;
        }
        assert_eq!(operations.0.lock().len(), REMEMBERED);
    }
}
