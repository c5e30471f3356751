//! The number of claims of a queue whose outcome this broker does not know yet.

use std::time::Duration;

use tokio::sync::watch;

use crate::store::{Result, mongo::server::error::unavailable};

/// Time limit of a reserve's wait for earlier claims of its queue.
const PATIENCE: Duration = Duration::from_secs(1);

/// The number of open claims of a queue.
pub(crate) struct OpenClaims(watch::Sender<usize>);

impl OpenClaims {
    pub(crate) fn new() -> Self {
        Self(watch::Sender::new(0))
    }

    /// Waits until the outcomes of all earlier claims are known.
    pub(crate) async fn resolved(&self) -> Result<()> {
        let mut open = self.0.subscribe();
        let resolved = open.wait_for(|open| *open == 0);
        match tokio::time::timeout(PATIENCE, resolved).await {
            Ok(_) => Ok(()),
            Err(_) => Err(unavailable(
                "the outcome of an earlier claim of this queue is not known yet: nothing more is claimed",
            )),
        }
    }

    /// Counts a claim that begins.
    pub(crate) fn opened(&self) {
        self.0.send_modify(|open| *open += 1);
    }

    /// Counts a claim whose outcome is known.
    pub(crate) fn closed(&self) {
        self.0.send_modify(|open| *open -= 1);
    }
}
