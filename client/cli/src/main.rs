//! `sluice`: Sluicegate's command line tool.
//!
//! # Layout
//! One file per group of commands, and the folders `backup`, `bench`, `declare`, `doctor`, `tail` and `top`. `context` has what
//! commands share, `connection` how brokers are reached, `confirm` the question before destruction, `examples` what the help of
//! each command shows, `failure` the exit codes and hints, `protocol` what is at an address that is no broker, `repeat` calls whose
//! answer was lost, `json` and `output` how results are shown, `values` how values are parsed.

mod backup;
mod bench;
mod brokers;
mod confirm;
mod connection;
mod consume;
mod context;
mod context_command;
mod contexts;
mod declare;
mod doctor;
mod documents;
mod examples;
mod failure;
mod files;
mod history;
mod items;
mod json;
mod operation;
mod options;
mod output;
mod protocol;
mod push;
mod queue;
mod repeat;
mod schedule;
mod settle;
mod stats;
mod tail;
mod take;
mod template;
mod top;
mod values;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use tracing_subscriber::{Layer, filter::Targets, layer::SubscriberExt, util::SubscriberInitExt};

use crate::{
    context::Context,
    failure::{Failure, error_json},
    options::Global,
};

const AFTER_HELP: &str = "\
Durations: 500ms, 10s, 1.5m, 2h, 1d, or several together: 1h30m. Sizes: 65536, 512KiB, 4MiB.

With --json, lists are one JSON object per line; a payload is in `payload` if it is UTF-8, else in `payload_base64`. An error is \
one object on stderr: {\"error\":{\"code\",\"reason\",\"message\",\"hint\"}}.

Commands that delete something, or move many items, ask first. --yes answers for scripts.

Exit codes:
  0  done
  1  error
  2  wrong usage
  3  no item for pop, reserve or consume
  4  not found: no such queue, item, template, schedule or operation
  5  broker unreachable or unavailable

Examples:
  sluice push orders 'two pounds of apples'
  seq 1000 | sluice push orders
  sluice consume orders --exec './handle.sh' --max-in-flight 4
  sluice peek orders --state delayed --json";

/// Push, consume and manage items of a Sluicegate broker.
#[derive(Debug, Parser)]
#[command(name = "sluice", version, after_help = AFTER_HELP, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Put items into a queue: an argument, a file, or one item per line of stdin
    Push(push::Args),
    /// Consume items under a lease: print each, or run a command for each
    Consume(consume::Args),
    /// Take items out of a queue at once and print them: at-most-once delivery
    Pop(take::PopArgs),
    /// Take items under a lease and print their receipts, to settle them by other commands
    Reserve(take::ReserveArgs),
    /// Commit reserved items: they are done
    Commit(settle::CommitArgs),
    /// Roll reserved items back, to be delivered again
    Rollback(settle::RollbackArgs),
    /// Extend the leases of reserved items
    Extend(settle::ExtendArgs),
    /// Move a reserved item into another queue of its group
    Move(settle::MoveArgs),
    /// Commit a reserved item and push others, in one step
    Fork(settle::ForkArgs),
    /// List a queue's items without changing them
    Peek(items::PeekArgs),
    /// Show or delete one item
    #[command(subcommand)]
    Item(items::ItemCommand),
    /// List the queues
    Queues(stats::Which),
    /// Show depth and totals of queues
    Stats(stats::StatsArgs),
    /// Show all queues live, on the terminal: depths, rates, and everything about one of them
    Top(top::Args),
    /// Show depth and totals of queues at each change
    Watch(stats::WatchArgs),
    /// Show items as they come into queues, without taking them
    Tail(tail::Args),
    /// List the brokers of the store, with version and health
    Brokers,
    /// Look for what is wrong: the connection, the brokers, their clocks, the queues
    Doctor(doctor::Args),
    /// List the consumers of all brokers: where they are, and what they hold
    Consumers(brokers::ConsumersArgs),
    /// Create, show, change, pause, purge or delete a queue
    #[command(subcommand)]
    Queue(queue::QueueCommand),
    /// Show, set or delete templates: settings of queues that are not there yet, by the pattern of their names
    #[command(subcommand)]
    Template(template::TemplateCommand),
    /// Write queues, templates and schedules to stdout, as a file for `apply`
    Export(declare::ExportArgs),
    /// Create and change queues, templates and schedules so that they are as a file says
    Apply(declare::ApplyArgs),
    /// Write the items of a queue into a file, without taking them
    Backup(backup::BackupArgs),
    /// Put the items of a backup into a queue
    Restore(backup::RestoreArgs),
    /// Move items of a dead-letter queue back to where they came from
    Redrive(history::RedriveArgs),
    /// Make processed items ready again
    Replay(history::ReplayArgs),
    /// Show, cancel or wait for operations: long work that brokers do by themselves
    #[command(subcommand)]
    Operation(operation::OperationCommand),
    /// Measure a broker
    Bench(Box<bench::Args>),
    /// Manage schedules, which push items at set times
    #[command(subcommand)]
    Schedule(schedule::ScheduleCommand),
    /// Manage contexts: brokers by name, with what it takes to reach them
    #[command(subcommand)]
    Context(context_command::ContextCommand),
    /// Print the completion of commands and options for a shell
    Completion(documents::CompletionArgs),
    /// Write man pages
    Man(documents::ManArgs),
}

