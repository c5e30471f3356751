//! A queue as it stands in a file: what is left out has its default.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use sluicegate_client::proto::{Queue, RetryPolicy};

use crate::values;

const DEFAULT_GROUP: &str = "default";
const DEFAULT_DEDUP_WINDOW: Duration = Duration::from_mins(5);
const DEFAULT_MULTIPLIER: f64 = 2.0;
const DEFAULT_MAX_DELAY: Duration = Duration::from_hours(1);

/// A duration that is written as on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Span(pub(crate) Duration);

impl Span {
    pub(super) fn of(duration: Option<&prost_types::Duration>) -> Option<Self> {
        duration.map(|duration| Self(values::from_proto(duration)))
    }

    pub(super) fn into_proto(self) -> prost_types::Duration {
        values::to_proto(self.0)
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&values::exact(self.0))
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let why = |why| D::Error::custom(format!("{text:?}: {why}"));
        values::duration(&text).map(Self).map_err(why)
    }
}

/// A queue. Its fields are called as in the API.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct QueueEntry {
    /// Empty for the settings of a template.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) group: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lease: Option<Span>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_attempts: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_deliveries: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dead_letter_queue: Option<String>,
    #[serde(default, skip_serializing_if = "is_default")]
    discard_failed: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    retry_policy: Option<RetryEntry>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    default_ttl: Option<Span>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    retention: Option<Span>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dedup_window: Option<Span>,
    #[serde(default, skip_serializing_if = "is_default")]
    max_depth: i64,
    #[serde(default, skip_serializing_if = "is_default")]
    sequenced: bool,
    /// `None`: as it is. Whether a queue is paused is a state rather than a setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) paused: Option<bool>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    labels: BTreeMap<String, String>,
}

/// A retry policy.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RetryEntry {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    initial_delay: Option<Span>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    multiplier: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_delay: Option<Span>,
    #[serde(default, skip_serializing_if = "is_default")]
    jitter: f64,
}

pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Returns the value, unless it is the default.
fn unless<T: PartialEq>(value: Option<T>, default: &T) -> Option<T> {
    value.filter(|value| value != default)
}

impl QueueEntry {
    /// Returns the entry without what is so by default: equal settings are equal entries.
    pub(super) fn brief(self) -> Self {
        Self {
            group: unless(self.group, &DEFAULT_GROUP.to_owned()).filter(|name| !name.is_empty()),
            dead_letter_queue: unless(self.dead_letter_queue, &String::new()),
            retention: unless(self.retention, &Span::default()),
            dedup_window: unless(self.dedup_window, &Span(DEFAULT_DEDUP_WINDOW)),
            retry_policy: self.retry_policy.map(|policy| RetryEntry {
                initial_delay: unless(policy.initial_delay, &Span::default()),
                multiplier: unless(policy.multiplier, &DEFAULT_MULTIPLIER).filter(|x| *x != 0.0),
                max_delay: unless(policy.max_delay, &Span(DEFAULT_MAX_DELAY)),
                jitter: policy.jitter,
            }),
            ..self
        }
    }

    /// Returns how long dedup ids are remembered.
    pub(crate) fn dedup_window(&self) -> Duration {
        self.dedup_window.map_or(DEFAULT_DEDUP_WINDOW, |window| window.0)
    }
}

impl From<&Queue> for QueueEntry {
    fn from(queue: &Queue) -> Self {
        let entry = Self {
            name: queue.name.clone(),
            group: Some(queue.group.clone()),
            lease: Span::of(queue.lease.as_ref()),
            max_attempts: queue.max_attempts,
            max_deliveries: queue.max_deliveries,
            dead_letter_queue: Some(queue.dead_letter_queue.clone()),
            discard_failed: queue.discard_failed,
            retry_policy: queue.retry_policy.as_ref().map(|policy| RetryEntry {
                initial_delay: Span::of(policy.initial_delay.as_ref()),
                multiplier: Some(policy.multiplier),
                max_delay: Span::of(policy.max_delay.as_ref()),
                jitter: policy.jitter,
            }),
            default_ttl: Span::of(queue.default_ttl.as_ref()),
            retention: Span::of(queue.retention.as_ref()),
            dedup_window: Span::of(queue.dedup_window.as_ref()),
            max_depth: queue.max_depth,
            sequenced: queue.sequenced,
            paused: queue.paused.then_some(true),
            labels: queue.labels.clone().into_iter().collect(),
        };
        entry.brief()
    }
}

