//! What all pages have around them, and the parts that several pages have.

use maud::{DOCTYPE, Markup, html};

use crate::{assets, problem::Problem, text, visitor::Visitor};

/// The part of the console to which a page belongs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Section {
    Queues,
    DeadLetters,
    Schedules,
    Templates,
    Consumers,
    Brokers,
    None,
}

const SECTIONS: [(Section, &str, &str, &str); 6] = [
    (Section::Queues, "/queues", "Queues", "g q"),
    (Section::DeadLetters, "/dead-letters", "Dead letters", "g d"),
    (Section::Schedules, "/schedules", "Schedules", "g s"),
    (Section::Templates, "/templates", "Templates", "g t"),
    (Section::Consumers, "/consumers", "Consumers", "g c"),
    (Section::Brokers, "/brokers", "Brokers", "g b"),
];

const KEYS: [(&str, &str); 12] = [
    ("/", "search"),
    ("j k or ↓ ↑", "next and previous row"),
    ("Enter", "open the row"),
    ("g q", "queues"),
    ("g d", "dead letters"),
    ("g s", "schedules"),
    ("g t", "templates"),
    ("g c", "consumers"),
    ("g b", "brokers"),
    ("u", "up: from an item to its queue, from a queue to all"),
    ("t", "dark or light"),
    ("?", "this help"),
];

/// Returns what was done just before, in words, out of the address to which the browser was led.
pub(crate) fn notice(query: &str) -> Option<String> {
    let notice = query.split('&').find_map(|part| part.strip_prefix("notice="))?;
    let (word, items) = notice.split_once('.')?;
    let items: i64 = items.parse().ok()?;
    let of_items = |what: &str| format!("{} {what}.", text::counted(items, "item"));
    Some(match word {
        "pushed" => of_items("pushed"),
        "purged" => of_items("deleted"),
        "redriven" => of_items("moved back"),
        "replayed" => of_items("ready again"),
        "deleted" => format!("The queue is deleted, and {} with it.", text::counted(items, "item")),
        "item-deleted" => "The item is deleted.".to_owned(),
        "paused" => "The queue is paused: nothing is handed out.".to_owned(),
        "resumed" => "The queue goes on.".to_owned(),
        "saved" => "The settings are saved.".to_owned(),
        "created" => "The queue is created.".to_owned(),
        "schedule-created" => "The schedule is created.".to_owned(),
        "schedule-paused" => "The schedule is paused.".to_owned(),
        "schedule-resumed" => "The schedule goes on.".to_owned(),
        "schedule-run" => "1 item is pushed. The ticks stay as they are.".to_owned(),
        "schedule-saved" => "The schedule is saved.".to_owned(),
        "template-created" => "The template is created.".to_owned(),
        "template-saved" => {
            "The template is saved. Queues that are there stay as they are.".to_owned()
        }
        "template-deleted" => {
            "The template is deleted. Queues that it has made stay as they are.".to_owned()
        }
        "schedule-deleted" => "The schedule is deleted.".to_owned(),
        _ => return None,
    })
}

/// Returns a whole page.
pub(super) fn page(visitor: &Visitor, title: &str, section: Section, body: &Markup) -> Markup {
    let is_known = visitor.token.is_some() || !visitor.console.needs_token;
    html! {
        (DOCTYPE)
        html lang="en" data-theme=[visitor.theme] {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) " · Sluicegate" }
                link rel="icon" href=(assets::address("icon.svg"));
                link rel="stylesheet" href=(assets::address("console.css"));
                script src=(assets::address("console.js")) defer {}
            }
            body {
                a.skip href="#main" { "Skip to the content" }
                header.top {
                    a.brand href="/queues" { img src=(assets::address("icon.svg")) alt="" width="20" height="20"; "Sluicegate" }
                    @if is_known { (navigation(section)) }
                    div.tools {
                        button.plain #theme type="button" aria-label="Dark or light" title="Dark or light (t)" { "◐" }
                        button.plain #keys type="button" aria-label="Keyboard" title="Keyboard (?)" { "?" }
                        @if visitor.token.is_some() {
                            form method="post" action="/sign-out" { button.plain { "Sign out" } }
                        }
                    }
                }
                div #notice role="status" {
                    @if let Some(notice) = &visitor.notice { p { (notice) } }
                }
                main #main tabindex="-1" { (body) }
                dialog #dialog aria-label="Action" {}
                (help())
            }
        }
    }
}

