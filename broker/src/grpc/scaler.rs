//! ExternalScaler of KEDA: whether the consumers of a queue are needed, and how many.

use std::{collections::HashMap, slice, time::Duration};

use futures_util::stream;
use sluicegate_proto::externalscaler::{
    GetMetricSpecResponse, GetMetricsRequest, GetMetricsResponse, IsActiveResponse, MetricSpec,
    MetricValue, ScaledObjectRef, external_scaler_server::ExternalScaler,
};
use tokio::time::sleep;
use tonic::{Request, Response, Status};

use super::{
    Api, caller,
    parse::{self, Figure, Scaler},
    queue_service::Responses,
};
use crate::{
    access::Caller,
    domain::{Action::View, Depth, QueueName, Timestamp},
    engine::EngineError,
};

/// Items that become ready within this time need consumers: it is about as long as a consumer takes to start.
const DUE_SOON: Duration = Duration::from_secs(30);
/// How often a stream looks at its queue. A queue in which nothing is known to have happened is not counted.
const INTERVAL: Duration = Duration::from_secs(1);

#[tonic::async_trait]
impl ExternalScaler for Api {
    type StreamIsActiveStream = Responses<IsActiveResponse>;

    async fn is_active(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> Result<Response<IsActiveResponse>, Status> {
        let scaler = permitted(&caller(&request)?, &request.get_ref().scaler_metadata)?;
        let depth = self.depth(scaler.queue).await?;
        let result = is_active(&depth, self.engine.now());
        Ok(Response::new(IsActiveResponse { result }))
    }

    async fn stream_is_active(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> Result<Response<Self::StreamIsActiveStream>, Status> {
        let caller = caller(&request)?;
        let Scaler { queue, .. } = permitted(&caller, &request.get_ref().scaler_metadata)?;
        let api = self.clone();
        let stream = stream::try_unfold(None, move |last| {
            let (api, caller, queue) = (api.clone(), caller.clone(), queue.clone());
            async move {
                let changed = api.activity_other_than(last, &caller, &queue).await?;
                Ok(Some((IsActiveResponse { result: changed }, Some(changed))))
            }
        });
        Ok(Response::new(Box::pin(stream)))
    }

    async fn get_metric_spec(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> Result<Response<GetMetricSpecResponse>, Status> {
        let scaler = permitted(&caller(&request)?, &request.get_ref().scaler_metadata)?;
        let ready = Some((Figure::Ready, scaler.target_ready));
        let age = scaler.target_age_seconds.map(|age| (Figure::AgeSeconds, age));
        let spec = |(figure, target): (Figure, f64)| MetricSpec {
            metric_name: figure.name().to_owned(),
            target_size: target.ceil() as i64,
            target_size_float: target,
        };
        let metric_specs = ready.into_iter().chain(age).map(spec).collect();
        Ok(Response::new(GetMetricSpecResponse { metric_specs }))
    }

    async fn get_metrics(
        &self,
        request: Request<GetMetricsRequest>,
    ) -> Result<Response<GetMetricsResponse>, Status> {
        let caller = caller(&request)?;
        let GetMetricsRequest { scaled_object_ref, metric_name } = request.into_inner();
        let metadata = scaled_object_ref.unwrap_or_default().scaler_metadata;
        let scaler = permitted(&caller, &metadata)?;
        let figure = parse::figure(&metric_name)?;
        let depth = self.depth(scaler.queue).await?;
        let value = value(figure, &depth, self.engine.now());
        let value = MetricValue {
            metric_name,
            metric_value: value.ceil() as i64,
            metric_value_float: value,
        };
        Ok(Response::new(GetMetricsResponse { metric_values: vec![value] }))
    }
}

impl Api {
    /// Returns the depth of a queue. A queue that is not there is empty, because the first push may create it.
    async fn depth(&self, queue: QueueName) -> Result<Depth, Status> {
        self.run(|engine| async move {
            match engine.queue_stats(&queue).await {
                Ok(stats) => Ok(stats.depth),
                Err(EngineError::QueueNotFound(_)) => Ok(Depth::default()),
                Err(error) => Err(error),
            }
        })
        .await
    }

    /// Waits until the queue needs consumers or needs none any more, whichever is not the last answer.
    async fn activity_other_than(
        &self,
        last: Option<bool>,
        caller: &Caller,
        queue: &QueueName,
    ) -> Result<bool, Status> {
        let mut pause = if last.is_none() { Duration::ZERO } else { INTERVAL };
        loop {
            tokio::select! {
                biased;
                () = self.engine.until_draining() => return Err(EngineError::ShuttingDown.into()),
                () = self.shutdown.cancelled() => return Err(EngineError::ShuttingDown.into()),
                () = sleep(pause) => pause = INTERVAL,
            }
            // The token may be withdrawn meanwhile.
            caller.may(View, queue.as_str())?;
            let name = queue.clone();
            let (stats, _) = self
                .run(|engine| async move { engine.batch_stats(slice::from_ref(&name)).await })
                .await?;
            let depth = stats.first().map_or_else(Depth::default, |stats| stats.depth);
            let now = is_active(&depth, self.engine.now());
            if last != Some(now) {
                return Ok(now);
            }
        }
    }
}

/// Parses the metadata of a caller who may see its queue.
fn permitted(caller: &Caller, metadata: &HashMap<String, String>) -> Result<Scaler, Status> {
    caller.may(View, metadata.get("queue").map_or("", String::as_str))?;
    Ok(parse::scaler(metadata)?)
}

/// Returns true if the queue needs consumers.
fn is_active(depth: &Depth, now: Timestamp) -> bool {
    let is_due_soon =
        depth.delayed > 0 && depth.next_eligible.is_some_and(|next| now.until(next) <= DUE_SOON);
    depth.ready > 0 || depth.reserved > 0 || is_due_soon
}

fn value(figure: Figure, depth: &Depth, now: Timestamp) -> f64 {
    match figure {
        Figure::Ready => (depth.ready + depth.reserved) as f64,
        Figure::AgeSeconds => {
            depth.oldest_ready.map_or(0.0, |since| since.until(now).as_secs_f64())
        }
    }
}
