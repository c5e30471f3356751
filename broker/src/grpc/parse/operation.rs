//! Requests about operations.

use sluicegate_proto::v1 as pb;

use super::{item_filter, item_state, max_items, rate, redrive, replay, required};
use crate::{
    domain::{Invalid, OperationId, QueueName},
    store::{OperationPlace, Work},
};

/// Parses what an operation is to do.
pub(in crate::grpc) fn work(work: Option<pb::OperationWork>) -> Result<Work, Invalid> {
    use pb::operation_work::Kind;
    let kind = required("work", work.and_then(|work| work.kind))?;
    match kind {
        Kind::Redrive(given) => work_redrive(given).map_err(|e| e.within("work.redrive")),
        Kind::Replay(given) => work_replay(given).map_err(|e| e.within("work.replay")),
        Kind::Purge(given) => {
            Ok(Work::Purge { queue: QueueName::parse("work.purge.name", &given.name)? })
        }
        Kind::Delete(given) => work_delete(given).map_err(|e| e.within("work.delete")),
    }
}

fn work_redrive(given: pb::RedriveItemsRequest) -> Result<Work, Invalid> {
    Ok(Work::Redrive {
        queue: QueueName::parse("queue", &given.queue)?,
        to: QueueName::parse_optional("to_queue", &given.to_queue)?,
        filter: redrive(given.filter)?,
        max_items: max_items(given.max_items)?,
        rate: rate(given.rate)?,
    })
}

fn work_replay(given: pb::ReplayItemsRequest) -> Result<Work, Invalid> {
    Ok(Work::Replay {
        queue: QueueName::parse("queue", &given.queue)?,
        selection: replay(given.selection)?,
        max_items: max_items(given.max_items)?,
    })
}

fn work_delete(given: pb::DeleteItemsRequest) -> Result<Work, Invalid> {
    Ok(Work::Delete {
        queue: QueueName::parse("queue", &given.queue)?,
        state: item_state("state", given.state)?,
        filter: item_filter(given.filter)?,
        max_items: max_items(given.max_items)?,
        rate: rate(given.rate)?,
    })
}

/// Parses the id of an operation.
pub(in crate::grpc) fn operation_id(text: &str) -> Result<OperationId, Invalid> {
    text.parse()
        .map_err(|()| Invalid::new("id", "not an id of an operation: 24 hexadecimal digits"))
}

/// Parses the token of a page of operations.
pub(in crate::grpc) fn operation_place(
    token: Option<&str>,
) -> Result<Option<OperationPlace>, Invalid> {
    let place = |token: &str| {
        token.parse().map_err(|()| Invalid::new("page_token", "not a page token of this broker"))
    };
    token.map(place).transpose()
}

#[cfg(test)]
mod tests {
    use pb::operation_work::Kind;

    use super::*;

    fn parsed(kind: Kind) -> Result<Work, Invalid> {
        work(Some(pb::OperationWork { kind: Some(kind) }))
    }

    #[test]
    fn work_is_checked_as_the_calls_of_its_kind_are() {
        assert_eq!(work(None).unwrap_err().field, "work");
        assert_eq!(work(Some(pb::OperationWork { kind: None })).unwrap_err().field, "work");
        let delete = || pb::DeleteItemsRequest { queue: "q".into(), ..Default::default() };
        let filter = pb::ItemFilter { min_attempts: -1, ..Default::default() };
        let cases = [
            (Kind::Purge(pb::PurgeQueueRequest { name: "a b".into() }), "work.purge.name"),
            (Kind::Redrive(pb::RedriveItemsRequest::default()), "work.redrive.queue"),
            (
                Kind::Redrive(pb::RedriveItemsRequest {
                    queue: "q".into(),
                    rate: -1,
                    ..Default::default()
                }),
                "work.redrive.rate",
            ),
            (
                Kind::Replay(pb::ReplayItemsRequest { queue: "q".into(), ..Default::default() }),
                "work.replay.selection",
            ),
            (Kind::Delete(pb::DeleteItemsRequest { state: 9, ..delete() }), "work.delete.state"),
            (
                Kind::Delete(pb::DeleteItemsRequest { filter: Some(filter), ..delete() }),
                "work.delete.filter.min_attempts",
            ),
            (
                Kind::Delete(pb::DeleteItemsRequest { max_items: -1, ..delete() }),
                "work.delete.max_items",
            ),
        ];
        for (kind, field) in cases {
            assert_eq!(parsed(kind).unwrap_err().field, field);
        }
        assert!(parsed(Kind::Delete(delete())).is_ok());
        assert_eq!(operation_id("7").unwrap_err().field, "id");
        assert_eq!(operation_place(Some("7")).unwrap_err().field, "page_token");
        assert_eq!(operation_place(None), Ok(None));
    }
}
