//! The settings of a queue, each with what it means.

use axum::{Form as Body, extract::Path};
use maud::{Markup, html};
use prost_types::FieldMask;
use serde::Deserialize;
use sluicegate_proto::v1::{Queue, RetryPolicy, UpdateQueueRequest};

use super::{
    answer::{Answer, done, queue_address, rejected, shown},
    frame::{Field, Section, page},
};
use crate::{
    api::incomplete,
    problem::{Problem, duration, number},
    text,
    visitor::Visitor,
};

/// The settings as they are entered.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Settings {
    lease: String,
    max_attempts: String,
    max_deliveries: String,
    dead_letter_queue: String,
    discard_failed: String,
    initial_delay: String,
    multiplier: String,
    max_delay: String,
    jitter: String,
    default_ttl: String,
    retention: String,
    dedup_window: String,
    max_depth: String,
    sequenced: String,
    labels: String,
}

impl Settings {
    /// Returns the settings of a queue, or of a template, as the form shows them.
    pub(super) fn of(queue: &Queue) -> Self {
        let retry = queue.retry_policy.as_ref();
        let number =
            |number: Option<i32>| number.map_or_else(String::new, |number| number.to_string());
        let factor = |number: f64| if number == 0.0 { String::new() } else { number.to_string() };
        let mut labels: Vec<_> =
            queue.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        labels.sort();
        Self {
            lease: text::setting(queue.lease.as_ref()),
            max_attempts: number(queue.max_attempts),
            max_deliveries: number(queue.max_deliveries),
            dead_letter_queue: queue.dead_letter_queue.clone(),
            discard_failed: if queue.discard_failed { "true".to_owned() } else { String::new() },
            initial_delay: text::setting(retry.and_then(|retry| retry.initial_delay.as_ref())),
            multiplier: factor(retry.map_or(0.0, |retry| retry.multiplier)),
            max_delay: text::setting(retry.and_then(|retry| retry.max_delay.as_ref())),
            jitter: factor(retry.map_or(0.0, |retry| retry.jitter)),
            default_ttl: text::setting(queue.default_ttl.as_ref()),
            retention: text::setting(queue.retention.as_ref()),
            dedup_window: text::setting(queue.dedup_window.as_ref()),
            max_depth: if queue.max_depth == 0 {
                String::new()
            } else {
                queue.max_depth.to_string()
            },
            sequenced: if queue.sequenced { "true".to_owned() } else { String::new() },
            labels: labels.join("\n"),
        }
    }

    /// Returns those of the settings that are not the default, each with its name in words.
    pub(super) fn brief(&self) -> Vec<(&'static str, String)> {
        let flag = |value: &String| if value == "true" { "yes".to_owned() } else { String::new() };
        // As the broker shows what is not set.
        let unless = |value: &String, default: &str| {
            if value == default { String::new() } else { value.clone() }
        };
        let all = [
            ("most attempts", self.max_attempts.clone()),
            ("most deliveries", self.max_deliveries.clone()),
            ("dead-letter queue", self.dead_letter_queue.clone()),
            ("discards at a limit", flag(&self.discard_failed)),
            ("first delay", self.initial_delay.clone()),
            ("factor", self.multiplier.clone()),
            ("longest delay", self.max_delay.clone()),
            ("jitter", self.jitter.clone()),
            ("lease", self.lease.clone()),
            ("time to live", self.default_ttl.clone()),
            ("retention", unless(&self.retention, "0s")),
            ("deduplication window", unless(&self.dedup_window, "5m")),
            ("most items", self.max_depth.clone()),
            ("sequence numbers", flag(&self.sequenced)),
            ("labels", self.labels.replace('\n', ", ")),
        ];
        all.into_iter().filter(|(_, value)| !value.is_empty()).collect()
    }

