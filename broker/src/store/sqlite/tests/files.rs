//! Tests of the file and those beside it: who may read it, who may open it, whether it is whole, how large it is.

use std::{fs, os::unix::fs::PermissionsExt};

use super::{super::mark, *};

/// Copies the files as they are while a broker runs, which is what a killed broker leaves behind.
fn killed(path: &Path) -> (TempDir, PathBuf) {
    let (folder, copy) = file();
    let name = path.file_name().unwrap().to_str().unwrap();
    for entry in fs::read_dir(path.parent().unwrap()).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name().to_str().unwrap().starts_with(name) {
            fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
    }
    (folder, copy)
}

#[tokio::test]
async fn no_other_user_can_read_the_file_or_those_beside_it() {
    let (folder, path) = file();
    let store = open(&path).unwrap();
    let queue = queue(&store);
    store.push(vec![push_of(&queue, "x")]).await.unwrap();
    let mut names = Vec::new();
    for entry in fs::read_dir(folder.path()).unwrap() {
        let entry = entry.unwrap();
        names.push(entry.file_name().into_string().unwrap());
        assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{names:?}");
    }
    assert_eq!(names.len(), 6, "{names:?}");
}

#[tokio::test]
async fn a_file_that_everyone_could_read_is_closed_to_them() {
    let (_folder, path) = file();
    drop(open(&path).unwrap());
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    let _store = open(&path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
}

#[tokio::test]
async fn two_hard_links_to_one_file_are_refused() {
    let (folder, path) = file();
    let store = open(&path).unwrap();
    let queue = queue(&store);
    let link = folder.path().join("link.db");
    fs::hard_link(&path, &link).unwrap();
    assert!(refused(&link).contains("hard links"), "{}", refused(&link));
    // The first broker is not disturbed, and keeps others out.
    store.push(vec![push_of(&queue, "x")]).await.unwrap();
    assert!(refused(&path).contains("is in use by another broker"), "{}", refused(&path));
    drop(store);
    assert!(refused(&path).contains("2 names"), "{}", refused(&path));
    fs::remove_file(&link).unwrap();
    assert_eq!(open(&path).unwrap().depth(&queue).await.unwrap().ready, 1);
}

/// This lock protects a file that two containers mount under different folders.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn the_file_itself_is_locked() {
    let (_folder, path) = file();
    let _store = open(&path).unwrap();
    let other = fs::File::open(&path).unwrap();
    assert!(matches!(other.try_lock(), Err(fs::TryLockError::WouldBlock)));
    std::mem::forget(other); // closing it would release SQLite's locks in this process
}

/// The log is cut at several places, and damaged at several places.
#[tokio::test]
async fn a_log_that_has_lost_its_end_is_noticed_at_the_start() {
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let queue = queue(&store);
    let reader = Connection::open(&path).unwrap();
    reader.execute_batch("BEGIN; SELECT * FROM items;").unwrap(); // so the log is not begun anew
    for n in 0..20 {
        store.push(vec![push_of(&queue, &n.to_string())]).await.unwrap();
    }
    let (_copied, whole) = killed(&path);
    assert_eq!(open(&whole).unwrap().depth(&queue).await.unwrap().ready, 20);

    let length = fs::metadata(beside(&path, "-wal")).unwrap().len();
    for part in 0..8 {
        let at = length * part / 8;
        let (_copied, cut) = killed(&path);
        fs::File::options().write(true).open(beside(&cut, "-wal")).unwrap().set_len(at).unwrap();
        let message = refused(&cut);
        assert!(message.contains("has lost the last"), "{message}");
        // The log stays as it was, for people to examine.
        assert_eq!(fs::metadata(beside(&cut, "-wal")).map_or(0, |found| found.len()), at);

        let (_copied, damaged) = killed(&path);
        let log = beside(&damaged, "-wal");
        let mut bytes = fs::read(&log).unwrap();
        bytes[at as usize + 100] ^= 4;
        fs::write(&log, bytes).unwrap();
        let message = refused(&damaged);
        assert!(message.contains("has lost the last"), "{message}");
        // As the message says, without the mark the rest is served.
        fs::remove_file(mark::path_of(&damaged)).unwrap();
        assert!(open(&damaged).unwrap().depth(&queue).await.unwrap().ready < 20);
    }
}

