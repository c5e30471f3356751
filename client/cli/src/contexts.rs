//! The file of contexts: brokers by name, for one user.

use std::{
    collections::BTreeMap,
    env, fs,
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Once,
};

use serde::{Deserialize, Serialize};

use crate::{connection::Connection, failure::Failure, files::put_in_place, output::harmless};

/// The contexts of a user. Without debug output, as it may hold tokens.
#[derive(Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Contexts {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) current: Option<String>,
    #[serde(rename = "context")]
    pub(crate) contexts: BTreeMap<String, Connection>,
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

    /// Reads a file of contexts; none if it is not there.
    pub(crate) fn read_from(path: &Path) -> Result<Self, Failure> {
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
    pub(crate) fn write_to(&self, path: &Path) -> Result<(), Failure> {
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
            put_in_place(&new, &path)
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

/// Returns that there is no such context.
pub(crate) fn unknown(name: &str) -> Failure {
    Failure::Usage(format!(
        "there is no context {name}; `sluice context list` shows those there are"
    ))
}

/// Returns the path of the user's contexts; `None` if the user has no home.
pub(crate) fn path() -> Option<PathBuf> {
    let absolute = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let folder = absolute("XDG_CONFIG_HOME").or_else(|| Some(absolute("HOME")?.join(".config")))?;
    Some(folder.join("sluice").join("contexts.toml"))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn kept(token: &str) -> Connection {
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
}
