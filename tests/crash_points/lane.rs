//! A database with a broker behind a proxy. Cases run in it one after the other.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use mongodb::{Client, Database, options::ClientOptions};

use crate::{
    harness::{Api, Broker, Launch, TestStore},
    proxy::{Kill, Proxy},
};

/// Counts how often the machine stood still.
#[derive(Clone, Default)]
pub(crate) struct Stalls(Arc<AtomicU32>);

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

/// A database, its proxy and its brokers.
pub(crate) struct Lane {
    pub(crate) proxy: Proxy,
    pub(crate) database: Database,
    /// The name under which the server knows the brokers' connections.
    pub(crate) app_name: String,
    launch: Launch,
    /// How a broker is started that reaches the server without the proxy.
    launch_beside: Launch,
    broker: Arc<Broker>,
    pub(crate) api: Api,
    /// How many brokers were started behind the proxy.
    started: u32,
    beside: Option<(Broker, Api)>,
    pub(crate) cases: u32,
    stalls: Stalls,
    _store: TestStore,
}

impl Lane {
    /// Starts a broker on a database of its own of the server at `uri`, of which `primary` takes the writes.
    pub(crate) async fn start(uri: &str, primary: &str, stalls: Stalls) -> Self {
        let store = TestStore::mongo(uri);
        let TestStore::Mongo { database: name, .. } = &store else { unreachable!() };
        let proxy = Proxy::start(primary, name).await;
        let mut options = ClientOptions::parse(uri).await.expect("the address of a MongoDB");
        options.app_name = Some("crash points".to_owned());
        let database = Client::with_options(options).expect("a client").database(name);
        let direct =
            |address: &str| format!("mongodb://{address}/?directConnection=true&appName={name}");
        let launch = store.launch().flag("store", &direct(&proxy.address));
        let launch_beside = store.launch().flag("store", &direct(primary));
        let broker = Arc::new(launch.start().await);
        let api = broker.api().await;
        let app_name = format!("sluicegate {name}");
        Self {
            proxy,
            database,
            app_name,
            launch,
            launch_beside,
            broker,
            api,
            started: 1,
            beside: None,
            cases: 0,
            stalls,
            _store: store,
        }
    }

    /// Returns what the checker knows the broker behind the proxy by.
    pub(crate) fn broker_name(&self) -> String {
        format!("broker {}", self.started)
    }

    /// Returns how to kill the broker behind the proxy.
    pub(crate) fn kill(&self) -> Kill {
        let broker = Arc::downgrade(&self.broker);
        Arc::new(move || {
            if let Some(broker) = broker.upgrade() {
                broker.signal("KILL");
            }
        })
    }

    /// Starts another broker in the place of the one that was killed.
    pub(crate) async fn replace(&mut self) {
        self.broker = Arc::new(self.launch.start().await);
        self.api = self.broker.api().await;
        self.started += 1;
    }

    /// Returns a connection to the other broker, which reaches the server without the proxy.
    pub(crate) async fn beside(&mut self) -> Api {
        if self.beside.is_none() {
            let broker = self.launch_beside.start().await;
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
        self.broker.log()
    }
}
