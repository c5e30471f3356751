//! Settings of queues: one parser per field. CreateQueue uses the parsers of all fields, UpdateQueue those of the
//! fields in its mask.

use std::{collections::HashMap, num::NonZeroU64, time::Duration};

use prost_types::FieldMask;
use sluicegate_proto::v1 as pb;

use super::{
    Rules, at_most, duration, duration_or_zero, lease, not_negative, required, time_to_live,
};
use crate::domain::{
    GroupName, Invalid, Limit, Queue, QueueName, RetryPolicy,
    limits::{
        MAX_DEDUP_WINDOW, MAX_LABEL_KEY_BYTES, MAX_LABEL_VALUE_BYTES, MAX_LABELS, MAX_RETRY_DELAY,
        MAX_SPAN,
    },
};

/// The fields that UpdateQueue can change; `*` stands for all of them.
pub(super) const MUTABLE: &[&str] = &[
    "lease",
    "max_attempts",
    "max_deliveries",
    "dead_letter_queue",
    "discard_failed",
    "retry_policy",
    "default_ttl",
    "retention",
    "dedup_window",
    "max_depth",
    "sequenced",
    "labels",
];

/// A change of a queue's settings. Everything is checked except what depends on the queue itself.
pub(in crate::grpc) type Change = Box<dyn Fn(&mut Queue) -> Result<(), Invalid> + Send + Sync>;

/// Parses a queue to create; the paths of fields begin at the request.
pub(in crate::grpc) fn new_queue(
    queue: Option<pb::Queue>,
    rules: &Rules,
) -> Result<Queue, Invalid> {
    let given = required("queue", queue)?;
    let parse = || {
        let name = QueueName::parse("name", &given.name)?;
        let mut queue = Queue::with_defaults(name, rules.now);
        queue.group = GroupName::parse_optional("group", &given.group)?.unwrap_or_default();
        queue.paused = given.paused;
        for field in MUTABLE {
            if let Some(change) = setting(field, &given, rules)? {
                change(&mut queue)?;
            }
        }
        Ok(queue)
    };
    parse().map_err(|e: Invalid| e.within("queue"))
}

/// Parses an UpdateQueue. Returns the name of the queue and the change that the mask describes.
pub(in crate::grpc) fn change(
    queue: Option<pb::Queue>,
    mask: Option<FieldMask>,
    rules: &Rules,
) -> Result<(QueueName, Change), Invalid> {
    let given = required("queue", queue)?;
    let name = QueueName::parse("queue.name", &given.name)?;
    let paths = mask.unwrap_or_default().paths;
    if paths.is_empty() {
        let why = "must name the fields to change, for example max_attempts, or * for all";
        return Err(Invalid::new("update_mask", why));
    }
    let mut changes = Vec::new();
    for path in &paths {
        if path == "*" {
            for field in MUTABLE {
                changes.extend(setting(field, &given, rules).map_err(|e| e.within("queue"))?);
            }
        } else {
            let change = setting(path, &given, rules).map_err(|e| e.within("queue"))?;
            changes.push(change.ok_or_else(|| immutable(path))?);
        }
    }
    let change = move |queue: &mut Queue| {
        changes.iter().try_for_each(|change| change(queue)).map_err(|e| e.within("queue"))
    };
    Ok((name, Box::new(change)))
}

fn immutable(path: &str) -> Invalid {
    let why = match path {
        "paused" => "paused is changed by PauseQueue and ResumeQueue".to_owned(),
        "name" | "group" | "create_time" => format!("{path} cannot be changed"),
        _ => format!("a queue has no field {path:?}"),
    };
    Invalid::new("update_mask", why)
}

