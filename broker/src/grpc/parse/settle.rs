//! Settles: receipts, and what to do with their items.

use std::time::Duration;

use sluicegate_proto::v1 as pb;

use super::{
    Rules, at_most, batch_length, duration, duration_or_zero,
    item::{headers, new_item, payload},
    lease, required, within,
};
use crate::{
    domain::{
        Cause, Invalid, NewItem, Priority, QueueName, Receipt, ReceiptKeys, cut_reason,
        limits::{MAX_CONTENT_TYPE_BYTES, MAX_SPAN},
    },
    engine::{MoveRequest, RollbackRequest},
    grpc::status::ApiError,
};

/// Parses the field `receipts`.
pub(in crate::grpc) fn receipts(
    receipts: &[String],
    keys: &ReceiptKeys,
) -> Result<Vec<Receipt>, Invalid> {
    batch_length("receipts", receipts.len())?;
    let mut parsed: Vec<Receipt> = Vec::with_capacity(receipts.len());
    for (i, text) in receipts.iter().enumerate() {
        let receipt = Receipt::parse_after(parsed.last(), "", text, keys)
            .map_err(|e| Invalid::new(format!("receipts[{i}]"), e.description))?;
        parsed.push(receipt);
    }
    Ok(parsed)
}

/// Returns the receipts of a Rollback that are well-formed, whether all of it is or not.
pub(in crate::grpc) fn named(request: &pb::RollbackRequest, keys: &ReceiptKeys) -> Vec<Receipt> {
    let receipt = |item: &pb::RollbackItem| Receipt::parse("receipt", &item.receipt, keys).ok();
    request.items.iter().filter_map(receipt).collect()
}

/// Parses a Rollback. Returns the receipts as sent, and the rollback for each.
pub(in crate::grpc) fn rollbacks(
    request: pb::RollbackRequest,
    keys: &ReceiptKeys,
) -> Result<(Vec<String>, Vec<RollbackRequest>), Invalid> {
    let items = request.items;
    batch_length("items", items.len())?;
    let item = |item: pb::RollbackItem| -> Result<(String, RollbackRequest), Invalid> {
        let cause = match (item.dead_letter, item.keep_attempt) {
            (true, false) if item.delay.is_none() => Cause::Reject,
            (true, _) => {
                let why = "not together with delay or keep_attempt: the item is never tried again";
                return Err(Invalid::new("dead_letter", why));
            }
            (false, true) => Cause::Release,
            (false, false) => Cause::Rollback,
        };
        let parsed = RollbackRequest {
            receipt: Receipt::parse("receipt", &item.receipt, keys)?,
            delay: item.delay.map(|delay| duration("delay", delay, MAX_SPAN)).transpose()?,
            reason: cut_reason(item.reason),
            cause,
        };
        Ok((item.receipt, parsed))
    };
    let numbered = |(i, it)| item(it).map_err(|e: Invalid| e.within(&format!("items[{i}]")));
    items.into_iter().enumerate().map(numbered).collect()
}

/// Parses an Extend. Returns the receipts and the lease from now on.
pub(in crate::grpc) fn extend(
    request: &pb::ExtendRequest,
    rules: &Rules,
    keys: &ReceiptKeys,
) -> Result<(Vec<Receipt>, Option<Duration>), Invalid> {
    Ok((receipts(&request.receipts, keys)?, lease("lease", request.lease, rules)?))
}

/// Parses a Move.
pub(in crate::grpc) fn move_item(
    request: pb::MoveRequest,
    rules: &Rules,
    keys: &ReceiptKeys,
) -> Result<MoveRequest, ApiError> {
    if let Some(new) = &request.payload {
        payload(new, rules)?;
    }
    if let Some(new) = &request.content_type {
        at_most("content_type", new, MAX_CONTENT_TYPE_BYTES)?;
    }
    Ok(MoveRequest {
        receipt: Receipt::parse("receipt", &request.receipt, keys)?,
        to_queue: QueueName::parse("to_queue", &request.to_queue)?,
        headers: headers(request.headers)?,
        priority: request.priority.map(|p| Priority::parse("priority", p)).transpose()?,
        delay: duration_or_zero("delay", request.delay, MAX_SPAN)?,
        payload: request.payload,
        content_type: request.content_type,
    })
}

