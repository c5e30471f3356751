//! A disk that no longer syncs the store's file, or its log.

use futures_util::future::join_all;
use rusqlite::OpenFlags;

use super::{
    file::open,
    write_log::{FailingSyncs, Recorded},
};
use crate::harness::new_item;

/// The exit code of a broker that ends because of its disk.
const EXIT_CODE: i32 = 74;
/// A broker has come to sync its file long before it has taken so many items.
const MOST: i64 = 1_000;
/// Pushes under way at the same time, so that the thread that syncs the log has some to answer.
const AT_ONCE: i64 = 4;

/// Pushes items to a broker until its file or its log cannot be synced, starts another, and returns what is wrong.
///
/// SQLite does not write a page again that it has written, while the page may be lost with the failed sync. So
/// the broker has to end, and the next one has to write all of the log.
pub(crate) async fn end_of_a_broker() -> Vec<String> {
    let mut found = after(FailingSyncs::OfFile).await;
    found.extend(after(FailingSyncs::OfLog).await);
    found
}

async fn after(failing: FailingSyncs) -> Vec<String> {
    let Recorded { store: _store, path, log, launch } = Recorded::begin();
    let broker = launch.start().await;
    let api = broker.api().await;
    api.ensure("q").await;
    api.push("q", &["x"]).await;
    log.fail_syncs(failing);
    // As long as a process has the file open, the index of the log says what of it is in the file.
    let shell = open(&path, OpenFlags::default()).expect("another process's connection");
    shell.execute_batch("SELECT * FROM sqlite_schema").expect("a readable file");
    let mut pushed = 1;
    while pushed < MOST {
        let pushes = (0..AT_ONCE).map(|_| api.try_push("q", vec![new_item("x")]));
        let answers = join_all(pushes).await;
        pushed += answers.iter().filter(|answer| answer.is_ok()).count() as i64;
        if answers.iter().any(Result::is_err) {
            break;
        }
    }
    if pushed >= MOST {
        return vec![format!("a broker goes on with failing syncs {failing:?}")];
    }
    let mut found = Vec::new();
    let ended = broker.ended().await;
    if ended.status.code() != Some(EXIT_CODE) || !ended.log.contains("cannot be synced") {
        found.push(format!("a broker ended with {}, and its log is\n{}", ended.status, ended.log));
    }
    let in_file = shell.query_row("PRAGMA wal_checkpoint(NOOP)", [], |row| row.get::<_, i64>(2));
    if matches!(failing, FailingSyncs::OfFile) && in_file != Ok(0) {
        found.push(format!("{in_file:?} pages of the log are taken to be in the file"));
    }
    log.fail_syncs(FailingSyncs::None);
    let broker = launch.start().await;
    let ready = broker.api().await.stats("q").await.ready;
    // The last ones were not answered.
    if !(pushed..=pushed + AT_ONCE).contains(&ready) {
        found.push(format!("{pushed} items were stored before a failed sync, {ready} are left"));
    }
    broker.stop().await;
    found
}