    /// Returns the queue with what differs from `before`, and the names of those fields. What nobody touched stays as it is,
    /// even if it has more digits than were shown.
    pub(super) fn change(&self, before: &Queue) -> Result<(Queue, Vec<String>), Problem> {
        let shown = Self::of(before);
        let mut queue = before.clone();
        let mut mask = Vec::new();
        let mut changed = |name: &str, is_changed: bool| {
            if is_changed {
                mask.push(name.to_owned());
            }
            is_changed
        };
        if changed("lease", self.lease != shown.lease) {
            queue.lease = duration("lease", &self.lease)?;
        }
        if changed("max_attempts", self.max_attempts != shown.max_attempts) {
            queue.max_attempts = number("max_attempts", &self.max_attempts)?;
        }
        if changed("max_deliveries", self.max_deliveries != shown.max_deliveries) {
            queue.max_deliveries = number("max_deliveries", &self.max_deliveries)?;
        }
        if changed("dead_letter_queue", self.dead_letter_queue != shown.dead_letter_queue) {
            self.dead_letter_queue.trim().clone_into(&mut queue.dead_letter_queue);
        }
        if changed("discard_failed", self.discard_failed != shown.discard_failed) {
            queue.discard_failed = self.discard_failed == "true";
        }
        if changed("retry_policy", self.retry_differs(&shown)) {
            queue.retry_policy = self.retry_policy()?;
        }
        if changed("default_ttl", self.default_ttl != shown.default_ttl) {
            queue.default_ttl = duration("default_ttl", &self.default_ttl)?;
        }
        if changed("retention", self.retention != shown.retention) {
            queue.retention = duration("retention", &self.retention)?;
        }
        if changed("dedup_window", self.dedup_window != shown.dedup_window) {
            queue.dedup_window = duration("dedup_window", &self.dedup_window)?;
        }
        if changed("max_depth", self.max_depth != shown.max_depth) {
            queue.max_depth = number("max_depth", &self.max_depth)?.unwrap_or(0);
        }
        if changed("sequenced", self.sequenced != shown.sequenced) {
            queue.sequenced = self.sequenced == "true";
        }
        let labels = self.labels.replace("\r\n", "\n");
        if changed("labels", labels.trim() != shown.labels) {
            let lines = labels.lines().filter(|line| !line.trim().is_empty());
            let pairs = lines
                .map(|line| line.split_once('=').map(|(key, value)| (key.trim(), value.trim())));
            let pairs =
                pairs.map(|pair| pair.map(|(key, value)| (key.to_owned(), value.to_owned())));
            let pairs: Option<_> = pairs.collect();
            queue.labels = pairs.ok_or_else(|| Problem::field("labels", "each line needs a ="))?;
        }
        Ok((queue, mask))
    }

    fn retry_differs(&self, shown: &Self) -> bool {
        let retry = |settings: &Self| {
            [&settings.initial_delay, &settings.multiplier, &settings.max_delay, &settings.jitter]
                .map(String::clone)
        };
        retry(self) != retry(shown)
    }

    fn retry_policy(&self) -> Result<Option<RetryPolicy>, Problem> {
        let policy = RetryPolicy {
            initial_delay: duration("initial_delay", &self.initial_delay)?,
            multiplier: number("multiplier", &self.multiplier)?.unwrap_or(0.0),
            max_delay: duration("max_delay", &self.max_delay)?,
            jitter: number("jitter", &self.jitter)?.unwrap_or(0.0),
        };
        Ok(Some(policy).filter(|policy| *policy != RetryPolicy::default()))
    }
}

pub(super) async fn show(visitor: Visitor, Path(name): Path<String>) -> Answer {
    let queue = visitor.api().get_queue(&name).await?;
    Ok(shown(form(&visitor, &queue, &Settings::of(&queue), None)))
}

