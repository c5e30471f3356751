//! A `mongod`.

use std::{
    env,
    fs::{self, File},
    future::Future,
    io,
    path::{Path, PathBuf},
    process::{Child, Command},
    time::Duration,
};

use mongodb::{
    Client,
    bson::{Document, doc},
    options::ClientOptions,
};

use super::{LIMIT, Process, free_port, program, spawn};

/// The variable that names the `mongod` to start.
const MONGOD: &str = "SLUICEGATE_TEST_MONGOD";
/// The log of a `mongod`, beside its data.
const LOG: &str = "mongod.log";
/// How long one try to write may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
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

/// A MongoDB replica set of one node, or a member of a [`MongoSet`](super::MongoSet).
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
    pub(super) fn alone(variables: Vec<(&'static str, PathBuf)>) -> Self {
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
    pub(super) async fn initiate(&self, addresses: &[String]) {
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

    pub(super) fn spawn(&mut self) {
        let mut command = self.command();
        command.args(["--replSet", "rs0"]);
        self.process = Process(Some(spawn(&mut command, MONGOD)));
    }

    /// Returns the id of the process, if there is one.
    pub(crate) fn process_id(&self) -> Option<u32> {
        self.process.0.as_ref().map(Child::id)
    }

    /// Removes all data but the log. The server must not run.
    pub(super) fn empty(&self) -> io::Result<()> {
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
    pub(super) async fn until<T, F>(&self, what: &str, mut ask: impl FnMut() -> F) -> T
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

    pub(super) async fn client(&self) -> Client {
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

pub(super) async fn is_primary(client: &Client) -> bool {
    hello(client).await.is_some_and(|hello| hello.get_bool("isWritablePrimary").unwrap_or(false))
}

/// Returns whether the server takes part in its set.
pub(super) async fn takes_part(client: &Client) -> bool {
    let Ok(Some(hello)) = tokio::time::timeout(PATIENCE, hello(client)).await else { return false };
    ["isWritablePrimary", "secondary"].iter().any(|role| hello.get_bool(role).unwrap_or(false))
}
