//! What all commands share: how to reach the broker, and how to show results.

use std::{path::PathBuf, time::Duration};

use sluicegate_client::{Client, Error};

use crate::{
    failure::Failure,
    output::Output,
    protocol::{self, Protocol},
    values,
};

/// Options that come before or after any command.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Options of all commands")]
pub(crate) struct Global {
    /// URL of the broker; of several, separated by commas, the first that answers is used
    #[arg(
        long,
        global = true,
        value_name = "URL",
        env = "SLUICE_SERVER",
        hide_env_values = true,
        value_delimiter = ',',
        default_value = "http://127.0.0.1:7400"
    )]
    pub(crate) server: Vec<String>,
    /// Bearer token. Every user of the machine can read it on a command line: prefer --token-file
    #[arg(long, global = true, env = "SLUICE_TOKEN", hide_env_values = true)]
    pub(crate) token: Option<String>,
    /// File that holds the bearer token and nothing else
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "SLUICE_TOKEN_FILE",
        hide_env_values = true,
        conflicts_with = "token"
    )]
    pub(crate) token_file: Option<PathBuf>,
    /// File with the certificate authorities to trust, for https (PEM)
    #[arg(long, global = true, value_name = "FILE", env = "SLUICE_CA", hide_env_values = true)]
    pub(crate) ca: Option<PathBuf>,
    /// File with the client certificate, for https (PEM)
    #[arg(long, global = true, value_name = "FILE", env = "SLUICE_CERT", hide_env_values = true)]
    pub(crate) cert: Option<PathBuf>,
    /// File with the private key of --cert (PEM)
    #[arg(long, global = true, value_name = "FILE", env = "SLUICE_KEY", hide_env_values = true)]
    pub(crate) key: Option<PathBuf>,
    /// Name that the broker's certificate must have [default: the host of the URL]
    #[arg(
        long,
        global = true,
        value_name = "NAME",
        env = "SLUICE_TLS_SERVER_NAME",
        hide_env_values = true
    )]
    pub(crate) tls_server_name: Option<String>,
    /// How long one call may take
    #[arg(long, global = true, value_name = "DURATION", default_value = "30s", value_parser = values::duration)]
    pub(crate) timeout: Duration,
    /// Print JSON, one object per line
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

/// What all commands have: how to connect, and where to print.
pub(crate) struct Context {
    global: Global,
    pub(crate) output: Output,
}

impl Context {
    pub(crate) fn new(global: Global) -> Self {
        let output = Output::new(global.json);
        Self { global, output }
    }

    /// Returns why the command failed: in place of a broken connection, what is at the address if that is no broker.
    pub(crate) async fn explain(&self, failure: Failure) -> Failure {
        if failure.is_of_web_server() {
            return Failure::WebServer(self.global.server.join(", "));
        }
        if !failure.is_of_connection() {
            return failure;
        }
        for url in &self.global.server {
            let spoken = protocol::spoken_at(url).await;
            let expected =
                if url.starts_with("https://") { Protocol::Tls } else { Protocol::Http2 };
            if let Some(spoken) = spoken.filter(|spoken| *spoken != expected) {
                return Failure::NotGrpc { url: url.clone(), spoken };
            }
        }
        failure
    }

    /// Connects. Fails immediately if no broker can be reached.
    pub(crate) async fn client(&self) -> Result<Client, Failure> {
        self.client_of(None).await
    }

    /// Connects to `server` if it is given, else to the brokers of --server.
    pub(crate) async fn client_of(&self, server: Option<&str>) -> Result<Client, Failure> {
        let servers: Vec<&str> = match server {
            Some(server) => vec![server],
            None => self.global.server.iter().map(String::as_str).collect(),
        };
        let mut urls = servers.into_iter();
        let mut builder = Client::builder(urls.next().unwrap_or_default());
        for url in urls {
            builder = builder.endpoint(url);
        }
        if let Some(token) = &self.global.token {
            builder = builder.bearer_token(token);
        }
        if let Some(path) = &self.global.token_file {
            builder = builder.bearer_token(read_text(path)?.trim());
        }
        if let Some(path) = &self.global.ca {
            builder = builder.ca_certificate(read_text(path)?);
        }
        builder = match (&self.global.cert, &self.global.key) {
            (Some(cert), Some(key)) => {
                builder.client_certificate(read_text(cert)?, read_text(key)?)
            }
            (None, None) => builder,
            _ => return Err(Failure::Usage("--cert and --key go together".into())),
        };
        if let Some(name) = &self.global.tls_server_name {
            builder = builder.tls_domain(name);
        }
        builder.request_timeout(self.global.timeout).connect().await.map_err(|error| match error {
            Error::InvalidAddress { .. } => {
                Failure::Usage(format!("--server: {error}: {}", why(&error)))
            }
            other => other.into(),
        })
    }
}

fn why(error: &Error) -> String {
    std::error::Error::source(error).map(ToString::to_string).unwrap_or_default()
}

fn read_text(path: &std::path::Path) -> Result<String, Failure> {
    std::fs::read_to_string(path).map_err(|source| Failure::File { path: path.to_owned(), source })
}
