//! Writes the metrics of `/metrics` as OTLP has them, under the same names.

use std::{
    mem,
    time::{SystemTime, UNIX_EPOCH},
};

use opentelemetry_proto::tonic::{
    collector::metrics::v1::ExportMetricsServiceRequest,
    common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value},
    metrics::v1::{
        AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint,
        ResourceMetrics, ScopeMetrics, Sum, metric::Data, number_data_point,
    },
    resource::v1::Resource,
};
use prometheus_client::encoding::prometheus_protobuf::prometheus_data_model::{
    self as model, LabelPair, MetricFamily, MetricType,
};
use prost::Message;

/// About how large a request may become. Collectors refuse those over 4 MiB, and the metrics of a thousand queues with long names
/// have 3.7 MiB.
const MAX_REQUEST_BYTES: usize = 2 << 20;

/// The time that all counts are from, and the present, in nanoseconds of Unix time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Period {
    start: u64,
    now: u64,
}

impl Period {
    /// Returns the time since `start`.
    pub(super) fn since(start: SystemTime) -> Self {
        let nanos = |time: SystemTime| {
            time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
        };
        Self { start: nanos(start), now: nanos(SystemTime::now()) }
    }
}

/// Returns the requests that tell a collector all of this, each of a size that collectors take.
pub(super) fn requests(
    families: Vec<MetricFamily>,
    resource: &Resource,
    period: Period,
) -> Vec<ExportMetricsServiceRequest> {
    let (mut requests, mut part, mut bytes) = (Vec::new(), Vec::new(), 0);
    for metric in families.into_iter().map(|family| metric(family, period)) {
        let size = metric.encoded_len();
        if !part.is_empty() && bytes + size > MAX_REQUEST_BYTES {
            requests.push(request(mem::take(&mut part), resource));
            bytes = 0;
        }
        bytes += size;
        part.push(metric);
    }
    requests.push(request(part, resource));
    requests
}

fn request(metrics: Vec<Metric>, resource: &Resource) -> ExportMetricsServiceRequest {
    let scope = InstrumentationScope {
        name: "sluicegate".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..InstrumentationScope::default()
    };
    let scope = ScopeMetrics { scope: Some(scope), metrics, schema_url: String::new() };
    ExportMetricsServiceRequest {
        resource_metrics: vec![ResourceMetrics {
            resource: Some(resource.clone()),
            scope_metrics: vec![scope],
            schema_url: String::new(),
        }],
    }
}

/// Returns a family as a metric. Those without values are not among the families.
fn metric(family: MetricFamily, period: Period) -> Metric {
    let kind = family.r#type();
    let values = family.metric;
    let cumulative = i32::from(AggregationTemporality::Cumulative);
    let data = match kind {
        MetricType::Counter => Data::Sum(Sum {
            data_points: values
                .into_iter()
                .map(|value| number(value, period.start, period))
                .collect(),
            aggregation_temporality: cumulative,
            is_monotonic: true,
        }),
        MetricType::Histogram => Data::Histogram(Histogram {
            data_points: values.into_iter().filter_map(|value| buckets(value, period)).collect(),
            aggregation_temporality: cumulative,
        }),
        // What a metric of `Info` says is in its labels; its value is 1.
        _ => Data::Gauge(Gauge {
            data_points: values.into_iter().map(|value| number(value, 0, period)).collect(),
        }),
    };
    let unit = match family.unit.as_str() {
        "seconds" => "s".to_owned(), // as in UCUM
        _ => family.unit,
    };
    Metric {
        name: family.name,
        description: family.help,
        unit,
        data: Some(data),
        ..Metric::default()
    }
}

fn number(value: model::Metric, start: u64, period: Period) -> NumberDataPoint {
    let number = match (value.counter, value.gauge) {
        (Some(counter), _) => counter.value,
        (None, gauge) => gauge.unwrap_or_default().value,
    };
    NumberDataPoint {
        attributes: attributes(value.label),
        start_time_unix_nano: start,
        time_unix_nano: period.now,
        value: Some(number_data_point::Value::AsDouble(number)),
        ..NumberDataPoint::default()
    }
}

fn buckets(value: model::Metric, period: Period) -> Option<HistogramDataPoint> {
    let histogram = value.histogram?;
    // In the family each bucket counts what is in those before it too, and the last has no bound.
    let (mut bounds, mut counts, mut below) = (Vec::new(), Vec::new(), 0);
    for bucket in histogram.bucket.iter().filter(|bucket| bucket.upper_bound < f64::MAX) {
        bounds.push(bucket.upper_bound);
        counts.push(bucket.cumulative_count.saturating_sub(below));
        below = bucket.cumulative_count;
    }
    counts.push(histogram.sample_count.saturating_sub(below));
    Some(HistogramDataPoint {
        attributes: attributes(value.label),
        start_time_unix_nano: period.start,
        time_unix_nano: period.now,
        count: histogram.sample_count,
        sum: Some(histogram.sample_sum),
        bucket_counts: counts,
        explicit_bounds: bounds,
        ..HistogramDataPoint::default()
    })
}