#[tokio::test]
async fn a_file_that_was_emptied_or_replaced_by_an_older_one_is_noticed() {
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let queue = queue(&store);
    store.push(vec![push_of(&queue, "x")]).await.unwrap();
    drop(store);
    let older = fs::read(&path).unwrap();
    let store = open(&path).unwrap();
    store.push(vec![push_of(&queue, "y")]).await.unwrap();
    drop(store);
    fs::write(&path, older).unwrap();
    assert!(refused(&path).contains("has lost the last 1 of"), "{}", refused(&path));
    fs::write(&path, "").unwrap();
    assert!(refused(&path).contains("is empty"), "{}", refused(&path));
    // As the message says, without the mark an empty store begins.
    fs::remove_file(mark::path_of(&path)).unwrap();
    assert_eq!(open(&path).unwrap().depth(&queue).await.unwrap().ready, 0);
}

/// A disk that was not mounted, or a file deleted by mistake, once led to an empty store.
#[tokio::test]
async fn a_file_that_is_gone_is_not_created_again_unless_its_mark_is_gone_too() {
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let queue = queue(&store);
    store.push(vec![push_of(&queue, "x")]).await.unwrap();
    drop(store);
    let away = path.with_extension("away");
    fs::rename(&path, &away).unwrap();
    for _ in 0..2 {
        let message = refused(&path);
        assert!(message.contains("is gone") && message.contains("db-mark"), "{message}");
        assert!(!path.exists(), "no file blocks a backup");
    }
    fs::rename(&away, &path).unwrap();
    assert_eq!(open(&path).unwrap().depth(&queue).await.unwrap().ready, 1);
    fs::remove_file(&path).unwrap();
    fs::remove_file(mark::path_of(&path)).unwrap();
    assert_eq!(open(&path).unwrap().depth(&queue).await.unwrap().ready, 0);
}

/// Reserves are not synced. Their loss in a power cut is allowed, and must not look like damage.
#[tokio::test]
async fn the_mark_claims_only_synced_commits() {
    let (_folder, path) = file();
    let store = open(&path).unwrap();
    let queue = queue(&store);
    store.push(vec![push_of(&queue, "x")]).await.unwrap();
    let before = mark::read(&path).unwrap().unwrap();
    let (hold, go) = hold_up(&store);
    let change = store.inner.writer.call(Kind::Reserve, |tx| {
        tx.conn.execute("UPDATE meta SET value = 1 WHERE key = 'pinged'", [])
    });
    let release = async { go.send(()).unwrap() };
    let (_, changed, ()) = tokio::join!(hold, change, release);
    assert_eq!(changed.unwrap(), 1);
    assert_eq!(mark::read(&path).unwrap().unwrap(), before);
}

#[tokio::test]
async fn unused_space_returns_to_the_disk() {
    let (_folder, path) = file();
    let uri = format!("sqlite:{}", path.display());
    let every = Duration::from_millis(20);
    let store = SqliteStore::open_with(&uri, Arc::new(Clock::system()), every).unwrap();
    let queue = queue(&store);
    let large = "x".repeat(1 << 20);
    for _ in 0..40 {
        store.push(vec![push_of(&queue, &large)]).await.unwrap();
    }
    let pages = || {
        store.inner.read(|view| {
            view.conn.pragma_query_value(None, "page_count", |row| row.get::<_, i64>(0))
        })
    };
    assert!(pages().await.unwrap() > 40 * 256);
    store.purge(&queue).await.unwrap();
    while pages().await.unwrap() > 18 * 256 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_file_of_an_earlier_version_returns_space_too() {
    let (_folder, path) = file();
    drop(open(&path).unwrap());
    let conn = Connection::open(&path).unwrap();
    conn.execute_batch("PRAGMA auto_vacuum = NONE; VACUUM;").unwrap();
    let mode = |conn: &Connection| {
        conn.pragma_query_value(None, "auto_vacuum", |row| row.get::<_, i64>(0)).unwrap()
    };
    assert_eq!(mode(&conn), 0);
    drop(conn);
    drop(open(&path).unwrap());
    assert_eq!(mode(&Connection::open(&path).unwrap()), 2);
}
