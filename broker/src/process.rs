//! The process: settings, logs, serving until told to stop.

use std::process::ExitCode;

use crate::{
    app::App,
    config::{self, Check, ConfigError, Settings},
    listener,
    store::sqlite,
    telemetry,
};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Reads the settings from the command line, the environment and the file, and serves until told to
/// stop.
pub fn run() -> ExitCode {
    match config::check_asked_for() {
        Ok(None) => {}
        Ok(Some(asked)) => return check(&asked),
        Err(ConfigError::Usage(error)) => error.exit(),
        Err(error) => return fail(&error.to_string()),
    }
    let settings = match Settings::from_process() {
        Ok(settings) => settings,
        Err(ConfigError::Usage(error)) => error.exit(),
        Err(error) => return fail(&error.to_string()),
    };
    if let Err(error) = telemetry::init(settings.log_format, &settings.log_level) {
        return fail(&error.to_string());
    }
    listener::raise_open_files();
    match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime.block_on(serve(settings)),
        Err(error) => fail(&format!("cannot start threads: {error}")),
    }
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
        () = signals.told_to_stop() => {
            tracing::info!("told to stop before it served");
            return ExitCode::SUCCESS;
        }
    };
    let app = match app {
        Ok(app) => app,
        Err(error) => return fail(&error.to_string()),
    };
    println!("{}", app.banner());
    signals.told_to_stop().await;
    tracing::info!("shutting down");
    if app.shutdown().await {
        ExitCode::SUCCESS
    } else {
        fail("shutdown_grace is over: some work was cut short")
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
    async fn told_to_stop(&mut self) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hang_up.recv() => {
                    tracing::info!("told to reload: there is nothing that can be reloaded without a restart");
                }
            }
        }
    }
}

fn check(Check { file, repair }: &Check) -> ExitCode {
    let tell = |progress| eprintln!("{progress}");
    let checked = if *repair { sqlite::repair(file, tell) } else { sqlite::check(file, tell) };
    match checked {
        Ok(report) => {
            println!("{report}");
            if report.is_whole() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(why) => fail(&why),
    }
}

fn fail(message: &str) -> ExitCode {
    eprintln!("sluicegate: {message}");
    ExitCode::FAILURE
}
