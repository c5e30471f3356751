//! Connections that stay open and lead nowhere, and commands that are held up on their way to the server.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicUsize, Ordering},
    time::Instant,
};

use futures_util::future::join_all;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::oneshot,
};

use super::{own_server::Server, *};
use crate::store::StoreError;

/// Longer than any operation without an answer may take.
const LIMIT: Duration = Duration::from_secs(45);

/// Forwards bytes until told to swallow them: its connections stay open and lead nowhere.
pub(super) struct Proxy {
    address: SocketAddr,
    way: Arc<Way>,
}

#[derive(Default)]
struct Way {
    /// Number of connections so far.
    made: AtomicUsize,
    /// Bytes on connections with lower numbers are swallowed.
    dead_below: AtomicUsize,
    /// The commands to hold up, each once.
    holds: Mutex<Vec<Hold>>,
}

/// A command to hold up.
struct Hold {
    /// The bytes by which the command is recognised.
    bytes: Vec<u8>,
    caught: oneshot::Sender<()>,
    release: oneshot::Receiver<()>,
}

/// A command that is held up, together with its connection, until this value is dropped.
pub(super) struct HeldCommand {
    caught: oneshot::Receiver<()>,
    _release: oneshot::Sender<()>,
}

impl HeldCommand {
    /// Waits until the command has been caught.
    pub(super) async fn caught(&mut self) {
        tokio::time::timeout(LIMIT, &mut self.caught).await.expect("a command in time").unwrap();
    }
}

impl Proxy {
    pub(super) async fn start(server: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, way) = (listener.local_addr().unwrap(), Arc::new(Way::default()));
        let ways = Arc::clone(&way);
        tokio::spawn(async move {
            loop {
                let (near, _) = listener.accept().await.unwrap();
                let far = TcpStream::connect(&server).await.unwrap();
                let number = ways.made.fetch_add(1, Ordering::SeqCst);
                let ((near_in, near_out), (far_in, far_out)) =
                    (near.into_split(), far.into_split());
                tokio::spawn(forward(near_in, far_out, number, Arc::clone(&ways), true));
                tokio::spawn(forward(far_in, near_out, number, Arc::clone(&ways), false));
            }
        });
        Self { address, way }
    }

    /// Opens a broker that reaches the server only through this proxy.
    pub(super) async fn open(&self, clock: &Arc<Clock>, database: &str) -> Broker<MongoStore> {
        self.open_with(16, clock, database).await
    }

    /// The same with so many connections.
    async fn open_with(
        &self,
        pool_size: u32,
        clock: &Arc<Clock>,
        database: &str,
    ) -> Broker<MongoStore> {
        let uri = format!("mongodb://{}/?directConnection=true&appName=proxied", self.address);
        let options = MongoOptions {
            clock: clock.clone(),
            discipline: false,
            pool_size,
            ..MongoOptions::default()
        };
        connected(&uri, database, options).await
    }

    /// Makes all present connections lead nowhere. New ones work.
    fn cut(&self) {
        self.way.dead_below.store(self.way.made.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// Holds up the next command that contains these bytes. All other connections work.
    fn hold(&self, bytes: &[u8]) -> HeldCommand {
        let ((caught, is_caught), (release, released)) = (oneshot::channel(), oneshot::channel());
        let hold = Hold { bytes: bytes.to_vec(), caught, release: released };
        self.way.holds.lock().push(hold);
        HeldCommand { caught: is_caught, _release: release }
    }

    /// Holds up the next command of this name on the items.
    pub(super) fn hold_on_items(&self, command: &str) -> HeldCommand {
        self.hold(format!("\u{2}{command}\0\u{e}\0\0\0items.default\0").as_bytes())
    }
}

impl Way {
    fn hold_of(&self, bytes: &[u8]) -> Option<Hold> {
        let mut holds = self.holds.lock();
        let known = |hold: &Hold| bytes.windows(hold.bytes.len()).any(|part| part == hold.bytes);
        let at = holds.iter().position(known)?;
        Some(holds.remove(at))
    }
}

async fn forward(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    number: usize,
    way: Arc<Way>,
    to_server: bool,
) {
    let mut bytes = vec![0; 64 * 1024];
    while let Ok(count) = from.read(&mut bytes).await {
        if to_server && let Some(hold) = way.hold_of(&bytes[..count]) {
            let _ = hold.caught.send(());
            let _ = hold.release.await;
        }
        let dead = number < way.dead_below.load(Ordering::SeqCst);
        if count == 0 || !dead && to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}

impl Scratch {
    /// The address of the server.
    fn server(&self) -> String {
        let (_, rest) = self.uri.split_once("://").unwrap();
        rest.split_once('/').unwrap().0.to_owned()
    }
}

/// Connections that stay open and lead nowhere, as behind a firewall that forgot them, hold up deliveries for less than
/// five seconds.
#[tokio::test(flavor = "multi_thread")]
async fn half_open_connections_stall_deliveries_for_less_than_five_seconds() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let proxy = Proxy::start(scratch.server()).await;
    let store = proxy.open(&clock, &scratch.name).await;
    let queue = make(&store, queue_named("q")).await;
    store.push(vec![push_of(&queue, "a", 0), push_of(&queue, "b", 0)]).await.unwrap();
    let first = take(&store, &queue, 1).await;

    proxy.cut();
    let started = Instant::now();
    let second = async {
        loop {
            // A reserve without an answer is repeated, as the dispatcher does.
            if let Ok(reserved) = store.reserve(&queue, &[want(1, LEASE)]).await {
                break reserved.deliveries;
            }
        }
    };
    let settle = async {
        let receipts = || vec![held(&queue, &first[0])];
        while store.commit(receipts()).await.is_err() {}
    };
    let (second, ()) = tokio::join!(second, settle);
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert_eq!(second.len(), 1);
}

/// The driver does not notice a single connection that leads nowhere beside others that work, because its heartbeats
/// are answered.
#[tokio::test(flavor = "multi_thread")]
async fn a_read_over_a_dead_connection_is_repeated_over_another() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let proxy = Proxy::start(scratch.server()).await;
    let store = proxy.open(&clock, &scratch.name).await;
    let queue = make(&store, queue_named("q")).await;
    let pushed = store.push(vec![push_of(&queue, "a", 0)]).await.unwrap();
    let mut dead = ["find", "aggregate", "distinct"].map(|command| proxy.hold_on_items(command));
    let reads = async {
        tokio::try_join!(
            store.get_item(&queue, pushed[0].id),
            store.depth(&queue),
            store.origins(&queue),
        )
    };
    let others = async {
        for held in &mut dead {
            held.caught().await;
        }
        // Calls that come meanwhile are not affected.
        let started = Instant::now();
        let page = store.list_items(&queue, None, None, 1).await.unwrap();
        assert_eq!(page.entries.len(), 1);
        assert_eq!(take(&store, &queue, 1).await.len(), 1);
        assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    };
    let both = async { tokio::join!(reads, others) };
    let (read, ()) = tokio::time::timeout(LIMIT, both).await.expect("answers in time");
    let (item, depth, origins) = read.unwrap();
    assert!(item.is_some());
    assert_eq!(depth.unsettled(), 1);
    assert!(origins.is_empty());
    drop(dead);
}