/// Checks one field of `given`. Returns the change that sets it, or `None` if there is no such mutable field.
pub(super) fn setting(
    field: &str,
    given: &pb::Queue,
    rules: &Rules,
) -> Result<Option<Change>, Invalid> {
    let policy = || given.retry_policy.unwrap_or_default();
    Ok(Some(match field {
        "lease" => {
            let lease = lease(field, given.lease, rules)?;
            set(move |queue| queue.lease = lease)
        }
        "max_attempts" => {
            let limit = failure_limit(field, given.max_attempts)?;
            set(move |queue| queue.max_attempts = limit)
        }
        "max_deliveries" => {
            let limit = failure_limit(field, given.max_deliveries)?;
            set(move |queue| queue.max_deliveries = limit)
        }
        "discard_failed" => {
            let discard = given.discard_failed;
            set(move |queue| queue.discard_failed = discard)
        }
        "dead_letter_queue" => {
            let to = QueueName::parse_optional(field, &given.dead_letter_queue)?;
            Box::new(move |queue| {
                if to.as_ref() == Some(&queue.name) {
                    let why = "must be another queue: items would go round for ever";
                    return Err(Invalid::new("dead_letter_queue", why));
                }
                queue.dead_letter_queue.clone_from(&to);
                Ok(())
            })
        }
        "retry_policy" => {
            let policy = given.retry_policy.map(retry_policy).transpose()?;
            set(move |queue| queue.retry_policy.clone_from(&policy))
        }
        "retry_policy.initial_delay" => {
            let delay = initial_delay(&policy())?;
            set(move |queue| policy_of(queue).initial_delay = delay)
        }
        "retry_policy.multiplier" => {
            let multiplier = multiplier(&policy())?;
            set(move |queue| policy_of(queue).multiplier = multiplier)
        }
        "retry_policy.max_delay" => {
            let delay = max_delay(&policy())?;
            set(move |queue| policy_of(queue).max_delay = delay)
        }
        "retry_policy.jitter" => {
            let jitter = jitter(&policy())?;
            set(move |queue| policy_of(queue).jitter = jitter)
        }
        "default_ttl" => {
            let ttl = time_to_live(field, given.default_ttl)?;
            set(move |queue| queue.default_ttl = ttl)
        }
        "retention" => {
            let retention = duration_or_zero(field, given.retention, MAX_SPAN)?;
            set(move |queue| queue.retention = retention)
        }
        "dedup_window" => {
            let window = given.dedup_window.map(|window| duration(field, window, MAX_DEDUP_WINDOW));
            let window = window.transpose()?.unwrap_or(Queue::DEFAULT_DEDUP_WINDOW);
            set(move |queue| queue.dedup_window = window)
        }
        "max_depth" => {
            let max_depth = not_negative(field, given.max_depth)?;
            set(move |queue| queue.max_depth = NonZeroU64::new(max_depth))
        }
        "sequenced" => {
            let sequenced = given.sequenced;
            set(move |queue| queue.sequenced = sequenced)
        }
        "labels" => {
            check_labels(&given.labels)?;
            let labels = given.labels.clone().into_iter().collect();
            set(move |queue| queue.labels.clone_from(&labels))
        }
        _ => return Ok(None),
    }))
}

fn set(assign: impl Fn(&mut Queue) + Send + Sync + 'static) -> Change {
    Box::new(move |queue| {
        assign(queue);
        Ok(())
    })
}

/// Returns the queue's own policy. If the queue has none, it gets a copy of the policy in force.
fn policy_of(queue: &mut Queue) -> &mut RetryPolicy {
    let in_force = &queue.defaults.retry_policy;
    queue.retry_policy.get_or_insert_with(|| in_force.clone())
}

fn retry_policy(given: pb::RetryPolicy) -> Result<RetryPolicy, Invalid> {
    Ok(RetryPolicy {
        initial_delay: initial_delay(&given)?,
        multiplier: multiplier(&given)?,
        max_delay: max_delay(&given)?,
        jitter: jitter(&given)?,
    })
}

/// Parses a limit that the broker's default replaces if it is not given.
fn failure_limit(field: &str, given: Option<i32>) -> Result<Option<Limit>, Invalid> {
    given.map(|number| not_negative(field, number).map(Limit::of)).transpose()
}

fn initial_delay(given: &pb::RetryPolicy) -> Result<Duration, Invalid> {
    duration_or_zero("retry_policy.initial_delay", given.initial_delay, MAX_RETRY_DELAY)
}

fn multiplier(given: &pb::RetryPolicy) -> Result<f64, Invalid> {
    match given.multiplier {
        0.0 => Ok(RetryPolicy::default().multiplier),
        value if value.is_finite() && value >= 1.0 => Ok(value),
        value => Err(Invalid::new("retry_policy.multiplier", format!("{value} is not 1 or more"))),
    }
}

fn max_delay(given: &pb::RetryPolicy) -> Result<Duration, Invalid> {
    let delay =
        given.max_delay.map(|delay| duration("retry_policy.max_delay", delay, MAX_RETRY_DELAY));
    Ok(delay.transpose()?.unwrap_or(RetryPolicy::default().max_delay))
}