fn attributes(labels: Vec<LabelPair>) -> Vec<KeyValue> {
    let attribute = |label: LabelPair| KeyValue {
        key: label.name,
        value: Some(AnyValue { value: Some(any_value::Value::StringValue(label.value)) }),
        ..KeyValue::default()
    };
    labels.into_iter().map(attribute).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        domain::{Depth, LimitReason, QueueName, limits::MAX_NAME_BYTES},
        metrics::{MAX_QUEUE_LABELS, Metrics, count_one_of_each},
    };

    const PERIOD: Period = Period { start: 7, now: 9 };

    fn queue(name: &str) -> QueueName {
        QueueName::parse("queue", name).unwrap()
    }

    fn sent(metrics: &Metrics) -> Vec<Metric> {
        let requests = requests(metrics.families().unwrap(), &Resource::default(), PERIOD);
        let scopes = requests.into_iter().flat_map(|request| request.resource_metrics);
        let scopes = scopes.flat_map(|of_resource| of_resource.scope_metrics);
        scopes.flat_map(|of_scope| of_scope.metrics).collect()
    }

    fn named<'a>(metrics: &'a [Metric], name: &str) -> &'a Metric {
        let mut found = metrics.iter().filter(|metric| metric.name == name);
        let metric = found.next().unwrap_or_else(|| panic!("no {name}"));
        assert!(found.next().is_none(), "{name} is there once");
        metric
    }

    fn number_of(point: &NumberDataPoint) -> f64 {
        match point.value {
            Some(number_data_point::Value::AsDouble(number)) => number,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_counter_is_a_sum_since_the_start() {
        let metrics = Metrics::new();
        metrics.pushed(&queue("orders"), 5);
        let sent = sent(&metrics);
        let Some(Data::Sum(sum)) = &named(&sent, "sluicegate_items_pushed_total").data else {
            panic!("no sum")
        };
        assert!(sum.is_monotonic);
        assert_eq!(sum.aggregation_temporality(), AggregationTemporality::Cumulative);
        let [point] = &sum.data_points[..] else { panic!("one queue") };
        assert_eq!(number_of(point).to_bits(), 5_f64.to_bits());
        assert_eq!((point.start_time_unix_nano, point.time_unix_nano), (7, 9));
        let expected = LabelPair { name: "queue".to_owned(), value: "orders".to_owned() };
        assert_eq!(point.attributes, attributes(vec![expected]));
    }

    #[test]
    fn a_histogram_has_counts_by_bucket_and_bounds_without_the_last() {
        let metrics = Metrics::new();
        // Bounds are 0.1 ms, 0.4 ms and so on, up to 26 s.
        let delays = [Duration::ZERO, Duration::from_micros(300), Duration::from_mins(1)];
        metrics.delivery_delays(&queue("orders"), delays.into_iter());
        let sent = sent(&metrics);
        let delay = named(&sent, "sluicegate_delivery_delay_seconds");
        assert_eq!(delay.unit, "s");
        let Some(Data::Histogram(histogram)) = &delay.data else { panic!("no histogram") };
        assert_eq!(histogram.aggregation_temporality(), AggregationTemporality::Cumulative);
        let [point] = &histogram.data_points[..] else { panic!("one queue") };
        assert_eq!((point.start_time_unix_nano, point.count), (7, 3));
        assert_eq!(point.sum.map(f64::to_bits), Some(60.0003_f64.to_bits()));
        assert_eq!(point.bucket_counts, [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(point.explicit_bounds.len(), 10);
        assert!(point.explicit_bounds.iter().all(|bound| bound.is_finite() && *bound < 30.0));
    }

    #[test]
    fn what_is_measured_now_is_a_gauge_and_what_has_no_value_is_not_there() {
        let metrics = Metrics::new();
        metrics.depth(&queue("orders"), &Depth { ready: 3, ..Depth::default() });
        let sent = sent(&metrics);
        let Some(Data::Gauge(items)) = &named(&sent, "sluicegate_queue_items").data else {
            panic!("no gauge")
        };
        let ready = attributes(vec![
            LabelPair { name: "queue".to_owned(), value: "orders".to_owned() },
            LabelPair { name: "state".to_owned(), value: "ready".to_owned() },
        ]);
        let point = items.data_points.iter().find(|point| point.attributes == ready).unwrap();
        assert_eq!(number_of(point).to_bits(), 3_f64.to_bits());
        let Some(Data::Gauge(build)) = &named(&sent, "sluicegate_build_info").data else {
            panic!("no gauge")
        };
        assert_eq!(number_of(&build.data_points[0]).to_bits(), 1_f64.to_bits());
        assert!(!sent.iter().any(|metric| metric.name == "sluicegate_items_pushed_total"));
    }

    /// What is sent has the names and values of the page.
    #[test]
    fn every_metric_of_the_page_is_sent() {
        let metrics = crate::metrics::recorded();
        let sent = sent(&metrics);
        let page = metrics.encode().unwrap();
        let names = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        let mut count = 0;
        for (name, kind) in names.filter_map(|line| line.split_once(' ')) {
            let suffix = match kind {
                "counter" => "_total",
                "info" => "_info",
                _ => "",
            };
            named(&sent, &format!("{name}{suffix}"));
            count += 1;
        }
        assert_eq!(sent.len(), count);
    }

    #[test]
    fn the_metrics_of_a_thousand_queues_are_sent_in_parts_that_collectors_take() {
        let metrics = Metrics::new();
        for n in 0..MAX_QUEUE_LABELS {
            let queue = queue(&format!("{n:q>MAX_NAME_BYTES$}"));
            count_one_of_each(&metrics, &queue);
            for reason in LimitReason::ALL {
                metrics.dead_lettered(&queue, reason, 1);
                metrics.discarded(&queue, reason, 1);
            }
            metrics.depth(&queue, &Depth { ready: 3, ..Depth::default() });
            metrics.delivery_delays(&queue, [Duration::ZERO; 2].into_iter());
        }
        let families = metrics.families().unwrap();
        let all = families.len();
        let requests = requests(families, &Resource::default(), PERIOD);
        let sizes: Vec<usize> = requests.iter().map(Message::encoded_len).collect();
        assert!(sizes.len() > 1, "{sizes:?}");
        assert!(sizes.iter().all(|size| *size < MAX_REQUEST_BYTES + 1_000), "{sizes:?}");
        assert_eq!(sent(&metrics).len(), all, "none is left out");
    }
}
