//! How to reach the brokers: by options, by the environment, and by a context.

use std::path::{Path, PathBuf};

use clap::{ArgMatches, parser::ValueSource};
use serde::{Deserialize, Serialize};
use sluicegate_client::ClientBuilder;

use crate::{failure::Failure, options::Global};

/// Where a broker is if nothing says so.
const DEFAULT_SERVER: &str = "http://127.0.0.1:7400";

/// Where the brokers are, and how to be let in. Without debug output, as it may hold a token.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Connection {
    pub(crate) server: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_file: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ca: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cert: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) key: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tls_server_name: Option<String>,
}

impl Connection {
    /// Returns what comes from one source: the options of the command line, or the environment.
    pub(crate) fn from(
        global: &Global,
        matches: &ArgMatches,
        source: ValueSource,
    ) -> Result<Self, Failure> {
        let is = |id: &str| matches.value_source(id) == Some(source);
        let given = Self {
            server: if is("server") { global.server.clone() } else { Vec::new() },
            token: global.token.clone().filter(|_| is("token")),
            token_file: global.token_file.clone().filter(|_| is("token_file")),
            ca: global.ca.clone().filter(|_| is("ca")),
            cert: global.cert.clone().filter(|_| is("cert")),
            key: global.key.clone().filter(|_| is("key")),
            tls_server_name: global.tls_server_name.clone().filter(|_| is("tls_server_name")),
        };
        if given.token.is_some() && given.token_file.is_some() {
            let why = match source {
                ValueSource::EnvVariable => "SLUICE_TOKEN and SLUICE_TOKEN_FILE are both set",
                _ => "--token and --token-file are both given",
            };
            return Err(Failure::Usage(why.into()));
        }
        Ok(given)
    }

    /// Returns these settings, and those of `other` where they say nothing.
    pub(crate) fn over(self, other: Self) -> Self {
        // A token and its file are one setting, and so are a certificate and its key.
        let (token, token_file) = match (self.token, self.token_file) {
            (None, None) => (other.token, other.token_file),
            given => given,
        };
        let (cert, key) = match (self.cert, self.key) {
            (None, None) => (other.cert, other.key),
            given => given,
        };
        Self {
            server: if self.server.is_empty() { other.server } else { self.server },
            token,
            token_file,
            ca: self.ca.or(other.ca),
            cert,
            key,
            tls_server_name: self.tls_server_name.or(other.tls_server_name),
        }
    }

    /// Returns these settings with the address that is used if nothing names one.
    pub(crate) fn or_default(mut self) -> Self {
        if self.server.is_empty() {
            self.server.push(DEFAULT_SERVER.to_owned());
        }
        self
    }

    /// Returns the token, read from its file if need be.
    pub(crate) fn bearer_token(&self) -> Result<Option<String>, Failure> {
        match (&self.token, &self.token_file) {
            (Some(token), _) => Ok(Some(token.clone())),
            (None, Some(path)) => Ok(Some(read_text(path)?.trim().to_owned())),
            (None, None) => Ok(None),
        }
    }

    /// Adds the token and what TLS needs.
    pub(crate) fn apply(&self, mut builder: ClientBuilder) -> Result<ClientBuilder, Failure> {
        if let Some(token) = self.bearer_token()? {
            builder = builder.bearer_token(token);
        }
        if let Some(path) = &self.ca {
            builder = builder.ca_certificate(read_text(path)?);
        }
        builder = match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => {
                builder.client_certificate(read_text(cert)?, read_text(key)?)
            }
            (None, None) => builder,
            _ => return Err(Failure::Usage("--cert and --key go together".into())),
        };
        if let Some(name) = &self.tls_server_name {
            builder = builder.tls_domain(name);
        }
        Ok(builder)
    }
}

fn read_text(path: &Path) -> Result<String, Failure> {
    std::fs::read_to_string(path).map_err(|source| Failure::File { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_first_wins_and_a_token_is_one_setting_with_its_file() {
        let token_file = Some(PathBuf::from("/context/token"));
        let ca = Some(PathBuf::from("/context/ca"));
        let server = vec!["https://context".to_owned()];
        let context = Connection { server, token_file, ca, ..Connection::default() };
        let environment =
            Connection { token: Some("environment".to_owned()), ..Connection::default() };
        let merged = Connection::default().over(environment).over(context).or_default();
        assert_eq!(merged.server, ["https://context"]);
        assert_eq!(merged.token.as_deref(), Some("environment"));
        assert_eq!(merged.token_file, None);
        assert_eq!(merged.ca, Some(PathBuf::from("/context/ca")));
        assert_eq!(Connection::default().or_default().server, [DEFAULT_SERVER]);
    }
}
