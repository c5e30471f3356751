//! The exit code of `sluicegate check` distinguishes an intact file from a damaged one. A broker
//! does not start on a file that has lost acknowledged changes.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use crate::harness::{Backend, TestStore, binary};

fn check(file: &Path) -> Output {
    check_with(file, &[])
}

fn check_with(file: &Path, flags: &[&str]) -> Output {
    let mut command = Command::new(binary("sluicegate"));
    command.arg("check").arg(file).args(flags).output().expect("it runs")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_check_detects_a_file_that_lost_its_end() {
    let store = Backend::Sqlite.store();
    let TestStore::Sqlite(folder) = &store else { unreachable!("it is asked for") };
    let file = folder.path().join("items.db");
    let broker = store.broker().await;
    broker.api().await.push("lines", &["one", "two", "three"]).await;
    let beside = check(&file);
    assert_eq!(beside.status.code(), Some(0), "{beside:?}");
    assert!(String::from_utf8_lossy(&beside.stdout).contains("3 items: the file is whole"));
    let refused = check_with(&file, &["--repair"]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("is in use"), "{refused:?}");
    broker.kill();
    assert_eq!(check(&file).status.code(), Some(0));

    let log = folder.path().join("items.db-wal");
    let length = fs::metadata(&log).expect("a log").len();
    fs::File::options()
        .write(true)
        .open(&log)
        .expect("a log")
        .set_len(length / 2)
        .expect("it is cut");
    let damaged = check(&file);
    assert_eq!(damaged.status.code(), Some(1), "{damaged:?}");
    assert!(String::from_utf8_lossy(&damaged.stdout).contains("commits are lost"), "{damaged:?}");
    let ended = store.launch().run_to_end().await;
    assert!(!ended.status.success() && ended.log.contains("has lost the last"), "{}", ended.log);
    // The message gives this advice.
    fs::remove_file(folder.path().join("items.db-mark")).expect("the mark");
    store.broker().await.stop().await;
    assert_eq!(check(&folder.path().join("missing.db")).status.code(), Some(1));
}
