//! What KEDA is told of a queue.

use sluicegate_proto::externalscaler::{
    GetMetricsRequest, IsActiveResponse, ScaledObjectRef,
    external_scaler_client::ExternalScalerClient,
};

use super::*;

pub(super) fn scaled_object(queue: &str) -> ScaledObjectRef {
    scaled_by(&[("queue", queue), ("targetReady", "5")])
}

fn scaled_by(metadata: &[(&str, &str)]) -> ScaledObjectRef {
    let entry = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    ScaledObjectRef {
        scaler_metadata: metadata.iter().map(entry).collect(),
        ..ScaledObjectRef::default()
    }
}

impl Broker {
    pub(super) fn scaler(&self) -> ExternalScalerClient<Channel> {
        ExternalScalerClient::new(self.channel.clone())
    }

    async fn is_active(&self, queue: &str) -> bool {
        self.scaler().is_active(scaled_object(queue)).await.unwrap().into_inner().result
    }

    async fn figure(&self, queue: &str, metric_name: &str) -> Result<f64, Status> {
        let scaled_object_ref = Some(scaled_object(queue));
        let request = GetMetricsRequest { scaled_object_ref, metric_name: metric_name.into() };
        let values = self.scaler().get_metrics(request).await?.into_inner().metric_values;
        let [value] = &values[..] else { panic!("one figure: {values:?}") };
        assert_eq!(value.metric_name, metric_name);
        assert_eq!(value.metric_value, value.metric_value_float.ceil() as i64);
        Ok(value.metric_value_float)
    }

    async fn ready(&self, queue: &str) -> i64 {
        self.figure(queue, "ready").await.unwrap() as i64
    }

    async fn push_later(&self, queue: &str, seconds: i64) {
        let delay = prost_types::Duration { seconds, nanos: 0 };
        let eligibility = Some(pb::new_item::Eligibility::Delay(delay));
        let item = pb::NewItem { eligibility, ..Default::default() };
        let request =
            pb::PushRequest { queue: queue.into(), items: vec![item], ..Default::default() };
        self.queues().push(request).await.unwrap();
    }
}

#[tokio::test]
async fn ready_and_reserved_items_need_consumers() {
    let broker = Broker::start().await;
    assert!(!broker.is_active("q").await, "no such queue: its first item may create it");
    assert_eq!(broker.ready("q").await, 0);
    broker.push("q", small(7)).await;
    assert!(broker.is_active("q").await);
    assert_eq!(broker.ready("q").await, 7);
    let request = pb::ReserveRequest { queue: "q".into(), max_items: 7, ..Default::default() };
    let reserved = broker.queues().reserve(request).await.unwrap().into_inner().deliveries;
    assert!(broker.is_active("q").await, "reserved");
    assert_eq!(broker.ready("q").await, 7);
    assert!(broker.figure("q", "age_seconds").await.unwrap() <= 0.0, "nothing waits");
    let receipts = reserved.into_iter().map(|delivery| delivery.receipt).collect();
    broker.queues().commit(pb::CommitRequest { receipts }).await.unwrap();
    assert!(!broker.is_active("q").await, "settled");
    assert_eq!(broker.ready("q").await, 0);
}

#[tokio::test]
async fn items_that_are_due_soon_need_consumers_too() {
    let broker = Broker::start().await;
    broker.push_later("q", 3_600).await;
    assert!(!broker.is_active("q").await, "due in an hour");
    broker.push_later("q", 20).await;
    assert!(broker.is_active("q").await, "due in 20 s");
    assert_eq!(broker.ready("q").await, 0, "nothing to do yet");
}

#[tokio::test]
async fn the_age_is_that_of_the_oldest_ready_item() {
    let broker = Broker::start().await;
    broker.push("q", small(1)).await;
    let mut ages = vec![broker.figure("q", "age_seconds").await.unwrap()];
    while ages.last() <= ages.first() {
        ages.push(broker.figure("q", "age_seconds").await.unwrap());
    }
    assert!(ages.iter().all(|age| (0.0..60.0).contains(age)), "{ages:?}");
}

#[tokio::test]
async fn targets_are_those_of_the_metadata() {
    let broker = Broker::start().await;
    let specs = async |metadata: &[(&str, &str)]| {
        let answer = broker.scaler().get_metric_spec(scaled_by(metadata)).await.unwrap();
        let specs = answer.into_inner().metric_specs.into_iter();
        let spec = |spec: sluicegate_proto::externalscaler::MetricSpec| {
            (spec.metric_name, spec.target_size, spec.target_size_float)
        };
        specs.map(spec).collect::<Vec<_>>()
    };
    let (queue, address) = (("queue", "q"), ("scalerAddress", "sluicegate:7400"));
    let ready = ("ready".to_owned(), 3, 2.5);
    let one = specs(&[queue, address, ("targetReady", "2.5")]).await;
    assert_eq!(one, std::slice::from_ref(&ready));
    let both = specs(&[queue, ("targetReady", "2.5"), ("targetAgeSeconds", "60")]).await;
    assert_eq!(both, [ready, ("age_seconds".to_owned(), 60, 60.0)]);
}

#[tokio::test]
async fn what_is_wrong_with_a_scaled_object_is_named() {
    let broker = Broker::start().await;
    let refused = broker.scaler().is_active(scaled_by(&[("queue", "q")])).await.unwrap_err();
    assert_eq!(field(&refused), "scalerMetadata.targetReady");
    let refused = broker.scaler().stream_is_active(scaled_by(&[])).await.unwrap_err();
    assert_eq!(field(&refused), "scalerMetadata.queue");
    let refused = broker.figure("q", "s0-ready").await.unwrap_err();
    assert_eq!(field(&refused), "metricName");
}

#[tokio::test]
async fn a_stream_tells_each_change_once() {
    let broker = Broker::start().await;
    let open = async |queue| {
        broker.scaler().stream_is_active(scaled_object(queue)).await.unwrap().into_inner()
    };
    let mut stream = open("q").await;
    let answer = |result| Some(IsActiveResponse { result });
    assert_eq!(stream.message().await.unwrap(), answer(false), "there is no queue");
    broker.push("q", small(2)).await;
    assert_eq!(stream.message().await.unwrap(), answer(true));
    broker.push("q", small(1)).await;
    // Two answers of another stream are an interval apart: meanwhile this one looks again.
    let mut other = open("p").await;
    assert_eq!(other.message().await.unwrap(), answer(false));
    broker.push("p", small(1)).await;
    assert_eq!(other.message().await.unwrap(), answer(true));
    let request = pb::PopRequest { queue: "q".into(), max_items: 9, ..Default::default() };
    broker.queues().pop(request).await.unwrap();
    assert_eq!(stream.message().await.unwrap(), answer(false));
}
