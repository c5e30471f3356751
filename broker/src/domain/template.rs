//! Templates: settings of queues that come into being by use.

use std::cmp::Reverse;

use super::{Pattern, Queue, QueueName, Timestamp};

/// Settings of queues that come into being by use and whose names match a pattern.
#[derive(Debug, Clone, PartialEq)]
pub struct QueueTemplate {
    /// Which queues. Identifies the template.
    pub pattern: Pattern,
    /// The settings, those of a queue without a name.
    pub settings: Queue,
    /// When the template was created.
    pub create_time: Timestamp,
    /// When it was last changed.
    pub update_time: Timestamp,
    /// Increases with each change, and so fences updates.
    pub revision: i64,
}

impl QueueTemplate {
    /// Returns the default settings of a template, those of a queue without a name.
    pub fn default_settings() -> Queue {
        Queue::with_defaults(QueueName::none(), Timestamp::default())
    }

    /// Returns the template that decides about a queue: of those that match, the one that says most about the name.
    pub fn deciding<'a>(
        templates: impl IntoIterator<Item = &'a Self>,
        queue: &QueueName,
    ) -> Option<&'a Self> {
        let matching = templates.into_iter().filter(|one| one.pattern.matches(queue.as_str()));
        matching.min_by_key(|one| {
            let text = one.pattern.as_str();
            let stars = text.bytes().filter(|byte| *byte == b'*').count();
            (Reverse(text.len() - stars), stars, text)
        })
    }

    /// Returns the queue of this name that a push creates: with the settings of the template that decides about the name, or else
    /// with the defaults. A link by which dead letters would return to the queue is left out: a pattern may match the dead-letter
    /// queue of its own template, and what that leads to, which ends with `.dead`.
    pub(crate) fn queue_by_use<'a>(
        templates: impl IntoIterator<Item = &'a Self>,
        name: QueueName,
        now: Timestamp,
    ) -> Queue {
        let Some(template) = Self::deciding(templates, &name) else {
            return Queue::created_by_use(name, now);
        };
        let queue = template.queue(name, now);
        let is_its_own = queue.dead_letter_queue.as_ref() == Some(&queue.name);
        if queue.is_for_dead_letters() || is_its_own { unlinked(queue) } else { queue }
    }

    /// Returns the queue of this name that a dead letter of another queue creates: as [`Self::queue_by_use`], but in the group of
    /// that queue, with no link that a template made.
    pub fn dead_letter_queue<'a>(
        templates: impl IntoIterator<Item = &'a Self>,
        name: QueueName,
        of: &Queue,
        now: Timestamp,
    ) -> Queue {
        let queue = unlinked(Self::queue_by_use(templates, name, now));
        Queue { group: of.group.clone(), ..queue }
    }

    /// Returns the queue of this name with these settings, as use creates it.
    fn queue(&self, name: QueueName, now: Timestamp) -> Queue {
        Queue { name, create_time: now, unused_since: Some(now), ..self.settings.clone() }
    }
}

fn unlinked(queue: Queue) -> Queue {
    Queue { dead_letter_queue: None, ..queue }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::GroupName;

    fn template(pattern: &str) -> QueueTemplate {
        QueueTemplate {
            pattern: Pattern::new(pattern),
            settings: QueueTemplate::default_settings(),
            create_time: Timestamp(0),
            update_time: Timestamp(0),
            revision: 1,
        }
    }

    fn deciding(patterns: &[&str], queue: &str) -> Option<String> {
        let queue = QueueName::parse("queue", queue).unwrap();
        let mut templates: Vec<_> = patterns.iter().map(|pattern| template(pattern)).collect();
        let found = QueueTemplate::deciding(&templates, &queue).cloned();
        templates.reverse();
        assert_eq!(QueueTemplate::deciding(&templates, &queue), found.as_ref(), "in any order");
        found.map(|template| template.pattern.to_string())
    }

    #[test]
    fn the_template_that_says_most_about_a_name_decides() {
        for (patterns, queue, expected) in [
            (&[][..], "orders", None),
            (&["mail", "order"], "orders", None),
            (&["*", "orders.*", "orders.eu.*"], "orders.eu.new", Some("orders.eu.*")),
            (&["*", "orders.*", "orders.eu.*"], "orders.us", Some("orders.*")),
            (&["*", "orders.*", "orders.eu.*"], "mail", Some("*")),
            (&["*.dead", "a*"], "a.dead", Some("*.dead")),
            // As much text: the fewest stars, and then the order of bytes.
            (&["orders*", "*orders", "orders"], "orders", Some("orders")),
            (&["o*s", "o*s*", "*os", "os*"], "os", Some("*os")),
            (&["a*b*", "*a*b*", "a*b**"], "ab", Some("a*b*")),
        ] {
            assert_eq!(deciding(patterns, queue).as_deref(), expected, "{queue} {patterns:?}");
        }
    }

    fn queue_by_use(templates: &[QueueTemplate], name: &str) -> Queue {
        let name = QueueName::parse("queue", name).unwrap();
        QueueTemplate::queue_by_use(templates, name, Timestamp(7))
    }

    /// So that one template may name one queue for all dead letters.
    #[test]
    fn a_template_links_no_queue_to_itself_and_none_that_is_for_dead_letters() {
        let mut template = template("*");
        template.settings.dead_letter_queue = QueueName::parse_optional("queue", "all").unwrap();
        template.settings.sequenced = true;
        let templates = [template];
        for (name, linked) in [("orders", true), ("all", false), ("orders.dead", false)] {
            let queue = queue_by_use(&templates, name);
            let link = queue.dead_letter_queue.as_ref().map(QueueName::as_str);
            assert_eq!(link, linked.then_some("all"), "{name}");
            assert!(queue.sequenced, "{name} has the other settings");
            assert_eq!((queue.name.as_str(), queue.unused_since), (name, Some(Timestamp(7))));
        }
        let plain = queue_by_use(&[], "orders");
        assert_eq!(plain, Queue::created_by_use(plain.name.clone(), Timestamp(7)));
    }

    #[test]
    fn a_dead_letter_queue_is_in_the_group_of_its_queue_and_leads_nowhere() {
        let group = |name: &str| GroupName::parse("group", name).unwrap();
        let mut template = template("*");
        template.settings.dead_letter_queue = QueueName::parse_optional("queue", "all").unwrap();
        template.settings.group = group("elsewhere");
        template.settings.sequenced = true;
        let of = Queue { group: group("here"), ..QueueTemplate::default_settings() };
        let name = QueueName::parse("queue", "failed").unwrap();
        let queue = QueueTemplate::dead_letter_queue(&[template], name.clone(), &of, Timestamp(7));
        let plain = Queue::created_by_use(name, Timestamp(7));
        assert_eq!(queue, Queue { group: group("here"), sequenced: true, ..plain });
    }

    #[test]
    fn a_queue_of_a_template_has_all_its_settings_and_is_created_by_use() {
        let mut template = template("q*");
        template.settings.sequenced = true;
        template.settings.labels.insert("team".into(), "a".into());
        let name = QueueName::parse("queue", "q1").unwrap();
        let queue = template.queue(name.clone(), Timestamp(7));
        let plain = Queue::created_by_use(name, Timestamp(7));
        assert_eq!(queue, Queue { sequenced: true, labels: queue.labels.clone(), ..plain });
        assert_eq!(queue.labels["team"], "a");
    }
}
