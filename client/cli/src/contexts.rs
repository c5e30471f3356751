//! `sluice context`: brokers by name, in a file of the user.

use std::{
    collections::BTreeMap,
    env, fs,
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Once,
};

use clap::Subcommand;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{connection::Connection, context::Context, failure::Failure, output::harmless};

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

/// The contexts of a user. Without debug output, as it may hold tokens.
#[derive(Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Contexts {
    #[serde(skip_serializing_if = "Option::is_none")]
    current: Option<String>,
    #[serde(rename = "context")]
    contexts: BTreeMap<String, Connection>,
}

impl Contexts {
    /// Returns the context with this name, or the current one, or `None` if there is none.
    pub(crate) fn find(&self, name: Option<&str>) -> Result<Option<&Connection>, Failure> {
        let name = name.or(self.current.as_deref());
        name.map(|name| self.contexts.get(name).ok_or_else(|| unknown(name))).transpose()
    }

    /// Reads the contexts of the user; none if there is no file, or none that this user can reach. A `HOME` of another user must not
    /// keep a command from the broker of this machine.
    pub(crate) fn read() -> Result<Self, Failure> {
        let Some(path) = path() else { return Ok(Self::default()) };
        if let Err(error) = fs::File::open(&path)
            && is_out_of_reach(&error)
        {
            static WARNED: Once = Once::new();
            let path = harmless(&path.display().to_string(), false);
            WARNED.call_once(|| eprintln!("sluice: no contexts are used: {path}: {error}"));
            return Ok(Self::default());
        }
        Self::read_from(&path)
    }

    fn read_from(path: &Path) -> Result<Self, Failure> {
        let failed = |source| Failure::File { path: path.to_owned(), source };
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(failed(error)),
        };
        let contexts: Self = toml::from_str(&text).map_err(|error| {
            // The whole error shows the line, which may be that of a token.
            failed(io::Error::new(io::ErrorKind::InvalidData, error.message().to_owned()))
        })?;
        let mode = fs::metadata(path).map_err(failed)?.permissions().mode();
        let holds_token = contexts.contexts.values().any(|context| context.token.is_some());
        if holds_token && mode & 0o077 != 0 {
            let why = "it holds tokens and others may read it; run chmod 600 on it";
            return Err(failed(io::Error::new(io::ErrorKind::PermissionDenied, why)));
        }
        Ok(contexts)
    }

    /// Writes the file anew: a crash leaves the one or the other.
    fn write_to(&self, path: &Path) -> Result<(), Failure> {
        // Behind a link is the file, which may be kept elsewhere.
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let failed = |source| Failure::File { path: path.clone(), source };
        let text = toml::to_string(self).map_err(|error| failed(io::Error::other(error)))?;
        let folder = path.parent().unwrap_or(Path::new("."));
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
        let new = path.with_extension(format!("toml.{}", std::process::id()));
        let written = (|| {
            let mut file =
                fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&new, &path)
        })();
        written.map_err(|error| {
            let _ = fs::remove_file(&new);
            failed(error)
        })
    }
}

/// Returns true if the file belongs to somebody else, or cannot be there.
fn is_out_of_reach(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::NotADirectory)
}

fn unknown(name: &str) -> Failure {
    Failure::Usage(format!(
        "there is no context {name}; `sluice context list` shows those there are"
    ))
}

/// Returns the path of the user's contexts; `None` if the user has no home.
fn path() -> Option<PathBuf> {
    let absolute = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let folder = absolute("XDG_CONFIG_HOME").or_else(|| Some(absolute("HOME")?.join(".config")))?;
    Some(folder.join("sluice").join("contexts.toml"))
}

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
    use super::*;

    fn kept(token: &str) -> Connection {
        let server = vec!["https://queue.example:7400".to_owned()];
        Connection { server, token: Some(token.to_owned()), ..Connection::default() }
    }

    #[test]
    fn the_file_is_for_its_owner_alone_and_reads_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sluice").join("contexts.toml");
        let mut contexts = Contexts::read_from(&path).unwrap_or_default();
        assert!(contexts.find(None).is_ok_and(|found| found.is_none()));
        contexts.contexts.insert("prod".to_owned(), kept("secret"));
        contexts.current = Some("prod".to_owned());
        for _ in 0..2 {
            assert!(contexts.write_to(&path).is_ok());
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        let Ok(read) = Contexts::read_from(&path) else { panic!("it does not read back") };
        let found = read.find(None).ok().flatten().map(|entry| entry.token.as_deref());
        assert_eq!(found, Some(Some("secret")));
        assert!(read.find(Some("other")).is_err());
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_with_a_token_that_others_may_read_is_refused_and_errors_show_no_token() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("contexts.toml");
        fs::write(&path, "[context.a]\nserver = [\"http://a\"]\ntoken = \"secret\"\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let error = Contexts::read_from(&path).err().unwrap().to_string();
        assert!(error.contains("chmod 600") && !error.contains("secret"), "{error}");
        fs::write(&path, "[context.a]\nserver = [\"http://a\"]\ntokn = \"secret\"\n").unwrap();
        let error = Contexts::read_from(&path).err().unwrap().to_string();
        assert!(error.contains("tokn") && !error.contains("secret"), "{error}");
    }

    #[test]
    fn a_file_of_another_user_is_out_of_reach_and_a_broken_one_is_not() {
        let of = |kind: io::ErrorKind| is_out_of_reach(&io::Error::from(kind));
        assert!(of(io::ErrorKind::PermissionDenied) && of(io::ErrorKind::NotADirectory));
        assert!(!of(io::ErrorKind::InvalidData) && !of(io::ErrorKind::NotFound));
        let error = fs::File::open("/dev/null/sluice/contexts.toml").unwrap_err();
        assert!(is_out_of_reach(&error), "{error}");
    }

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
