//! A request of each call, and calls with requests as they are on the wire.

use pb::consume_stream_request::Action;
use prost::{
    Message,
    bytes::{Buf, BufMut},
};
use sluicegate_proto::{
    externalscaler::GetMetricsRequest,
    v1::{
        operation_service_client::OperationServiceClient,
        template_service_client::TemplateServiceClient,
    },
};
use tonic::{
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    codegen::http::uri::PathAndQuery,
};

use super::*;
use crate::grpc::tests::scaler::scaled_object;

/// Messages as they are on the wire.
pub(in crate::grpc::tests) struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining()).to_vec()))
    }
}

impl Broker {
    /// Makes a call and reads its answers until its end, or until there is one.
    pub(super) async fn call(
        &self,
        token: &str,
        path: &'static str,
        message: Vec<u8>,
    ) -> Result<(), Status> {
        let mut grpc = Grpc::new(self.channel.clone());
        grpc.ready().await.unwrap();
        let to = PathAndQuery::from_static(path);
        let message = by(token, tokio_stream::iter([message]));
        let mut answers = grpc.streaming(message, to, Raw).await?.into_inner();
        let answer = answers.message().await?;
        if path.ends_with("/PushStream") {
            // What is wrong with a batch does not end the stream.
            let answer = pb::PushStreamResponse::decode(&answer.unwrap()[..]).unwrap();
            if let Some(error) = answer.error {
                let details = error.encode_to_vec().into();
                return Err(Status::with_details(error.code.into(), error.message, details));
            }
        }
        Ok(())
    }

    pub(super) async fn receipt(&self, queue: &str) -> String {
        let item = pb::NewItem { payload: "x".into(), ..Default::default() };
        let push = pb::PushRequest { queue: queue.into(), items: vec![item], ..Default::default() };
        self.queues().push(by("admin", push)).await.unwrap();
        let reserve = pb::ReserveRequest { queue: queue.into(), ..Default::default() };
        let reserved = self.queues().reserve(by("admin", reserve)).await.unwrap().into_inner();
        reserved.deliveries[0].receipt.clone()
    }

