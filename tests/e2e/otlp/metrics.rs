//! Metrics that brokers send to a collector.

use std::{
    fs,
    time::{SystemTime, UNIX_EPOCH},
};

use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Metric, NumberDataPoint, metric::Data, number_data_point::Value,
};
use sluicegate_proto::v1::{CommitRequest, ConsumeRequest, PushRequest};
use tonic::Request;

use super::{
    collector::{Collector, Measured, attributes},
    lines, sending,
};
use crate::harness::{Api, Backend, new_item, until, within};

const PROTOCOLS: [&str; 2] = ["grpc", "http"];
const PUSHED: &str = "sluicegate_items_pushed_total";

async fn push(api: &Api, items: usize) {
    let items = (0..items).map(|n| new_item(&n.to_string())).collect();
    let request = PushRequest { queue: "orders".to_owned(), items, ..PushRequest::default() };
    api.queue.clone().push(request).await.expect("an answered push");
}

/// Pushes an item within a trace that is wanted.
async fn push_traced(api: &Api) {
    let mut request =
        Request::new(PushRequest { queue: "orders".to_owned(), ..PushRequest::default() });
    request.get_mut().items.push(new_item("a"));
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    request.metadata_mut().insert("traceparent", parent.parse().expect("metadata"));
    api.queue.clone().push(request).await.expect("an answered push");
}

fn metric<'a>(measured: &'a Measured, name: &str) -> Option<&'a Metric> {
    measured.metrics.iter().find(|metric| metric.name == name)
}

/// Returns the value of a point, and its attributes but for the queue, which is `orders` if there is one.
fn value(point: &NumberDataPoint) -> (f64, Vec<(String, String)>) {
    let Some(Value::AsDouble(value)) = point.value else { panic!("{point:?}") };
    let mut labels = attributes(&point.attributes);
    if let Some(queue) = labels.remove("queue") {
        assert_eq!(queue, "orders");
    }
    (value, labels.into_iter().collect())
}

/// Returns the only point of a counter, which is asserted to be one.
fn count(metric: &Metric) -> &NumberDataPoint {
    let Some(Data::Sum(sum)) = &metric.data else { panic!("no counter: {metric:?}") };
    assert!(sum.is_monotonic, "{metric:?}");
    assert_eq!(sum.aggregation_temporality(), AggregationTemporality::Cumulative);
    let [point] = &sum.data_points[..] else { panic!("one queue: {metric:?}") };
    point
}

/// Waits for metrics in which a counter has this value.
async fn counted(collector: &Collector, name: &str, expected: f64) -> Measured {
    until(&format!("{name} of {expected}"), || async {
        collector.metrics().into_iter().find(|measured| {
            metric(measured, name).is_some_and(|found| value(count(found)) == (expected, vec![]))
        })
    })
    .await
}

