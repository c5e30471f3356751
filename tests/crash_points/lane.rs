//! A database with a broker behind a proxy. Cases run in it one after the other.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use mongodb::{Client, options::ClientOptions};

use crate::{
    clients::Clients,
    database::Database,
    faults::Fault,
    harness::{Api, Broker, Launch, TestStore},
    inspection,
    proxy::Proxy,
    sqlite::{Answered, Position, Promises, Recorded, Recording, StoreFile, WriteLog},
    wire::Command,
};

/// Counts how often the machine stood still.
#[derive(Clone, Default)]
pub(crate) struct Stalls(Arc<AtomicU32>);

/// After so many cases the log of an SQLite store is written into the file.
const CHECKPOINT_EVERY: u32 = 4;
/// After so many cases its broker is stopped and started again.
const RESTART_EVERY: u32 = 3 * CHECKPOINT_EVERY;

/// A pause of this length, or longer, of a task that wants to run.
const STALL: Duration = Duration::from_secs(2);

impl Stalls {
    /// Counts for as long as the runtime lives.
    pub(crate) async fn count(self) {
        loop {
            let (begun, pause) = (Instant::now(), Duration::from_millis(100));
            tokio::time::sleep(pause).await;
            if begun.elapsed() > pause + STALL {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// Where the databases of lanes are.
#[derive(Debug, Clone)]
pub(crate) enum Server {
    /// A MongoDB server: its address, and that of the member that takes the writes.
    Mongo { uri: String, primary: String },
    /// A file for each lane.
    Sqlite,
}

/// By what faults happen.
enum Injector {
    Proxy(Proxy),
    Writes { log: WriteLog, armed: Armed },
}

/// Where the record of writes ended when a fault was prepared.
#[derive(Debug, Clone, Copy, Default)]
struct Armed {
    position: Position,
    bytes: u64,
}

/// What was seen while a fault was prepared.
pub(crate) struct Seen {
    pub(crate) commands: Vec<Command>,
    pub(crate) happened: bool,
}

/// A database, its brokers, and what makes faults happen to them.
pub(crate) struct Lane {
    injector: Injector,
    pub(crate) database: Database,
    /// The name under which the server knows the brokers' connections.
    app_name: String,
    launch: Launch,
    /// How a broker is started that reaches the server without the proxy.
    launch_beside: Option<Launch>,
    /// Present but while it is replaced.
    broker: Option<Arc<Broker>>,
    pub(crate) api: Api,
    /// How many brokers were started behind the proxy.
    started: u32,
    beside: Option<(Broker, Api)>,
    cases: u32,
    stalls: Stalls,
    /// The answers that must not be forgotten, and the positions at which brokers were started.
    pub(crate) answers: Vec<Answered>,
    restarts: Vec<Position>,
    _store: TestStore,
}

impl Lane {
    /// Starts a broker on a database of its own.
    pub(crate) async fn start(server: &Server, stalls: Stalls) -> Self {
        let (store, database, injector, launch, launch_beside, app_name) = match server {
            Server::Mongo { uri, primary } => {
                let store = TestStore::mongo(uri);
                let TestStore::Mongo { database: name, .. } = &store else { unreachable!() };
                let proxy = Proxy::start(primary, name).await;
                let mut options =
                    ClientOptions::parse(uri).await.expect("the address of a MongoDB");
                options.app_name = Some("crash points".to_owned());
                let database = Client::with_options(options).expect("a client").database(name);
                let direct = |address: &str| {
                    format!("mongodb://{address}/?directConnection=true&appName={name}")
                };
                let launch = store.launch().flag("store", &direct(&proxy.address));
                let launch_beside = store.launch().flag("store", &direct(primary));
                let app_name = format!("sluicegate {name}");
                let (database, injector) = (Database::Mongo(database), Injector::Proxy(proxy));
                (store, database, injector, launch, Some(launch_beside), app_name)
            }
            Server::Sqlite => {
                let Recorded { store, path, log, launch } = Recorded::begin();
                let injector = Injector::Writes { log: log.clone(), armed: Armed::default() };
                let database = Database::Sqlite(StoreFile { path, log });
                (store, database, injector, launch, None, String::new())
            }
        };
        let broker = Arc::new(launch.start().await);
        let api = broker.api().await;
        Self {
            injector,
            database,
            app_name,
            launch,
            launch_beside,
            broker: Some(broker),
            api,
            started: 1,
            beside: None,
            cases: 0,
            stalls,
            answers: Vec::new(),
            restarts: Vec::new(),
            _store: store,
        }
    }

    fn broker(&self) -> &Arc<Broker> {
        self.broker.as_ref().expect("a broker")
    }

    /// Returns what the checker knows the broker behind the proxy by.
    pub(crate) fn broker_name(&self) -> String {
        format!("broker {}", self.started)
    }

    /// Returns clients of the broker to which faults happen.
    pub(crate) fn clients(&self) -> Clients {
        let log = match &self.injector {
            Injector::Proxy(_) => None,
            Injector::Writes { log, .. } => Some(log.clone()),
        };
        Clients::new(self.api.clone(), self.broker_name(), log)
    }

    /// Prepares a fault, which happens at command number `at`, counted from 1; 0: at none.
    pub(crate) fn arm(&mut self, at: usize, fault: Option<Fault>) {
        let broker = Arc::downgrade(self.broker());
        match &mut self.injector {
            Injector::Proxy(proxy) => {
                let kill = move || {
                    if let Some(broker) = broker.upgrade() {
                        broker.signal("KILL");
                    }
                };
                proxy.arm(at, fault, Arc::new(kill));
            }
            Injector::Writes { log, armed } => {
                *armed = Armed { position: log.position(), bytes: log.length() };
                log.kill_after(at);
            }
        }
    }

    /// Ends what [`arm`](Self::arm) began.
    pub(crate) fn disarm(&mut self) -> Seen {
        match &self.injector {
            Injector::Proxy(proxy) => proxy.disarm(),
            Injector::Writes { log, armed } => {
                let happened = log.has_killed();
                log.kill_after(0);
                let mut commands = log.commands_behind(armed.bytes);
                commands.truncate((log.position() - armed.position) as usize);
                Seen { commands, happened }
            }
        }
    }

    /// Starts another broker in the place of the one that was killed, or told to stop.
    pub(crate) async fn replace(&mut self) {
        if let Injector::Writes { log, .. } = &self.injector {
            // A file has one broker. The one that was killed may not have ended yet.
            if let Some(broker) = self.broker.take().and_then(Arc::into_inner) {
                broker.ended().await;
            }
            self.restarts.push(log.position());
        }
        let broker = Arc::new(self.launch.start().await);
        self.api = broker.api().await;
        self.broker = Some(broker);
        self.started += 1;
    }

    /// Prepares for the next case. Returns its number.
    pub(crate) async fn next_case(&mut self) -> u32 {
        self.cases += 1;
        if let Database::Sqlite(file) = &self.database {
            // A short log is examined faster. Checkpoints, ends and beginnings of brokers are recorded too.
            if self.cases.is_multiple_of(RESTART_EVERY) {
                self.broker().terminate();
                self.replace().await;
            } else if self.cases.is_multiple_of(CHECKPOINT_EVERY) {
                file.checkpoint();
            }
        }
        self.cases
    }

    /// Returns a connection to the other broker, which reaches the server without the proxy.
    pub(crate) async fn beside(&mut self) -> Api {
        if self.beside.is_none() {
            let launch = self.launch_beside.as_ref().expect("a store for several brokers");
            let broker = launch.start().await;
            let api = broker.api().await;
            self.beside = Some((broker, api));
        }
        let (_, api) = self.beside.as_ref().expect("started above");
        api.clone()
    }

    /// Returns how often the machine has stood still.
    pub(crate) fn stalls(&self) -> u32 {
        self.stalls.0.load(Ordering::Relaxed)
    }

    /// Returns the log of the broker behind the proxy.
    pub(crate) fn log(&self) -> String {
        self.broker().log()
    }

    /// Waits until no transaction is open. Returns false if one stays open.
    pub(crate) async fn has_no_open_transaction(&mut self) -> bool {
        let Database::Mongo(database) = &self.database else { return true };
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(20) {
            if inspection::open_transactions(database, &self.app_name).await == 0 {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        false
    }

    /// Stops the broker and returns what it wrote, if that was recorded.
    pub(crate) async fn finish(mut self) -> Option<Recording> {
        let broker = Arc::into_inner(self.broker.take()?);
        let Injector::Writes { log, .. } = &self.injector else { return None };
        broker?.stop().await;
        Some(log.finish(Promises::Answers(self.answers), self.restarts))
    }
}