fn jitter(given: &pb::RetryPolicy) -> Result<f64, Invalid> {
    if (0.0..=1.0).contains(&given.jitter) {
        return Ok(given.jitter);
    }
    let why = format!("{} is not within 0 to 1", given.jitter);
    Err(Invalid::new("retry_policy.jitter", why))
}

/// Checks labels, of a queue or to find queues by.
pub(in crate::grpc) fn check_labels(labels: &HashMap<String, String>) -> Result<(), Invalid> {
    if labels.len() > MAX_LABELS {
        return Err(Invalid::new("labels", format!("more than {MAX_LABELS} entries")));
    }
    for (key, value) in labels {
        if key.is_empty() {
            return Err(Invalid::new("labels", "keys must not be empty"));
        }
        if key.contains('\0') {
            return Err(Invalid::new("labels", "keys must not contain zero bytes"));
        }
        at_most("labels", key, MAX_LABEL_KEY_BYTES)?;
        at_most("labels", value, MAX_LABEL_VALUE_BYTES)?;
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::tests::{RULES, span};
    use super::*;

    fn named() -> pb::Queue {
        pb::Queue { name: "orders".into(), ..Default::default() }
    }

    /// Returns a queue with a value of its own for each setting.
    pub(in crate::grpc::parse) fn full() -> pb::Queue {
        pb::Queue {
            name: "orders".into(),
            group: "eu".into(),
            lease: Some(span(5, 0)),
            max_attempts: Some(3),
            max_deliveries: Some(4),
            discard_failed: false,
            dead_letter_queue: "orders.dead".into(),
            retry_policy: Some(pb::RetryPolicy {
                initial_delay: Some(span(1, 0)),
                multiplier: 3.0,
                max_delay: Some(span(9, 0)),
                jitter: 0.5,
            }),
            default_ttl: Some(span(60, 0)),
            retention: Some(span(70, 0)),
            dedup_window: Some(span(80, 0)),
            max_depth: 9,
            sequenced: true,
            paused: true,
            labels: [("team".to_owned(), "a".to_owned())].into(),
            create_time: Some(prost_types::Timestamp { seconds: -1, nanos: -1 }),
        }
    }

    fn mask(paths: &[&str]) -> FieldMask {
        FieldMask { paths: paths.iter().map(|&path| path.to_owned()).collect() }
    }

    fn changed(given: pb::Queue, paths: &[&str], queue: &Queue) -> Result<Queue, Invalid> {
        let (_, change) = change(Some(given), Some(mask(paths)), &RULES)?;
        let mut queue = queue.clone();
        change(&mut queue).map(|()| queue)
    }

    #[test]
    fn a_name_alone_creates_a_queue_with_the_defaults() {
        let name = QueueName::parse("name", "orders").unwrap();
        let expected = Queue::with_defaults(name, RULES.now);
        assert_eq!(new_queue(Some(named()), &RULES), Ok(expected));
    }

    #[test]
    fn every_setting_arrives() {
        let queue = new_queue(Some(full()), &RULES).unwrap();
        let answered = crate::grpc::convert::queue(&queue);
        assert_eq!(answered, pb::Queue { create_time: answered.create_time, ..full() });
        assert_eq!(queue.create_time, RULES.now);
    }

    #[test]
    fn a_policy_with_nothing_set_has_the_defaults() {
        let retry_policy = Some(pb::RetryPolicy::default());
        let queue = new_queue(Some(pb::Queue { retry_policy, ..named() }), &RULES).unwrap();
        assert_eq!(queue.retry_policy, Some(RetryPolicy::default()));
    }

    #[test]
    fn each_bad_setting_is_named() {
        let policy = |policy: pb::RetryPolicy| pb::Queue { retry_policy: Some(policy), ..named() };
        let none = pb::RetryPolicy::default;
        let labels = |n: usize, key: usize, value: usize| pb::Queue {
            labels: (0..n).map(|i| (format!("{i:0key$}"), "v".repeat(value))).collect(),
            ..named()
        };
        let month = 30 * 24 * 3600;
        let cases = [
            (pb::Queue::default(), "name"),
            (pb::Queue { group: "a b".into(), ..named() }, "group"),
            (pb::Queue { lease: Some(span(0, 1)), ..named() }, "lease"),
            (pb::Queue { lease: Some(span(61, 0)), ..named() }, "lease"),
            (pb::Queue { max_attempts: Some(-1), ..named() }, "max_attempts"),
            (pb::Queue { max_deliveries: Some(-1), ..named() }, "max_deliveries"),
            (pb::Queue { dead_letter_queue: "/".into(), ..named() }, "dead_letter_queue"),
            (pb::Queue { dead_letter_queue: "orders".into(), ..named() }, "dead_letter_queue"),
            (pb::Queue { default_ttl: Some(span(0, 0)), ..named() }, "default_ttl"),
            (pb::Queue { retention: Some(span(-1, 0)), ..named() }, "retention"),
            (pb::Queue { dedup_window: Some(span(month, 1)), ..named() }, "dedup_window"),
            (pb::Queue { max_depth: -1, ..named() }, "max_depth"),
            (
                policy(pb::RetryPolicy { initial_delay: Some(span(month, 1)), ..none() }),
                "retry_policy.initial_delay",
            ),
            (
                policy(pb::RetryPolicy { max_delay: Some(span(-1, 0)), ..none() }),
                "retry_policy.max_delay",
            ),
            (policy(pb::RetryPolicy { multiplier: 0.5, ..none() }), "retry_policy.multiplier"),
            (policy(pb::RetryPolicy { multiplier: f64::NAN, ..none() }), "retry_policy.multiplier"),
            (
                policy(pb::RetryPolicy { multiplier: f64::INFINITY, ..none() }),
                "retry_policy.multiplier",
            ),
            (policy(pb::RetryPolicy { jitter: 1.1, ..none() }), "retry_policy.jitter"),
            (policy(pb::RetryPolicy { jitter: -0.1, ..none() }), "retry_policy.jitter"),
            (policy(pb::RetryPolicy { jitter: f64::NAN, ..none() }), "retry_policy.jitter"),
            (labels(65, 2, 1), "labels"),
            (labels(1, 64, 1), "labels"),
            (labels(1, 1, 256), "labels"),
        ];
        for (queue, field) in cases {
            let refused = new_queue(Some(queue), &RULES).unwrap_err().field;
            assert_eq!(refused, format!("queue.{field}"));
        }
        assert_eq!(new_queue(None, &RULES).unwrap_err().field, "queue");
        assert!(new_queue(Some(labels(64, 63, 255)), &RULES).is_ok());
    }

    #[test]
    fn an_update_changes_only_fields_in_the_mask() {
        let before = new_queue(Some(full()), &RULES).unwrap();
        let after = changed(named(), &["max_attempts", "retry_policy.jitter"], &before).unwrap();
        let mut expected = before.clone();
        expected.max_attempts = None;
        expected.retry_policy.as_mut().unwrap().jitter = 0.0;
        assert_eq!(after, expected);
        // Fields that the mask does not name are not read.
        let junk = pb::Queue { max_depth: -1, max_attempts: Some(7), ..named() };
        assert_eq!(
            changed(junk, &["max_attempts"], &before).unwrap().max_attempts,
            Some(Limit::of(7))
        );
    }

    #[test]
    fn a_star_changes_all_mutable_fields() {
        let before = new_queue(Some(named()), &RULES).unwrap();
        let given = pb::Queue { group: "other".into(), ..full() };
        let mut expected = new_queue(Some(full()), &RULES).unwrap();
        (expected.group, expected.paused) = (before.group.clone(), before.paused);
        assert_eq!(changed(given, &["*"], &before), Ok(expected));
    }

    #[test]
    fn one_field_of_a_policy_can_be_set() {
        let before = new_queue(Some(named()), &RULES).unwrap();
        let after = changed(full(), &["retry_policy.initial_delay"], &before).unwrap();
        let in_force = before.defaults.retry_policy.clone();
        let begun = RetryPolicy { initial_delay: Duration::from_secs(1), ..in_force };
        assert_eq!(after.retry_policy, Some(begun));
    }

    #[test]
    fn a_bad_mask_is_refused() {
        let queue = new_queue(Some(named()), &RULES).unwrap();
        for paths in
            [&[][..], &["name"], &["group"], &["paused"], &["create_time"], &["nope"], &[""]]
        {
            assert_eq!(
                changed(full(), paths, &queue).unwrap_err().field,
                "update_mask",
                "{paths:?}"
            );
        }
        let itself = pb::Queue { dead_letter_queue: "orders".into(), ..named() };
        let refused = changed(itself, &["dead_letter_queue"], &queue).unwrap_err();
        assert_eq!(refused.field, "queue.dead_letter_queue");
        let unnamed = pb::Queue { name: String::new(), ..full() };
        assert_eq!(changed(unnamed, &["*"], &queue).unwrap_err().field, "queue.name");
    }
}
