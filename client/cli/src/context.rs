//! What all commands share: how to reach the broker, and how to show results.

use std::{path::PathBuf, time::Duration};

use clap::{ArgMatches, parser::ValueSource};
use sluicegate_client::{Client, Error};

use crate::{
    connection::Connection,
    contexts::Contexts,
    failure::Failure,
    output::Output,
    protocol::{self, Protocol},
    values,
};

/// Options that come before or after any command.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Options of all commands")]
pub(crate) struct Global {
    /// Context to use, of those that `sluice context` manages [default: the current one]
    #[arg(
        long,
        global = true,
        value_name = "NAME",
        env = "SLUICE_CONTEXT",
        hide_env_values = true
    )]
    pub(crate) context: Option<String>,
    /// URL of the broker; of several, separated by commas, the first that answers is used. Sets the current context aside
    /// [default: http://127.0.0.1:7400]
    #[arg(
        long,
        global = true,
        value_name = "URL",
        env = "SLUICE_SERVER",
        hide_env_values = true,
        value_delimiter = ','
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
        hide_env_values = true
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
    timeout: Duration,
    name: Option<String>,
    options: Connection,
    environment: Connection,
    pub(crate) output: Output,
}

impl Context {
    pub(crate) fn new(global: Global, matches: &ArgMatches) -> Result<Self, Failure> {
        Ok(Self {
            options: Connection::from(&global, matches, ValueSource::CommandLine)?,
            environment: Connection::from(&global, matches, ValueSource::EnvVariable)?,
            output: Output::new(global.json),
            timeout: global.timeout,
            name: global.context.filter(|name| !name.is_empty()),
        })
    }

    /// Returns what the options of this command line say, and nothing else.
    pub(crate) fn given_by_options(&self) -> &Connection {
        &self.options
    }

    /// Returns how to connect: as the options say, then the environment, then the context. The current context is set aside if
    /// a server is named without it: its token is for its own servers.
    pub(crate) fn connection(&self) -> Result<Connection, Failure> {
        let given = self.options.clone().over(self.environment.clone());
        if self.name.is_none() && !given.server.is_empty() {
            return Ok(given);
        }
        let contexts = Contexts::read()?;
        let context = contexts.find(self.name.as_deref())?.cloned().unwrap_or_default();
        Ok(given.over(context).or_default())
    }

    /// Returns why the command failed: in place of a broken connection, what is at the address if that is no broker.
    pub(crate) async fn explain(&self, failure: Failure) -> Failure {
        let servers = self.connection().map(|connection| connection.server).unwrap_or_default();
        explain_at(failure, &servers).await
    }

    /// Connects. Fails immediately if no broker can be reached.
    pub(crate) async fn client(&self) -> Result<Client, Failure> {
        self.client_of(None).await
    }

    /// Connects to `server` if it is given, else to the brokers of --server.
    pub(crate) async fn client_of(&self, server: Option<&str>) -> Result<Client, Failure> {
        let connection = self.connection()?;
        let servers: Vec<&str> = match server {
            Some(server) => vec![server],
            None => connection.server.iter().map(String::as_str).collect(),
        };
        let mut urls = servers.into_iter();
        let mut builder = Client::builder(urls.next().unwrap_or_default());
        for url in urls {
            builder = builder.endpoint(url);
        }
        let builder = connection.apply(builder)?.request_timeout(self.timeout);
        builder.connect().await.map_err(|error| match error {
            Error::InvalidAddress { .. } => {
                Failure::Usage(format!("--server: {error}: {}", why(&error)))
            }
            other => other.into(),
        })
    }
}

/// Returns what is at the addresses in place of a broken connection, if that is no broker.
pub(crate) async fn explain_at(failure: Failure, servers: &[String]) -> Failure {
    if failure.is_of_web_server() {
        return Failure::WebServer(servers.join(", "));
    }
    if !failure.is_of_connection() {
        return failure;
    }
    for url in servers {
        let spoken = protocol::spoken_at(url).await;
        let expected = if url.starts_with("https://") { Protocol::Tls } else { Protocol::Http2 };
        if let Some(spoken) = spoken.filter(|spoken| *spoken != expected) {
            return Failure::NotGrpc { url: url.clone(), spoken };
        }
    }
    failure
}

fn why(error: &Error) -> String {
    std::error::Error::source(error).map(ToString::to_string).unwrap_or_default()
}
