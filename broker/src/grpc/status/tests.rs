//! Each error and its status.

use super::*;
use crate::{
    access::Refused,
    domain::{Action, GroupName, ItemState, OperationId, Pattern, QueueName, ScheduleName},
    store::StoreError,
};

fn queue() -> QueueName {
    QueueName::parse("queue", "orders").unwrap()
}

fn group(name: &str) -> GroupName {
    GroupName::parse("group", name).unwrap()
}

fn schedule() -> ScheduleName {
    ScheduleName::parse("name", "nightly").unwrap()
}

fn unavailable() -> StoreError {
    StoreError::Unavailable { reason: "mongodb://user:secret@db".into(), source: None }
}

fn internal() -> StoreError {
    StoreError::Internal { reason: "at secret".into(), source: None }
}

fn pattern() -> Pattern {
    Pattern::new("orders.*")
}

fn operation() -> OperationId {
    OperationId([7; 12])
}

/// Returns every variant, with the code and reason that clients may rely on.
fn all() -> Vec<(ApiError, Code, &'static str)> {
    let engine = engine_errors().into_iter();
    let engine = engine.map(|(error, code, reason)| (ApiError::Engine(error), code, reason));
    engine.chain(other_errors()).collect()
}

fn engine_errors() -> Vec<(EngineError, Code, &'static str)> {
    vec![
        (Invalid::new("wait", "bad").into(), Code::InvalidArgument, "INVALID_FIELD"),
        (EngineError::QueueNotFound(queue()), Code::NotFound, "QUEUE_NOT_FOUND"),
        (
            EngineError::ItemNotFound { queue: queue(), id: "ab".into() },
            Code::NotFound,
            "ITEM_NOT_FOUND",
        ),
        (
            EngineError::ItemInOtherState {
                queue: queue(),
                id: "ab".into(),
                state: ItemState::Reserved,
            },
            Code::FailedPrecondition,
            "ITEM_IN_OTHER_STATE",
        ),
        (EngineError::ScheduleNotFound(schedule()), Code::NotFound, "SCHEDULE_NOT_FOUND"),
        (EngineError::OperationNotFound(operation()), Code::NotFound, "OPERATION_NOT_FOUND"),
        (EngineError::OperationExists(operation()), Code::AlreadyExists, "OPERATION_EXISTS"),
        (EngineError::TooManyOperations(9), Code::ResourceExhausted, "TOO_MANY_OPERATIONS"),
        (EngineError::TemplateNotFound(pattern()), Code::NotFound, "TEMPLATE_NOT_FOUND"),
        (EngineError::TemplateExists(pattern()), Code::AlreadyExists, "TEMPLATE_EXISTS"),
        (EngineError::TooManyTemplates(9), Code::ResourceExhausted, "TOO_MANY_TEMPLATES"),
        (EngineError::NotRead, Code::ResourceExhausted, "ITEMS_NOT_READ"),
        (EngineError::TooManySchedules(9), Code::ResourceExhausted, "TOO_MANY_SCHEDULES"),
        (EngineError::TemplateConflict(pattern()), Code::Aborted, "CONFLICT"),
        (EngineError::QueueExists(queue()), Code::AlreadyExists, "QUEUE_EXISTS"),
        (EngineError::ScheduleExists(schedule()), Code::AlreadyExists, "SCHEDULE_EXISTS"),
        (
            EngineError::DifferentGroup { from: group("a"), to: group("b") },
            Code::FailedPrecondition,
            "DIFFERENT_GROUP",
        ),
        (
            EngineError::QueueNotEmpty { queue: queue(), items: 3 },
            Code::FailedPrecondition,
            "QUEUE_NOT_EMPTY",
        ),
        (
            EngineError::DeadLetterQueueInUse { queue: queue(), sources: vec![queue()] },
            Code::FailedPrecondition,
            "DEAD_LETTER_QUEUE_IN_USE",
        ),
        (EngineError::DeadLetterRing(vec![queue()]), Code::FailedPrecondition, "DEAD_LETTER_RING"),
        (
            EngineError::DeadLetterGroup {
                queue: queue(),
                group: group("a"),
                from: queue(),
                from_group: group("b"),
            },
            Code::FailedPrecondition,
            "DIFFERENT_GROUP",
        ),
        (
            EngineError::QueueFull { queue: queue(), max_depth: 9 },
            Code::ResourceExhausted,
            "QUEUE_FULL",
        ),
        (EngineError::QueueDeleted(queue()), Code::NotFound, "QUEUE_DELETED"),
        (EngineError::MayNotCreate(queue()), Code::PermissionDenied, "PERMISSION_MISSING"),
        (EngineError::Conflict(queue()), Code::Aborted, "CONFLICT"),
        (EngineError::ShuttingDown, Code::Unavailable, "SHUTTING_DOWN"),
        (EngineError::StreamTooOld, Code::Unavailable, "STREAM_TOO_OLD"),
        (unavailable().into(), Code::Unavailable, "STORE_UNAVAILABLE"),
        (
            StoreError::Unsupported("start it as a replica set".into()).into(),
            Code::FailedPrecondition,
            "UNSUPPORTED_BY_STORE",
        ),
        (StoreError::Full { reason: "disk".into() }.into(), Code::ResourceExhausted, "STORE_FULL"),
        (
            StoreError::Damaged { reason: "checksum".into(), source: None }.into(),
            Code::DataLoss,
            "DAMAGED",
        ),
        (StoreError::BadCursor.into(), Code::InvalidArgument, "INVALID_FIELD"),
        (internal().into(), Code::Internal, "INTERNAL"),
    ]
}