fn nanos(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).expect("a time since 1970").as_nanos() as u64
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counters_gauges_and_histograms_arrive_with_their_values() {
    for protocol in PROTOCOLS {
        let (store, collector) = (Backend::Sqlite.store(), Collector::speaking(protocol).await);
        let launch = sending(store.launch(), &collector)
            .flag("otlp-protocol", protocol)
            .flag("otlp-metrics-interval", "1s")
            .variable("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret".into());
        let before = nanos(SystemTime::now());
        let broker = launch.start().await;
        let api = broker.api().await;
        push(&api, 3).await;
        let request = ConsumeRequest { queue: "orders".to_owned(), ..ConsumeRequest::default() };
        let mut stream = api.queue.clone().consume(request).await.expect("a stream").into_inner();
        let delivered = within("a delivery", stream.message()).await.expect("no error");
        let receipt = delivered.expect("deliveries").deliveries.remove(0).receipt;
        let request = CommitRequest { receipts: vec![receipt] };
        api.queue.clone().commit(request).await.expect("an answered commit");

        let first = counted(&collector, "sluicegate_items_committed_total", 1.0).await;
        assert_eq!(first.authorization.as_deref(), Some("Bearer secret"), "{protocol}");
        assert_eq!(first.sender["service.name"], "sluicegate");
        assert!(!first.sender["service.version"].is_empty());
        let pushed = count(metric(&first, PUSHED).expect("pushes"));
        assert_eq!(value(pushed), (3.0, vec![]));
        let (start, time) = (pushed.start_time_unix_nano, pushed.time_unix_nano);
        assert!(before <= start && start <= time && time <= nanos(SystemTime::now()));
        let Some(Data::Gauge(streams)) =
            &metric(&first, "sluicegate_streams_open").expect("streams").data
        else {
            panic!("no gauge: {first:?}")
        };
        let consume = ("rpc".to_owned(), "Consume".to_owned());
        assert!(streams.data_points.iter().any(|p| value(p) == (1.0, vec![consume.clone()])));
        let delay = metric(&first, "sluicegate_delivery_delay_seconds").expect("delays");
        let Some(Data::Histogram(histogram)) = &delay.data else { panic!("{delay:?}") };
        assert_eq!(histogram.aggregation_temporality(), AggregationTemporality::Cumulative);
        let [point] = &histogram.data_points[..] else { panic!("one queue: {delay:?}") };
        assert_eq!((point.count, point.bucket_counts.iter().sum()), (3, 3));
        assert_eq!(point.bucket_counts.len(), point.explicit_bounds.len() + 1);
        assert_eq!((delay.unit.as_str(), point.start_time_unix_nano), ("s", start));

        push(&api, 2).await;
        let later = counted(&collector, PUSHED, 5.0).await;
        let again = count(metric(&later, PUSHED).expect("pushes"));
        assert_eq!(again.start_time_unix_nano, start, "counted since the start");
        assert!(again.time_unix_nano > time);
        drop((stream, api));
        broker.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spans_and_metrics_are_of_one_sender_and_the_last_come_at_the_end() {
    for protocol in PROTOCOLS {
        let (store, collector) = (Backend::Sqlite.store(), Collector::speaking(protocol).await);
        let broker = sending(store.launch(), &collector)
            .flag("otlp-protocol", protocol)
            .flag("otlp-metrics-interval", "1h")
            .start()
            .await;
        until("the first metrics", || async { collector.metrics().pop() }).await;
        push_traced(&broker.api().await).await;
        broker.stop().await;
        let last = collector.metrics().pop().expect("metrics");
        assert_eq!(value(count(metric(&last, PUSHED).expect("pushes"))), (1.0, vec![]));
        assert_eq!(collector.all()[0].0, last.sender);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interval_of_zero_sends_no_metrics() {
    let (store, collector) = (Backend::Sqlite.store(), Collector::grpc().await);
    let launch = sending(store.launch(), &collector).flag("otlp-metrics-interval", "0s");
    let broker = launch.start().await;
    push(&broker.api().await, 1).await;
    broker.stop().await;
    assert_eq!(collector.metrics().len(), 0);
}

/// Over TLS, a collector has to show a certificate of a public authority, or of one that is given. One that does not is sent nothing, and is in
/// nobody's way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_is_not_known_to_be_the_right_one_is_sent_nothing() {
    let (_, of_others) = Collector::over_tls().await;
    let files = tempfile::tempdir().expect("a directory");
    let file = files.path().join("others.pem");
    fs::write(&file, of_others).expect("a file");
    for authorities in [None, file.to_str()] {
        let (store, (collector, _)) = (Backend::Sqlite.store(), Collector::over_tls().await);
        let mut launch = store.launch().flag("otlp-endpoint", &collector.tls_endpoint());
        if let Some(file) = authorities {
            launch = launch.flag("otlp-ca", file);
        }
        let broker = launch.flag("otlp-metrics-interval", "1s").start().await;
        push_traced(&broker.api().await).await;
        let said = "metrics cannot be sent";
        until(said, || async { (lines(&broker.log(), said) == 1).then_some(()) }).await;
        let log = broker.log();
        broker.stop().await;
        assert!(log.contains("UnknownIssuer") || log.contains("BadSignature"), "{log}");
        assert_eq!((collector.metrics().len(), collector.all().len()), (0, 0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_of_an_authority_that_is_given_gets_spans_and_metrics() {
    let (store, (collector, authority)) = (Backend::Sqlite.store(), Collector::over_tls().await);
    let files = tempfile::tempdir().expect("a directory");
    let file = files.path().join("company.pem");
    fs::write(&file, authority).expect("a file");
    let launch = store.launch().flag("otlp-endpoint", &collector.tls_endpoint());
    let launch = launch.flag("otlp-ca", file.to_str().expect("a path"));
    let broker = launch.flag("otlp-metrics-interval", "1s").start().await;
    push_traced(&broker.api().await).await;
    counted(&collector, PUSHED, 1.0).await;
    collector.span("push orders").await;
    let log = broker.log();
    broker.stop().await;
    assert_eq!(lines(&log, "cannot be sent"), 0, "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_refuses_metrics_is_logged_once_and_gets_all_of_them_later() {
    for protocol in PROTOCOLS {
        let (store, collector) = (Backend::Sqlite.store(), Collector::speaking(protocol).await);
        collector.refuse_metrics(true);
        let broker = sending(store.launch(), &collector)
            .flag("otlp-protocol", protocol)
            .flag("otlp-metrics-interval", "1s")
            .start()
            .await;
        push(&broker.api().await, 3).await;
        until("three refused rounds", || async { (collector.refused() > 2).then_some(()) }).await;
        assert_eq!(lines(&broker.log(), "metrics cannot be sent"), 1, "{}", broker.log());
        collector.refuse_metrics(false);
        counted(&collector, PUSHED, 3.0).await;
        let said = "metrics reach the collector again";
        until(said, || async { (lines(&broker.log(), said) == 1).then_some(()) }).await;
        broker.stop().await;
    }
}