fn navigation(section: Section) -> Markup {
    html! {
        nav aria-label="Pages" {
            @for (this, address, name, keys) in SECTIONS {
                a href=(address) title=(keys) aria-current=[(this == section).then_some("page")] { (name) }
            }
        }
    }
}

fn help() -> Markup {
    html! {
        dialog #help aria-labelledby="help-title" {
            h2 #help-title { "Keyboard" }
            dl.keys {
                @for (keys, what) in KEYS { dt { kbd { (keys) } } dd { (what) } }
            }
            form method="dialog" { button { "Close" } }
        }
    }
}

/// A form that asks for something, or for confirmation.
pub(super) struct Form<'a> {
    pub(super) title: &'a str,
    /// What happens, before it does.
    pub(super) text: Markup,
    pub(super) fields: Markup,
    pub(super) action: &'a str,
    pub(super) button: &'a str,
    /// True if something is lost.
    pub(super) is_danger: bool,
    pub(super) back: &'a str,
}

impl Form<'_> {
    /// Returns the form as a page. Links marked `data-dialog` show it in a dialog instead.
    pub(super) fn page(
        &self,
        visitor: &Visitor,
        section: Section,
        problem: Option<&Problem>,
    ) -> Markup {
        let body = html! {
            form.asks method="post" action=(self.action) {
                h1 { (self.title) }
                @if let Some(problem) = problem { p.problem role="alert" { (problem.text) } }
                (self.text)
                (self.fields)
                div.buttons {
                    button.primary.danger[self.is_danger] type="submit" { (self.button) }
                    a.button href=(self.back) data-close { "Cancel" }
                }
            }
        };
        page(visitor, self.title, section, &body)
    }
}

/// One field of a form.
pub(super) struct Field<'a> {
    pub(super) name: &'a str,
    pub(super) label: &'a str,
    pub(super) value: &'a str,
    pub(super) hint: &'a str,
    pub(super) placeholder: &'a str,
}

impl Field<'_> {
    /// Returns a field of one line, with what is wrong with it.
    pub(super) fn line(&self, problem: Option<&Problem>) -> Markup {
        let wrong = problem.and_then(|problem| wrong(problem, self.name));
        let hint = format!("{}-hint", self.name);
        html! {
            div.field {
                label for=(self.name) { (self.label) }
                input #(self.name) name=(self.name) value=(self.value) placeholder=(self.placeholder) autocomplete="off"
                    spellcheck="false" aria-describedby=(hint) aria-invalid=[wrong.map(|_| "true")];
                small #(hint) {
                    @if let Some(wrong) = wrong { strong.wrong { (wrong) } " " }
                    (self.hint)
                }
            }
        }
    }

    /// Returns a box to tick.
    pub(super) fn tick(&self) -> Markup {
        let hint = format!("{}-hint", self.name);
        html! {
            div.field.tick {
                label for=(self.name) { (self.label) }
                input #(self.name) type="checkbox" name=(self.name) value="true" checked[self.value == "true"] aria-describedby=(hint);
                small #(hint) { (self.hint) }
            }
        }
    }
}

/// Returns what is wrong with a field. The broker names fields by their path in the message.
fn wrong<'a>(problem: &'a Problem, field: &str) -> Option<&'a str> {
    let is_it = |path: &str| {
        let last = path.rsplit('.').next().unwrap_or_default();
        last == field || last.split('[').next() == Some(field)
    };
    problem.fields.iter().find(|(path, _)| is_it(path)).map(|(_, text)| text.as_str())
}

/// Returns a small word that stands out.
pub(super) fn badge(kind: &str, word: &str) -> Markup {
    html! { span class={ "badge " (kind) } { (word) } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_are_known_words_alone() {
        assert_eq!(notice("a=b&notice=purged.1200").as_deref(), Some("1,200 items deleted."));
        assert_eq!(
            notice("notice=paused.0").as_deref(),
            Some("The queue is paused: nothing is handed out.")
        );
        assert_eq!(notice("notice=<script>.1"), None);
        assert_eq!(notice("notice=purged.x"), None);
    }

    #[test]
    fn problems_are_shown_beside_their_fields() {
        let mut problem = Problem::field("lease", "must be positive");
        problem
            .fields
            .push(("queue.retry_policy.jitter".to_owned(), "must be at most 1".to_owned()));
        assert_eq!(wrong(&problem, "lease"), Some("must be positive"));
        assert_eq!(wrong(&problem, "jitter"), Some("must be at most 1"));
        assert_eq!(wrong(&problem, "retry_policy"), None);
    }
}
