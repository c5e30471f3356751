//! Sends spans, in batches.
//!
//! Spans wait in a queue of bounded length; what does not fit is dropped, and no call waits. A thread of the library takes
//! them out. What it sends is sent by the broker's own runtime, because the clients of both protocols need one.

use std::{
    future::Future,
    sync::Arc,
    time::{Duration, Instant},
};

use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig, WithTonicConfig};
use opentelemetry_sdk::{
    Resource,
    error::{OTelSdkError, OTelSdkResult},
    trace::{
        BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracerProvider, SpanData,
        SpanExporter as ExportSpans,
    },
};
use parking_lot::Mutex;
use tokio::{runtime::Handle, task::spawn_blocking, time::timeout};

use super::{EXPORT_LIMIT, tls};
use crate::{
    config::{Otlp, OtlpProtocol},
    traces::Traces,
};

/// Spans are sent after this time at the latest.
const INTERVAL: Duration = Duration::from_secs(1);
/// A collector that fails is logged this often.
const LOG_INTERVAL: Duration = Duration::from_mins(1);

/// Spans on their way to a collector.
pub(super) struct Spans(SdkTracerProvider);

impl Spans {
    /// Begins to send spans, within a tokio runtime. Whether the collector is there is found out when there are spans.
    pub(super) fn start(otlp: &Otlp, resource: Resource) -> Result<Self, ExporterBuildError> {
        let exporter = Guarded {
            exporter: Arc::new(exporter(otlp)?),
            runtime: Handle::current(),
            failures: Mutex::default(),
        };
        let config = BatchConfigBuilder::default().with_scheduled_delay(INTERVAL).build();
        let provider = SdkTracerProvider::builder()
            .with_sampler(Sampler::AlwaysOn) // spans that nobody wants are not begun
            .with_resource(resource)
            .with_span_processor(BatchSpanProcessor::new(exporter, config))
            .build();
        Ok(Self(provider))
    }

    /// Returns what makes spans that are sent.
    pub(super) fn traces(&self) -> Traces {
        Traces::new(self.0.tracer("sluicegate"))
    }

    /// Sends what is left, for so long at most.
    pub(super) async fn close(&self, limit: Duration) {
        let provider = self.0.clone();
        let closed = spawn_blocking(move || provider.shutdown_with_timeout(limit)).await;
        if !matches!(closed, Ok(Ok(()))) {
            tracing::info!("the last spans may not have been sent");
        }
    }
}

impl Drop for Spans {
    /// Without [`Self::close`] there was no time to send anything.
    fn drop(&mut self) {
        let _ = self.0.shutdown_with_timeout(Duration::ZERO); // it may have been closed
    }
}

fn exporter(otlp: &Otlp) -> Result<SpanExporter, ExporterBuildError> {
    let endpoint = otlp.endpoint.trim_end_matches('/');
    match otlp.protocol {
        OtlpProtocol::Grpc => {
            let exporter = SpanExporter::builder()
                .with_tonic()
                .with_endpoint(endpoint)
                .with_timeout(EXPORT_LIMIT);
            match tls(otlp) {
                Some(tls) => exporter.with_tls_config(tls).build(),
                None => exporter.build(),
            }
        }
        OtlpProtocol::Http => SpanExporter::builder()
            .with_http()
            .with_endpoint(format!("{endpoint}/v1/traces"))
            .with_timeout(EXPORT_LIMIT)
            .build(),
    }
}

/// An exporter that runs on the broker's runtime, is bounded in time, and whose failures are logged now and then.
#[derive(Debug)]
struct Guarded<E> {
    exporter: Arc<E>,
    runtime: Handle,
    failures: Mutex<Failures>,
}

#[derive(Debug, Default)]
struct Failures {
    /// Spans that were lost since the last line of the log.
    lost: usize,
    logged: Option<Instant>,
}

impl<E: ExportSpans + 'static> ExportSpans for Guarded<E> {
    fn export(&self, batch: Vec<SpanData>) -> impl Future<Output = OTelSdkResult> + Send {
        let (exporter, spans) = (Arc::clone(&self.exporter), batch.len());
        let sent =
            self.runtime.spawn(async move { timeout(EXPORT_LIMIT, exporter.export(batch)).await });
        async move {
            let result = match sent.await {
                Ok(Ok(result)) => result,
                Ok(Err(_)) => Err(OTelSdkError::Timeout(EXPORT_LIMIT)),
                Err(ended) => Err(OTelSdkError::InternalFailure(ended.to_string())),
            };
            self.failures.lock().note(spans, &result);
            result
        }
    }

    fn shutdown_with_timeout(&self, limit: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(limit)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        // Nothing is being sent yet.
        if let Some(exporter) = Arc::get_mut(&mut self.exporter) {
            exporter.set_resource(resource);
        }
    }
}

impl Failures {
    fn note(&mut self, spans: usize, result: &OTelSdkResult) {
        let Err(error) = result else {
            if self.logged.take().is_some() {
                tracing::info!("spans reach the collector again");
            }
            return;
        };
        self.lost += spans;
        if self.logged.is_none_or(|at| at.elapsed() >= LOG_INTERVAL) {
            self.logged = Some(Instant::now());
            tracing::warn!(%error, lost = self.lost, "spans cannot be sent to the collector");
            self.lost = 0;
        }
    }
}
