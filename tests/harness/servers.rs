//! Servers that belong to one test, which may stop, freeze and restart them.

use std::{
    env,
    net::TcpStream,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use mongodb::{
    Client,
    bson::{Document, doc},
    options::ClientOptions,
};

use super::{
    broker::{free_port, send_signal},
    until,
};

/// Returns the address of the Redis that the environment names, shared by all tests.
pub(crate) fn redis_url() -> String {
    env::var("SLUICEGATE_TEST_REDIS_URL").unwrap_or_else(|_| {
        panic!(
            "this test needs a Redis server: run it by tests/run e2e, or set \
             SLUICEGATE_TEST_REDIS_URL, for example to redis://127.0.0.1:6379"
        )
    })
}

/// The variable that names the `mongod` to start.
const MONGOD: &str = "SLUICEGATE_TEST_MONGOD";

/// Returns the program that a variable names, or the one on PATH.
fn program(variable: &str, name: &str) -> PathBuf {
    env::var_os(variable).map_or_else(|| PathBuf::from(name), PathBuf::from)
}

fn spawn(command: &mut Command, variable: &str) -> Child {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| {
            let program = command.get_program().to_string_lossy();
            panic!("{program}: {error}; this test needs that server: run it by tests/run e2e, or set {variable}")
        })
}

/// A process that is killed when dropped.
struct Process(Option<Child>);

