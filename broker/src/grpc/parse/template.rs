//! Templates of queues. Their settings are parsed as those of queues.

use prost_types::FieldMask;
use sluicegate_proto::v1 as pb;

use super::{
    Rules,
    queue::{Change, MUTABLE, setting},
    required,
};
use crate::domain::{GroupName, Invalid, Pattern, Queue, QueueTemplate, limits::MAX_NAME_BYTES};

/// The settings that UpdateQueue cannot change, and UpdateTemplate can.
const FURTHER: [&str; 2] = ["group", "paused"];

/// A change of a template.
pub(in crate::grpc) struct TemplateChange {
    pub(in crate::grpc) pattern: Pattern,
    pub(in crate::grpc) settings: Change,
    /// The new dead-letter queue, if it is changed.
    pub(in crate::grpc) dead_letter_queue: Option<String>,
}

/// Parses the pattern of a template.
pub(in crate::grpc) fn pattern(field: &str, text: &str) -> Result<Pattern, Invalid> {
    let why = || {
        let given = if text.is_empty() { "must be given: " } else { "" };
        format!("{given}1 to {MAX_NAME_BYTES} letters, digits, '.', '_', '-' or '*'")
    };
    Pattern::of_queues(text).ok_or_else(|| Invalid::new(field, why()))
}

/// Parses a template to create.
pub(in crate::grpc) fn template(
    template: Option<pb::QueueTemplate>,
    rules: &Rules,
) -> Result<(Pattern, Queue), Invalid> {
    let given = required("template", template)?;
    let pattern = pattern("template.pattern", &given.pattern)?;
    let given = given_settings(given)?;
    let mut settings = QueueTemplate::default_settings();
    for field in MUTABLE.iter().chain(&FURTHER) {
        if let Some(change) = any_setting(field, &given, rules)? {
            change(&mut settings)?;
        }
    }
    Ok((pattern, settings))
}

/// Parses an UpdateTemplate.
pub(in crate::grpc) fn template_change(
    template: Option<pb::QueueTemplate>,
    mask: Option<FieldMask>,
    rules: &Rules,
) -> Result<TemplateChange, Invalid> {
    let given = required("template", template)?;
    let pattern = pattern("template.pattern", &given.pattern)?;
    let given = given_settings(given)?;
    let paths = mask.unwrap_or_default().paths;
    if paths.is_empty() {
        let why = "must name the fields to change, for example settings.max_attempts, or * for all";
        return Err(Invalid::new("update_mask", why));
    }
    let mut fields = Vec::new();
    for path in &paths {
        match path.as_str() {
            "*" | "settings" => fields.extend(MUTABLE.iter().chain(&FURTHER).copied()),
            path => fields.push(path.strip_prefix("settings.").ok_or_else(|| unknown(path))?),
        }
    }
    let mut changes = Vec::new();
    for field in &fields {
        let change = any_setting(field, &given, rules)?;
        changes.push(change.ok_or_else(|| unknown(&format!("settings.{field}")))?);
    }
    let links = fields.contains(&"dead_letter_queue");
    let settings = move |settings: &mut Queue| -> Result<(), Invalid> {
        changes.iter().try_for_each(|change| change(settings))
    };
    let dead_letter_queue = links.then_some(given.dead_letter_queue);
    Ok(TemplateChange { pattern, settings: Box::new(settings), dead_letter_queue })
}

fn unknown(path: &str) -> Invalid {
    let why = match path {
        "pattern" | "create_time" | "update_time" => format!("{path} cannot be changed"),
        _ => format!("a template has no field {path:?}"),
    };
    Invalid::new("update_mask", why)
}

fn given_settings(given: pb::QueueTemplate) -> Result<pb::Queue, Invalid> {
    let settings = required("template.settings", given.settings)?;
    if settings.name.is_empty() {
        return Ok(settings);
    }
    let why = "must be empty: the settings are those of all queues that the pattern stands for";
    Err(Invalid::new("template.settings.name", why))
}

/// Checks one setting. Returns the change that makes it, or `None` if there is no such setting.
fn any_setting(field: &str, given: &pb::Queue, rules: &Rules) -> Result<Option<Change>, Invalid> {
    let parse = || -> Result<Option<Change>, Invalid> {
        Ok(match field {
            "group" => {
                let group = GroupName::parse_optional(field, &given.group)?.unwrap_or_default();
                Some(Box::new(move |settings| {
                    settings.group.clone_from(&group);
                    Ok(())
                }))
            }
            "paused" => {
                let paused = given.paused;
                Some(Box::new(move |settings| {
                    settings.paused = paused;
                    Ok(())
                }))
            }
            _ => setting(field, given, rules)?,
        })
    };
    parse().map_err(|e| e.within("template.settings"))
}

