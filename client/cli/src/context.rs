//! What all commands share: how to reach the broker, and how to show results.

use std::time::Duration;

use clap::{ArgMatches, parser::ValueSource};
use sluicegate_client::{Client, Error};

use crate::{
    connection::Connection,
    contexts::Contexts,
    failure::Failure,
    options::Global,
    output::Output,
    protocol::{self, Protocol},
};

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