impl Process {
    fn signal(&self, name: &str) {
        send_signal(self.0.as_ref().expect("a running server").id(), name);
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A Redis server.
pub(crate) struct RedisServer {
    port: u16,
    process: Process,
}

impl RedisServer {
    pub(crate) async fn start() -> Self {
        let mut server = Self { port: free_port(), process: Process(None) };
        server.restart().await;
        server
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Stops the server, which loses all its data.
    pub(crate) fn stop(&mut self) {
        self.process.kill();
    }

    /// Freezes the server: connections stay open, and nothing is answered.
    pub(crate) fn freeze(&self) {
        self.process.signal("STOP");
    }

    /// Resumes the server.
    pub(crate) fn thaw(&self) {
        self.process.signal("CONT");
    }

    /// Restarts the server on the same port.
    pub(crate) async fn restart(&mut self) {
        let variable = "SLUICEGATE_TEST_REDIS_SERVER";
        let mut command = Command::new(program(variable, "redis-server"));
        command.args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--port"]);
        self.process = Process(Some(spawn(command.arg(self.port.to_string()), variable)));
        let port = self.port;
        until(
            "redis-server answers",
            || async move { TcpStream::connect(("127.0.0.1", port)).ok() },
        )
        .await;
    }
}

/// A MongoDB replica set of one node, or a member of a [`MongoSet`].
pub(crate) struct MongoServer {
    port: u16,
    process: Process,
    directory: tempfile::TempDir,
}

impl MongoServer {
    pub(crate) async fn start() -> Self {
        let server = Self::alone();
        server.initiate(vec![server.member(0)]).await;
        server.until_primary().await;
        server
    }

    /// Returns a process that belongs to no set yet.
    fn alone() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut server = Self { port: free_port(), process: Process(None), directory };
        server.spawn();
        server
    }

    /// Returns a server that is not a replica set, and its address.
    pub(crate) async fn standalone() -> (Self, String) {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut server = Self { port: free_port(), process: Process(None), directory };
        let mut command = server.command();
        server.process = Process(Some(spawn(&mut command, MONGOD)));
        let client = server.client().await;
        until("mongod answers", || async {
            client.database("admin").run_command(doc! { "ping": 1 }).await.ok()
        })
        .await;
        let uri = format!("mongodb://127.0.0.1:{}/", server.port);
        (server, uri)
    }

    fn member(&self, number: i32) -> Document {
        doc! { "_id": number, "host": format!("127.0.0.1:{}", self.port) }
    }

    /// Makes the members a set that elects a new primary after two seconds without one.
    async fn initiate(&self, members: Vec<Document>) {
        let settings = doc! { "electionTimeoutMillis": 2000, "heartbeatIntervalMillis": 500 };
        let set = doc! { "_id": "rs0", "members": members, "settings": settings };
        let client = self.client().await;
        until("mongod takes its configuration", || async {
            let initiate = doc! { "replSetInitiate": set.clone() };
            client.database("admin").run_command(initiate).await.ok()
        })
        .await;
    }

    /// Returns an address with which clients wait at most two seconds for a server, so that outages
    /// do not use up a test's time.
    pub(crate) fn uri(&self) -> String {
        format!("mongodb://127.0.0.1:{}/?replicaSet=rs0&serverSelectionTimeoutMS=2000", self.port)
    }

    /// Returns where the server listens, as `host:port`.
    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Kills the server as in a crash. Durable data stays.
    pub(crate) fn kill(&mut self) {
        self.process.kill();
    }

    /// Restarts the server on the same port and data.
    pub(crate) async fn restart(&mut self) {
        self.spawn();
        self.until_primary().await;
    }

    /// Freezes the server: connections stay open, and nothing is answered.
    pub(crate) fn freeze(&self) {
        self.process.signal("STOP");
    }

    /// Resumes the server.
    pub(crate) fn thaw(&self) {
        self.process.signal("CONT");
    }

    /// Delays the next command of this name by `time`. Other commands are not delayed.
    pub(crate) async fn hold(&self, command: &str, time: Duration) {
        let time = i32::try_from(time.as_millis()).expect("a short time");
        let data = doc! { "failCommands": [command], "blockConnection": true, "blockTimeMS": time };
        let point =
            doc! { "configureFailPoint": "failCommand", "mode": { "times": 1 }, "data": data };
        let client = self.client().await;
        client.database("admin").run_command(point).await.expect("a server that holds commands up");
    }

    fn spawn(&mut self) {
        let mut command = self.command();
        command.args(["--replSet", "rs0"]);
        self.process = Process(Some(spawn(&mut command, MONGOD)));
    }

    /// Returns the command that starts the server, without a set.
    fn command(&self) -> Command {
        let mut command = Command::new(program(MONGOD, "mongod"));
        command.args(["--bind_ip", "127.0.0.1", "--quiet"]);
        command.args(["--setParameter", "enableTestCommands=1"]); // for `hold`
        command.args(["--wiredTigerCacheSizeGB", "0.25", "--port"]).arg(self.port.to_string());
        command.arg("--dbpath").arg(self.directory.path());
        command
    }

    async fn client(&self) -> Client {
        let uri = format!("mongodb://127.0.0.1:{}/?directConnection=true", self.port);
        let mut options = ClientOptions::parse(uri).await.expect("a valid address");
        options.server_selection_timeout = Some(Duration::from_secs(1));
        Client::with_options(options).expect("a client")
    }

    async fn until_primary(&self) {
        let client = self.client().await;
        until("mongod is primary", || async { is_primary(&client).await.then_some(()) }).await;
    }
}

async fn is_primary(client: &Client) -> bool {
    let hello = client.database("admin").run_command(doc! { "hello": 1 }).await;
    hello.is_ok_and(|hello| hello.get_bool("isWritablePrimary").is_ok_and(|is| is))
}

/// A MongoDB replica set of three nodes.
pub(crate) struct MongoSet(Vec<MongoServer>);

impl MongoSet {
    pub(crate) async fn start() -> Self {
        let servers: Vec<_> = (0..3).map(|_| MongoServer::alone()).collect();
        let members = servers.iter().zip(0..).map(|(server, number)| server.member(number));
        servers[0].initiate(members.collect()).await;
        let set = Self(servers);
        set.primary().await;
        set
    }

    pub(crate) fn uri(&self) -> String {
        let hosts: Vec<_> = self.0.iter().map(|s| format!("127.0.0.1:{}", s.port)).collect();
        format!("mongodb://{}/?replicaSet=rs0", hosts.join(","))
    }

    /// Kills the primary as in a crash, and returns its index.
    pub(crate) async fn kill_primary(&mut self) -> usize {
        let primary = self.primary().await;
        self.0[primary].kill();
        primary
    }

    /// Restarts a member on the same port and data.
    pub(crate) fn restart(&mut self, member: usize) {
        self.0[member].spawn();
    }

    /// Freezes the primary, and returns its index.
    pub(crate) async fn freeze_primary(&self) -> usize {
        let primary = self.primary().await;
        self.0[primary].freeze();
        primary
    }

    /// Resumes a member.
    pub(crate) fn thaw(&self, member: usize) {
        self.0[member].thaw();
    }

    /// Makes the primary a secondary, so that another one is elected.
    pub(crate) async fn step_down(&self) {
        until("a primary that steps down", || async {
            let client = self.0[self.primary().await].client().await;
            let command = doc! { "replSetStepDown": 5, "secondaryCatchUpPeriodSecs": 4 };
            client.database("admin").run_command(command).await.ok()
        })
        .await;
    }

    /// Waits until all members take part in the set.
    pub(crate) async fn until_whole(&self) {
        for server in &self.0 {
            let client = server.client().await;
            until("a member of the set", || async {
                let hello = client.database("admin").run_command(doc! { "hello": 1 }).await.ok()?;
                let is = |role| hello.get_bool(role).unwrap_or(false);
                (is("isWritablePrimary") || is("secondary")).then_some(())
            })
            .await;
        }
    }

    async fn primary(&self) -> usize {
        let mut running = Vec::new();
        for (number, server) in self.0.iter().enumerate() {
            if server.process.0.is_some() {
                running.push((number, server.client().await));
            }
        }
        until("a primary", || async {
            for (number, client) in &running {
                if is_primary(client).await {
                    return Some(*number);
                }
            }
            None
        })
        .await
    }
}
