//! `sluice context`: adds, lists and removes contexts.

use clap::Subcommand;
use serde_json::{Value, json};

use crate::{
    connection::Connection,
    context::Context,
    contexts::{Contexts, path, unknown},
    failure::Failure,
};

/// The command line of `sluice context`.
#[derive(Debug, Subcommand)]
pub(crate) enum ContextCommand {
    /// Add a context: --server, --token-file, --ca and so on, as given on this command line, under a name
    Add {
        /// Its name
        name: String,
        /// Keep the token itself, not the path of --token-file. The file can be /dev/stdin
        #[arg(long)]
        keep_token: bool,
        /// Replace a context of this name
        #[arg(long)]
        replace: bool,
    },
    /// Make a context the current one, which is used when no other is named
    Use {
        /// Its name
        name: String,
    },
    /// List the contexts
    List,
    /// Show a context. Its token is not shown
    Show {
        /// Its name [default: the current one]
        name: Option<String>,
    },
    /// Remove a context
    Remove {
        /// Its name
        name: String,
    },
}

/// Carries out a command.
pub(crate) fn run(context: &Context, command: ContextCommand) -> Result<(), Failure> {
    let no_home = "there is no home folder for contexts: set HOME or XDG_CONFIG_HOME";
    let path = path().ok_or_else(|| Failure::Usage(no_home.into()))?;
    let mut contexts = Contexts::read_from(&path)?;
    let name = match command {
        ContextCommand::Add { name, keep_token, replace } => {
            let given = context.given_by_options();
            let added = prepare(&name, given, keep_token)?;
            if contexts.contexts.contains_key(&name) && !replace {
                let why = format!("context {name} is there already; --replace replaces it");
                return Err(Failure::Usage(why));
            }
            contexts.contexts.insert(name.clone(), added);
            contexts.current.get_or_insert_with(|| name.clone());
            contexts.write_to(&path)?;
            name
        }
        ContextCommand::Use { name } => {
            if !contexts.contexts.contains_key(&name) {
                return Err(unknown(&name));
            }
            contexts.current = Some(name.clone());
            contexts.write_to(&path)?;
            name
        }
        ContextCommand::Remove { name } => {
            if contexts.contexts.remove(&name).is_none() {
                return Err(unknown(&name));
            }
            if contexts.current.as_ref() == Some(&name) {
                contexts.current = None;
            }
            contexts.write_to(&path)?;
            let text = format!("{name} removed");
            return Ok(context.output.one(&json!({ "removed": name }), &text)?);
        }
        ContextCommand::List => {
            let rows = contexts.contexts.iter().map(|(name, entry)| {
                let is_current = contexts.current.as_ref() == Some(name);
                let mark = if is_current { "*" } else { "" };
                let cells =
                    vec![mark.to_owned(), name.clone(), entry.server.join(", "), token(entry)];
                (shown(name, entry, is_current), cells)
            });
            let head = ["", "CONTEXT", "SERVER", "TOKEN"];
            return Ok(context.output.list(&head, rows.collect())?);
        }
        ContextCommand::Show { name } => {
            let none = "there is no current context; `sluice context use` chooses one";
            name.or_else(|| contexts.current.clone()).ok_or_else(|| Failure::Usage(none.into()))?
        }
    };
    let entry = contexts.contexts.get(&name).ok_or_else(|| unknown(&name))?;
    let is_current = contexts.current.as_ref() == Some(&name);
    Ok(context.output.object(&shown(&name, entry, is_current))?)
}

/// Returns the context as it is stored: with a server, with paths that hold anywhere, and with the token if it is kept.
fn prepare(name: &str, given: &Connection, keep_token: bool) -> Result<Connection, Failure> {
    let is_good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if name.is_empty() || !name.chars().all(is_good) {
        let why =
            "the name of a context consists of letters, digits, dots, hyphens and underscores";
        return Err(Failure::Usage(why.into()));
    }
    if given.server.is_empty() {
        return Err(Failure::Usage("name the broker of the context: --server URL".into()));
    }
    let mut added = given.clone();
    if keep_token {
        added.token = added.bearer_token()?;
        added.token_file = None;
        if added.token.is_none() {
            let why = "--keep-token needs --token-file (it can be /dev/stdin) or --token";
            return Err(Failure::Usage(why.into()));
        }
    }
    let paths = [&mut added.token_file, &mut added.ca, &mut added.cert, &mut added.key];
    for path in paths.into_iter().flatten() {
        *path = std::path::absolute(&*path)?;
    }
    Ok(added)
}

/// Returns where the token of a context is, in words.
fn token(entry: &Connection) -> String {
    match (&entry.token, &entry.token_file) {
        (Some(_), _) => "kept here".to_owned(),
        (None, Some(path)) => path.display().to_string(),
        (None, None) => String::new(),
    }
}

/// Returns a context as JSON, without its token.
fn shown(name: &str, entry: &Connection, is_current: bool) -> Value {
    let mut value =
        json!({ "name": name, "current": is_current, "server": entry.server.join(",") });
    if entry.token.is_some() {
        value["token_kept"] = true.into();
    }
    let files = [
        ("token_file", &entry.token_file),
        ("ca", &entry.ca),
        ("cert", &entry.cert),
        ("key", &entry.key),
    ];
    for (field, path) in files {
        if let Some(path) = path {
            value[field] = path.display().to_string().into();
        }
    }
    if let Some(name) = &entry.tls_server_name {
        value["tls_server_name"] = name.as_str().into();
    }
    value
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::contexts::tests::kept;

    #[test]
    fn what_is_shown_has_no_token() {
        let text = shown("prod", &kept("secret"), true).to_string();
        assert!(text.contains("token_kept") && !text.contains("secret"), "{text}");
        assert!(!token(&kept("secret")).contains("secret"));
    }

    #[test]
    fn paths_of_a_context_hold_anywhere() {
        let ca = Some(PathBuf::from("ca.pem"));
        let given = Connection { ca, ..kept("secret") };
        let Ok(added) = prepare("prod", &given, false) else { panic!("refused") };
        assert!(added.ca.is_some_and(|path| path.is_absolute()));
        assert!(prepare("no/name", &given, false).is_err());
        assert!(prepare("prod", &Connection::default(), false).is_err());
    }
}