pub(super) async fn save(
    visitor: Visitor,
    Path(name): Path<String>,
    Body(settings): Body<Settings>,
) -> Answer {
    let before = visitor.api().get_queue(&name).await?;
    let saved = async {
        let (queue, paths) = settings.change(&before)?;
        if paths.is_empty() {
            return Ok(before.clone());
        }
        let (queue, update_mask) = (Some(queue), Some(FieldMask { paths }));
        let request = UpdateQueueRequest { queue, update_mask };
        let answer = visitor.api().admin.update_queue(request).await?;
        Ok::<_, Problem>(answer.into_inner().queue.ok_or_else(incomplete)?)
    };
    match saved.await {
        Ok(queue) => {
            visitor.board().put(queue);
            Ok(done(&queue_address(&name), "saved", 0))
        }
        Err(problem) => {
            let page = form(&visitor, &before, &settings, Some(&problem));
            Ok(rejected(&problem, page))
        }
    }
}

fn form(
    visitor: &Visitor,
    queue: &Queue,
    settings: &Settings,
    problem: Option<&Problem>,
) -> Markup {
    let address = queue_address(&queue.name);
    let may_manage = visitor.rights(&queue.name).manage;
    let body = html! {
        form.asks.settings method="post" action={ (address) "/settings" } {
            div.heading { div { a.up href=(address) data-up { (queue.name) } h1 { "Settings" } } }
            @if let Some(problem) = problem { p.problem role="alert" { (problem.text) } }
            p.quiet {
                "Empty fields take the broker's own setting. Changes reach every broker within a second. The group is "
                strong { (queue.group) } ", created " (text::time(queue.create_time.as_ref(), "at a time that is not known")) "."
            }
            @if !may_manage { p { "This token may look at the settings, but not change them." } }
            div inert[!may_manage] { (fields(settings, problem)) }
            @if may_manage {
                div.buttons {
                    button.primary type="submit" { "Save" }
                    a.button href=(address) { "Cancel" }
                }
            }
        }
    };
    page(visitor, &format!("Settings of {}", queue.name), Section::Queues, &body)
}

/// Returns the fields of all settings.
pub(super) fn fields(settings: &Settings, problem: Option<&Problem>) -> Markup {
    html! {
        (attempts(settings, problem))
        (times(settings, problem))
        (bounds(settings, problem))
    }
}

fn attempts(settings: &Settings, problem: Option<&Problem>) -> Markup {
    let field = |name, label, value: &String, placeholder, hint| {
        Field { name, label, value, hint, placeholder }.line(problem)
    };
    let discard = Field {
        name: "discard_failed",
        label: "Discard instead",
        value: &settings.discard_failed,
        hint: "Items at a limit are discarded instead of becoming dead letters.",
        placeholder: "",
    };
    html! {
        fieldset {
            legend { "Attempts and dead letters" }
            div.columns {
                (field("max_attempts", "Most attempts", &settings.max_attempts, "25", "The attempt whose failure makes a dead letter. 0: no limit."))
                (field("max_deliveries", "Most deliveries", &settings.max_deliveries, "100", "A bound on items that kill their consumers. 0: no limit."))
                (field("dead_letter_queue", "Dead-letter queue", &settings.dead_letter_queue, "<name>.dead", "A queue of the same group."))
                (discard.tick())
                (field("initial_delay", "First delay", &settings.initial_delay, "1s", "Before the attempt after the first failure."))
                (field("multiplier", "Factor", &settings.multiplier, "2", "From one delay to the next. At least 1."))
                (field("max_delay", "Longest delay", &settings.max_delay, "5m", "However many attempts have failed."))
                (field("jitter", "Jitter", &settings.jitter, "0.2", "The random share of each delay, 0 to 1."))
            }
        }
    }
}

