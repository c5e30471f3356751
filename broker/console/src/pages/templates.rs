//! Templates: settings of queues that are not there yet.

use axum::{Form as Body, extract::Path};
use maud::{Markup, html};
use prost_types::FieldMask;
use serde::Deserialize;
use sluicegate_proto::v1::{
    CreateTemplateRequest, DeleteTemplateRequest, GetTemplateRequest, ListTemplatesRequest, Queue,
    QueueTemplate, UpdateTemplateRequest,
};
use tonic::Status;

use super::{
    answer::{Answer, done, rejected, shown},
    frame::{Field, Form, Section, badge, page},
    settings::{Settings, fields},
};
use crate::{api::incomplete, problem::Problem, text, visitor::Visitor};

/// The most templates that the page shows: all that there may be.
const MOST: i32 = 1_000;

pub(super) async fn show(visitor: Visitor) -> Answer {
    let request = ListTemplatesRequest { page_size: MOST, page_token: String::new() };
    let templates = match visitor.api().template.list_templates(request).await {
        // A token without `view` anywhere has no templates to see.
        Err(status) if status.code() == tonic::Code::PermissionDenied => Vec::new(),
        answer => answer?.into_inner().templates,
    };
    let body = html! {
        div.heading {
            h1 { "Templates" }
            @if visitor.rights("").manage { a.button href="/new-template" { "New template" } }
        }
        p.quiet {
            "Settings that a queue has when it comes into being, with its first push or its first dead letter. Of several patterns that match its name, "
            "the one that says most decides. Queues that are there stay as they are."
        }
        @if templates.is_empty() {
            div.nothing { p { "There are no templates: new queues have the broker's own settings." } }
        } @else { (table(&visitor, &templates)) }
    };
    Ok(shown(page(&visitor, "Templates", Section::Templates, &body)))
}

fn table(visitor: &Visitor, templates: &[QueueTemplate]) -> Markup {
    html! {
        table.templates {
            thead { tr {
                th scope="col" { "Pattern" }
                th scope="col" { "Settings" }
                th.middle scope="col" { "Changed" }
                th scope="col" { span.quiet { "Action" } }
            } }
            tbody { @for template in templates { (line(visitor, template)) } }
        }
    }
}

fn line(visitor: &Visitor, template: &QueueTemplate) -> Markup {
    let address = format!("/templates/{}", text::encode(&template.pattern));
    let settings = template.settings.clone().unwrap_or_default();
    let brief = Settings::of(&settings).brief();
    html! {
        tr {
            th scope="row" {
                code { (template.pattern) } @if settings.paused { " " (badge("warn", "paused")) }
                @if !is_default(&settings.group) { br; small { "group " (settings.group) } }
            }
            td {
                @if brief.is_empty() { span.quiet { "the broker's own" } }
                @for (at, (name, value)) in brief.iter().enumerate() {
                    @if at > 0 { br; } small { (name) ": " } (value)
                }
            }
            td.middle { (text::away(template.update_time.as_ref())) }
            td { @if visitor.rights(&template.pattern).manage { div.row-actions {
                a.button href={ (address) "/edit" } { "Edit" }
                a.button.risky href={ (address) "/delete" } data-dialog { "Delete" }
            } } }
        }
    }
}

fn is_default(group: &str) -> bool {
    group.is_empty() || group == "default"
}

async fn get(visitor: &Visitor, pattern: &str) -> Result<QueueTemplate, Status> {
    let request = GetTemplateRequest { pattern: pattern.to_owned() };
    let answer = visitor.api().template.get_template(request).await?.into_inner();
    answer.template.ok_or_else(incomplete)
}

/// What is entered in a form.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Entered {
    pattern: String,
    #[serde(flatten)]
    settings: Settings,
}

pub(super) async fn create_form(visitor: Visitor) -> Answer {
    Ok(shown(create_page(&visitor, &Entered::default(), None)))
}

