//! OperationService: long work of operators.

use std::sync::Arc;

use bytes::Bytes;
use sluicegate_proto::v1::{self as pb, operation_service_server::OperationService};
use tonic::{Request, Response, Status};

use super::{
    Api, admin_service::may_read_payloads, caller, convert, may_create, pages, parse,
    status::ApiError,
};
use crate::{
    access::Caller,
    domain::{
        Action::{Manage, View},
        FOREVER, ItemFilter, ItemId, OperationId, QueueName, Timestamp,
    },
    engine::{Engine, EngineError, NewOperation},
    store::{
        Operation, OperationPlace, OperationState, RedriveFilter, Selection, Work, broker_text,
    },
};

/// How many operations a page has if the caller does not say.
const OPERATIONS_PER_PAGE: usize = 100;
/// Number of operations read from the store at a time. Each may name a thousand items.
const OPERATIONS_PER_READ: usize = 50;

#[tonic::async_trait]
impl OperationService for Api {
    async fn start_operation(
        &self,
        request: Request<pb::StartOperationRequest>,
    ) -> Result<Response<pb::StartOperationResponse>, Status> {
        let caller = caller(&request)?;
        let pb::StartOperationRequest { work, dry_run, request_id } = request.into_inner();
        parse::request_id(&request_id)?;
        if let Some(work) = &work {
            for queue in queues_of(work) {
                caller.may(Manage, queue)?;
            }
        }
        let work = parse::work(work)?;
        let started_by = caller.name().unwrap_or_default().to_owned();
        let new = NewOperation { work, dry_run, request_id, started_by };
        let start = |engine: Arc<Engine>| async move {
            let to = new.work.creates().filter(|_| !new.dry_run).cloned();
            let _place = engine.place_by_use(to.as_ref(), &may_create(&caller)).await?;
            engine.start_operation(new).await
        };
        let operation = Some(converted(self.run(start).await?));
        Ok(Response::new(pb::StartOperationResponse { operation }))
    }

    async fn get_operation(
        &self,
        request: Request<pb::GetOperationRequest>,
    ) -> Result<Response<pb::GetOperationResponse>, Status> {
        let caller = caller(&request)?;
        let operation = self.operation(&request.get_ref().id).await?;
        if caller.may(View, operation.work.queue().as_str()).is_err() {
            return Err(hidden(&operation));
        }
        let operation = Some(shown(&caller, operation));
        Ok(Response::new(pb::GetOperationResponse { operation }))
    }

    async fn list_operations(
        &self,
        request: Request<pb::ListOperationsRequest>,
    ) -> Result<Response<pb::ListOperationsResponse>, Status> {
        let caller = caller(&request)?;
        let pb::ListOperationsRequest { queue, page_size, page_token } = request.into_inner();
        if !queue.is_empty() {
            caller.may(View, &queue)?;
        }
        let queue = QueueName::parse_optional("queue", &queue)?;
        let keys = self.engine.receipt_keys();
        let page = pages::request(&keys, page_size, page_token, OPERATIONS_PER_PAGE)?;
        let after = parse::operation_place(page.token.as_deref())?;
        let read = |after: Option<OperationPlace>, step| {
            self.run(move |engine| async move { engine.list_operations(after, step).await })
        };
        let is_shown = |operation: Operation| {
            let of = operation.work.queue();
            let is_wanted = queue.as_ref().is_none_or(|queue| queue == of);
            (is_wanted && caller.allows(View, of.as_str())).then(|| shown(&caller, operation))
        };
        let (operations, next_page_token) =
            pages::list(&keys, &page, after, OPERATIONS_PER_READ, read, Operation::place, is_shown)
                .await?;
        Ok(Response::new(pb::ListOperationsResponse { operations, next_page_token }))
    }

    async fn cancel_operation(
        &self,
        request: Request<pb::CancelOperationRequest>,
    ) -> Result<Response<pb::CancelOperationResponse>, Status> {
        let caller = caller(&request)?;
        let operation = self.operation(&request.get_ref().id).await?;
        let queue = operation.work.queue().as_str();
        if let Err(refused) = caller.may(Manage, queue) {
            let is_seen = caller.allows(View, queue);
            return Err(if is_seen { ApiError::from(refused).into() } else { hidden(&operation) });
        }
        let id = operation.id;
        let cancelled =
            self.run(move |engine| async move { engine.cancel_operation(id).await }).await?;
        let operation = Some(converted(cancelled));
        Ok(Response::new(pb::CancelOperationResponse { operation }))
    }
}

