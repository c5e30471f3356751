//! Requests of operators: pages, filters, selections.

use sluicegate_proto::v1 as pb;

use super::{at_most, batch_length, item::headers, item_ids, not_negative, required, time_range};
use crate::{
    domain::{
        DedupId, FOREVER, Invalid, ItemFilter, ItemState, OrderingKey, QueueName, Timestamp,
        limits::{
            MAX_BATCH, MAX_DEDUP_ID_BYTES, MAX_NAME_BYTES, MAX_ORDERING_KEY_BYTES, MAX_PAGE,
            MAX_REASON_BYTES,
        },
    },
    store::{RedriveFilter, Selection},
};

/// The size of an answer without its entries: the token of the next page.
pub(in crate::grpc) const TOKEN_BYTES: usize = 1024;

/// A page, as AIP-158 defines it.
#[derive(Debug, PartialEq)]
pub(in crate::grpc) struct PageRequest {
    /// At least 1.
    pub(in crate::grpc) size: usize,
    /// The token of the page before.
    pub(in crate::grpc) token: Option<String>,
}

impl PageRequest {
    /// Parses a page; a size of 0 means `default`.
    pub(in crate::grpc) fn parse(
        size: i32,
        token: String,
        default: usize,
    ) -> Result<Self, Invalid> {
        let size = match not_negative("page_size", size)? {
            0 => default,
            size => MAX_PAGE.min(size),
        };
        Ok(Self { size, token: Some(token).filter(|token| !token.is_empty()) })
    }

    /// Returns the last name of the previous page, for lists by name.
    pub(in crate::grpc) fn after<T>(
        &self,
        parse: fn(&str, &str) -> Result<T, Invalid>,
    ) -> Result<Option<T>, Invalid> {
        let after = self.token.as_deref().map(|token| parse("page_token", token)).transpose();
        after.map_err(|e| Invalid::new(e.field, "not a page token of this broker"))
    }
}

/// Parses a state to filter by; `None`: any.
pub(in crate::grpc) fn item_state(field: &str, state: i32) -> Result<Option<ItemState>, Invalid> {
    match pb::ItemState::try_from(state) {
        Ok(pb::ItemState::Unspecified) => Ok(None),
        Ok(pb::ItemState::Ready) => Ok(Some(ItemState::Ready)),
        Ok(pb::ItemState::Delayed) => Ok(Some(ItemState::Delayed)),
        Ok(pb::ItemState::Reserved) => Ok(Some(ItemState::Reserved)),
        Ok(pb::ItemState::Blocked) => Ok(Some(ItemState::Blocked)),
        Ok(pb::ItemState::Processed) => Ok(Some(ItemState::Processed)),
        Err(_) => Err(Invalid::new(field, format!("there is no state {state}"))),
    }
}

/// Parses a limit of items; 0: no limit.
pub(in crate::grpc) fn max_items(value: i64) -> Result<u64, Invalid> {
    not_negative("max_items", value)
}

/// Parses a limit of items per second; 0: no limit.
pub(in crate::grpc) fn rate(value: i32) -> Result<u32, Invalid> {
    not_negative("rate", value)
}

/// Parses the selection of processed items to replay.
pub(in crate::grpc) fn replay(
    selection: Option<pb::replay_items_request::Selection>,
) -> Result<Selection, Invalid> {
    use pb::replay_items_request::Selection as Given;
    match required("selection", selection)? {
        Given::Ids(pb::ItemIds { ids }) => {
            batch_length("ids.ids", ids.len())?;
            Ok(Selection::Ids(item_ids("ids.ids", &ids)?))
        }
        Given::ProcessTime(range) => {
            let (start, end) = time_range("process_time", range)?;
            let start = start.unwrap_or(Timestamp(0));
            Ok(Selection::Processed { start, end: end.unwrap_or(FOREVER) })
        }
    }
}