fn other_errors() -> Vec<(ApiError, Code, &'static str)> {
    vec![
        (
            ApiError::PayloadTooLarge { field: "items[0].payload".into(), bytes: 9, limit: 8 },
            Code::ResourceExhausted,
            "PAYLOAD_TOO_LARGE",
        ),
        (Refused::NoSuchCall.into(), Code::Unimplemented, "UNIMPLEMENTED"),
        (Refused::TokenMissing.into(), Code::Unauthenticated, "TOKEN_MISSING"),
        (Refused::TokenUnknown.into(), Code::Unauthenticated, "TOKEN_UNKNOWN"),
        (Refused::TokenExpired.into(), Code::Unauthenticated, "TOKEN_EXPIRED"),
        (
            Refused::PermissionMissing {
                action: Action::Manage,
                queue: "orders".into(),
                call: "/a/B",
            }
            .into(),
            Code::PermissionDenied,
            "PERMISSION_MISSING",
        ),
        (
            ApiError::Transport(Status::out_of_range("too large")),
            Code::ResourceExhausted,
            "REQUEST_TOO_LARGE",
        ),
        (
            ApiError::Transport(Status::resource_exhausted("unpacked too large")),
            Code::ResourceExhausted,
            "REQUEST_TOO_LARGE",
        ),
        (
            ApiError::Transport(Status::internal("failed to decode")),
            Code::InvalidArgument,
            "MALFORMED_MESSAGE",
        ),
        (ApiError::Transport(Status::unimplemented("")), Code::Unimplemented, "UNIMPLEMENTED"),
        (
            ApiError::Transport(Status::not_found("service not registered")),
            Code::NotFound,
            "SERVICE_NOT_FOUND",
        ),
        (ApiError::Transport(Status::cancelled("gone")), Code::Cancelled, "TRANSPORT"),
        (ApiError::TooManyLargeRequests, Code::Unavailable, "TOO_MANY_LARGE_REQUESTS"),
        (ApiError::AnswersNotRead, Code::DeadlineExceeded, "ANSWERS_NOT_READ"),
        (ApiError::TaskDied, Code::Internal, "INTERNAL"),
    ]
}