fn create_page(visitor: &Visitor, entered: &Entered, problem: Option<&Problem>) -> Markup {
    let pattern = Field {
        name: "pattern",
        label: "Pattern",
        value: &entered.pattern,
        hint: "Names of queues, in which * stands for anything.",
        placeholder: "orders.*",
    };
    let form = Form {
        title: "New template",
        text: html! {},
        fields: html! { (pattern.line(problem)) (fields(&entered.settings, problem)) },
        action: "/templates",
        button: "Create",
        is_danger: false,
        back: "/templates",
    };
    form.page(visitor, Section::Templates, problem)
}

pub(super) async fn create(visitor: Visitor, Body(entered): Body<Entered>) -> Answer {
    let created = async {
        let (settings, _) = entered.settings.change(&Queue::default())?;
        let pattern = entered.pattern.trim().to_owned();
        let settings = Some(settings);
        let template = QueueTemplate { pattern, settings, ..QueueTemplate::default() };
        let request = CreateTemplateRequest { template: Some(template) };
        visitor.api().template.create_template(request).await?;
        Ok::<_, Problem>(())
    };
    match created.await {
        Ok(()) => Ok(done("/templates", "template-created", 1)),
        Err(problem) => {
            let page = create_page(&visitor, &entered, Some(&problem));
            Ok(rejected(&problem, page))
        }
    }
}

pub(super) async fn edit_form(visitor: Visitor, Path(pattern): Path<String>) -> Answer {
    let template = get(&visitor, &pattern).await?;
    let settings = Settings::of(&template.settings.unwrap_or_default());
    Ok(shown(edit_page(&visitor, &pattern, &settings, None)))
}

fn edit_page(
    visitor: &Visitor,
    pattern: &str,
    settings: &Settings,
    problem: Option<&Problem>,
) -> Markup {
    let action = format!("/templates/{}/edit", text::encode(pattern));
    let form = Form {
        title: "Edit this template",
        text: html! { p { code { (pattern) } ": queues that are there stay as they are." } },
        fields: fields(settings, problem),
        action: &action,
        button: "Save",
        is_danger: false,
        back: "/templates",
    };
    form.page(visitor, Section::Templates, problem)
}

pub(super) async fn edit(
    visitor: Visitor,
    Path(pattern): Path<String>,
    Body(entered): Body<Settings>,
) -> Answer {
    let before = get(&visitor, &pattern).await?;
    let saved = async {
        let (settings, names) = entered.change(&before.settings.clone().unwrap_or_default())?;
        if names.is_empty() {
            return Ok(());
        }
        let paths = names.into_iter().map(|name| format!("settings.{name}")).collect();
        let template = QueueTemplate { settings: Some(settings), ..before };
        let (template, update_mask) = (Some(template), Some(FieldMask { paths }));
        let request = UpdateTemplateRequest { template, update_mask };
        visitor.api().template.update_template(request).await?;
        Ok::<_, Problem>(())
    };
    match saved.await {
        Ok(()) => Ok(done("/templates", "template-saved", 1)),
        Err(problem) => {
            let page = edit_page(&visitor, &pattern, &entered, Some(&problem));
            Ok(rejected(&problem, page))
        }
    }
}

pub(super) async fn delete_form(visitor: Visitor, Path(pattern): Path<String>) -> Answer {
    get(&visitor, &pattern).await?;
    let action = format!("/templates/{}/delete", text::encode(&pattern));
    let form = Form {
        title: "Delete this template",
        text: html! { p { code { (pattern) } ": queues that it has made stay as they are." } },
        fields: html! {},
        action: &action,
        button: "Delete",
        is_danger: true,
        back: "/templates",
    };
    Ok(shown(form.page(&visitor, Section::Templates, None)))
}

pub(super) async fn delete(visitor: Visitor, Path(pattern): Path<String>) -> Answer {
    let request = DeleteTemplateRequest { pattern };
    visitor.api().template.delete_template(request).await?;
    Ok(done("/templates", "template-deleted", 1))
}
