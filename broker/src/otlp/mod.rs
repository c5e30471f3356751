//! Spans and metrics for a collector of OpenTelemetry, over gRPC or HTTP.
//!
//! * [`spans`]: what calls do, in batches, as they end.
//! * [`metrics`]: what is counted and measured, at intervals; [`families`] writes it as OTLP has it.
//!
//! A collector that is slow, full or away costs no call anything, and memory that is bounded.

mod families;
mod metrics;
mod spans;

use std::{sync::Arc, time::Duration};

use opentelemetry::KeyValue;
use opentelemetry_otlp::ExporterBuildError;
use opentelemetry_sdk::Resource;
use tonic::transport::{Certificate, ClientTlsConfig};

use self::{metrics::MetricsExport, spans::Spans};
use crate::{config::Otlp, metrics::Metrics, traces::Traces};

/// How long a batch of spans may take, with what is tried again, and all metrics once.
const EXPORT_LIMIT: Duration = Duration::from_secs(10);

/// What is on its way to a collector.
pub(crate) struct Export {
    spans: Spans,
    /// `None`: metrics are not sent.
    metrics: Option<MetricsExport>,
}

impl Export {
    /// Begins to send, within a tokio runtime. Whether the collector is there is found out later; `instance` names this broker
    /// among others.
    pub(crate) fn start(
        otlp: &Otlp,
        instance: String,
        metrics: &Arc<Metrics>,
    ) -> Result<Self, ExporterBuildError> {
        let resource = resource(instance);
        let spans = Spans::start(otlp, resource.clone())?;
        let metrics = otlp
            .metrics_interval
            .map(|interval| MetricsExport::start(otlp, interval, &resource, Arc::clone(metrics)))
            .transpose()?;
        Ok(Self { spans, metrics })
    }

    /// Returns what makes spans that are sent.
    pub(crate) fn traces(&self) -> Traces {
        self.spans.traces()
    }

    /// Sends what is left, for so long at most.
    pub(crate) async fn close(self, limit: Duration) {
        let metrics = async {
            if let Some(metrics) = self.metrics {
                metrics.close(limit).await;
            }
        };
        tokio::join!(self.spans.close(limit), metrics);
    }
}

/// Returns what the broker says of itself, with what `OTEL_RESOURCE_ATTRIBUTES` adds.
fn resource(instance: String) -> Resource {
    Resource::builder()
        .with_service_name("sluicegate")
        .with_attributes([
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
            KeyValue::new("service.instance.id", instance),
        ])
        .build()
}

/// Returns how a collector is known to be the right one; `None` without TLS.
fn tls(otlp: &Otlp) -> Option<ClientTlsConfig> {
    let config = otlp.endpoint.starts_with("https:").then(ClientTlsConfig::new)?;
    Some(match &otlp.authorities {
        Some(pem) => config.ca_certificate(Certificate::from_pem(pem)),
        None => config.with_webpki_roots(),
    })
}