#[test]
fn every_error_has_its_code_and_a_stable_reason() {
    for (error, code, reason) in all() {
        let status = status(&error);
        let details = status.get_error_details();
        let info = details.error_info().unwrap();
        assert_eq!((status.code(), info.reason.as_str()), (code, reason), "{error:?}");
        assert_eq!(info.domain, DOMAIN);
        assert!(!status.message().is_empty(), "{error:?}");
        let embedded = embedded(&status);
        assert_eq!((embedded.code, embedded.message.as_str()), (code as i32, status.message()));
        assert!(embedded.details.iter().any(|any| any.type_url.ends_with("google.rpc.ErrorInfo")));
        // A status that passes through the conversion again stays the same.
        let again = super::status(&ApiError::Transport(status.clone()));
        assert_eq!((again.code(), again.details()), (status.code(), status.details()));
    }
}

#[test]
fn details_match_the_documentation_of_the_code() {
    for (error, code, reason) in all() {
        let details = status(&error).get_error_details();
        assert_eq!(
            details.retry_info().is_some(),
            matches!(code, Code::Unavailable | Code::Aborted)
                || matches!(reason, "QUEUE_FULL" | "STORE_FULL"),
            "{error:?}"
        );
        assert_eq!(
            details.resource_info().is_some(),
            matches!(code, Code::NotFound | Code::AlreadyExists) && reason != "SERVICE_NOT_FOUND",
            "{error:?}"
        );
        assert_eq!(
            details.precondition_failure().is_some(),
            code == Code::FailedPrecondition,
            "{error:?}"
        );
        assert_eq!(
            details.bad_request().is_some(),
            matches!(reason, "INVALID_FIELD" | "PAYLOAD_TOO_LARGE"),
            "{error:?}"
        );
    }
}

#[test]
fn the_field_and_the_queue_are_named() {
    let details = Status::from(Invalid::new("items[3].priority", "too high")).get_error_details();
    let violations = &details.bad_request().unwrap().field_violations;
    assert_eq!(violations[0].field, "items[3].priority");
    assert_eq!(violations[0].description, "too high");

    let details = Status::from(EngineError::QueueNotFound(queue())).get_error_details();
    assert_eq!(details.error_info().unwrap().metadata["queue"], "orders");
    let resource = details.resource_info().unwrap();
    assert_eq!(
        (&*resource.resource_type, &*resource.resource_name),
        ("sluicegate.v1.Queue", "orders")
    );

    let details = Status::from(EngineError::from(StoreError::BadCursor)).get_error_details();
    assert_eq!(details.bad_request().unwrap().field_violations[0].field, "page_token");
}

#[test]
fn the_drivers_message_is_not_sent_to_clients() {
    for error in [unavailable(), internal()] {
        let status = Status::from(EngineError::from(error));
        assert!(!format!("{status:?}").contains("secret"), "{status:?}");
    }
}

/// The words of the audit log and of metrics are those of errors, and each reason that is documented is used.
#[test]
fn every_reason_is_in_the_enum_and_every_one_of_the_enum_is_used() {
    for (error, _, reason) in all() {
        let known = ErrorReason::from_reason(reason);
        assert!(known.is_some_and(|known| known.reason() == reason), "{reason}");
        if let ApiError::Refused(refused) = error {
            assert_eq!(refused.reason(), reason);
        }
    }
    let unused = (1..).map_while(|number| ErrorReason::try_from(number).ok()).filter(|reason| {
        // Those of the limits of calls and queues have tests of their own.
        let elsewhere =
            [ErrorReason::TooManyRequests, ErrorReason::TooManyStreams, ErrorReason::TooManyQueues];
        !elsewhere.contains(reason) && all().iter().all(|(_, _, used)| *used != reason.reason())
    });
    assert_eq!(unused.collect::<Vec<_>>(), []);
    assert_eq!(ErrorReason::from_reason("NO_SUCH_REASON"), None);
}
