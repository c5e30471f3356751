//! All settings, each defined once: its key in the file, from which its flag and its variable are
//! derived, and its help.

use std::path::PathBuf;

use clap::{Arg, ArgAction, Command, value_parser};

use super::values::{DURATIONS, SIZES};

/// One setting.
pub(super) struct Key {
    /// Its name in `sluicegate.toml`.
    pub(super) name: &'static str,
    /// The form of its value, for the help.
    value: &'static str,
    /// Its default as text; empty for none.
    pub(super) default: &'static str,
    /// The purpose of the setting.
    help: &'static str,
}

const fn key(
    name: &'static str,
    value: &'static str,
    default: &'static str,
    help: &'static str,
) -> Key {
    Key { name, value, default, help }
}

/// All settings, in the order of the help.
pub(super) const KEYS: &[Key] = &[
    key("listen", "ADDRESS:PORT", "127.0.0.1:7400", "Where gRPC is served"),
    key(
        "http_listen",
        "ADDRESS:PORT",
        "127.0.0.1:7401",
        "Where HTTP is served: console, /metrics, /healthz, /readyz",
    ),
    key(
        "store",
        "URI",
        "sqlite:sluicegate.db",
        "Where items live: sqlite:PATH, sqlite::memory:, mongodb://... or mongodb+srv://...",
    ),
    key(
        "signals",
        "URI",
        "",
        "How brokers on one store notify each other: local:, redis://..., rediss://... or \
         mongodb: (through the store) [default: local: with SQLite, mongodb: with MongoDB]",
    ),
    key(
        "store_file",
        "FILE",
        "",
        "File that holds the address of the store, in place of store: no argument or variable then shows its password",
    ),
    key(
        "signals_file",
        "FILE",
        "",
        "File that holds the address of the signals, in place of signals",
    ),
    key(
        "database",
        "NAME",
        "sluicegate",
        "Name of the MongoDB database, and of the signals' channel",
    ),
    key("auto_create_queues", "BOOL", "true", "Create a queue when it is first pushed to"),
    key(
        "max_payload_bytes",
        "SIZE",
        "3MiB",
        "Largest payload of an item, at most 15MiB; above 3MiB, consumers must be told to accept larger messages than gRPC's \
         default of 4MiB",
    ),
    key("default_lease", "DURATION", "30s", "Lease where neither queue nor consumer asks for one"),
    key(
        "max_lease",
        "DURATION",
        "12h",
        "Longest lease, and how long the leases of a living stream are renewed",
    ),
    key(
        "default_max_attempts",
        "COUNT",
        "25",
        "The attempt whose failure dead-letters an item, in queues with no max_attempts of their own; 0: no limit",
    ),
    key(
        "default_max_deliveries",
        "COUNT",
        "100",
        "The delivery after which an unsettled item is dead-lettered, in queues with no max_deliveries of their own; \
         0: no limit",
    ),
    key(
        "default_retry_initial_delay",
        "DURATION",
        "1s",
        "How long an item waits after its first failed attempt, in queues with no retry_policy of their own; 0s: not \
         at all",
    ),
    key(
        "default_retry_multiplier",
        "FACTOR",
        "2",
        "Factor from one such delay to the next, 1 or more",
    ),
    key("default_retry_max_delay", "DURATION", "5m", "Longest such delay"),
    key(
        "default_retry_jitter",
        "SHARE",
        "0.2",
        "Random share by which such a delay is shortened, 0 to 1",
    ),
    key(
        "shutdown_grace",
        "DURATION",
        "10s",
        "How long a shutdown may take before what is still open is cut off",
    ),
    key(
        "poll_min",
        "DURATION",
        "1s",
        "Shortest time between scans of a waiting queue that no signal caused",
    ),
    key("poll_max", "DURATION", "15s", "Longest such time; a lost signal costs at most this"),
    key(
        "worker_threads",
        "COUNT",
        "0",
        "Threads that serve calls and streams, at most 1024; those that SQLite works on are not among them; 0: one for each \
         processor",
    ),
    key("log_format", "FORMAT", "text", "How the log is written: text or json"),
    key(
        "log_level",
        "FILTER",
        "info",
        "What is logged: error, warn, info, debug, trace or off, also by module, as in \
         info,sluicegate_broker::signals=debug; of the HTTP/2 library errors alone, unless h2 is named",
    ),
    key(
        "otlp_endpoint",
        "URL",
        "",
        "Collector of OpenTelemetry to which spans and metrics are sent, such as http://127.0.0.1:4317, or \
         http://127.0.0.1:4318 with otlp_protocol = http; without it there are no spans",
    ),
    key(
        "otlp_protocol",
        "PROTOCOL",
        "grpc",
        "How they are sent: grpc, or http, which sends protobuf to /v1/traces and /v1/metrics of that address and knows no \
         https",
    ),
    key(
        "otlp_ca",
        "FILE",
        "",
        "Certificate authorities, PEM, one of which the certificate of an otlp_endpoint of https must be from, in place of the \
         public ones",
    ),
    key(
        "otlp_metrics_interval",
        "DURATION",
        "60s",
        "How often metrics are sent to otlp_endpoint, 1s to 1h; 0s: never",
    ),
    key(
        "max_connection_age",
        "DURATION",
        "30m",
        "About how old a connection gets before its client is asked to make a new one, so that load spreads over brokers that \
         were added; calls under way go on; 0s: no limit",
    ),
    key("tls_cert", "FILE", "", "Certificate chain for gRPC, PEM; with it, only TLS is served"),
    key("tls_key", "FILE", "", "Private key of tls_cert, PEM"),
    key(
        "tls_client_ca",
        "FILE",
        "",
        "Certificate authorities, PEM, one of which every client's certificate must be from",
    ),
    key(
        "tls_client_auth",
        "WHETHER",
        "required",
        "Whether a client needs a certificate of tls_client_ca: required, or optional, which serves clients without one by \
         their tokens",
    ),
    key(
        "tokens_file",
        "FILE",
        "",
        "TOML file of tokens and of names of client certificates, and what each may do (docs/ACCESS.md); read again when it \
         changes. Without it everyone may do everything, and only this machine is served",
    ),
    key(
        "insecure",
        "BOOL",
        "false",
        "Serve other machines without tokens: everyone who reaches the broker may do everything",
    ),
    key(
        "max_refusals",
        "COUNT",
        "20",
        "Calls of one address that may be refused in a minute before its refusals come later and later; 0: any number",
    ),
    key(
        "max_queues",
        "COUNT",
        "10000",
        "Most queues; dead-letter queues that the broker creates by itself are not refused; 0: no limit",
    ),
    key(
        "unused_queue_ttl",
        "DURATION",
        "7d",
        "How long a queue that a push or a dead letter created may be empty and unused until it is deleted, and up to a \
         quarter longer; queues that an operator created or changed stay; the same on all brokers; 0s: forever",
    ),
    key(
        "max_connections",
        "COUNT",
        "10000",
        "Most gRPC connections, of which there are never more than three quarters of the files that the process may \
         open; 0: so many",
    ),
    key(
        "max_connections_per_peer",
        "COUNT",
        "1000",
        "Most connections of one address, and never more than half of all; of IPv6 addresses the first 64 bits count; 0: half \
         of all",
    ),
    key(
        "max_requests",
        "COUNT",
        "20000",
        "Most calls under way that are not streams, waiting ones included; 0: no limit",
    ),
    key("max_requests_per_peer", "COUNT", "5000", "Most such calls of one address; 0: no limit"),
    key("max_streams", "COUNT", "20000", "Most open streams; 0: no limit"),
    key("max_streams_per_peer", "COUNT", "5000", "Most open streams of one address; 0: no limit"),
    key(
        "max_incoming_bytes",
        "SIZE",
        "256MiB",
        "Most bytes of large requests that are held until they are decoded, and as many of the batches of push streams until \
         they are stored; what does not fit is not read",
    ),
    key(
        "max_unread_bytes",
        "SIZE",
        "256MiB",
        "Most bytes of answers that clients have not read; beyond it, the call that has waited longest ends, of the address that \
         has left the most",
    ),
    key(
        "unread_timeout",
        "DURATION",
        "30s",
        "How long a large answer is kept of which the client reads nothing; messages of streams are exempt",
    ),
    key("max_metadata_bytes", "SIZE", "16KiB", "Largest metadata of a call"),
    key(
        "max_resets",
        "COUNT",
        "1024",
        "Calls that a client may cancel before the broker has seen them, and faulty calls, until its connection is closed; 0: \
         any number",
    ),
    key(
        "handshake_timeout",
        "DURATION",
        "10s",
        "How long the beginning of a connection may take, TLS included, and each request over HTTP",
    ),
    key(
        "ping_interval",
        "DURATION",
        "15s",
        "How often a connection is tested on which nothing arrives, or only a part of a call's metadata",
    ),
    key("ping_timeout", "DURATION", "10s", "How long the answer to such a test may take"),
];

