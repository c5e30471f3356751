//! Servers that belong to one test, which may stop, freeze and restart them.

use std::{
    env,
    fs::{self, File},
    future::Future,
    io,
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use futures_util::future::join_all;
use mongodb::{
    Client, Collection,
    bson::{DateTime, Document, doc},
    options::{Acknowledgment, ClientOptions, WriteConcern},
};

use super::{
    LIMIT,
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
/// The log of a `mongod`, beside its data.
const LOG: &str = "mongod.log";
/// How long one try to write may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// How many lines of a log are shown when its server does not do what it has to do.
const LAST_LINES: usize = 60;

/// Makes a directory for the data of a `mongod`: in memory, if `SLUICEGATE_TEST_MONGOD_DATA` names a directory there. A disk
/// that is busy for seconds would fail tests which are not about it.
fn data_directory() -> tempfile::TempDir {
    let directory = match env::var_os("SLUICEGATE_TEST_MONGOD_DATA") {
        Some(parent) => tempfile::tempdir_in(parent),
        None => tempfile::tempdir(),
    };
    directory.expect("a temporary directory")
}

/// Returns the program that a variable names, or the one on PATH.
fn program(variable: &str, name: &str) -> PathBuf {
    env::var_os(variable).map_or_else(|| PathBuf::from(name), PathBuf::from)
}

fn spawn(command: &mut Command, variable: &str) -> Child {
    command
        .stdin(Stdio::null())
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
        command.stdout(Stdio::null()).stderr(Stdio::null());
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
    /// Of the environment of the process.
    variables: Vec<(&'static str, PathBuf)>,
}

impl MongoServer {
    pub(crate) async fn start() -> Self {
        Self::start_with(Vec::new()).await
    }

    /// Starts a server with these variables in its environment.
    pub(crate) async fn start_with(variables: Vec<(&'static str, PathBuf)>) -> Self {
        let server = Self::alone(variables);
        server.initiate(&[server.address()]).await;
        server.until_primary().await;
        server
    }

    /// Returns a process that belongs to no set yet.
    fn alone(variables: Vec<(&'static str, PathBuf)>) -> Self {
        let directory = data_directory();
        let mut server = Self { port: free_port(), process: Process(None), directory, variables };
        server.spawn();
        server
    }

    /// Returns a server that is not a replica set, and its address.
    pub(crate) async fn standalone() -> (Self, String) {
        let (directory, variables) = (data_directory(), Vec::new());
        let mut server = Self { port: free_port(), process: Process(None), directory, variables };
        let mut command = server.command();
        server.process = Process(Some(spawn(&mut command, MONGOD)));
        let client = server.client().await;
        server
            .until("mongod answers", || async {
                client.database("admin").run_command(doc! { "ping": 1 }).await.ok()
            })
            .await;
        let uri = format!("mongodb://127.0.0.1:{}/", server.port);
        (server, uri)
    }

    /// Makes the members at these addresses a set that elects a new primary after two seconds without one.
    async fn initiate(&self, addresses: &[String]) {
        let members: Vec<Document> = (0..)
            .zip(addresses)
            .map(|(number, address): (i32, _)| doc! { "_id": number, "host": address })
            .collect();
        let settings = doc! { "electionTimeoutMillis": 2000, "heartbeatIntervalMillis": 500 };
        let set = doc! { "_id": "rs0", "members": members, "settings": settings };
        let client = self.client().await;
        self.until("mongod takes its configuration", || async {
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

    /// Returns the id of the process, if there is one.
    pub(crate) fn process_id(&self) -> Option<u32> {
        self.process.0.as_ref().map(Child::id)
    }

    /// Removes all data but the log. The server must not run.
    fn empty(&self) -> io::Result<()> {
        for entry in fs::read_dir(self.directory.path())? {
            let path = entry?.path();
            if path.is_dir() {
                fs::remove_dir_all(path)?;
            } else if path != self.log() {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }

    /// Returns the command that starts the server, without a set.
    fn command(&self) -> Command {
        let mut command = Command::new(program(MONGOD, "mongod"));
        command.envs(self.variables.iter().map(|(name, path)| (name, path)));
        command.args(["--bind_ip", "127.0.0.1", "--quiet"]);
        command.args(["--setParameter", "enableTestCommands=1"]); // for `hold`
        command.args(["--wiredTigerCacheSizeGB", "0.25", "--port"]).arg(self.port.to_string());
        command.arg("--dbpath").arg(self.directory.path());
        let log = File::options().create(true).append(true).open(self.log()).expect("a log");
        command.stdout(log.try_clone().expect("a second handle")).stderr(log);
        command
    }

    fn log(&self) -> PathBuf {
        self.directory.path().join(LOG)
    }

    /// Copies the server's log.
    pub(crate) fn keep_log(&self, to: &Path) -> io::Result<u64> {
        fs::copy(self.log(), to)
    }

    /// Repeats `ask` until it returns a value. Panics with `what` and the end of the server's log after [`LIMIT`], and
    /// keeps the log.
    async fn until<T, F>(&self, what: &str, mut ask: impl FnMut() -> F) -> T
    where
        F: Future<Output = Option<T>>,
    {
        let asking = async {
            loop {
                if let Some(value) = ask().await {
                    return value;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        if let Ok(value) = tokio::time::timeout(LIMIT, asking).await {
            return value;
        }
        let text = fs::read_to_string(self.log()).unwrap_or_default();
        let kept = env::temp_dir().join(format!("mongod-{}.log", self.port));
        let copied = self.keep_log(&kept);
        let lines: Vec<&str> = text.lines().collect();
        let last = lines[lines.len().saturating_sub(LAST_LINES)..].join("\n");
        panic!(
            "{what}: nothing within {LIMIT:?} from mongod on port {}, process {:?}; its log ({copied:?} bytes are in {}) \
             ends with:\n{last}",
            self.port,
            self.process_id(),
            kept.display()
        );
    }

    async fn client(&self) -> Client {
        let uri = format!("mongodb://127.0.0.1:{}/?directConnection=true", self.port);
        let mut options = ClientOptions::parse(uri).await.expect("a valid address");
        options.server_selection_timeout = Some(Duration::from_secs(1));
        Client::with_options(options).expect("a client")
    }

    async fn until_primary(&self) {
        let client = self.client().await;
        self.until("mongod is primary", || async { is_primary(&client).await.then_some(()) }).await;
    }
}

/// Returns what the server says of its part in the set, if it answers.
async fn hello(client: &Client) -> Option<Document> {
    client.database("admin").run_command(doc! { "hello": 1 }).await.ok()
}

async fn is_primary(client: &Client) -> bool {
    hello(client).await.is_some_and(|hello| hello.get_bool("isWritablePrimary").unwrap_or(false))
}

/// Returns whether the server takes part in its set.
async fn takes_part(client: &Client) -> bool {
    let Ok(Some(hello)) = tokio::time::timeout(PATIENCE, hello(client)).await else { return false };
    ["isWritablePrimary", "secondary"].iter().any(|role| hello.get_bool(role).unwrap_or(false))
}

/// A MongoDB replica set of three nodes.
pub(crate) struct MongoSet {
    servers: Vec<MongoServer>,
    /// Where clients and the other members reach each.
    addresses: Vec<String>,
}

impl MongoSet {
    pub(crate) async fn start() -> Self {
        Self::start_behind(|_| Vec::new(), async |_, server| server.address()).await
    }

    /// Starts a set whose members are reached, by clients and by each other, at the addresses that `way` returns for
    /// the number of each, with the `variables` of each in its environment.
    pub(crate) async fn start_behind(
        variables: impl Fn(usize) -> Vec<(&'static str, PathBuf)>,
        mut way: impl AsyncFnMut(usize, &MongoServer) -> String,
    ) -> Self {
        let servers: Vec<_> = (0..3).map(|number| MongoServer::alone(variables(number))).collect();
        let mut addresses = Vec::new();
        for (number, server) in servers.iter().enumerate() {
            addresses.push(way(number, server).await);
        }
        servers[0].initiate(&addresses).await;
        let set = Self { servers, addresses };
        set.primary().await;
        set
    }

    pub(crate) fn uri(&self) -> String {
        format!("mongodb://{}/?replicaSet=rs0", self.addresses.join(","))
    }

    /// Returns the members.
    pub(crate) fn servers(&self) -> &[MongoServer] {
        &self.servers
    }

    /// Returns the process of each member, if it has one.
    pub(crate) fn process_ids(&self) -> Vec<Option<u32>> {
        self.servers.iter().map(MongoServer::process_id).collect()
    }

    /// Kills the primary as in a crash, and returns its index.
    pub(crate) async fn kill_primary(&mut self) -> usize {
        let primary = self.primary().await;
        self.servers[primary].kill();
        primary
    }

    /// Restarts a member on the same port and data.
    pub(crate) fn restart(&mut self, member: usize) {
        self.servers[member].spawn();
    }

    /// Kills a member as in a crash.
    pub(crate) fn kill(&mut self, member: usize) {
        self.servers[member].kill();
    }

    /// Starts a member that is not running without its data, which it copies from the others.
    pub(crate) fn restart_empty(&mut self, member: usize) {
        self.servers[member].empty().expect("a folder that can be emptied");
        self.restart(member);
    }

    /// Returns whether a member takes itself for the primary.
    pub(crate) async fn is_primary(&self, member: usize) -> bool {
        is_primary(&self.servers[member].client().await).await
    }

    /// Freezes the primary, and returns its index.
    pub(crate) async fn freeze_primary(&self) -> usize {
        let primary = self.primary().await;
        self.servers[primary].freeze();
        primary
    }

    /// Resumes a member.
    pub(crate) fn thaw(&self, member: usize) {
        self.servers[member].thaw();
    }

    /// Makes the primary a secondary, so that another one is elected.
    pub(crate) async fn step_down(&self) {
        until("a primary that steps down", || async {
            let client = self.servers[self.primary().await].client().await;
            let command = doc! { "replSetStepDown": 5, "secondaryCatchUpPeriodSecs": 4 };
            client.database("admin").run_command(command).await.ok()
        })
        .await;
    }

    /// Has the secondaries apply nothing of what they receive, or go on. Elections are not affected.
    pub(crate) async fn hold_secondaries(&self, hold: bool) {
        self.hold_at("rsSyncApplyStop", hold).await;
    }

    /// Has the secondaries copy nothing from the primary, so that an election takes back what it writes, or go on.
    pub(crate) async fn starve_secondaries(&self, starve: bool) {
        self.hold_at("stopReplProducer", starve).await;
    }

    /// Turns a fail point on in all running members but the primary, or off in all.
    async fn hold_at(&self, point: &str, on: bool) {
        let primary = if on { Some(self.primary().await) } else { None };
        let mode = if on { "alwaysOn" } else { "off" };
        for (number, server) in self.servers.iter().enumerate() {
            if Some(number) != primary && server.process.0.is_some() {
                let point = doc! { "configureFailPoint": point, "mode": mode };
                let admin = server.client().await.database("admin");
                admin.run_command(point).await.expect("a server with fail points");
            }
        }
    }

    /// Returns a collection of the present primary.
    pub(crate) async fn collection(&self, database: &str, name: &str) -> Collection<Document> {
        self.servers[self.primary().await].client().await.database(database).collection(name)
    }

    /// Tries to write so that a majority has it, once. True if it has.
    pub(crate) async fn takes_writes(&self) -> bool {
        let concern =
            WriteConcern::builder().w(Acknowledgment::Majority).w_timeout(PATIENCE).build();
        for server in self.servers.iter().filter(|server| server.process.0.is_some()) {
            let client = server.client().await;
            let writes = async {
                let probes = client.database("probes").collection::<Document>("probes");
                let write = probes.insert_one(doc! { "at": DateTime::now() });
                is_primary(&client).await && write.write_concern(concern.clone()).await.is_ok()
            };
            if tokio::time::timeout(PATIENCE * 2, writes).await.unwrap_or(false) {
                return true;
            }
        }
        false
    }

    /// Waits until all members take part in the set.
    pub(crate) async fn until_whole(&self) {
        for server in &self.servers {
            let client = server.client().await;
            let asked = || async { takes_part(&client).await.then_some(()) };
            server.until("a member of the set", asked).await;
        }
    }

    /// Returns, for each member, whether it takes part in the set.
    pub(crate) async fn taking_part(&self) -> Vec<bool> {
        let asked = async |server: &MongoServer| takes_part(&server.client().await).await;
        join_all(self.servers.iter().map(asked)).await
    }

    pub(crate) async fn primary(&self) -> usize {
        let mut running = Vec::new();
        for (number, server) in self.servers.iter().enumerate() {
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