#[cfg(test)]
mod tests {
    use super::super::{
        queue,
        tests::{RULES, span},
    };
    use super::*;
    use crate::domain::RetryPolicy;

    fn full() -> pb::Queue {
        let (name, dead_letter_queue) = (String::new(), "failed".to_owned());
        pb::Queue { name, dead_letter_queue, create_time: None, ..queue::tests::full() }
    }

    fn of(settings: pb::Queue) -> pb::QueueTemplate {
        let settings = Some(settings);
        pb::QueueTemplate { pattern: "q.*".into(), settings, ..Default::default() }
    }

    fn changed(settings: pb::Queue, paths: &[&str], before: &Queue) -> Result<Queue, Invalid> {
        let paths = paths.iter().map(|&path| path.to_owned()).collect();
        let change = template_change(Some(of(settings)), Some(FieldMask { paths }), &RULES)?;
        let mut settings = before.clone();
        (change.settings)(&mut settings).map(|()| settings)
    }

    #[test]
    fn every_setting_of_a_template_arrives() {
        let (pattern, settings) = template(Some(of(full())), &RULES).unwrap();
        let time = crate::domain::Timestamp(1);
        let answered = crate::grpc::convert::template(&QueueTemplate {
            pattern,
            settings,
            create_time: time,
            update_time: time,
            revision: 1,
        });
        assert_eq!(answered.pattern, "q.*");
        assert_eq!(answered.settings, Some(full()));
        let (_, plain) = template(Some(of(pb::Queue::default())), &RULES).unwrap();
        assert_eq!(plain, QueueTemplate::default_settings());
    }

    #[test]
    fn each_fault_of_a_template_is_named() {
        let refused = |given| template(given, &RULES).unwrap_err().field;
        assert_eq!(refused(None), "template");
        let named = |pattern: &str, settings| {
            Some(pb::QueueTemplate { pattern: pattern.into(), settings, ..Default::default() })
        };
        assert_eq!(refused(named("", Some(pb::Queue::default()))), "template.pattern");
        assert_eq!(refused(named("a b", Some(pb::Queue::default()))), "template.pattern");
        assert_eq!(refused(named("a", None)), "template.settings");
        for (settings, field) in [
            (pb::Queue { name: "a".into(), ..full() }, "name"),
            (pb::Queue { group: "a b".into(), ..full() }, "group"),
            (pb::Queue { max_attempts: Some(-1), ..full() }, "max_attempts"),
            (pb::Queue { lease: Some(span(61, 0)), ..full() }, "lease"),
        ] {
            assert_eq!(refused(Some(of(settings))), format!("template.settings.{field}"));
        }
    }

    #[test]
    fn an_update_of_a_template_changes_what_its_mask_names() {
        let (_, before) = template(Some(of(full())), &RULES).unwrap();
        let plain = QueueTemplate::default_settings();
        for all in ["*", "settings"] {
            assert_eq!(changed(pb::Queue::default(), &[all], &before), Ok(plain.clone()));
            assert_eq!(changed(full(), &[all], &plain), Ok(before.clone()));
        }
        let some = ["settings.group", "settings.paused", "settings.retry_policy.jitter"];
        let expected = Queue {
            group: GroupName::default(),
            paused: false,
            retry_policy: before
                .retry_policy
                .clone()
                .map(|policy| RetryPolicy { jitter: 0.0, ..policy }),
            ..before.clone()
        };
        assert_eq!(changed(pb::Queue::default(), &some, &before), Ok(expected));
        for path in ["", "name", "pattern", "settings.name", "settings.nope", "max_attempts"] {
            let refused = changed(full(), &[path], &before).unwrap_err();
            assert_eq!(refused.field, "update_mask", "{path:?}");
        }
        assert_eq!(changed(full(), &[], &before).unwrap_err().field, "update_mask");
    }

    /// Whoever changes where dead letters go has to be allowed to manage that queue.
    #[test]
    fn an_update_says_whether_it_changes_the_dead_letter_queue() {
        for (path, expected) in [
            ("*", Some("failed")),
            ("settings.dead_letter_queue", Some("failed")),
            ("settings.paused", None),
        ] {
            let mask = FieldMask { paths: vec![path.to_owned()] };
            let change = template_change(Some(of(full())), Some(mask), &RULES).unwrap();
            assert_eq!(change.dead_letter_queue.as_deref(), expected, "{path}");
        }
    }
}