/// The driver does not notice that an operation has given up while it waited for a connection. If operations waited there, those
/// that did so while the server was slow would keep all later ones from its connections, which lie idle.
#[tokio::test(flavor = "multi_thread")]
async fn reads_that_waited_while_the_server_was_slow_are_answered() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let proxy = Proxy::start(scratch.server()).await;
    let store = proxy.open_with(2, &clock, &scratch.name).await;
    let queue = make(&store, queue_named("q")).await;
    let pushed = store.push(vec![push_of(&queue, "a", 0)]).await.unwrap();
    // Both connections are busy until the time limit of the first attempts at a read.
    let mut slow = [proxy.hold_on_items("find"), proxy.hold_on_items("find")];
    let reads = (0..1_000).map(|_| store.get_item(&queue, pushed[0].id));
    let caught = async {
        for held in &mut slow {
            held.caught().await;
        }
    };
    let both = async { tokio::join!(join_all(reads), caught) };
    let (read, ()) = tokio::time::timeout(LIMIT, both).await.expect("answers in time");
    let refused: Vec<_> = read.iter().filter_map(|read| read.as_ref().err()).collect();
    assert!(refused.is_empty(), "{} were refused, as {:?}", refused.len(), refused[0]);
    drop(slow);
}

/// The broker reads the format regularly to learn of newer versions. A dead connection does not end that.
#[tokio::test(flavor = "multi_thread")]
async fn the_format_is_read_again_over_another_connection() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let proxy = Proxy::start(scratch.server()).await;
    let store = proxy.open(&clock, &scratch.name).await;
    let mut watch = store.watch_settings();
    let mut dead = proxy.hold(b"\x02find\0\x07\0\0\0format\0");
    let changes = async { tokio::join!(watch.changes(), dead.caught()) };
    let (changes, ()) = tokio::time::timeout(LIMIT, changes).await.expect("an answer in time");
    changes.unwrap();
    drop(dead);
}

/// Nothing waits for a dead connection for ever: a write without an answer has an unknown outcome, and the store
/// closes.
#[tokio::test(flavor = "multi_thread")]
async fn a_write_over_a_dead_connection_ends() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let proxy = Proxy::start(scratch.server()).await;
    let store = proxy.open(&clock, &scratch.name).await;
    let plain = make(&store, queue_named("plain")).await;
    let ordered = make(&store, Queue { sequenced: true, ..queue_named("ordered") }).await;
    let pushed = store.push(vec![push_of(&plain, "a", 0)]).await.unwrap();
    let dead = [proxy.hold_on_items("findAndModify"), proxy.hold(b"\x10commitTransaction\0")];
    let both = async {
        tokio::join!(
            store.delete_item(&plain, pushed[0].id, None),
            store.push(vec![push_of(&ordered, "b", 0)]),
        )
    };
    let (deleted, pushed) = tokio::time::timeout(LIMIT, both).await.expect("answers in time");
    assert!(matches!(deleted, Err(StoreError::Unavailable { .. })), "{deleted:?}");
    // A commit may be repeated.
    assert_eq!(pushed.unwrap().len(), 1);
    assert_eq!(take(&store, &ordered, 9).await.len(), 1);
    tokio::time::timeout(LIMIT, store.close()).await.expect("nothing waits any more");
    drop(dead);
}

