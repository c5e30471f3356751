//! `sluice template`: settings of queues that come into being by use.

use clap::Subcommand;
use prost_types::FieldMask;
use serde_json::{Value, json};
use sluicegate_client::{
    Client,
    proto::{
        CreateTemplateRequest, DeleteTemplateRequest, GetTemplateRequest, ListTemplatesRequest,
        QueueTemplate, UpdateTemplateRequest,
    },
    tonic::Code,
};

use crate::{
    confirm::{self, Confirmation},
    context::Context,
    declare::template::brief_settings,
    failure::Failure,
    json,
    queue::Settings,
};

/// The command line of `sluice template`.
#[derive(Debug, Subcommand)]
pub(crate) enum TemplateCommand {
    /// List the templates
    List,
    /// Show a template
    Get(Pattern),
    /// Create a template, or change some of its settings; queues that are there stay as they are
    Set(Box<SetArgs>),
    /// Delete a template; queues that it has made stay as they are
    Delete {
        /// The template
        pattern: String,
        #[command(flatten)]
        confirmation: Confirmation,
    },
}

/// Names a template.
#[derive(Debug, clap::Args)]
pub(crate) struct Pattern {
    /// The template
    pattern: String,
}

/// The command line of `sluice template set`.
#[derive(Debug, clap::Args)]
pub(crate) struct SetArgs {
    /// Names of queues, in which `*` stands for anything; in quotation marks, so that the shell leaves it alone
    pattern: String,
    /// The group whose collection holds the items; empty: default
    #[arg(long)]
    group: Option<String>,
    /// Create the queues paused
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    paused: Option<bool>,
    #[command(flatten)]
    settings: Settings,
}

impl SetArgs {
    /// Returns the template with these settings, and the paths of those that were given.
    fn template(self) -> (QueueTemplate, Vec<String>) {
        let (mut settings, mut paths) = self.settings.apply(String::new());
        if let Some(group) = self.group {
            settings.group = group;
            paths.push("group".to_owned());
        }
        if let Some(paused) = self.paused {
            settings.paused = paused;
            paths.push("paused".to_owned());
        }
        let paths = paths.into_iter().map(|path| format!("settings.{path}")).collect();
        let settings = Some(settings);
        (QueueTemplate { pattern: self.pattern, settings, ..QueueTemplate::default() }, paths)
    }
}

pub(crate) async fn run(context: &Context, command: TemplateCommand) -> Result<(), Failure> {
    let is_asked = match &command {
        TemplateCommand::Delete { confirmation, .. } => {
            confirmation.is_needed("template delete")?
        }
        _ => false,
    };
    let client = context.client().await?;
    let mut service = client.template_service();
    let template = match command {
        TemplateCommand::List => return list(context, &client).await,
        TemplateCommand::Get(Pattern { pattern }) => {
            let request = client.request(GetTemplateRequest { pattern });
            service.get_template(request).await?.into_inner().template
        }
        TemplateCommand::Set(args) => set(&client, *args).await?,
        TemplateCommand::Delete { pattern, .. } => {
            if is_asked {
                confirm::ask(&format!(
                    "Delete template {pattern}? Queues that it has made stay as they are."
                ))?;
            }
            let request = DeleteTemplateRequest { pattern: pattern.clone() };
            service.delete_template(client.request(request)).await?;
            let value = json!({ "deleted": pattern });
            return Ok(context.output.one(&value, &format!("{pattern} deleted"))?);
        }
    };
    let value = json::template(&template.unwrap_or_default());
    let value = if context.output.is_json() { value } else { flat(value) };
    Ok(context.output.object(&value)?)
}

/// Changes a template, or creates it if it is not there.
async fn set(client: &Client, args: SetArgs) -> Result<Option<QueueTemplate>, Failure> {
    let mut service = client.template_service();
    let (template, paths) = args.template();
    let template = Some(template);
    if !paths.is_empty() {
        let update_mask = Some(FieldMask { paths });
        let request = UpdateTemplateRequest { template: template.clone(), update_mask };
        match service.update_template(client.request(request)).await {
            Err(status) if status.code() == Code::NotFound => {}
            updated => return Ok(updated?.into_inner().template),
        }
    }
    let request = client.request(CreateTemplateRequest { template });
    Ok(service.create_template(request).await?.into_inner().template)
}

/// Reads the templates page by page.
pub(crate) async fn list_templates(client: &Client) -> Result<Vec<QueueTemplate>, Failure> {
    let (mut templates, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = client.request(ListTemplatesRequest { page_size: 1_000, page_token });
        let page = client.template_service().list_templates(request).await?.into_inner();
        templates.extend(page.templates);
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return Ok(templates);
        }
    }
}

async fn list(context: &Context, client: &Client) -> Result<(), Failure> {
    let rows = list_templates(client).await?.into_iter().map(|template| {
        let value = json::template(&template);
        let settings = brief_settings(&template).into_iter().map(|(name, value)| match value {
            Value::String(text) => format!("{name}={text}"),
            value => format!("{name}={value}"),
        });
        let cells = vec![template.pattern.clone(), settings.collect::<Vec<_>>().join(" ")];
        (value, cells)
    });
    Ok(context.output.list(&["TEMPLATE", "SETTINGS"], rows.collect())?)
}

/// Returns the object with its settings among the other fields.
fn flat(value: Value) -> Value {
    let Value::Object(fields) = value else { return value };
    let mut all = serde_json::Map::new();
    for (name, value) in fields {
        match value {
            Value::Object(settings) if name == "settings" => all.extend(settings),
            value => drop(all.insert(name, value)),
        }
    }
    Value::Object(all)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(subcommand)]
        command: TemplateCommand,
    }

    #[test]
    fn exactly_what_is_given_is_set() {
        let line = ["x", "set", "orders.*", "--group", "eu", "--paused", "--max-attempts", "3"];
        let TemplateCommand::Set(args) = Line::parse_from(line).command else { panic!() };
        let (template, paths) = args.template();
        assert_eq!(paths, ["settings.max_attempts", "settings.group", "settings.paused"]);
        let settings = template.settings.unwrap();
        assert_eq!((template.pattern.as_str(), settings.name.as_str()), ("orders.*", ""));
        assert_eq!(
            (settings.group.as_str(), settings.paused, settings.max_attempts),
            ("eu", true, Some(3))
        );
    }
}
