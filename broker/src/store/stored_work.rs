//! The work of an operation as text: JSON that both stores keep, and people can read.
//!
//! A broker must not run work of which it knows only a part. So what it does not know is refused, and whoever adds to the text in
//! a way that brokers of earlier versions must not pass over raises [`FORMAT`]: they leave operations of other formats alone.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{RedriveFilter, Selection, operations::Work};
use crate::domain::{
    DedupId, Invalid, ItemFilter, ItemId, ItemState, OrderingKey, QueueName, Timestamp,
};

/// The format of the text. Stored beside it.
pub(super) const FORMAT: i32 = 1;

/// Returns the work as text.
pub(super) fn encode(work: &Work) -> String {
    // Texts and numbers can always be written.
    serde_json::to_string(&Stored::of(work)).unwrap_or_default()
}

/// Returns the work that the text says, or what is wrong with the text.
pub(super) fn decode(text: &str) -> Result<Work, String> {
    let stored: Stored = serde_json::from_str(text).map_err(|e| e.to_string())?;
    stored.work().map_err(|e| e.to_string())
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", deny_unknown_fields)]
enum Stored {
    #[serde(rename_all = "camelCase")]
    Redrive {
        queue: String,
        to: Option<String>,
        ids: Vec<String>,
        origin_queue: Option<String>,
        reason_contains: String,
        // Written where it is a condition, and refused by those who do not know it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
        created_from: Option<i64>,
        created_before: Option<i64>,
        max_items: u64,
        rate: u32,
    },
    #[serde(rename_all = "camelCase")]
    ReplayIds {
        queue: String,
        ids: Vec<String>,
        max_items: u64,
    },
    #[serde(rename_all = "camelCase")]
    ReplayProcessed {
        queue: String,
        start: i64,
        end: i64,
        max_items: u64,
    },
    Purge {
        queue: String,
    },
    #[serde(rename_all = "camelCase")]
    Delete {
        queue: String,
        state: Option<String>,
        ordering_key: Option<String>,
        dedup_id: Option<String>,
        headers: BTreeMap<String, String>,
        reason_contains: String,
        // Written where it is a condition, and refused by those who do not know it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
        origin_queue: Option<String>,
        created_from: Option<i64>,
        created_before: Option<i64>,
        min_attempts: u32,
        payload_contains: Vec<u8>,
        max_items: u64,
        rate: u32,
    },
}

impl Stored {
    fn of(work: &Work) -> Self {
        let name = |name: &Option<QueueName>| name.as_ref().map(ToString::to_string);
        let time = |at: Option<Timestamp>| at.map(Timestamp::millis);
        let texts = |ids: &[ItemId]| ids.iter().map(ToString::to_string).collect();
        match work {
            Work::Redrive { queue, to, filter, max_items, rate } => Self::Redrive {
                queue: queue.to_string(),
                to: name(to),
                ids: texts(&filter.ids),
                origin_queue: name(&filter.origin_queue),
                reason_contains: filter.reason_contains.clone(),
                reason: filter.reason.clone(),
                created_from: time(filter.created_from),
                created_before: time(filter.created_before),
                max_items: *max_items,
                rate: *rate,
            },
            Work::Replay { queue, selection: Selection::Ids(ids), max_items } => {
                Self::ReplayIds { queue: queue.to_string(), ids: texts(ids), max_items: *max_items }
            }
            Work::Replay { queue, selection: Selection::Processed { start, end }, max_items } => {
                Self::ReplayProcessed {
                    queue: queue.to_string(),
                    start: start.0,
                    end: end.0,
                    max_items: *max_items,
                }
            }
            Work::Purge { queue } => Self::Purge { queue: queue.to_string() },
            Work::Delete { queue, state, filter, max_items, rate } => Self::Delete {
                queue: queue.to_string(),
                state: state.map(|state| state.to_string()),
                ordering_key: filter.ordering_key.clone().map(String::from),
                dedup_id: filter.dedup_id.clone().map(String::from),
                headers: filter.headers.clone(),
                reason_contains: filter.reason_contains.clone(),
                reason: filter.reason.clone(),
                origin_queue: name(&filter.origin_queue),
                created_from: time(filter.created_from),
                created_before: time(filter.created_before),
                min_attempts: filter.min_attempts,
                payload_contains: filter.payload_contains.to_vec(),
                max_items: *max_items,
                rate: *rate,
            },
        }
    }

    fn work(self) -> Result<Work, Invalid> {
        Ok(match self {
            Self::Redrive {
                queue,
                to,
                ids,
                origin_queue,
                reason_contains,
                reason,
                created_from,
                created_before,
                max_items,
                rate,
            } => Work::Redrive {
                queue: QueueName::parse("queue", &queue)?,
                to: name("to", to)?,
                filter: RedriveFilter {
                    ids: item_ids(&ids)?,
                    origin_queue: name("originQueue", origin_queue)?,
                    reason_contains,
                    reason,
                    created_from: created_from.map(Timestamp),
                    created_before: created_before.map(Timestamp),
                    ready_by: None,
                },
                max_items,
                rate,
            },
            Self::ReplayIds { queue, ids, max_items } => Work::Replay {
                queue: QueueName::parse("queue", &queue)?,
                selection: Selection::Ids(item_ids(&ids)?),
                max_items,
            },
            Self::ReplayProcessed { queue, start, end, max_items } => Work::Replay {
                queue: QueueName::parse("queue", &queue)?,
                selection: Selection::Processed { start: Timestamp(start), end: Timestamp(end) },
                max_items,
            },
            Self::Purge { queue } => Work::Purge { queue: QueueName::parse("queue", &queue)? },
            Self::Delete {
                queue,
                state,
                ordering_key,
                dedup_id,
                headers,
                reason_contains,
                reason,
                origin_queue,
                created_from,
                created_before,
                min_attempts,
                payload_contains,
                max_items,
                rate,
            } => Work::Delete {
                queue: QueueName::parse("queue", &queue)?,
                state: state.as_deref().map(item_state).transpose()?,
                filter: ItemFilter {
                    ordering_key: ordering_key.and_then(OrderingKey::new),
                    dedup_id: dedup_id.and_then(DedupId::new),
                    headers,
                    reason_contains,
                    reason,
                    origin_queue: name("originQueue", origin_queue)?,
                    created_from: created_from.map(Timestamp),
                    created_before: created_before.map(Timestamp),
                    min_attempts,
                    payload_contains: payload_contains.into(),
                },
                max_items,
                rate,
            },
        })
    }
}

fn name(field: &str, name: Option<String>) -> Result<Option<QueueName>, Invalid> {
    name.map(|name| QueueName::parse(field, &name)).transpose()
}

fn item_ids(ids: &[String]) -> Result<Vec<ItemId>, Invalid> {
    let id = |id: &String| id.parse().map_err(|()| Invalid::new("ids", "not an id"));
    ids.iter().map(id).collect()
}

fn item_state(word: &str) -> Result<ItemState, Invalid> {
    use ItemState::{Blocked, Delayed, Processed, Ready, Reserved};
    let found =
        [Ready, Delayed, Reserved, Blocked, Processed].into_iter().find(|s| s.to_string() == word);
    found.ok_or_else(|| Invalid::new("state", format!("there is no state {word}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(text: &str) -> QueueName {
        QueueName::parse("queue", text).unwrap()
    }

    fn works() -> Vec<Work> {
        let (from, before) = (Some(Timestamp(3)), Some(Timestamp(9)));
        vec![
            Work::Redrive {
                queue: queue("q.dead"),
                to: Some(queue("to")),
                filter: RedriveFilter {
                    ids: vec![ItemId([1; 12]), ItemId([255; 12])],
                    origin_queue: Some(queue("q")),
                    reason_contains: "a \"reason\"\n".to_owned(),
                    reason: None,
                    created_from: from,
                    created_before: before,
                    ready_by: None,
                },
                max_items: u64::MAX,
                rate: 7,
            },
            Work::Replay {
                queue: queue("q"),
                selection: Selection::Ids(vec![ItemId([7; 12])]),
                max_items: 1,
            },
            Work::Replay {
                queue: queue("q"),
                selection: Selection::Processed { start: Timestamp(0), end: Timestamp(i64::MAX) },
                max_items: 0,
            },
            Work::Purge { queue: queue("q") },
            Work::Delete {
                queue: queue("q"),
                state: Some(ItemState::Delayed),
                filter: ItemFilter {
                    ordering_key: OrderingKey::new("key"),
                    dedup_id: DedupId::new("once"),
                    headers: [("a".to_owned(), "b".to_owned())].into(),
                    reason_contains: "why".to_owned(),
                    reason: Some(String::new()),
                    origin_queue: Some(queue("o")),
                    created_from: from,
                    created_before: before,
                    min_attempts: 3,
                    payload_contains: vec![0, 255, 10].into(),
                },
                max_items: 5,
                rate: 0,
            },
        ]
    }

    #[test]
    fn work_survives_being_stored() {
        for work in works() {
            assert_eq!(decode(&encode(&work)).as_ref(), Ok(&work), "{}", encode(&work));
        }
    }

    /// What a newer version has added could be a condition, without which the work would do more than was asked.
    #[test]
    fn work_that_says_more_than_this_version_knows_is_refused() {
        for text in [
            r#"{"kind":"purge","queue":"q","exceptPriority":9}"#,
            r#"{"kind":"move","queue":"q"}"#,
            r#"{"kind":"purge","queue":"no name"}"#,
            r#"{"kind":"purge"}"#,
            "",
        ] {
            assert!(decode(text).is_err(), "{text}");
        }
        assert!(decode(r#"{"kind":"purge","queue":"q"}"#).is_ok());
    }

    /// Stores hold such texts: a broker of any later version must read them.
    #[test]
    fn the_text_stays_as_it_is() {
        let texts: Vec<String> = works().iter().map(encode).collect();
        assert_eq!(
            texts[1],
            r#"{"kind":"replayIds","queue":"q","ids":["070707070707070707070707"],"maxItems":1}"#
        );
        assert_eq!(
            texts[0],
            concat!(
                r#"{"kind":"redrive","queue":"q.dead","to":"to","ids":["010101010101010101010101","ffffffffffffffffffffffff"],"#,
                r#""originQueue":"q","reasonContains":"a \"reason\"\n","createdFrom":3,"createdBefore":9,"#,
                r#""maxItems":18446744073709551615,"rate":7}"#
            )
        );
    }
}
