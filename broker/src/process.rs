//! The process: settings, logs, serving until told to stop.

use std::{
    fs::OpenOptions,
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    process::ExitCode,
};

use crate::{
    access::tokens,
    app::App,
    config::{self, ConfigError, Settings, Task},
    folder::sync_name,
    healthcheck, listener,
    store::sqlite,
    telemetry,
};
use sd_notify::NotifyState;
use tokio::{
    runtime::{self, Runtime},
    signal::unix::{Signal, SignalKind, signal},
};

/// Reads the settings from the command line, the environment and the file, and serves until told to
/// stop.
pub fn run() -> ExitCode {
    let asks_only = match config::task() {
        Ok(None) => false,
        Ok(Some(Task::Healthcheck)) => true,
        Ok(Some(Task::Check { file, repair })) => return check(&file, repair),
        Ok(Some(Task::NewToken { name, allow, expires, file })) => {
            return new_token(&name, &allow, expires.as_deref(), file.as_deref());
        }
        Err(ConfigError::Usage(error)) => error.exit(),
        Err(error) => return fail(&error.to_string()),
    };
    let settings = match Settings::from_process() {
        Ok(settings) => settings,
        Err(ConfigError::Usage(error)) => error.exit(),
        Err(error) => return fail(&error.to_string()),
    };
    if asks_only {
        return healthcheck::ask(settings.http_listen)
            .map_or_else(|why| fail(&why), |()| ExitCode::SUCCESS);
    }
    if let Err(error) = telemetry::init(settings.log_format, &settings.log_level) {
        return fail(&error.to_string());
    }
    listener::raise_open_files();
    match runtime(settings.worker_threads) {
        Ok(runtime) => runtime.block_on(serve(settings)),
        Err(error) => fail(&format!("cannot start threads: {error}")),
    }
}

/// Starts `workers` threads, or, for 0, as many as tokio does: one for each processor.
fn runtime(workers: usize) -> io::Result<Runtime> {
    let mut builder = runtime::Builder::new_multi_thread();
    if workers > 0 {
        builder.worker_threads(workers);
    }
    builder.enable_all().build()
}

async fn serve(settings: Settings) -> ExitCode {
    for warning in settings.warnings() {
        tracing::warn!("{warning}");
    }
    // Listens from the start, because a signal without a listener would end the process.
    let mut signals = match Signals::listen() {
        Ok(signals) => signals,
        Err(error) => return fail(&format!("cannot listen for signals: {error}")),
    };
    let app = tokio::select! {
        app = App::start(settings) => app,
        () = signals.told_to_stop(|| ()) => {
            tracing::info!("told to stop before it served");
            return ExitCode::SUCCESS;
        }
    };
    let app = match app {
        Ok(app) => app,
        Err(error) => return fail(&error.to_string()),
    };
    println!("{}", app.banner());
    notify(NotifyState::Ready);
    let is_whole = tokio::select! {
        () = signals.told_to_stop(|| app.reload()) => true,
        () = app.server_ended() => false,
    };
    tracing::info!("shutting down");
    notify(NotifyState::Stopping);
    match (app.shutdown().await, is_whole) {
        (true, true) => ExitCode::SUCCESS,
        (true, false) => fail("a server ended by itself: see the log"),
        (false, _) => fail("shutdown_grace is over: some work was cut short"),
    }
}

/// Notifies systemd, if systemd has started the broker and waits for it (`NOTIFY_SOCKET`).
fn notify(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!("cannot notify systemd: {error}");
    }
}

/// The signals that concern the broker.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
}

impl Signals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for SIGTERM or SIGINT. SIGHUP asks for a reload, and never ends the process.
    async fn told_to_stop(&mut self, reload: impl Fn()) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hang_up.recv() => {
                    tracing::info!("reloading tokens and certificates");
                    reload();
                }
            }
        }
    }
}

fn check(file: &Path, repair: bool) -> ExitCode {
    let tell = |progress| eprintln!("{progress}");
    let checked = if repair { sqlite::repair(file, tell) } else { sqlite::check(file, tell) };
    match checked {
        Ok(report) => {
            println!("{report}");
            if report.is_whole() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(why) => fail(&why),
    }
}

fn new_token(name: &str, allow: &[String], expires: Option<&str>, file: Option<&Path>) -> ExitCode {
    let new = match tokens::new_token(name, allow, expires) {
        Ok(new) => new,
        Err(why) => return fail(&why),
    };
    match file {
        Some(file) => {
            if let Err(error) = add_entry(file, &new.entry) {
                return fail(&format!("cannot add the entry to {}: {error}", file.display()));
            }
        }
        None => eprint!("Add this to the file that tokens_file names:\n\n{}", new.entry),
    }
    println!("{}", new.token);
    ExitCode::SUCCESS
}

/// Adds an entry in one write, so that a broker that reads the file meanwhile reads all of the entry or nothing of it. The last line
/// of the file may have no end.
fn add_entry(path: &Path, entry: &str) -> io::Result<()> {
    let mut file =
        OpenOptions::new().create(true).read(true).append(true).mode(0o600).open(path)?;
    let mut text = Vec::new();
    file.read_to_end(&mut text)?;
    let end = if text.is_empty() || text.ends_with(b"\n") { "" } else { "\n\n" };
    file.write_all(format!("{end}{entry}").as_bytes())?;
    file.sync_all()?;
    sync_name(path) // it may be new
}

fn fail(message: &str) -> ExitCode {
    eprintln!("sluicegate: {message}");
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_processor_has_a_thread_unless_a_number_is_given() {
        let processors = std::thread::available_parallelism().unwrap().get();
        assert_eq!(runtime(0).unwrap().metrics().num_workers(), processors);
        assert_eq!(runtime(3).unwrap().metrics().num_workers(), 3);
    }

    #[test]
    fn an_entry_is_added_to_a_file_whose_last_line_has_no_end() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("tokens.toml");
        let allow = ["view@*".to_owned()];
        for name in ["first", "second", "third"] {
            let entry = tokens::new_token(name, &allow, None).unwrap().entry;
            add_entry(&file, &entry).unwrap();
            tokens::Tokens::read(&file).unwrap();
            let text = std::fs::read_to_string(&file).unwrap();
            std::fs::write(&file, text.trim_end()).unwrap();
        }
        let text = std::fs::read_to_string(&file).unwrap();
        assert_eq!(text.matches("[[token]]").count(), 3);
    }
}
