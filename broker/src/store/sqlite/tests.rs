//! The suite on both kinds of this store, and what only this store promises.

use tempfile::TempDir;

use super::*;
use crate::store::conformance::{Env, conformance};

/// The tests that expect an item to expire under a reserve are not to be forestalled.
const NO_SWEEP: Duration = Duration::from_secs(3_600);

fn env(uri: &str, guard: impl std::any::Any + Send + Sync) -> Env {
    let clock = Arc::new(Clock::system());
    let store = Arc::new(SqliteStore::open_with(uri, clock.clone(), NO_SWEEP).unwrap());
    Env::new(store.clone(), store, clock, guard)
}

fn file() -> (TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let uri = format!("sqlite:{}", folder.path().join("store.db").display());
    (folder, uri)
}

mod in_memory {
    async fn open() -> super::Env {
        super::env("sqlite::memory:", ())
    }
    super::conformance!(super::open);
}

mod in_a_file {
    async fn open() -> super::Env {
        let (folder, uri) = super::file();
        super::env(&uri, folder)
    }
    super::conformance!(super::open);
}