    /// Returns a request of the call that names `queue`, or a receipt or a schedule of it, and for a move to another queue
    /// also `other`.
    #[allow(clippy::too_many_lines)] // one arm for each call
    pub(super) async fn request(&self, path: &str, queue: &str, other: &str) -> Vec<u8> {
        let method = path.rsplit('/').next().unwrap();
        let (name, mut receipt) = (queue.to_owned(), String::new());
        if ["Commit", "Rollback", "Extend", "Move", "CommitAndPush"].contains(&method) {
            receipt = self.receipt(queue).await;
        } else {
            self.push_as_admin(queue).await;
        }
        let item = || pb::NewItem { payload: "x".into(), ..Default::default() };
        let schedule = format!("schedule-of-{queue}");
        let wait = None;
        match method {
            "Push" => pb::PushRequest { queue: name, items: vec![item()], ..Default::default() }
                .encode_to_vec(),
            "PushStream" => {
                pb::PushStreamRequest { queue: name, items: vec![item()], ..Default::default() }
                    .encode_to_vec()
            }
            "Pop" => pb::PopRequest { queue: name, max_items: 1, wait }.encode_to_vec(),
            "Reserve" => pb::ReserveRequest { queue: name, ..Default::default() }.encode_to_vec(),
            "Consume" => {
                self.push_as_admin(queue).await;
                pb::ConsumeRequest { queue: name, ..Default::default() }.encode_to_vec()
            }
            "ConsumeStream" => {
                act(Action::Open(pb::ConsumeRequest { queue: name, ..Default::default() }))
                    .encode_to_vec()
            }
            "Commit" => pb::CommitRequest { receipts: vec![receipt] }.encode_to_vec(),
            "Rollback" => pb::RollbackRequest {
                items: vec![pb::RollbackItem { receipt, ..Default::default() }],
            }
            .encode_to_vec(),
            "Extend" => pb::ExtendRequest { receipts: vec![receipt], lease: None }.encode_to_vec(),
            "Move" => {
                let payload = Some("forged".into());
                pb::MoveRequest { receipt, to_queue: other.into(), payload, ..Default::default() }
                    .encode_to_vec()
            }
            "CommitAndPush" => {
                let push = pb::PushEntry { queue: other.into(), item: Some(item()) };
                pb::CommitAndPushRequest { receipt, pushes: vec![push] }.encode_to_vec()
            }
            "CreateQueue" => {
                let name = format!("{queue}.new");
                let dead_letter_queue = other.to_owned();
                let queue = pb::Queue { name, dead_letter_queue, ..Default::default() };
                pb::CreateQueueRequest { queue: Some(queue) }.encode_to_vec()
            }
            "UpdateQueue" => {
                let dead_letter_queue = other.to_owned();
                let queue = pb::Queue { name, dead_letter_queue, ..Default::default() };
                let update_mask =
                    Some(prost_types::FieldMask { paths: vec!["dead_letter_queue".into()] });
                pb::UpdateQueueRequest { queue: Some(queue), update_mask }.encode_to_vec()
            }
            "GetQueue" => pb::GetQueueRequest { name }.encode_to_vec(),
            "DeleteQueue" => pb::DeleteQueueRequest { name, force: true }.encode_to_vec(),
            "PauseQueue" => pb::PauseQueueRequest { name }.encode_to_vec(),
            "ResumeQueue" => pb::ResumeQueueRequest { name }.encode_to_vec(),
            "PurgeQueue" => pb::PurgeQueueRequest { name }.encode_to_vec(),
            "GetQueueStats" => pb::GetQueueStatsRequest { queue: name }.encode_to_vec(),
            "BatchGetQueueStats" => {
                pb::BatchGetQueueStatsRequest { queues: vec![name] }.encode_to_vec()
            }
            "WatchQueues" => pb::WatchQueuesRequest { queues: vec![name] }.encode_to_vec(),
            "ListItems" => {
                pb::ListItemsRequest { queue: name, ..Default::default() }.encode_to_vec()
            }
            "GetItem" => {
                let id = self.push_as_admin(queue).await;
                pb::GetItemRequest { queue: name, id }.encode_to_vec()
            }
            "DeleteItem" => {
                let id = self.push_as_admin(queue).await;
                pb::DeleteItemRequest { queue: name, id, ..Default::default() }.encode_to_vec()
            }
            "ReplayItems" => {
                let all =
                    pb::replay_items_request::Selection::ProcessTime(pb::TimeRange::default());
                pb::ReplayItemsRequest { queue: name, selection: Some(all), max_items: 0 }
                    .encode_to_vec()
            }
            "RedriveItems" => pb::RedriveItemsRequest {
                queue: name,
                to_queue: other.into(),
                ..Default::default()
            }
            .encode_to_vec(),
            "CreateSchedule" => {
                let schedule = a_schedule(&format!("new-{schedule}"), queue);
                pb::CreateScheduleRequest { schedule: Some(schedule) }.encode_to_vec()
            }
            "GetSchedule" | "DeleteSchedule" | "PauseSchedule" | "ResumeSchedule"
            | "TriggerSchedule" | "UpdateSchedule" => {
                let request =
                    pb::CreateScheduleRequest { schedule: Some(a_schedule(&schedule, queue)) };
                let mut client = ScheduleServiceClient::new(self.channel.clone());
                let created = client.create_schedule(by("admin", request)).await;
                // An update that was allowed has changed it.
                assert!(created.is_ok() || method == "UpdateSchedule", "{created:?}");
                if method == "UpdateSchedule" {
                    let schedule = a_schedule(&schedule, other);
                    let paths = vec!["queue".to_owned()];
                    let update_mask = Some(prost_types::FieldMask { paths });
                    let schedule = Some(schedule);
                    return pb::UpdateScheduleRequest { schedule, update_mask }.encode_to_vec();
                }
                // All other requests have the name as their first field.
                pb::GetScheduleRequest { name: schedule }.encode_to_vec()
            }
            "StartOperation" => a_redrive(queue, other).encode_to_vec(),
            "GetOperation" | "CancelOperation" => {
                let mut client = OperationServiceClient::new(self.channel.clone());
                let started = client.start_operation(by("admin", a_redrive(queue, other))).await;
                let id = started.unwrap().into_inner().operation.unwrap().id;
                pb::GetOperationRequest { id }.encode_to_vec() // as CancelOperationRequest
            }
            "ListOperations" => {
                pb::ListOperationsRequest { queue: name, ..Default::default() }.encode_to_vec()
            }
            "ListConsumers" => {
                pb::ListConsumersRequest { queue: name, ..Default::default() }.encode_to_vec()
            }
            "IsActive" | "StreamIsActive" | "GetMetricSpec" => scaled_object(queue).encode_to_vec(),
            "GetMetrics" => {
                let scaled_object_ref = Some(scaled_object(queue));
                GetMetricsRequest { scaled_object_ref, metric_name: "ready".into() }.encode_to_vec()
            }
            "CreateTemplate" => {
                let template = Some(a_template(queue, other));
                pb::CreateTemplateRequest { template }.encode_to_vec()
            }
            "GetTemplate" | "UpdateTemplate" | "DeleteTemplate" => {
                let pattern = a_template(queue, "").pattern;
                let mut client = TemplateServiceClient::new(self.channel.clone());
                let template = Some(a_template(queue, ""));
                let created =
                    client.create_template(by("admin", pb::CreateTemplateRequest { template }));
                let created = created.await;
                // An update that was allowed has changed it.
                assert!(created.is_ok() || method == "UpdateTemplate", "{created:?}");
                if method == "UpdateTemplate" {
                    let paths = vec!["settings.dead_letter_queue".to_owned()];
                    let update_mask = Some(prost_types::FieldMask { paths });
                    let template = Some(a_template(queue, other));
                    return pb::UpdateTemplateRequest { template, update_mask }.encode_to_vec();
                }
                pb::GetTemplateRequest { pattern }.encode_to_vec() // as DeleteTemplateRequest
            }
            "ListQueues" | "ListSchedules" | "ListTemplates" | "ListBrokers" => Vec::new(),
            other => panic!("write a request of {other} here"),
        }
    }

