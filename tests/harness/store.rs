//! A separate store for each test.

use std::{
    process,
    sync::atomic::{AtomicU32, Ordering},
    thread,
};

use super::{Broker, Launch};

/// The kind of store that a test runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backend {
    Sqlite,
    Mongo,
}

impl Backend {
    /// Returns an empty store, which is deleted with the value.
    pub(crate) fn store(self) -> TestStore {
        match self {
            Self::Sqlite => TestStore::Sqlite(tempfile::tempdir().expect("a temporary directory")),
            Self::Mongo => TestStore::mongo(&mongodb_uri()),
        }
    }
}

/// Returns the address of the MongoDB that the environment names.
fn mongodb_uri() -> String {
    std::env::var("SLUICEGATE_TEST_MONGODB_URI").unwrap_or_else(|_| {
        panic!(
            "this test needs a MongoDB replica set: run it by tests/run e2e, or set \
             SLUICEGATE_TEST_MONGODB_URI, for example to mongodb://127.0.0.1:27017/?replicaSet=rs0"
        )
    })
}

/// The store of the brokers of one test.
pub(crate) enum TestStore {
    Sqlite(tempfile::TempDir),
    Mongo { uri: String, database: String },
}

impl TestStore {
    /// Returns an empty database on the server at `uri`.
    pub(crate) fn mongo(uri: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        Self::Mongo { uri: uri.to_owned(), database: format!("test_{}_{count}", process::id()) }
    }

    /// Returns the flags of a broker on this store.
    pub(crate) fn launch(&self) -> Launch {
        match self {
            Self::Sqlite(directory) => {
                let file = directory.path().join("items.db");
                Launch::new().flag("store", &format!("sqlite:{}", file.display()))
            }
            Self::Mongo { uri, database } => {
                Launch::new().flag("store", uri).flag("database", database)
            }
        }
    }

    /// Starts a broker with the default settings.
    pub(crate) async fn broker(&self) -> Broker {
        self.launch().start().await
    }
}

impl Drop for TestStore {
    /// Deletes the test's data from a server that outlives the tests.
    fn drop(&mut self) {
        let Self::Mongo { uri, database } = self else { return };
        let (uri, database) = (uri.clone(), database.clone());
        // In a thread of its own, because the test's runtime may be shutting down.
        let dropped = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let mut options = mongodb::options::ClientOptions::parse(&uri).await?;
                options.server_selection_timeout = Some(std::time::Duration::from_secs(2));
                mongodb::Client::with_options(options)?.database(&database).drop().await?;
                Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
            })
        })
        .join();
        if let Ok(Err(error)) = dropped {
            eprintln!("the database of this test is left behind: {error}");
        }
    }
}
