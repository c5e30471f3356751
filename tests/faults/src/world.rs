//! The servers and brokers, and what befalls them.

use std::{
    io,
    path::Path,
    process::Command,
    sync::atomic::{AtomicU32, AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use sluicegate_checker::Recorder;
use sluicegate_client::Client;
use tokio::sync::Mutex;

use crate::{
    clock::{FalseClock, StoreClock},
    crowd, damage,
    harness::{Broker, Launch, MongoServer, RedisServer},
    link::{Link, Mode},
    members::Members,
    plan::{Blow, Fault, Store},
    signals,
};

/// How long a call may take before its client gives up.
const PATIENCE: Duration = Duration::from_secs(5);
/// How many queues, and streams of this machine, brokers allow beside the crowd's.
const MANY: u64 = 10_000;
/// Size of the disk of an SQLite store.
const DISK: &str = "96m";

/// A broker, which is replaced when it dies, and the ways to it.
pub(crate) struct Node {
    pub(crate) number: usize,
    launch: Launch,
    /// The wall clock of its processes.
    pub(crate) clock: FalseClock,
    broker: Mutex<Option<Broker>>,
    /// How many processes there were.
    generation: AtomicU32,
    front: Link,
    /// The way of the consumers that vanish.
    pub(crate) fragile: Link,
    /// The way to the store, if faults happen on it.
    store: Option<Link>,
    pub(crate) client: Client,
    pub(crate) fragile_client: Client,
}

impl Node {
    /// Returns a broker that is yet to be started.
    async fn new(number: usize, launch: Launch, store: Option<Link>) -> Self {
        // Leads nowhere before the start.
        let clock = FalseClock::new();
        let (front, fragile) = (Link::to("127.0.0.1:1").await, Link::to("127.0.0.1:1").await);
        Self {
            number,
            launch: clock
                .variables()
                .into_iter()
                .fold(launch, |launch, (name, path)| launch.variable(name, path)),
            clock,
            broker: Mutex::default(),
            generation: AtomicU32::new(0),
            client: client_of(&front),
            fragile_client: client_of(&fragile),
            front,
            fragile,
            store,
        }
    }

    /// Returns a client with a connection of its own.
    pub(crate) fn connect(&self) -> Client {
        client_of(&self.front)
    }

    /// Returns what the checker knows the present process by.
    pub(crate) fn name(&self) -> String {
        format!("broker {}.{}", self.number, self.generation.load(Ordering::Relaxed))
    }

    /// Starts a process in the place of the one before, as a supervisor does: until it serves.
    async fn start(&self, place: &mut Option<Broker>) {
        loop {
            match self.launch.try_start().await {
                Ok(broker) => {
                    let address = broker.address.trim_start_matches("http://").to_owned();
                    self.generation.fetch_add(1, Ordering::Relaxed);
                    self.front.lead_to(&address);
                    self.fragile.lead_to(&address);
                    *place = Some(broker);
                    return;
                }
                Err(why) if why.contains("panicked") => panic!("{why}"),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    /// Returns the warnings and errors that the present process has logged.
    pub(crate) async fn complaints(&self) -> Vec<String> {
        let log = self.broker.lock().await.as_ref().map(Broker::log).unwrap_or_default();
        let is_complaint = |line: &&str| line.contains(" WARN ") || line.contains(" ERROR ");
        log.lines().filter(is_complaint).map(str::to_owned).collect()
    }
}

/// A folder for an SQLite store, on a small disk of its own if this process may mount one.
pub(crate) struct Disk {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) is_small: bool,
}

impl Disk {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let mut mount = Command::new("mount");
        let options = format!("size={DISK}");
        mount.args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(folder.path());
        let is_small = mount.output().is_ok_and(|done| done.status.success());
        Self { folder, is_small }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if self.is_small {
            let _ = Command::new("umount").arg("--lazy").arg(self.folder.path()).status();
        }
    }
}

/// Everything that faults happen to.
pub(crate) struct World {
    pub(crate) nodes: Vec<Node>,
    /// Reaches any of the brokers.
    pub(crate) client: Client,
    server: Option<Mutex<MongoServer>>,
    pub(crate) members: Option<Mutex<Members>>,
    redis: Option<Mutex<RedisServer>>,
    database: String,
    pub(crate) disk: Option<Disk>,
    filling: Mutex<()>,
    /// What is known of the store's clock.
    pub(crate) clock: StoreClock,
    /// The wall clock of the only server.
    pub(crate) server_clock: FalseClock,
    /// What the checker does not see and is wrong nevertheless.
    pub(crate) wrong: parking_lot::Mutex<Vec<String>>,
    turn: AtomicUsize,
}

/// Returns what is wrong with a broker that nobody has ended.
fn oddity(broker: &mut Broker) -> Option<String> {
    let log = broker.log();
    if let Some(status) = broker.has_ended() {
        let lines: Vec<&str> = log.lines().rev().take(20).collect();
        return Some(format!("a broker has ended by itself with {status}: {lines:#?}"));
    }
    let panic = log.lines().skip_while(|line| !line.contains("panicked at"));
    let panic: Vec<&str> = panic.take(5).collect();
    (!panic.is_empty()).then(|| format!("a broker panicked: {panic:#?}"))
}

fn client_of(link: &Link) -> Client {
    Client::builder(format!("http://{}", link.address))
        .request_timeout(PATIENCE)
        .connect_lazy()
        .expect("an address")
}

impl World {
    /// Starts the servers and so many brokers (on SQLite: one), with room for a crowd.
    pub(crate) async fn start(store: Store, brokers: usize, crowd: &crowd::Size) -> Self {
        let (mut server, mut members, mut redis, mut disk) = (None, None, None, None);
        let (database, server_clock) = ("faults".to_owned(), FalseClock::new());
        let launch = Launch::new()
            .flag("poll-min", "250ms")
            .flag("poll-max", "2s")
            .flag("ping-interval", "1s")
            .flag("ping-timeout", "1s")
            .flag("max-queues", &(MANY + crowd.queues).to_string())
            .flag("max-streams-per-peer", &(MANY + crowd.streams).to_string());
        let mut address = String::new();
        match store {
            Store::Sqlite => disk = Some(Disk::new()),
            Store::Mongodb => {
                let started = MongoServer::start_with(server_clock.variables()).await;
                address = started.address();
                server = Some(Mutex::new(started));
            }
            Store::Set => {
                let set = Members::start(brokers).await;
                address = set.uri();
                members = Some(Mutex::new(set));
            }
        }
        if store != Store::Sqlite {
            redis = Some(Mutex::new(RedisServer::start().await));
        }
        let mut nodes = Vec::new();
        for number in 1..=if store == Store::Sqlite { 1 } else { brokers } {
            let mut launch = launch.clone();
            let mut way = None;
            match store {
                Store::Sqlite => {
                    let folder = disk.as_ref().expect("a disk").folder.path();
                    let file = folder.join("items.db");
                    launch = launch.flag("store", &format!("sqlite:{}", file.display()));
                }
                Store::Mongodb => {
                    let link = Link::to(&address).await;
                    let uri = format!("mongodb://{}/?directConnection=true", link.address);
                    launch = launch.flag("store", &uri).flag("database", &database);
                    way = Some(link);
                }
                Store::Set => {
                    launch = launch.flag("store", &address).flag("database", &database);
                    let known = members.as_ref().expect("a set").lock().await.brokers();
                    launch = launch.when_spawned(move |id| known.lock()[number - 1] = Some(id));
                }
            }
            if let Some(redis) = &redis {
                launch = launch.signals(&redis.lock().await.url());
            }
            nodes.push(Node::new(number, launch, way).await);
        }
        for node in &nodes {
            let mut place = node.broker.lock().await;
            node.start(&mut place).await;
        }
        let url = |node: &Node| format!("http://{}", node.front.address);
        let builder = Client::builder(url(&nodes[0])).request_timeout(PATIENCE);
        let builder = nodes[1..].iter().fold(builder, |builder, node| builder.endpoint(url(node)));
        Self {
            client: builder.connect_lazy().expect("addresses"),
            nodes,
            server,
            members,
            redis,
            database,
            disk,
            filling: Mutex::default(),
            clock: StoreClock::default(),
            server_clock,
            wrong: parking_lot::Mutex::default(),
            turn: AtomicUsize::new(0),
        }
    }

    /// Returns the brokers in turn.
    pub(crate) fn next(&self) -> &Node {
        &self.nodes[self.turn.fetch_add(1, Ordering::Relaxed) % self.nodes.len()]
    }

    /// Lets a fault happen until it ends or all that it hits could go on without what is still away. Returns when
    /// that was. What is still away comes back by [`World::clean_up`].
    pub(crate) async fn strike(&self, blow: Blow, recorder: &Recorder) -> Instant {
        let node = &self.nodes[blow.victim % self.nodes.len()];
        match blow.fault {
            Fault::BrokerKill => {
                let mut broker = node.broker.lock().await;
                self.wrong.lock().extend(oddity(broker.as_mut().expect("a broker")));
                broker.take().expect("a broker").kill();
                tokio::time::sleep(blow.lasting).await;
                let over = Instant::now();
                node.start(&mut broker).await;
                drop(broker);
                if self.disk.is_some() {
                    self.know_clock().await;
                }
                over
            }
            Fault::BrokerFreeze => {
                let broker = node.broker.lock().await;
                let broker = broker.as_ref().expect("a broker");
                broker.signal("STOP");
                tokio::time::sleep(blow.lasting).await;
                broker.signal("CONT");
                Instant::now()
            }
            Fault::ServerKill | Fault::ServerFreeze => self.strike_server(blow).await,
            Fault::LinkCut | Fault::LinkDelay | Fault::LinkHalfOpen => {
                let link = node.store.as_ref().expect("a proxy before the store");
                link.set(match blow.fault {
                    Fault::LinkCut => Mode::Refusing,
                    Fault::LinkDelay => Mode::Slow(blow.lasting / 4),
                    _ => Mode::Silent,
                });
                if blow.fault == Fault::LinkCut {
                    link.cut();
                }
                tokio::time::sleep(blow.lasting).await;
                if blow.fault == Fault::LinkHalfOpen {
                    link.cut();
                }
                link.set(Mode::Open);
                Instant::now()
            }
            Fault::ConsumersVanish => {
                node.fragile.set(Mode::Silent);
                Instant::now() + blow.lasting
            }
            Fault::SignalsKill
            | Fault::SignalsFreeze
            | Fault::SignalsFlood
            | Fault::SignalsForge => self.strike_signals(blow).await,
            Fault::ClockStep | Fault::ServerClockStep => self.strike_clock(blow, recorder).await,
            Fault::StepDown
            | Fault::PrimaryKill
            | Fault::PrimaryFreeze
            | Fault::PrimaryDeserted
            | Fault::PrimaryCutOff => {
                let mut members = self.members.as_ref().expect("a set").lock().await;
                members.strike_primary(blow.fault).await
            }
            Fault::PrimarySplit => self.split(blow, node.number - 1, recorder).await,
            Fault::SecondBroker => {
                let _first = node.broker.lock().await;
                let ended = node.launch.run_to_end().await;
                if ended.status.success() || !ended.log.contains("in use") {
                    self.wrong.lock().push(format!("a second broker on the file: {ended:?}"));
                }
                Instant::now()
            }
            Fault::DiskFull => self.fill_disk(blow).await,
            Fault::FlipFile | Fault::FlipLog => {
                let wrong = damage::flip(blow).await;
                self.wrong.lock().extend(wrong);
                Instant::now()
            }
        }
    }

    async fn strike_server(&self, blow: Blow) -> Instant {
        let mut server = self.server.as_ref().expect("a server").lock().await;
        if blow.fault == Fault::ServerFreeze {
            server.freeze();
            tokio::time::sleep(blow.lasting).await;
            server.thaw();
            return Instant::now();
        }
        server.kill();
        tokio::time::sleep(blow.lasting).await;
        server.restart().await;
        Instant::now()
    }

    async fn strike_signals(&self, blow: Blow) -> Instant {
        let mut redis = self.redis.as_ref().expect("a Redis").lock().await;
        match blow.fault {
            Fault::SignalsKill => {
                redis.stop();
                tokio::time::sleep(blow.lasting).await;
                redis.restart().await;
            }
            Fault::SignalsFreeze => {
                redis.freeze();
                tokio::time::sleep(blow.lasting).await;
                redis.thaw();
            }
            Fault::SignalsFlood => signals::flood(&redis.url(), &self.database).await,
            _ => signals::forge(&redis.url(), &self.database).await,
        }
        Instant::now()
    }

    /// Fills the disk for a while.
    async fn fill_disk(&self, blow: Blow) -> Instant {
        let _alone = self.filling.lock().await;
        let disk = self.disk.as_ref().filter(|disk| disk.is_small);
        let filler = disk.expect("a small disk").folder.path().join("filler");
        // Ends with an error when nothing more fits.
        let filled = Command::new("dd")
            .args(["if=/dev/zero", "bs=64k"])
            .arg(format!("of={}", filler.display()))
            .output();
        assert!(filled.is_ok_and(|dd| !dd.status.success()), "the disk has an end");
        tokio::time::sleep(blow.lasting).await;
        std::fs::remove_file(&filler).expect("the filler");
        Instant::now()
    }

    /// Returns what the brokers say of themselves that they should not have to say.
    pub(crate) async fn oddities(&self) -> Vec<String> {
        let mut wrong = std::mem::take(&mut *self.wrong.lock());
        for node in &self.nodes {
            let mut place = node.broker.lock().await;
            let odd = place.as_mut().and_then(oddity);
            if odd.is_some() {
                node.start(&mut place).await;
            }
            wrong.extend(odd);
        }
        wrong
    }

    /// Returns how many members of the set had to copy all data anew; `None` without a set.
    pub(crate) async fn resynced(&self) -> Option<usize> {
        Some(self.members.as_ref()?.lock().await.resynced)
    }

    /// Returns the name, the process and the address of the metrics of each broker.
    pub(crate) async fn brokers(&self) -> Vec<(String, u32, String)> {
        let mut brokers = Vec::new();
        for node in &self.nodes {
            if let Some(broker) = &*node.broker.lock().await {
                brokers.push((node.name(), broker.process_id(), broker.http_address.clone()));
            }
        }
        brokers
    }

    /// Returns the process, if there is one, and the address of each MongoDB server.
    pub(crate) async fn servers(&self) -> Vec<(Option<u32>, String)> {
        let of = |server: &MongoServer| (server.process_id(), server.address());
        if let Some(server) = &self.server {
            return vec![of(&*server.lock().await)];
        }
        let Some(members) = &self.members else { return Vec::new() };
        members.lock().await.servers().iter().map(of).collect()
    }

    /// Copies the logs of brokers and MongoDB servers, under names that begin with this path.
    pub(crate) async fn keep_logs(&self, path: &Path) -> io::Result<()> {
        for node in &self.nodes {
            let log = node.broker.lock().await.as_ref().map(Broker::log).unwrap_or_default();
            let mut name = path.as_os_str().to_owned();
            name.push(format!("-broker-{}.log", node.number));
            std::fs::write(name, log)?;
        }
        let keep = |number: usize, server: &MongoServer| {
            let mut name = path.as_os_str().to_owned();
            name.push(format!("-mongod-{number}.log"));
            server.keep_log(Path::new(&name)).map(drop)
        };
        if let Some(server) = &self.server {
            keep(0, &*server.lock().await)?;
        }
        if let Some(members) = &self.members {
            for (number, server) in members.lock().await.servers().iter().enumerate() {
                keep(number, server)?;
            }
        }
        Ok(())
    }

    /// Brings back what is still away.
    pub(crate) async fn clean_up(&self) {
        for node in &self.nodes {
            node.fragile.cut();
            node.fragile.set(Mode::Open);
        }
        if let Some(members) = &self.members {
            members.lock().await.bring_back().await;
        }
    }
}
