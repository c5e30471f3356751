//! A schedule as it stands in a file: what is left out has its default.

use std::collections::BTreeMap;

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};
use sluicegate_client::proto::{NewItem, Schedule, new_item::Eligibility};

use super::queue::{Span, is_default};
use crate::values;

const DEFAULT_TIME_ZONE: &str = "UTC";

/// A schedule. Its fields are called as in the API.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ScheduleEntry {
    pub(super) name: String,
    queue: String,
    cron: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    time_zone: Option<String>,
    /// `None`: as it is. Whether a schedule is paused is a state rather than a setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) paused: Option<bool>,
    #[serde(default, skip_serializing_if = "is_default")]
    item: ItemEntry,
}

/// The item of a schedule. A payload that is text is `payload`, any other `payload_base64`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ItemEntry {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    payload: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    payload_base64: Option<String>,
    #[serde(default, skip_serializing_if = "is_default")]
    content_type: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    headers: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "is_default")]
    priority: i32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    delay: Option<Span>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    eligible_time: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ttl: Option<Span>,
    #[serde(default, skip_serializing_if = "is_default")]
    ordering_key: String,
}

impl ScheduleEntry {
    /// Returns the entry without what is so by default: equal settings are equal entries.
    pub(super) fn brief(self) -> Self {
        let time_zone = self.time_zone.filter(|zone| !zone.is_empty() && zone != DEFAULT_TIME_ZONE);
        let item = ItemEntry {
            payload: self.item.payload.filter(|payload| !payload.is_empty()),
            ..self.item
        };
        Self { time_zone, item, ..self }
    }
}

impl From<&Schedule> for ScheduleEntry {
    fn from(schedule: &Schedule) -> Self {
        let entry = Self {
            name: schedule.name.clone(),
            queue: schedule.queue.clone(),
            cron: schedule.cron.clone(),
            time_zone: Some(schedule.time_zone.clone()),
            paused: schedule.paused.then_some(true),
            item: schedule.item.as_ref().map(ItemEntry::from).unwrap_or_default(),
        };
        entry.brief()
    }
}

impl From<&NewItem> for ItemEntry {
    fn from(item: &NewItem) -> Self {
        let (payload, payload_base64) = match std::str::from_utf8(&item.payload) {
            Ok(text) => (Some(text.to_owned()), None),
            Err(_) => (None, Some(STANDARD.encode(&item.payload))),
        };
        let (delay, eligible_time) = match &item.eligibility {
            Some(Eligibility::Delay(delay)) => (Span::of(Some(delay)), None),
            Some(Eligibility::EligibleTime(time)) => (None, Some(time.to_string())),
            None => (None, None),
        };
        Self {
            payload,
            payload_base64,
            content_type: item.content_type.clone(),
            headers: item.headers.clone().into_iter().collect(),
            priority: item.priority,
            delay,
            eligible_time,
            ttl: Span::of(item.ttl.as_ref()),
            ordering_key: item.ordering_key.clone(),
        }
    }
}

impl TryFrom<ScheduleEntry> for Schedule {
    type Error = String;

    /// Fails for what cannot be a schedule, and says why.
    fn try_from(entry: ScheduleEntry) -> Result<Self, String> {
        let item = NewItem::try_from(entry.item)
            .map_err(|why| format!("schedule {}: {why}", entry.name))?;
        Ok(Self {
            name: entry.name,
            queue: entry.queue,
            cron: entry.cron,
            time_zone: entry.time_zone.unwrap_or_else(|| DEFAULT_TIME_ZONE.to_owned()),
            item: Some(item),
            paused: entry.paused.unwrap_or_default(),
            ..Self::default()
        })
    }
}

impl TryFrom<ItemEntry> for NewItem {
    type Error = String;

    fn try_from(entry: ItemEntry) -> Result<Self, String> {
        let payload = match (entry.payload, entry.payload_base64) {
            (Some(_), Some(_)) => return Err("payload and payload_base64 are both given".into()),
            (text, None) => text.unwrap_or_default().into_bytes(),
            (None, Some(text)) => {
                STANDARD.decode(text).map_err(|error| format!("payload_base64: {error}"))?
            }
        };
        let eligibility = match (entry.delay, entry.eligible_time) {
            (Some(_), Some(_)) => return Err("delay and eligible_time are both given".into()),
            (Some(delay), None) => Some(Eligibility::Delay(delay.into_proto())),
            (None, Some(time)) => Some(Eligibility::EligibleTime(
                values::instant(&time).map_err(|why| format!("eligible_time: {why}"))?,
            )),
            (None, None) => None,
        };
        Ok(Self {
            payload: payload.into(),
            content_type: entry.content_type,
            headers: entry.headers.into_iter().collect(),
            priority: entry.priority,
            eligibility,
            ttl: entry.ttl.map(Span::into_proto),
            ordering_key: entry.ordering_key,
            dedup_id: String::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(item: NewItem) -> Schedule {
        Schedule {
            name: "nightly".to_owned(),
            queue: "orders".to_owned(),
            cron: "0 3 * * *".to_owned(),
            time_zone: "Europe/Vienna".to_owned(),
            item: Some(item),
            paused: true,
            ..Schedule::default()
        }
    }

    #[test]
    fn every_setting_survives_the_file() {
        let span = |seconds| prost_types::Duration { seconds, nanos: 0 };
        let item = NewItem {
            payload: "go: yes".into(),
            content_type: "text/plain".to_owned(),
            headers: [("a".to_owned(), "b".to_owned())].into(),
            priority: 4,
            eligibility: Some(Eligibility::Delay(span(5))),
            ttl: Some(span(60)),
            ordering_key: "k".to_owned(),
            dedup_id: String::new(),
        };
        let time = prost_types::Timestamp { seconds: 1_800_000_000, nanos: 0 };
        let bytes = NewItem {
            payload: vec![0xff, 0].into(),
            eligibility: Some(Eligibility::EligibleTime(time)),
            ..NewItem::default()
        };
        for schedule in [schedule(item), schedule(bytes)] {
            let text = yaml_serde::to_string(&ScheduleEntry::from(&schedule)).unwrap();
            let read: ScheduleEntry = yaml_serde::from_str(&text).unwrap();
            assert_eq!(Schedule::try_from(read).as_ref(), Ok(&schedule), "{text}");
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused_with_the_name_of_the_schedule() {
        let text = "name: s\nqueue: q\ncron: '* * * * *'\nitem: {payload: a, payload_base64: YQ==}";
        let entry: ScheduleEntry = yaml_serde::from_str(text).unwrap();
        let why = Schedule::try_from(entry).unwrap_err();
        assert!(why.contains("schedule s: payload and payload_base64"), "{why}");
    }
}