impl From<QueueEntry> for Queue {
    fn from(entry: QueueEntry) -> Self {
        Self {
            name: entry.name,
            group: entry.group.unwrap_or_default(),
            lease: entry.lease.map(Span::into_proto),
            max_attempts: entry.max_attempts,
            max_deliveries: entry.max_deliveries,
            dead_letter_queue: entry.dead_letter_queue.unwrap_or_default(),
            discard_failed: entry.discard_failed,
            retry_policy: entry.retry_policy.map(|policy| RetryPolicy {
                initial_delay: policy.initial_delay.map(Span::into_proto),
                multiplier: policy.multiplier.unwrap_or_default(),
                max_delay: policy.max_delay.map(Span::into_proto),
                jitter: policy.jitter,
            }),
            default_ttl: entry.default_ttl.map(Span::into_proto),
            retention: entry.retention.map(Span::into_proto),
            dedup_window: entry.dedup_window.map(Span::into_proto),
            max_depth: entry.max_depth,
            sequenced: entry.sequenced,
            paused: entry.paused.unwrap_or_default(),
            labels: entry.labels.into_iter().collect(),
            create_time: None,
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns a queue with all settings, as a broker shows it.
    pub(in crate::declare) fn full() -> Queue {
        let span = |seconds, nanos| Some(prost_types::Duration { seconds, nanos });
        Queue {
            name: "orders".to_owned(),
            group: "shop".to_owned(),
            lease: span(90, 500_000_000),
            max_attempts: Some(0),
            max_deliveries: Some(7),
            dead_letter_queue: "graves".to_owned(),
            discard_failed: true,
            retry_policy: Some(RetryPolicy {
                initial_delay: span(1, 0),
                multiplier: 3.0,
                max_delay: span(60, 0),
                jitter: 0.5,
            }),
            default_ttl: span(86_400, 0),
            retention: span(3_600, 0),
            dedup_window: span(30, 0),
            max_depth: 100,
            sequenced: true,
            paused: true,
            labels: [("team".to_owned(), "a: b".to_owned())].into(),
            create_time: None,
        }
    }

    #[test]
    fn every_setting_survives_the_file() {
        let text = yaml_serde::to_string(&QueueEntry::from(&full())).unwrap();
        let read: QueueEntry = yaml_serde::from_str(&text).unwrap();
        assert_eq!(Queue::from(read), full(), "{text}");
        assert!(text.contains("lease: 1m30s500ms"), "{text}");
    }

    #[test]
    fn defaults_are_left_out() {
        // As a broker shows a queue of which nothing was set.
        let queue = Queue {
            name: "q".to_owned(),
            group: "default".to_owned(),
            retention: Some(prost_types::Duration::default()),
            dedup_window: Some(prost_types::Duration { seconds: 300, nanos: 0 }),
            ..Queue::default()
        };
        assert_eq!(yaml_serde::to_string(&QueueEntry::from(&queue)).unwrap(), "name: q\n");
    }

    #[test]
    fn a_misspelt_field_is_refused() {
        let error = yaml_serde::from_str::<QueueEntry>("name: q\nmax_atempts: 3\n").unwrap_err();
        assert!(error.to_string().contains("max_atempts"), "{error}");
        let error = yaml_serde::from_str::<QueueEntry>("name: q\nlease: 5\n").unwrap_err();
        assert!(error.to_string().contains("\"5\": expected a duration"), "{error}");
    }
}