#[tokio::main]
async fn main() -> ExitCode {
    let matches = command_line().try_get_matches();
    let parsed = matches.and_then(|matches| Ok((Cli::from_arg_matches(&matches)?, matches)));
    let (cli, matches) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => return refuse(&error),
    };
    let filter = std::env::var("SLUICE_LOG").ok().and_then(|text| text.parse().ok());
    let filter = filter.unwrap_or_else(|| Targets::new().with_default(tracing::Level::WARN));
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .without_time()
        .with_target(false);
    tracing_subscriber::registry().with(lines.with_filter(filter)).init();
    let json = cli.global.json;
    let context = match Context::new(cli.global, &matches) {
        Ok(context) => context,
        Err(failure) => return failure.report(json),
    };
    match run(&context, cli.command).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => context.explain(failure).await.report(json),
    }
}

/// Returns the command line with its whole help.
fn command_line() -> clap::Command {
    examples::with_examples(Cli::command())
}

/// Prints what is wrong with the command line, or the help that was asked for.
fn refuse(error: &clap::Error) -> ExitCode {
    // The command line was not understood, and so nor was --json.
    if error.use_stderr() && std::env::args().any(|argument| argument == "--json") {
        let text = error.to_string();
        let message = text.trim_start_matches("error: ").lines().next().unwrap_or_default();
        let hint = "see `sluice help`";
        eprintln!("{}", output::line(&error_json("USAGE", None, message, Some(hint))));
        return ExitCode::from(2);
    }
    error.exit()
}

async fn run(context: &Context, command: Command) -> Result<(), Failure> {
    match command {
        Command::Push(args) => push::run(context, args).await,
        Command::Consume(args) => consume::run(context, args).await,
        Command::Pop(args) => take::pop(context, args).await,
        Command::Reserve(args) => take::reserve(context, args).await,
        Command::Commit(args) => settle::commit(context, args).await,
        Command::Rollback(args) => settle::rollback(context, args).await,
        Command::Extend(args) => settle::extend(context, args).await,
        Command::Move(args) => settle::forward(context, args).await,
        Command::Fork(args) => settle::fork(context, args).await,
        Command::Peek(args) => items::peek(context, args).await,
        Command::Item(command) => items::run(context, command).await,
        Command::Queues(which) => stats::queues(context, which).await,
        Command::Stats(args) => stats::stats(context, args).await,
        Command::Top(args) => top::run(context, args).await,
        Command::Watch(args) => stats::watch(context, args).await,
        Command::Tail(args) => tail::run(context, args).await,
        Command::Brokers => brokers::brokers(context).await,
        Command::Doctor(args) => doctor::run(context, args).await,
        Command::Consumers(args) => brokers::consumers(context, args).await,
        Command::Queue(command) => queue::run(context, command).await,
        Command::Template(command) => template::run(context, command).await,
        Command::Export(args) => declare::export(context, args).await,
        Command::Apply(args) => declare::apply(context, args).await,
        Command::Backup(args) => backup::backup(context, args).await,
        Command::Restore(args) => backup::restore(context, args).await,
        Command::Redrive(args) => history::redrive(context, args).await,
        Command::Replay(args) => history::replay(context, args).await,
        Command::Operation(command) => operation::run(context, command).await,
        Command::Bench(args) => bench::run(context, *args).await,
        Command::Schedule(command) => schedule::run(context, command).await,
        Command::Context(command) => context_command::run(context, command),
        Command::Completion(args) => documents::completion(command_line(), &args),
        Command::Man(args) => documents::man(command_line(), &args),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
