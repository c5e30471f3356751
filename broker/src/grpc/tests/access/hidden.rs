//! What callers are not told of queues of others.

use pb::operation_work::Kind;

use super::*;

/// What a token may do that creates nothing.
pub(super) const MINE: [&str; 4] = ["produce@mine*", "consume@mine*", "view@mine*", "manage@mine*"];

/// The names of schedules and the ids of operations are those of all queues. A refusal would tell whose they are.
#[tokio::test]
async fn what_names_no_queue_is_not_there_for_those_who_may_not_see_its_queue() {
    let allow: [(&str, &[&str]); 3] =
        [("admin", &["admin@*"]), ("mine", &MINE), ("viewer", &["view@theirs", "manage@mine"])];
    let broker = broker_of(&allow).await;
    let mut schedules = ScheduleServiceClient::new(broker.channel.clone());
    broker.request("/GetSchedule", "theirs", "").await;
    let mut shown = Vec::new();
    for name in ["schedule-of-theirs", "schedule-of-nobody"] {
        let request = pb::GetScheduleRequest { name: name.into() };
        let refused = schedules.get_schedule(by("mine", request)).await.unwrap_err();
        shown.push((refused.code(), reason(&refused), refused.message().replace(name, "it")));
    }
    assert_eq!(shown[0], shown[1], "the same answer, whether it is there or not");
    assert_eq!(shown[0].0, Code::NotFound);

    let mut operations = OperationServiceClient::new(broker.channel.clone());
    let purge = Kind::Purge(pb::PurgeQueueRequest { name: "theirs".into() });
    let work = Some(pb::OperationWork { kind: Some(purge) });
    let request = pb::StartOperationRequest { work, ..Default::default() };
    let started = operations.start_operation(by("admin", request)).await.unwrap().into_inner();
    let theirs = started.operation.unwrap().id;
    let mut shown = Vec::new();
    for id in [theirs.clone(), "0123456789abcdef01234567".into()] {
        let request = pb::GetOperationRequest { id: id.clone() };
        let refused = operations.get_operation(by("mine", request)).await.unwrap_err();
        shown.push((refused.code(), reason(&refused), refused.message().replace(&id, "it")));
        let request = pb::CancelOperationRequest { id: id.clone() };
        let refused = operations.cancel_operation(by("mine", request)).await.unwrap_err();
        shown.push((refused.code(), reason(&refused), refused.message().replace(&id, "it")));
    }
    assert!(shown.iter().all(|one| one == &shown[0] && one.0 == Code::NotFound), "{shown:?}");
    // Who sees the operation is told what is missing.
    let request = pb::CancelOperationRequest { id: theirs };
    let refused = operations.cancel_operation(by("viewer", request)).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
}

/// Lists leave out operations of others, and what an operation looks for in payloads for those who may not read these.
pub(super) async fn operations_of_others_are_left_out(broker: &Broker) {
    let mut client = OperationServiceClient::new(broker.channel.clone());
    for queue in ["a", "b"] {
        let filter = pb::ItemFilter { payload_contains: "secret".into(), ..Default::default() };
        let delete = pb::DeleteItemsRequest {
            queue: queue.into(),
            filter: Some(filter),
            ..Default::default()
        };
        let kind = Some(pb::operation_work::Kind::Delete(delete));
        let work = Some(pb::OperationWork { kind });
        let request = pb::StartOperationRequest { work, ..Default::default() };
        let started = client.start_operation(by("admin", request)).await.unwrap();
        assert_eq!(started.into_inner().operation.unwrap().started_by, "admin");
    }
    for (token, searched) in [("viewer", ""), ("reader", "secret"), ("keeper", "secret")] {
        let request = pb::ListOperationsRequest::default();
        let listed = client.list_operations(by(token, request)).await.unwrap().into_inner();
        let seen: Vec<_> =
            listed.operations.into_iter().map(|one| one.work.unwrap().kind).collect();
        let [Some(pb::operation_work::Kind::Delete(delete))] = &seen[..] else {
            panic!("{token} sees {seen:?}");
        };
        let text = delete.filter.as_ref().unwrap().payload_contains.clone();
        assert_eq!((delete.queue.as_str(), text), ("a", searched.into()), "{token}");
    }
}

/// A redrive of dead letters by their origin does not tell whether some other queue is there.
#[tokio::test]
async fn a_redrive_tells_nothing_of_queues_that_no_dead_letter_came_from() {
    let broker = broker_of(&[("admin", &["admin@*"]), ("mine", &MINE)]).await;
    for queue in ["mine", "theirs"] {
        broker.push_as_admin(queue).await;
    }
    let full = pb::Queue { name: "theirs".into(), max_depth: 1, ..Default::default() };
    let update_mask = Some(prost_types::FieldMask { paths: vec!["max_depth".into()] });
    let full = pb::UpdateQueueRequest { queue: Some(full), update_mask };
    broker.admin().update_queue(by("admin", full)).await.unwrap();
    let other = pb::Queue { name: "elsewhere".into(), group: "other".into(), ..Default::default() };
    let other = pb::CreateQueueRequest { queue: Some(other) };
    broker.admin().create_queue(by("admin", other)).await.unwrap();
    for origin in ["theirs", "elsewhere", "nobody"] {
        let filter = pb::RedriveFilter { origin_queue: origin.into(), ..Default::default() };
        let request = pb::RedriveItemsRequest {
            queue: "mine".into(),
            filter: Some(filter),
            ..Default::default()
        };
        let answer = broker.admin().redrive_items(by("mine", request)).await;
        assert_eq!(answer.unwrap().into_inner().redriven_items, 0, "{origin}");
    }
}