impl Key {
    /// Returns the flag, without the dashes in front.
    pub(super) fn flag(&self) -> String {
        self.name.replace('_', "-")
    }

    /// Returns the name of the environment variable.
    pub(super) fn variable(&self) -> String {
        format!("{PREFIX}{}", self.name.to_uppercase())
    }
}

/// What the names of all variables begin with.
pub(super) const PREFIX: &str = "SLUICEGATE_";

/// The variable that names the file.
pub(super) const CONFIG_VARIABLE: &str = "SLUICEGATE_CONFIG";

/// Returns the parser of the command line.
pub(super) fn command() -> Command {
    let mut command = Command::new("sluicegate")
        .version(env!("CARGO_PKG_VERSION"))
        .about("A durable work-queue broker, spoken to over gRPC")
        .long_about(
            "A durable work-queue broker, spoken to over gRPC.\n\nWith no settings at all it keeps \
             its items in ./sluicegate.db and serves this machine.",
        )
        .after_help(format!(
            "Each setting can be given in sluicegate.toml, in the environment and as a flag, which \
             wins in that order. In the file it is named like its flag, with _ for -. Durations: \
             {DURATIONS}. Sizes: {SIZES}.",
        ))
        .arg(Arg::new("config").long("config").value_name("FILE").action(ArgAction::Set).help(
            format!(
                "File of settings [default: sluicegate.toml, if there is one] \
                     [env: {CONFIG_VARIABLE}]"
            ),
        ));
    command = command.arg(
        // A flag of earlier versions, which is refused with what to write instead.
        Arg::new("tokens").long("tokens").hide(true).action(ArgAction::Set),
    );
    let file =
        Arg::new("file").value_name("FILE").required(true).value_parser(value_parser!(PathBuf));
    command = command.subcommand(token_command()).subcommand(
        Command::new("healthcheck")
            .about("Ask the broker of these settings, on this machine, whether it takes requests")
            .long_about(
                "Ask the broker that runs with these settings on this machine, at http_listen, whether it takes requests. \
                 Settings come from the environment and the file. Exit code 0: it does; 1: it does not, or does not answer.",
            ),
    );
    command = command.args_conflicts_with_subcommands(true).subcommand(
        Command::new("check")
            .about("Check an SQLite store's file: its structure, every item, and that no commit is missing")
            .long_about(
                "Check an SQLite store's file: its structure, the checksum of every item, its counters, and that no \
                 commit is missing that was on disk. Changes nothing; a broker may use the file meanwhile. Progress goes \
                 to standard error. Exit code 0: the file is whole; 1: it is not, or could not be checked.",
            )
            .arg(file.help("The file, as in store = sqlite:FILE"))
            .arg(
                Arg::new("repair")
                    .long("repair")
                    .action(ArgAction::SetTrue)
                    .help("Build damaged indexes anew and free what nothing uses; no broker may use the file")
                    .long_help(
                        "Build damaged indexes anew from their tables and free what nothing uses, which loses nothing, then check. \
                         What is damaged in tables stays as it is. Needs as much room on the disk again as the file takes, and \
                         is refused while a broker uses the file.",
                    ),
            ),
    );
    for key in KEYS {
        let default = match key.default {
            "" => String::new(),
            default => format!(" [default: {default}]"),
        };
        command = command.arg(
            Arg::new(key.name)
                // clap takes static names only; the command line is read once per process.
                .long(&*key.flag().leak())
                .value_name(key.value)
                .action(ArgAction::Set)
                .help(format!("{}{default} [env: {}]", key.help, key.variable())),
        );
    }
    command
}

fn token_command() -> Command {
    let new = Command::new("new")
        .about("Make a token: print it, once, and the entry that makes it known to brokers")
        .long_about(
            "Make a token of 256 random bits. Prints the token to standard output, and the entry for tokens_file to standard error \
             unless --file adds it there. The entry has a hash of the token: nobody can tell the token from it.",
        )
        .arg(Arg::new("name").value_name("NAME").required(true).help("The name of its bearer, for the audit log"))
        .arg(
            Arg::new("allow")
                .long("allow")
                .value_name("ACTION@QUEUES")
                .required(true)
                .action(ArgAction::Append)
                .value_delimiter(',')
                .help("A permission, for example produce@orders.* or view@*; may be repeated"),
        )
        .arg(
            Arg::new("expires")
                .long("expires")
                .value_name("TIME")
                .help("When it expires, for example 2027-01-01T00:00:00Z [default: never]"),
        )
        .arg(
            Arg::new("file")
                .long("file")
                .value_name("FILE")
                .value_parser(value_parser!(PathBuf))
                .help("Add the entry to this file, which is created if it does not exist"),
        );
    Command::new("token").about("Make tokens").subcommand_required(true).subcommand(new)
}