/// Parses the selection of items to redrive.
pub(in crate::grpc) fn redrive(
    filter: Option<pb::RedriveFilter>,
) -> Result<RedriveFilter, Invalid> {
    let Some(filter) = filter else { return Ok(RedriveFilter::default()) };
    if filter.ids.len() > MAX_BATCH {
        return Err(Invalid::new("filter.ids", format!("more than {MAX_BATCH} entries")));
    }
    at_most("filter.reason", filter.reason(), MAX_REASON_BYTES)?;
    let range = filter.create_time.unwrap_or_default();
    let (created_from, created_before) = time_range("filter.create_time", range)?;
    Ok(RedriveFilter {
        ids: item_ids("filter.ids", &filter.ids)?,
        origin_queue: QueueName::parse_optional("filter.origin_queue", &filter.origin_queue)?,
        reason_contains: filter.reason_contains,
        reason: filter.reason,
        created_from,
        created_before,
        ready_by: None,
    })
}

/// Parses which items to list.
pub(in crate::grpc) fn item_filter(filter: Option<pb::ItemFilter>) -> Result<ItemFilter, Invalid> {
    let parse = |filter: pb::ItemFilter| {
        at_most("ordering_key", &filter.ordering_key, MAX_ORDERING_KEY_BYTES)?;
        at_most("dedup_id", &filter.dedup_id, MAX_DEDUP_ID_BYTES)?;
        at_most("reason_contains", &filter.reason_contains, MAX_REASON_BYTES)?;
        at_most("reason", filter.reason(), MAX_REASON_BYTES)?;
        if filter.payload_contains.len() > MAX_REASON_BYTES {
            let why = format!("more than {MAX_REASON_BYTES} bytes");
            return Err(Invalid::new("payload_contains", why));
        }
        let range = filter.create_time.unwrap_or_default();
        let (created_from, created_before) = time_range("create_time", range)?;
        Ok(ItemFilter {
            ordering_key: OrderingKey::new(filter.ordering_key),
            dedup_id: DedupId::new(filter.dedup_id),
            headers: headers(filter.headers)?,
            reason_contains: filter.reason_contains,
            reason: filter.reason,
            origin_queue: QueueName::parse_optional("origin_queue", &filter.origin_queue)?,
            created_from,
            created_before,
            min_attempts: not_negative("min_attempts", filter.min_attempts)?,
            payload_contains: filter.payload_contains,
        })
    };
    filter.map_or_else(|| Ok(ItemFilter::default()), parse).map_err(|e| e.within("filter"))
}

/// Parses the beginning of names; empty: any.
pub(in crate::grpc) fn prefix(field: &'static str, prefix: &str) -> Result<String, Invalid> {
    at_most(field, prefix, MAX_NAME_BYTES)?;
    Ok(prefix.to_owned())
}

/// Parses a batch of queues.
pub(in crate::grpc) fn queue_batch(queues: &[String]) -> Result<Vec<QueueName>, Invalid> {
    batch_length("queues", queues.len())?;
    let name = |(i, name): (usize, &String)| QueueName::parse(&format!("queues[{i}]"), name);
    queues.iter().enumerate().map(name).collect()
}

