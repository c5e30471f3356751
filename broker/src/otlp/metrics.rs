//! Sends the metrics at intervals.
//!
//! One round follows the other, so that at most one is under way, and nothing is kept of a round that failed: all counts are from
//! the start of the broker, and the next round tells them. A connection lasts for one round, so that none is left that a firewall has
//! forgotten in between.

use std::{
    env,
    error::Error,
    sync::Arc,
    time::{Duration, SystemTime},
};

use axum::http::{HeaderMap, HeaderValue, header::CONTENT_TYPE};
use bytes::Bytes;
use opentelemetry_http::{HttpClient, Request, hyper::HyperClient};
use opentelemetry_otlp::{
    ExporterBuildError, OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_METRICS_HEADERS,
};
use opentelemetry_proto::tonic::{
    collector::metrics::v1::{
        ExportMetricsServiceRequest, ExportMetricsServiceResponse,
        metrics_service_client::MetricsServiceClient,
    },
    resource::v1::Resource as ResourceMessage,
};
use opentelemetry_sdk::Resource;
use percent_encoding::percent_decode_str;
use prost::Message;
use tokio::{
    task::spawn_blocking,
    time::{MissedTickBehavior, interval, timeout},
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tonic::{metadata::MetadataMap, transport::Endpoint};

use super::{
    EXPORT_LIMIT,
    families::{Period, requests},
    tls,
};
use crate::{
    config::{Otlp, OtlpProtocol},
    metrics::Metrics,
};

/// Metrics on their way to a collector.
pub(super) struct MetricsExport {
    /// Cancelled when the last round is due.
    stop: CancellationToken,
    sending: AbortOnDropHandle<()>,
}

impl MetricsExport {
    /// Begins to send metrics, now and after each interval.
    pub(super) fn start(
        otlp: &Otlp,
        interval: Duration,
        resource: &Resource,
        metrics: Arc<Metrics>,
    ) -> Result<Self, ExporterBuildError> {
        let sender = Sender {
            collector: Collector::of(otlp)?,
            headers: headers(),
            resource: resource.into(),
            started: SystemTime::now(),
            metrics,
            failing: false,
        };
        let stop = CancellationToken::new();
        let sending = tokio::spawn(sender.run(interval, stop.clone()));
        Ok(Self { stop, sending: AbortOnDropHandle::new(sending) })
    }

    /// Sends the metrics once more, for so long at most.
    pub(super) async fn close(self, limit: Duration) {
        self.stop.cancel();
        if timeout(limit, self.sending).await.is_err() {
            tracing::info!("the last metrics may not have been sent");
        }
    }
}

/// Where metrics are sent.
enum Collector {
    Grpc(Box<Endpoint>),
    Http(String),
}

impl Collector {
    fn of(otlp: &Otlp) -> Result<Self, ExporterBuildError> {
        let endpoint = otlp.endpoint.trim_end_matches('/');
        if otlp.protocol == OtlpProtocol::Http {
            return Ok(Self::Http(format!("{endpoint}/v1/metrics")));
        }
        let wrong = |error: tonic::transport::Error| {
            ExporterBuildError::InvalidConfiguration(with_causes(&error))
        };
        let plain = Endpoint::from_shared(endpoint.to_owned()).map_err(wrong)?;
        let endpoint = match tls(otlp) {
            Some(tls) => plain.tls_config(tls).map_err(wrong)?,
            None => plain,
        };
        Ok(Self::Grpc(Box::new(endpoint)))
    }
}

struct Sender {
    collector: Collector,
    /// What every request carries besides.
    headers: HeaderMap,
    resource: ResourceMessage,
    /// Since when everything is counted.
    started: SystemTime,
    metrics: Arc<Metrics>,
    /// True if the last round failed, which is in the log then.
    failing: bool,
}

impl Sender {
    /// Sends rounds until `stop`, and one after that.
    async fn run(mut self, every: Duration, stop: CancellationToken) {
        let mut ticks = interval(every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let rounds = async {
            loop {
                ticks.tick().await;
                self.round().await;
            }
        };
        let _: Option<()> = stop.run_until_cancelled(rounds).await; // a round that is under way is given up
        self.round().await;
    }

    async fn round(&mut self) {
        let sent = timeout(EXPORT_LIMIT, self.send()).await;
        let sent = sent.unwrap_or_else(|_| Err(format!("no answer within {EXPORT_LIMIT:?}")));
        match &sent {
            Err(error) if !self.failing => tracing::warn!(
                %error,
                "metrics cannot be sent to the collector, which is said once (otlp_metrics_interval = 0s: none are sent)"
            ),
            Ok(()) if self.failing => tracing::info!("metrics reach the collector again"),
            _ => {}
        }
        self.failing = sent.is_err();
    }

    async fn send(&self) -> Result<(), String> {
        let (metrics, resource) = (Arc::clone(&self.metrics), self.resource.clone());
        let period = Period::since(self.started);
        let requests = spawn_blocking(move || {
            let families = metrics.families().map_err(|error| error.to_string())?;
            Ok::<_, String>(requests(families, &resource, period))
        });
        let requests = requests.await.map_err(|error| error.to_string())??;
        match &self.collector {
            Collector::Grpc(endpoint) => self.send_over_grpc(endpoint, requests).await,
            Collector::Http(url) => self.send_over_http(url, requests).await,
        }
    }

    async fn send_over_grpc(
        &self,
        endpoint: &Endpoint,
        requests: Vec<ExportMetricsServiceRequest>,
    ) -> Result<(), String> {
        let channel = endpoint.connect().await.map_err(|error| with_causes(&error))?;
        let mut client = MetricsServiceClient::new(channel);
        for request in requests {
            let mut request = tonic::Request::new(request);
            *request.metadata_mut() = MetadataMap::from_headers(self.headers.clone());
            let answer = client.export(request).await;
            let answer =
                answer.map_err(|status| format!("{:?}: {}", status.code(), status.message()))?;
            all_taken(answer.into_inner())?;
        }
        Ok(())
    }

    async fn send_over_http(
        &self,
        url: &str,
        requests: Vec<ExportMetricsServiceRequest>,
    ) -> Result<(), String> {
        let client = HyperClient::with_default_connector(EXPORT_LIMIT, None);
        for request in requests {
            let body = Bytes::from(request.encode_to_vec());
            let mut request = Request::post(url).body(body).map_err(|error| error.to_string())?;
            request.headers_mut().extend(self.headers.clone());
            let protobuf = HeaderValue::from_static("application/x-protobuf");
            request.headers_mut().insert(CONTENT_TYPE, protobuf);
            let answer = client.send_bytes(request).await.map_err(|error| with_causes(&*error))?;
            if !answer.status().is_success() {
                return Err(format!("HTTP status {}", answer.status()));
            }
            // An answer of another type says nothing about what was taken.
            all_taken(
                ExportMetricsServiceResponse::decode(answer.into_body()).unwrap_or_default(),
            )?;
        }
        Ok(())
    }
}

/// Fails if the collector has refused a part.
fn all_taken(answer: ExportMetricsServiceResponse) -> Result<(), String> {
    match answer.partial_success {
        Some(partial) if partial.rejected_data_points > 0 => Err(format!(
            "{} values were refused: {}",
            partial.rejected_data_points, partial.error_message
        )),
        _ => Ok(()),
    }
}

/// Returns the headers that the environment asks for, as the exporter of spans does.
fn headers() -> HeaderMap {
    let given = [OTEL_EXPORTER_OTLP_METRICS_HEADERS, OTEL_EXPORTER_OTLP_HEADERS];
    let given = given.iter().find_map(|variable| env::var(variable).ok());
    given.map(|text| parse_headers(&text)).unwrap_or_default()
}

/// Parses `name=value,name=value`, with values in percent encoding. What is not of this form is left out.
fn parse_headers(text: &str) -> HeaderMap {
    let header = |pair: &str| {
        let (name, value) = pair.split_once('=')?;
        let value = percent_decode_str(value.trim()).decode_utf8().ok()?;
        Some((name.trim().parse().ok()?, HeaderValue::from_str(&value).ok()?))
    };
    text.split(',').filter_map(header).collect()
}

/// Returns an error with what caused it.
fn with_causes(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_read_as_opentelemetry_writes_them() {
        let headers = parse_headers("x-team = shop,authorization=Bearer%20a%3Db,,nonsense");
        assert_eq!(headers.len(), 2, "{headers:?}");
        assert_eq!(headers["x-team"], "shop");
        assert_eq!(headers["authorization"], "Bearer a=b");
    }
}
