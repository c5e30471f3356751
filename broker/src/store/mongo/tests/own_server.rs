//! A server of a test's own, which can be told to fail.

use std::{
    env,
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use mongodb::options::ClientOptions;

use super::*;
use crate::test_port::free_port;

/// A replica set of one node that can be told to fail. It ends when dropped.
pub(super) struct Server {
    process: Child,
    port: u16,
    client: Client,
    _directory: tempfile::TempDir,
}

impl Server {
    pub(super) async fn start() -> Self {
        // In memory, if tests/run finds plenty: a disk that is busy for seconds says nothing about this store.
        let directory = match env::var_os("SLUICEGATE_TEST_MONGOD_DATA") {
            Some(parent) => tempfile::tempdir_in(parent).unwrap(),
            None => tempfile::tempdir().unwrap(),
        };
        let port = free_port();
        let variable = "SLUICEGATE_TEST_MONGOD";
        let program = env::var_os(variable).map_or_else(|| PathBuf::from("mongod"), PathBuf::from);
        let process = Command::new(&program)
            .args(["--replSet", "rs0", "--bind_ip", "127.0.0.1", "--quiet"])
            .args(["--setParameter", "enableTestCommands=1", "--wiredTigerCacheSizeGB", "0.25"])
            .args(["--port", &port.to_string(), "--dbpath"])
            .arg(directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| {
                panic!("{}: {error}; set {variable} to a mongod", program.display())
            });
        let uri = format!("mongodb://127.0.0.1:{port}/?directConnection=true");
        let mut options = ClientOptions::parse(uri).await.unwrap();
        options.server_selection_timeout = Some(Duration::from_secs(1));
        let client = Client::with_options(options).unwrap();
        let server = Self { process, port, client, _directory: directory };
        let members = vec![doc! { "_id": 0, "host": format!("127.0.0.1:{port}") }];
        let set = doc! { "_id": "rs0", "members": members };
        until("mongod takes its configuration", async || {
            server.admin(doc! { "replSetInitiate": set.clone() }).await.is_ok()
        })
        .await;
        until("mongod is primary", async || {
            let hello = server.admin(doc! { "hello": 1 }).await;
            hello.is_ok_and(|hello| hello.get_bool("isWritablePrimary").is_ok_and(|is| is))
        })
        .await;
        server
    }

    pub(super) async fn admin(&self, command: Document) -> mongodb::error::Result<Document> {
        self.client.database("admin").run_command(command).await
    }

    /// Opens a broker on this server under a name that fail points can use. Its items have documents of their own.
    pub(super) async fn open(&self, clock: &Arc<Clock>, name: &str) -> Broker<MongoStore> {
        self.open_with(clock, name, SegmentSize::NONE).await
    }

    /// The same with items that share documents.
    pub(super) async fn open_with(
        &self,
        clock: &Arc<Clock>,
        name: &str,
        segments: SegmentSize,
    ) -> Broker<MongoStore> {
        let uri = format!("mongodb://127.0.0.1:{}/?replicaSet=rs0&appName={name}", self.port);
        let clock = clock.clone();
        let options = MongoOptions { clock, discipline: false, pool_size: 16, segments };
        connected(&uri, "test", options).await
    }

    /// Sets a fail point for commands of this name: on the collection of items, except for commits of transactions, and
    /// for one broker alone if `data` names it.
    pub(super) async fn fail(
        &self,
        command: &str,
        mode: impl Into<mongodb::bson::Bson>,
        mut data: Document,
    ) {
        data.insert("failCommands", vec![command]);
        if command != "commitTransaction" {
            data.insert("namespace", "test.items.default");
        }
        let point = doc! { "configureFailPoint": "failCommand", "mode": mode, "data": data };
        self.admin(point).await.unwrap();
    }

    /// Waits until a command has met the fail point.
    pub(super) async fn until_failing(&self) {
        let met = doc! { "waitForFailPoint": "failCommand", "timesEntered": 1, "maxTimeMS": 9_000 };
        self.admin(met).await.unwrap();
    }

    pub(super) async fn heal(&self) {
        self.admin(doc! { "configureFailPoint": "failCommand", "mode": "off" }).await.unwrap();
    }

    /// Returns how many commands of this name it has executed.
    pub(super) async fn executed(&self, command: &str) -> i64 {
        let status = self.admin(doc! { "serverStatus": 1 }).await.unwrap();
        let metrics = status.get_document("metrics").unwrap().get_document("commands").unwrap();
        metrics.get_document(command).unwrap().get_i64("total").unwrap()
    }

    /// Returns the address of the server.
    pub(super) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub(super) fn items(&self) -> mongodb::Collection<Document> {
        self.client.database("test").collection("items.default")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The server applies the change and answers that its durability is unknown.
pub(super) fn unsure() -> Document {
    doc! { "writeConcernError": { "code": 64, "errmsg": "waiting for replication timed out" } }
}

pub(super) fn times(times: i32) -> Document {
    doc! { "times": times }
}

pub(super) fn held_up(time: Duration) -> Document {
    let time = i32::try_from(time.as_millis()).unwrap();
    doc! { "blockConnection": true, "blockTimeMS": time }
}
