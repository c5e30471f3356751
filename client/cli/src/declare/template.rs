//! A template as it stands in a file: what is left out has its default.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sluicegate_client::proto::{Queue, QueueTemplate};

use super::queue::{QueueEntry, is_default};

/// A template. Its fields are called as in the API, where its settings are those of a queue without a name.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TemplateEntry {
    pub(super) pattern: String,
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) settings: QueueEntry,
}

impl TemplateEntry {
    /// Returns the entry without what is so by default: equal settings are equal entries.
    pub(super) fn brief(self) -> Self {
        let mut settings = self.settings.brief();
        settings.paused = settings.paused.filter(|paused| *paused);
        Self { settings, ..self }
    }
}

impl From<&QueueTemplate> for TemplateEntry {
    fn from(template: &QueueTemplate) -> Self {
        let settings = template.settings.as_ref().map(QueueEntry::from).unwrap_or_default();
        Self { pattern: template.pattern.clone(), settings }.brief()
    }
}

impl From<TemplateEntry> for QueueTemplate {
    fn from(entry: TemplateEntry) -> Self {
        let settings = Some(Queue::from(entry.settings));
        Self { pattern: entry.pattern, settings, ..Self::default() }
    }
}

/// Returns the settings of a template that are not the default.
pub(crate) fn brief_settings(template: &QueueTemplate) -> Map<String, Value> {
    super::plan::fields(&TemplateEntry::from(template).settings)
}

#[cfg(test)]
mod tests {
    use super::{super::queue::tests::full, *};

    #[test]
    fn every_setting_survives_the_file() {
        let settings = Some(Queue { name: String::new(), ..full() });
        let template =
            QueueTemplate { pattern: "orders.*".to_owned(), settings, ..QueueTemplate::default() };
        let text = yaml_serde::to_string(&TemplateEntry::from(&template)).unwrap();
        let read: TemplateEntry = yaml_serde::from_str(&text).unwrap();
        assert_eq!(QueueTemplate::from(read), template, "{text}");
        assert_eq!(brief_settings(&template)["lease"], "1m30s500ms");
    }

    #[test]
    fn defaults_of_a_template_are_left_out() {
        let settings = Some(Queue { group: "default".to_owned(), ..Queue::default() });
        let plain = QueueTemplate { pattern: "q".to_owned(), settings, ..QueueTemplate::default() };
        let text = yaml_serde::to_string(&TemplateEntry::from(&plain)).unwrap();
        assert_eq!(text, "pattern: q\n");
        let going: TemplateEntry =
            yaml_serde::from_str("{pattern: q, settings: {paused: false, group: default}}")
                .unwrap();
        assert_eq!(going.brief(), TemplateEntry::from(&plain));
    }
}