/// Parses the queues to watch; none: all.
pub(in crate::grpc) fn watched(queues: &[String]) -> Result<Vec<QueueName>, Invalid> {
    if queues.is_empty() { Ok(Vec::new()) } else { queue_batch(queues) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(digit: char) -> String {
        digit.to_string().repeat(24)
    }

    #[test]
    fn pages_follow_aip_158() {
        let size = |size| PageRequest::parse(size, String::new(), 50).map(|page| page.size);
        assert_eq!([size(0), size(7), size(1_000_000)], [Ok(50), Ok(7), Ok(1000)]);
        assert_eq!(size(-1).unwrap_err().field, "page_size");
        let after = |token: &str| {
            PageRequest::parse(0, token.to_owned(), 50).unwrap().after(QueueName::parse)
        };
        assert_eq!(after(""), Ok(None));
        assert_eq!(after("orders").unwrap().unwrap().as_str(), "orders");
        assert_eq!(after("no/token").unwrap_err().field, "page_token");
    }

    #[test]
    fn an_unknown_state_is_refused() {
        assert_eq!(item_state("state", 0), Ok(None));
        assert_eq!(item_state("state", 5), Ok(Some(ItemState::Processed)));
        assert_eq!(item_state("state", 6).unwrap_err().field, "state");
        assert_eq!(item_state("state", -1).unwrap_err().field, "state");
    }

    #[test]
    fn a_replay_needs_a_selection() {
        use pb::replay_items_request::Selection as Given;
        let ids = |ids| replay(Some(Given::Ids(pb::ItemIds { ids })));
        assert!(matches!(ids(vec![id('a')]), Ok(Selection::Ids(ids)) if ids.len() == 1));
        assert_eq!(ids(vec![]).unwrap_err().field, "ids.ids");
        assert_eq!(ids(vec![id('a'), "x".into()]).unwrap_err().field, "ids.ids[1]");
        assert_eq!(ids(vec![id('a'); 1001]).unwrap_err().field, "ids.ids");
        assert_eq!(replay(None).unwrap_err().field, "selection");
        let open = replay(Some(Given::ProcessTime(pb::TimeRange::default())));
        assert_eq!(open, Ok(Selection::Processed { start: Timestamp(0), end: FOREVER }));
    }

    #[test]
    fn a_filter_of_items_is_checked() {
        let filter = pb::ItemFilter::default;
        assert!(item_filter(None).unwrap().matches_all());
        assert!(item_filter(Some(filter())).unwrap().matches_all());
        let refused = |filter| item_filter(Some(filter)).unwrap_err().field;
        let long = |bytes| "x".repeat(bytes);
        let cases = [
            (pb::ItemFilter { ordering_key: long(256), ..filter() }, "ordering_key"),
            (pb::ItemFilter { dedup_id: long(256), ..filter() }, "dedup_id"),
            (pb::ItemFilter { reason_contains: long(1_025), ..filter() }, "reason_contains"),
            (pb::ItemFilter { reason: Some(long(1_025)), ..filter() }, "reason"),
            (
                pb::ItemFilter { payload_contains: long(1_025).into(), ..filter() },
                "payload_contains",
            ),
            (pb::ItemFilter { origin_queue: "a b".to_owned(), ..filter() }, "origin_queue"),
            (pb::ItemFilter { min_attempts: -1, ..filter() }, "min_attempts"),
        ];
        for (filter, field) in cases {
            assert_eq!(refused(filter), format!("filter.{field}"));
        }
        let headers = [(String::new(), "x".to_owned())].into();
        assert_eq!(refused(pb::ItemFilter { headers, ..filter() }), "filter.headers");
        assert_eq!(prefix("prefix", &long(129)).unwrap_err().field, "prefix");
        assert_eq!(queue_batch(&[]).unwrap_err().field, "queues");
        assert_eq!(queue_batch(&vec!["a".to_owned(); 1_001]).unwrap_err().field, "queues");
    }

    #[test]
    fn a_redrive_filter_is_checked() {
        let filter = pb::RedriveFilter::default;
        assert_eq!(redrive(None), Ok(RedriveFilter::default()));
        assert_eq!(redrive(Some(filter())), Ok(RedriveFilter::default()));
        let refused = |filter| redrive(Some(filter)).unwrap_err().field;
        assert_eq!(
            refused(pb::RedriveFilter { ids: vec![String::new()], ..filter() }),
            "filter.ids[0]"
        );
        assert_eq!(
            refused(pb::RedriveFilter { ids: vec![id('a'); 1001], ..filter() }),
            "filter.ids"
        );
        let origin_queue = "a b".to_owned();
        assert_eq!(refused(pb::RedriveFilter { origin_queue, ..filter() }), "filter.origin_queue");
        let start_time = Some(prost_types::Timestamp { seconds: i64::MAX, nanos: 0 });
        let create_time = Some(pb::TimeRange { start_time, end_time: None });
        let refused = refused(pb::RedriveFilter { create_time, ..filter() });
        assert_eq!(refused, "filter.create_time.start_time");
        assert_eq!(max_items(-1).unwrap_err().field, "max_items");
        assert_eq!(rate(-1).unwrap_err().field, "rate");
        assert_eq!(watched(&["a".into(), "-".into()]).unwrap_err().field, "queues[1]");
    }
}