/// The claim is on its way to the server when it is undone, and arrives afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_arrives_after_it_was_undone_takes_nothing() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let proxy = Proxy::start(server.address()).await;
    let store = proxy.open(&clock, "test").await;
    let queue = make(&store, queue_named("q")).await;
    store.push(vec![push_of(&queue, "x", 0)]).await.unwrap();
    let mut claim = proxy.hold_on_items("update");
    // Its three repetitions are refused.
    let refused = doc! { "errorCode": 91, "appName": "sluicegate proxied" };
    server.fail("update", doc! { "times": 3 }, refused).await;
    let reserving = store.reserve(&queue, &[want(1, LEASE)]).await;
    assert!(matches!(reserving, Err(StoreError::Unavailable { .. })), "{reserving:?}");
    claim.caught().await;

    let items = server.items();
    let undone = async || items.count_documents(doc! { "q": "q", "settled": { "$exists": true } });
    until("the claim is undone", async || undone().await.await.unwrap() == 1).await;
    let before = items.find_one(doc! { "q": "q", "key": { "$exists": false } }).await.unwrap();
    let commands = async || server.executed("update").await;
    let done = commands().await;
    drop(claim);
    until("the claim arrives", async || commands().await > done).await;
    let after = items.find_one(doc! { "q": "q", "key": { "$exists": false } }).await.unwrap();
    assert_eq!(after, before);
    assert_untouched(&take(&store, &queue, 1).await);
}

/// The first attempt at an extension lies on its way to the server, its repetition is answered, and a later extension
/// too. When the first attempt arrives, it must not shorten the lease.
#[tokio::test(flavor = "multi_thread")]
async fn an_extension_that_comes_late_does_not_take_back_a_later_one() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let proxy = Proxy::start(server.address()).await;
    let store = proxy.open(&clock, "test").await;
    let queue = make(&store, queue_named("q")).await;
    store.push(vec![push_of(&queue, "x", 0)]).await.unwrap();
    let taken = take(&store, &queue, 1).await;
    let extend = async |by: Duration| {
        let until = clock.now() + by;
        let outcomes = store.extend(vec![extension(held(&queue, &taken[0]), until)]).await.unwrap();
        assert_eq!(outcomes, [Outcome::Ok]);
        until
    };
    let mut first = proxy.hold_on_items("update");
    let (_, ()) = tokio::join!(extend(Duration::from_mins(1)), first.caught());
    let end = extend(Duration::from_mins(5)).await;

    let done = server.executed("update").await;
    drop(first);
    until("the first attempt arrives", async || server.executed("update").await > done).await;
    let item = store.get_item(&queue, taken[0].item.id).await.unwrap().unwrap();
    assert_eq!(item.eligible_time, Some(end));
    // A lease may be shortened too.
    let end = extend(Duration::from_secs(10)).await;
    let item = store.get_item(&queue, taken[0].item.id).await.unwrap().unwrap();
    assert_eq!(item.eligible_time, Some(end));
}

/// The same where the repetition took effect and the lease was renewed after it: of one item, and of all items of a claim.
#[tokio::test(flavor = "multi_thread")]
async fn an_extension_that_comes_late_does_not_take_back_a_renewal() {
    for items in [1, 3] {
        let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
        let proxy = Proxy::start(server.address()).await;
        let store = proxy.open(&clock, "test").await;
        let queue = make(&store, queue_named("q")).await;
        store.push((0..items).map(|_| push_of(&queue, "x", 0)).collect()).await.unwrap();
        let taken = take(&store, &queue, items).await;
        let extend = async |by: Duration, is_renewal| {
            let until = clock.now() + by;
            let of = taken.iter().map(|delivery| held(&queue, delivery));
            let extensions = of.map(|held| Extension { is_renewal, ..extension(held, until) });
            let outcomes = store.extend(extensions.collect()).await.unwrap();
            assert_eq!(outcomes, vec![Outcome::Ok; items]);
            until
        };
        let mut first = proxy.hold_on_items("update");
        let extended = extend(Duration::from_mins(1), false);
        let (_, ()) = tokio::join!(extended, first.caught());
        let end = extend(Duration::from_mins(5), true).await;
        let done = server.executed("update").await;
        drop(first);
        until("the first attempt arrives", async || server.executed("update").await > done).await;
        for delivery in &taken {
            let item = store.get_item(&queue, delivery.item.id).await.unwrap().unwrap();
            assert_eq!(item.eligible_time, Some(end), "of {items} items");
        }
    }
}
