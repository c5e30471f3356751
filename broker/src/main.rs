//! The `sluicegate` binary: settings, logs, run until told to stop.

use std::{path::Path, process::ExitCode};

use sluicegate_broker::{
    app::App,
    config::{self, ConfigError, Settings},
    store::sqlite,
    telemetry,
};
use tokio::signal::unix::{SignalKind, signal};

fn main() -> ExitCode {
    match config::file_to_check() {
        Ok(None) => {}
        Ok(Some(file)) => return check(&file),
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
    match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime.block_on(run(settings)),
        Err(error) => fail(&format!("can not start threads: {error}")),
    }
}

async fn run(settings: Settings) -> ExitCode {
    for warning in settings.warnings() {
        tracing::warn!("{warning}");
    }
    let app = match App::start(settings).await {
        Ok(app) => app,
        Err(error) => return fail(&error.to_string()),
    };
    println!("{}", app.banner());
    if let Err(error) = told_to_stop().await {
        return fail(&format!("can not listen for signals: {error}"));
    }
    tracing::info!("shutting down");
    if app.shutdown().await {
        ExitCode::SUCCESS
    } else {
        fail("shutdown_grace is over: some work was cut short")
    }
}

async fn told_to_stop() -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

fn check(file: &Path) -> ExitCode {
    match sqlite::check(file, |progress| eprintln!("{progress}")) {
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
