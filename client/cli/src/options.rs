//! Options of all commands.

use std::{path::PathBuf, time::Duration};

use crate::values;

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