impl Api {
    async fn operation(&self, id: &str) -> Result<Operation, Status> {
        let id: OperationId = parse::operation_id(id)?;
        self.run(move |engine| async move { engine.get_operation(id).await }).await
    }
}

/// Returns what callers are told of an operation that they may not see: the request names no queue, and a refusal would tell
/// them which one it is.
fn hidden(operation: &Operation) -> Status {
    EngineError::OperationNotFound(operation.id).into()
}

/// Returns the queues that the work names and changes.
fn queues_of(work: &pb::OperationWork) -> Vec<&str> {
    use pb::operation_work::Kind;
    match &work.kind {
        None => Vec::new(),
        Some(Kind::Redrive(redrive)) if redrive.to_queue.is_empty() => vec![&redrive.queue],
        Some(Kind::Redrive(redrive)) => vec![&redrive.queue, &redrive.to_queue],
        Some(Kind::Replay(replay)) => vec![&replay.queue],
        Some(Kind::Purge(purge)) => vec![&purge.name],
        Some(Kind::Delete(delete)) => vec![&delete.queue],
    }
}

/// Converts an operation. What its filter looks for in payloads is left out for those who may not read them.
fn shown(caller: &Caller, operation: Operation) -> pb::Operation {
    let payloads = may_read_payloads(caller, operation.work.queue().as_str());
    let mut operation = converted(operation);
    if let Some(pb::operation_work::Kind::Delete(delete)) =
        operation.work.as_mut().and_then(|work| work.kind.as_mut())
        && let Some(filter) = &mut delete.filter
        && !payloads
    {
        filter.payload_contains = Bytes::new();
    }
    operation
}

fn converted(operation: Operation) -> pb::Operation {
    let state = match operation.state {
        OperationState::Running => pb::OperationState::Running,
        OperationState::Succeeded => pb::OperationState::Succeeded,
        OperationState::Cancelled => pb::OperationState::Cancelled,
        OperationState::Failed => pb::OperationState::Failed,
    };
    pb::Operation {
        id: operation.id.to_string(),
        work: Some(pb::OperationWork { kind: Some(kind(operation.work)) }),
        dry_run: operation.dry_run,
        state: state.into(),
        processed_items: convert::figure(operation.processed),
        total_items: convert::figure(operation.total),
        error: operation.error,
        create_time: Some(convert::timestamp(operation.create_time)),
        update_time: Some(convert::timestamp(operation.update_time)),
        started_by: operation.started_by,
        broker: operation.claim.map(|claim| broker_text(claim.broker)).unwrap_or_default(),
    }
}

fn kind(work: Work) -> pb::operation_work::Kind {
    use pb::{operation_work::Kind, replay_items_request::Selection as Selected};
    let rate = |rate: u32| i32::try_from(rate).unwrap_or(i32::MAX);
    match work {
        Work::Redrive { queue, to, filter, max_items, rate: most } => {
            Kind::Redrive(pb::RedriveItemsRequest {
                queue: queue.to_string(),
                to_queue: text(to),
                filter: Some(redrive_filter(filter)),
                max_items: convert::figure(max_items),
                rate: rate(most),
            })
        }
        Work::Replay { queue, selection, max_items } => {
            let selection = match selection {
                Selection::Ids(ids) => Selected::Ids(pb::ItemIds { ids: texts(&ids) }),
                Selection::Processed { start, end } => Selected::ProcessTime(pb::TimeRange {
                    start_time: (start.0 > 0).then(|| convert::timestamp(start)),
                    end_time: (end < FOREVER).then(|| convert::timestamp(end)),
                }),
            };
            Kind::Replay(pb::ReplayItemsRequest {
                queue: queue.to_string(),
                selection: Some(selection),
                max_items: convert::figure(max_items),
            })
        }
        Work::Purge { queue } => Kind::Purge(pb::PurgeQueueRequest { name: queue.to_string() }),
        Work::Delete { queue, state, filter, max_items, rate: most } => {
            let any = pb::ItemState::Unspecified;
            Kind::Delete(pb::DeleteItemsRequest {
                queue: queue.to_string(),
                state: state.map_or(any, convert::item_state).into(),
                filter: Some(item_filter(filter)),
                max_items: convert::figure(max_items),
                rate: rate(most),
            })
        }
    }
}