/// A checked CommitAndPush.
#[derive(Debug)]
pub(in crate::grpc) struct CommitAndPush {
    pub(in crate::grpc) receipt: Receipt,
    pub(in crate::grpc) pushes: Vec<(QueueName, NewItem)>,
}

/// Parses a CommitAndPush.
pub(in crate::grpc) fn commit_and_push(
    request: pb::CommitAndPushRequest,
    rules: &Rules,
    keys: &ReceiptKeys,
) -> Result<CommitAndPush, ApiError> {
    let receipt = Receipt::parse("receipt", &request.receipt, keys)?;
    batch_length("pushes", request.pushes.len())?;
    let entry = |entry: pb::PushEntry| -> Result<_, ApiError> {
        let queue = QueueName::parse("queue", &entry.queue)?;
        let item = required("item", entry.item)?;
        Ok((queue, new_item(item, rules).map_err(within(|| "item".to_owned()))?))
    };
    let numbered = |(i, e)| entry(e).map_err(within(|| format!("pushes[{i}]")));
    let pushes = request.pushes.into_iter().enumerate().map(numbered).collect::<Result<_, _>>()?;
    Ok(CommitAndPush { receipt, pushes })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{RULES, span};
    use super::*;
    use crate::domain::{GroupName, ItemId, LeaseToken};
    use crate::engine::EngineError;

    fn receipt() -> Receipt {
        Receipt {
            item: ItemId([1; 12]),
            token: LeaseToken([2; 12]),
            deliveries: 1,
            earlier_deliveries: 0,
            attempt: 1,
            queue: QueueName::parse("queue", "orders").unwrap(),
            group: GroupName::default(),
            keyed: false,
        }
    }

    fn keys() -> ReceiptKeys {
        ReceiptKeys::new([crate::domain::ReceiptKey::new(1, &[1; 32])])
    }

    fn field<T>(result: Result<T, ApiError>) -> String {
        match result.err().unwrap() {
            ApiError::Engine(EngineError::Invalid(invalid)) => invalid.field,
            ApiError::PayloadTooLarge { field, .. } => field,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_malformed_receipt_is_identified_by_its_index() {
        let good = receipt().encode(&keys());
        assert_eq!(receipts(std::slice::from_ref(&good), &keys()), Ok(vec![receipt()]));
        assert_eq!(
            receipts(&[good.clone(), "x".into()], &keys()).unwrap_err().field,
            "receipts[1]"
        );
        assert_eq!(receipts(&[], &keys()).unwrap_err().field, "receipts");
        assert_eq!(receipts(&vec![good; 1001], &keys()).unwrap_err().field, "receipts");
    }

    #[test]
    fn rollbacks_are_checked_and_long_reasons_cut() {
        let item = |delay, reason: &str| pb::RollbackItem {
            receipt: receipt().encode(&keys()),
            delay,
            reason: reason.to_owned(),
            keep_attempt: true,
            ..Default::default()
        };
        let rollbacks = |items| rollbacks(pb::RollbackRequest { items }, &keys());
        let items = vec![item(None, ""), item(Some(span(0, 0)), &"ü".repeat(600))];
        let (sent, taken) = rollbacks(items).unwrap();
        assert_eq!(sent, [receipt().encode(&keys()), receipt().encode(&keys())]);
        assert_eq!((taken[0].delay, taken[0].cause), (None, Cause::Release));
        assert_eq!((taken[1].delay, taken[1].reason.len()), (Some(Duration::ZERO), 1024));
        let refused = |items| rollbacks(items).unwrap_err().field;
        assert_eq!(refused(vec![]), "items");
        assert_eq!(refused(vec![item(Some(span(-1, 0)), "")]), "items[0].delay");
        assert_eq!(refused(vec![item(None, ""), pb::RollbackItem::default()]), "items[1].receipt");
    }

    /// A rollback that rejects an item must not ask for a delay or an uncounted attempt.
    #[test]
    fn a_rejected_item_has_neither_a_delay_nor_a_kept_attempt() {
        let rejected = |delay, keep_attempt| {
            let item = pb::RollbackItem {
                receipt: receipt().encode(&keys()),
                delay,
                keep_attempt,
                dead_letter: true,
                ..Default::default()
            };
            rollbacks(pb::RollbackRequest { items: vec![item] }, &keys())
        };
        assert_eq!(rejected(None, false).unwrap().1[0].cause, Cause::Reject);
        for (delay, keep_attempt) in [(Some(span(1, 0)), false), (None, true)] {
            let refused = rejected(delay, keep_attempt).unwrap_err();
            assert_eq!(refused.field, "items[0].dead_letter");
        }
    }

    #[test]
    fn extend_checks_its_lease() {
        let extend = |lease| {
            let receipts = vec![receipt().encode(&keys())];
            super::extend(&pb::ExtendRequest { receipts, lease }, &RULES, &keys())
        };
        assert_eq!(extend(None).unwrap().1, None);
        assert_eq!(extend(Some(span(60, 0))).unwrap().1, Some(Duration::from_mins(1)));
        assert_eq!(extend(Some(span(61, 0))).unwrap_err().field, "lease");
        assert_eq!(extend(Some(span(0, 0))).unwrap_err().field, "lease");
    }

    #[test]
    fn a_move_changes_only_what_is_given() {
        let request = || pb::MoveRequest {
            receipt: receipt().encode(&keys()),
            to_queue: "b".into(),
            ..Default::default()
        };
        let taken = move_item(request(), &RULES, &keys()).unwrap();
        assert_eq!((taken.payload, taken.content_type, taken.priority), (None, None, None));
        assert_eq!(taken.delay, Duration::ZERO);
        let refused = |request| field(move_item(request, &RULES, &keys()));
        assert_eq!(refused(pb::MoveRequest { receipt: "00".into(), ..request() }), "receipt");
        assert_eq!(refused(pb::MoveRequest { to_queue: String::new(), ..request() }), "to_queue");
        assert_eq!(refused(pb::MoveRequest { priority: Some(11), ..request() }), "priority");
        assert_eq!(refused(pb::MoveRequest { delay: Some(span(-9, 0)), ..request() }), "delay");
        let payload = Some(vec![0; 101].into());
        assert_eq!(refused(pb::MoveRequest { payload, ..request() }), "payload");
        let content_type = Some("x".repeat(256));
        assert_eq!(refused(pb::MoveRequest { content_type, ..request() }), "content_type");
        for name in ["", "a\0b"] {
            let headers = [(name.to_owned(), String::new())].into();
            assert_eq!(refused(pb::MoveRequest { headers, ..request() }), "headers");
        }
    }

    #[test]
    fn each_push_of_a_step_is_identified_by_its_index() {
        let push = |queue: &str, priority| pb::PushEntry {
            queue: queue.to_owned(),
            item: Some(pb::NewItem { priority, ..Default::default() }),
        };
        let parse = |pushes| {
            let receipt = receipt().encode(&keys());
            commit_and_push(pb::CommitAndPushRequest { receipt, pushes }, &RULES, &keys())
        };
        assert_eq!(parse(vec![push("a", 0), push("b", 9)]).unwrap().pushes.len(), 2);
        assert_eq!(field(parse(vec![])), "pushes");
        assert_eq!(field(parse(vec![push("a", 0), push("", 0)])), "pushes[1].queue");
        assert_eq!(field(parse(vec![push("a", 0), push("b", 10)])), "pushes[1].item.priority");
        let bare = pb::PushEntry { queue: "a".into(), item: None };
        assert_eq!(field(parse(vec![bare])), "pushes[0].item");
    }
}
