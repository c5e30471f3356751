//! A task without which the broker hangs ends the process if it panics.

use std::{env, process::Command};

use super::*;
use crate::essential::EXIT_CODE;

/// In a process that a test starts: the store method in which a task panics.
const PANICS_IN: &str = "SLUICEGATE_TEST_PANICS_IN";

#[tokio::test]
async fn a_panic_of_an_essential_task_ends_the_process() {
    if let Ok(method) = env::var(PANICS_IN) {
        return panic_in(Box::leak(method.into_boxed_str())).await;
    }
    for (method, task) in
        [("reserve", "dispatcher"), ("rollback", "rollbacks"), ("add_totals", "totals")]
    {
        let this = "engine::tests::panics::a_panic_of_an_essential_task_ends_the_process";
        let ended = Command::new(env::current_exe().unwrap())
            .args([this, "--exact", "--nocapture"])
            .env(PANICS_IN, method)
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&ended.stderr).into_owned()
            + &String::from_utf8_lossy(&ended.stdout);
        assert_eq!(ended.status.code(), Some(EXIT_CODE), "{method}: {output}");
        assert!(output.contains(&format!("task=\"{task}\"")), "{method}: {output}");
    }
}

/// Lets a task of this process panic, and waits for the end of the process.
async fn panic_in(method: &'static str) {
    tracing_subscriber::fmt().with_ansi(false).init();
    let bench = bench().await;
    super::super::background::start(&bench.engine);
    bench.push(1).await;
    let mut stream = bench.stream().await;
    deliveries(&mut stream).await;
    bench.faults.set(method, Fault::Panics);
    drop(stream);
    let _ = bench.reserve(1, LIMIT).await;
    tokio::time::sleep(LIMIT).await;
}