fn redrive_filter(filter: RedriveFilter) -> pb::RedriveFilter {
    pb::RedriveFilter {
        ids: texts(&filter.ids),
        origin_queue: text(filter.origin_queue),
        reason_contains: filter.reason_contains,
        reason: filter.reason,
        create_time: range(filter.created_from, filter.created_before),
    }
}

fn item_filter(filter: ItemFilter) -> pb::ItemFilter {
    pb::ItemFilter {
        ordering_key: filter.ordering_key.map(String::from).unwrap_or_default(),
        dedup_id: filter.dedup_id.map(String::from).unwrap_or_default(),
        headers: filter.headers.into_iter().collect(),
        reason_contains: filter.reason_contains,
        reason: filter.reason,
        origin_queue: text(filter.origin_queue),
        create_time: range(filter.created_from, filter.created_before),
        min_attempts: i32::try_from(filter.min_attempts).unwrap_or(i32::MAX),
        payload_contains: filter.payload_contains,
    }
}

fn text(name: Option<QueueName>) -> String {
    name.map(|name| name.to_string()).unwrap_or_default()
}

fn texts(ids: &[ItemId]) -> Vec<String> {
    ids.iter().map(ToString::to_string).collect()
}

fn range(from: Option<Timestamp>, before: Option<Timestamp>) -> Option<pb::TimeRange> {
    (from.is_some() || before.is_some()).then(|| pb::TimeRange {
        start_time: from.map(convert::timestamp),
        end_time: before.map(convert::timestamp),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is shown of an operation can be sent again.
    #[test]
    fn work_is_shown_as_it_was_asked_for() {
        use pb::{operation_work::Kind, replay_items_request::Selection as Selected};
        let time = |seconds| Some(prost_types::Timestamp { seconds, nanos: 0 });
        let range = Some(pb::TimeRange { start_time: time(1), end_time: time(2) });
        let id = "0123456789abcdef01234567".to_owned();
        for kind in [
            Kind::Purge(pb::PurgeQueueRequest { name: "q".into() }),
            Kind::Replay(pb::ReplayItemsRequest {
                queue: "q".into(),
                selection: Some(Selected::ProcessTime(pb::TimeRange::default())),
                max_items: 7,
            }),
            Kind::Replay(pb::ReplayItemsRequest {
                queue: "q".into(),
                selection: Some(Selected::Ids(pb::ItemIds { ids: vec![id.clone()] })),
                max_items: 0,
            }),
            Kind::Redrive(pb::RedriveItemsRequest {
                queue: "q.dead".into(),
                to_queue: "to".into(),
                filter: Some(pb::RedriveFilter {
                    ids: vec![id],
                    origin_queue: "q".into(),
                    reason_contains: "why".into(),
                    reason: Some("why not".into()),
                    create_time: range,
                }),
                max_items: 5,
                rate: 9,
            }),
            Kind::Delete(pb::DeleteItemsRequest {
                queue: "q".into(),
                state: pb::ItemState::Delayed.into(),
                filter: Some(pb::ItemFilter {
                    ordering_key: "key".into(),
                    dedup_id: "once".into(),
                    headers: [("a".to_owned(), "b".to_owned())].into(),
                    reason_contains: "why".into(),
                    reason: Some("why not".into()),
                    origin_queue: "o".into(),
                    create_time: range,
                    min_attempts: 3,
                    payload_contains: "x".into(),
                }),
                max_items: 5,
                rate: 9,
            }),
        ] {
            let asked = pb::OperationWork { kind: Some(kind.clone()) };
            assert_eq!(super::kind(parse::work(Some(asked)).unwrap()), kind);
        }
    }
}
