//! In place of this module in a broker without the feature `otlp`, whose settings name no collector.

use std::{sync::Arc, time::Duration};

use crate::{config::Otlp, metrics::Metrics, traces::Traces};

/// What is sent to a collector: nothing.
pub(crate) enum Export {}

impl Export {
    /// Says why nothing is sent.
    pub(crate) fn start(_: &Otlp, _: String, _: &Arc<Metrics>) -> Result<Self, &'static str> {
        Err("this broker was built without the feature otlp")
    }

    /// Returns what makes spans.
    pub(crate) fn traces(&self) -> Traces {
        match *self {}
    }

    /// Sends what is left.
    pub(crate) async fn close(self, _: Duration) {
        match self {}
    }
}
