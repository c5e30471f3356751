//! The `sluicegate` binary: settings, logs, run until told to stop.

use std::process::ExitCode;

use sluicegate_broker::{
    app::App,
    config::{ConfigError, Settings},
    telemetry,
};
use tokio::signal::unix::{SignalKind, signal};

fn main() -> ExitCode {
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

fn fail(message: &str) -> ExitCode {
    eprintln!("sluicegate: {message}");
    ExitCode::FAILURE
}