    pub(super) async fn push_as_admin(&self, queue: &str) -> String {
        let item = pb::NewItem { payload: "x".into(), ..Default::default() };
        let push = pb::PushRequest { queue: queue.into(), items: vec![item], ..Default::default() };
        let answer = self.queues().push(by("admin", push)).await.unwrap().into_inner();
        answer.results[0].id.clone()
    }
}

fn a_redrive(queue: &str, to_queue: &str) -> pb::StartOperationRequest {
    let redrive = pb::RedriveItemsRequest {
        queue: queue.into(),
        to_queue: to_queue.into(),
        ..Default::default()
    };
    let kind = Some(pb::operation_work::Kind::Redrive(redrive));
    pb::StartOperationRequest {
        work: Some(pb::OperationWork { kind }),
        request_id: format!("{queue} {to_queue}"),
        ..Default::default()
    }
}

/// Returns a template of the queues whose names begin with `queue` and a point.
fn a_template(queue: &str, dead_letter_queue: &str) -> pb::QueueTemplate {
    let settings = pb::Queue { dead_letter_queue: dead_letter_queue.into(), ..Default::default() };
    let pattern = format!("{queue}.*");
    pb::QueueTemplate { pattern, settings: Some(settings), ..Default::default() }
}

pub(super) fn a_schedule(name: &str, queue: &str) -> pb::Schedule {
    pb::Schedule {
        name: name.into(),
        queue: queue.into(),
        cron: "0 0 1 1 *".into(),
        item: Some(pb::NewItem::default()),
        ..Default::default()
    }
}