fn times(settings: &Settings, problem: Option<&Problem>) -> Markup {
    let field = |name, label, value: &String, placeholder, hint| {
        Field { name, label, value, hint, placeholder }.line(problem)
    };
    html! {
        fieldset {
            legend { "Times" }
            div.columns {
                (field("lease", "Lease", &settings.lease, "30s", "How long a consumer that asks for no lease may hold an item."))
                (field("default_ttl", "Time to live", &settings.default_ttl, "for ever", "Of items that are pushed without one."))
                (field("retention", "Retention", &settings.retention, "none", "How long committed items are kept, for a replay."))
                (field("dedup_window", "Deduplication window", &settings.dedup_window, "5m", "How long the id of a push is remembered."))
            }
        }
    }
}

fn bounds(settings: &Settings, problem: Option<&Problem>) -> Markup {
    let most = Field {
        name: "max_depth",
        label: "Most items",
        value: &settings.max_depth,
        hint: "Pushes are refused while the queue holds so many.",
        placeholder: "no limit",
    };
    let sequenced = Field {
        name: "sequenced",
        label: "Sequence numbers",
        value: &settings.sequenced,
        hint: "Every item gets an ever-growing number.",
        placeholder: "",
    };
    html! {
        fieldset {
            legend { "Contents" }
            div.columns {
                (most.line(problem))
                (sequenced.tick())
                div.field {
                    label for="labels" { "Labels" }
                    textarea #labels name="labels" rows="3" spellcheck="false" aria-describedby="labels-hint" { "\n" (settings.labels) }
                    small #labels-hint {
                        @for (_, text) in problem.into_iter().flat_map(|problem| &problem.fields).filter(|(name, _)| name.contains("labels")) {
                            strong.wrong { (text) } " "
                        }
                        "One a line: team=billing."
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue() -> Queue {
        let nanos = prost_types::Duration { seconds: 1, nanos: 500_000_000 };
        Queue {
            name: "a".to_owned(),
            lease: Some(nanos),
            max_attempts: Some(3),
            retry_policy: Some(RetryPolicy { jitter: 0.5, ..RetryPolicy::default() }),
            labels: [("team".to_owned(), "billing".to_owned())].into(),
            ..Queue::default()
        }
    }

    #[test]
    fn what_nobody_touches_stays_as_it_is() {
        let (same, mask) = Settings::of(&queue()).change(&queue()).unwrap();
        assert_eq!((same, mask), (queue(), Vec::new()));
    }

    #[test]
    fn what_is_not_set_is_not_brief() {
        let span = |seconds| Some(prost_types::Duration { seconds, nanos: 0 });
        let plain = Queue { retention: span(0), dedup_window: span(300), ..Queue::default() };
        assert_eq!(Settings::of(&plain).brief(), []);
        let brief = Settings::of(&Queue { retention: span(60), ..queue() }).brief();
        let expected = [
            ("most attempts", "3"),
            ("jitter", "0.5"),
            ("lease", "1s 500ms"),
            ("retention", "1m"),
            ("labels", "team=billing"),
        ];
        assert_eq!(brief, expected.map(|(name, value)| (name, value.to_owned())));
    }

    #[test]
    fn changes_are_named_and_nothing_else() {
        let settings = Settings {
            max_attempts: String::new(),
            jitter: String::new(),
            discard_failed: "true".to_owned(),
            labels: "team = ops\r\n\r\ntier=1\r\n".to_owned(),
            ..Settings::of(&queue())
        };
        let (changed, mask) = settings.change(&queue()).unwrap();
        assert_eq!(mask, ["max_attempts", "discard_failed", "retry_policy", "labels"]);
        assert_eq!(
            (changed.max_attempts, changed.retry_policy, changed.discard_failed),
            (None, None, true)
        );
        assert_eq!(changed.labels.len(), 2);
        let wrong = Settings { max_depth: "many".to_owned(), ..Settings::of(&queue()) };
        assert_eq!(wrong.change(&queue()).unwrap_err().fields[0].0, "max_depth");
        let wrong = Settings { labels: "team".to_owned(), ..Settings::of(&queue()) };
        assert_eq!(wrong.change(&queue()).unwrap_err().fields[0].0, "labels");
    }
}
