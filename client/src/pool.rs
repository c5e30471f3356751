//! The addresses of the brokers: which there are, which of them work, and which one is next.
//!
//! Each producer and each consumer stays at one address, so that settles reach the broker that delivered; the next producer
//! or consumer takes the next address. An address that failed is left out until a connection to it succeeds again.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::{StreamExt, future::join_all, stream::FuturesUnordered};
use parking_lot::Mutex;
use sluicegate_proto::backoff::Backoff;
use tokio::{
    net::lookup_host,
    time::{Instant, timeout_at},
};
use tonic::codegen::StdError;

use crate::transport::{Channel, Connection, Endpoint};

/// Pauses before a failed address is tried again.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(30));
/// How much longer than the first address the others may take to respond.
const OTHERS: Duration = Duration::from_millis(100);
/// Names are resolved at most once in this time.
const LOOK_UP: Duration = Duration::from_secs(5);
/// About how long a producer or consumer stays at its address.
const STAY: Duration = Duration::from_secs(20 * 60);

/// How the endpoint of a URL is made, at one given address of its host or at any of them.
type MakeEndpoint =
    dyn Fn(&str, Option<SocketAddr>) -> crate::error::Result<Endpoint> + Send + Sync;

/// One address of one URL.
pub(crate) struct Address {
    url: String,
    socket: Option<SocketAddr>,
    pub(crate) channel: Channel,
    failed: AtomicBool,
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {:?}", self.url, self.socket)
    }
}

impl Address {
    /// Makes a connection to see whether that is possible.
    async fn connect(&self) -> Result<(), StdError> {
        Connection::open(self.channel.endpoint()).await.map(drop)
    }
}

/// All addresses of a client.
pub(crate) struct Pool {
    urls: Vec<String>,
    make: Box<MakeEndpoint>,
    addresses: Mutex<Vec<Arc<Address>>>,
    next: AtomicUsize,
    looked_up: Mutex<Option<Instant>>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.addresses.lock().iter()).finish()
    }
}

impl Pool {
    /// The URLs, of which there is at least one, with names not looked up yet.
    pub(crate) fn new(
        urls: Vec<String>,
        make: Box<MakeEndpoint>,
    ) -> crate::error::Result<Arc<Self>> {
        let next = AtomicUsize::new(rand::random_range(0..urls.len().max(1)));
        let addresses = Mutex::default();
        let pool = Self { urls, make, addresses, next, looked_up: Mutex::default() };
        let all = pool
            .urls
            .iter()
            .map(|url| pool.address(url, None))
            .collect::<crate::error::Result<_>>()?;
        *pool.addresses.lock() = all;
        Ok(Arc::new(pool))
    }

    fn address(&self, url: &str, socket: Option<SocketAddr>) -> crate::error::Result<Arc<Address>> {
        let channel = Channel::new((self.make)(url, socket)?);
        let (url, failed) = (url.to_owned(), AtomicBool::new(false));
        Ok(Arc::new(Address { url, socket, channel, failed }))
    }

    /// Resolves all names, unless that was done just now. Known addresses stay as they are, and a name that cannot be resolved
    /// keeps the addresses it had.
    pub(crate) async fn look_up(&self) {
        if self.is_to_look_up() {
            for url in &self.urls {
                if let Some((found, new)) = self.resolve(url).await {
                    self.take_in(url, &found, new);
                }
            }
        }
    }

    /// Resolves all names while the client is in use: a new address is left out until it can be reached.
    pub(crate) async fn refresh(self: &Arc<Self>) {
        if self.is_to_look_up() {
            for url in &self.urls {
                if let Some((found, new)) = self.resolve(url).await {
                    let reached = join_all(new.iter().map(|it| it.connect())).await;
                    self.take_in(url, &found, new.clone());
                    for (address, _) in new.iter().zip(reached).filter(|(_, it)| it.is_err()) {
                        self.failed(address);
                    }
                }
            }
        }
    }

    fn is_to_look_up(&self) -> bool {
        let mut looked_up = self.looked_up.lock();
        if looked_up.is_some_and(|at| at.elapsed() < LOOK_UP) {
            return false;
        }
        *looked_up = Some(Instant::now());
        true
    }

    /// The addresses of a URL's host, at least one, and those of them that are not known yet.
    async fn resolve(&self, url: &str) -> Option<(Vec<SocketAddr>, Vec<Arc<Address>>)> {
        let (host, port) = host_and_port(url)?;
        let mut found: Vec<SocketAddr> = lookup_host((host, port)).await.ok()?.collect();
        found.dedup();
        let known: Vec<Option<SocketAddr>> = {
            let addresses = self.addresses.lock();
            addresses.iter().filter(|known| known.url == url).map(|known| known.socket).collect()
        };
        let new = found.iter().filter(|socket| !known.contains(&Some(**socket)));
        // The URL was good before, so it is with an address.
        let new = new.filter_map(|socket| self.address(url, Some(*socket)).ok()).collect();
        (!found.is_empty()).then_some((found, new))
    }

    fn take_in(&self, url: &str, found: &[SocketAddr], new: Vec<Arc<Address>>) {
        let is_there = |socket: Option<SocketAddr>| socket.is_some_and(|it| found.contains(&it));
        let mut addresses = self.addresses.lock();
        addresses.retain(|known| known.url != url || is_there(known.socket));
        for new in new {
            // Another look-up may have been faster.
            if !addresses.iter().any(|known| known.url == url && known.socket == new.socket) {
                addresses.push(new);
            }
        }
    }

    /// Returns the next address: one that works, if there is any.
    pub(crate) fn next(&self) -> Arc<Address> {
        let addresses = self.addresses.lock();
        let start = self.next.fetch_add(1, Ordering::Relaxed);
        let turn = |step: usize| &addresses[start.wrapping_add(step) % addresses.len()];
        // Never empty: a look-up removes only what it replaces.
        let working = (0..addresses.len()).map(turn).find(|it| !it.failed.load(Ordering::Relaxed));
        Arc::clone(working.unwrap_or_else(|| turn(0)))
    }

    /// Connects to all addresses at once, and returns the first that answers. Those that have not answered a moment later are
    /// left out until they do.
    pub(crate) async fn connect(self: &Arc<Self>) -> Result<Arc<Address>, StdError> {
        let addresses = self.addresses.lock().clone();
        let mut trying: FuturesUnordered<_> = addresses
            .iter()
            .map(|address| async move { (address, address.connect().await) })
            .collect();
        let (mut first, mut last) = (None, None);
        let mut answered = Vec::new();
        let mut until = None;
        while let Some((address, outcome)) = match until {
            None => trying.next().await,
            Some(until) => timeout_at(until, trying.next()).await.ok().flatten(),
        } {
            match outcome {
                Ok(()) => {
                    first.get_or_insert_with(|| Arc::clone(address));
                    until.get_or_insert_with(|| Instant::now() + OTHERS);
                    answered.push(address);
                }
                Err(error) => last = Some(error),
            }
        }
        match (first, last) {
            (Some(first), _) => {
                for address in &addresses {
                    if !answered.iter().any(|it| Arc::ptr_eq(it, address)) {
                        self.failed(address);
                    }
                }
                Ok(first)
            }
            (None, Some(error)) => Err(error),
            // There is at least one URL, and so one address: it has answered or failed.
            (None, None) => unreachable!("a client without addresses"),
        }
    }

    /// Leaves an address out until it works again.
    fn failed(self: &Arc<Self>, address: &Arc<Address>) {
        if !address.failed.swap(true, Ordering::Relaxed) {
            tokio::spawn(recover(Arc::downgrade(self), Arc::clone(address)));
        }
    }
}

/// Tries a failed address until it works, is gone, or the pool is dropped.
async fn recover(pool: Weak<Pool>, address: Arc<Address>) {
    for failures in 0.. {
        tokio::time::sleep(BACKOFF.delay(failures)).await;
        let Some(pool) = pool.upgrade() else { return };
        pool.refresh().await;
        if !pool.addresses.lock().iter().any(|known| Arc::ptr_eq(known, &address)) {
            return;
        }
        drop(pool);
        if address.connect().await.is_ok() {
            address.failed.store(false, Ordering::Relaxed);
            return;
        }
    }
}

/// Returns the host and the port of a URL; `None` if the host is an address, or there is none.
fn host_and_port(url: &str) -> Option<(&str, u16)> {
    let (scheme, rest) = url.split_once("://")?;
    let authority = rest.split(['/', '?']).next()?;
    let default = if scheme == "https" { 443 } else { 80 };
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !host.contains(':') || host.ends_with(']') => {
            (host, port.parse().ok()?)
        }
        _ => (authority, default),
    };
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    bare.parse::<IpAddr>().is_err().then_some((host, port))
}

/// The address at which a producer or a consumer is.
#[derive(Debug)]
pub(crate) struct Location {
    pool: Arc<Pool>,
    at: Mutex<(Arc<Address>, Instant)>,
}

impl Location {
    pub(crate) fn new(pool: &Arc<Pool>, address: Arc<Address>) -> Arc<Self> {
        Arc::new(Self { pool: Arc::clone(pool), at: Mutex::new((address, until())) })
    }

    pub(crate) fn address(&self) -> Arc<Address> {
        Arc::clone(&self.at.lock().0)
    }

    /// Goes from a failed address to the next one, unless another call has done so already.
    pub(crate) fn fail_over(&self, failed: &Arc<Address>) {
        self.pool.failed(failed);
        let mut at = self.at.lock();
        if Arc::ptr_eq(&at.0, failed) {
            *at = (self.pool.next(), until());
        }
    }

    /// Between two streams or calls: moves to the next address after long enough at this one.
    pub(crate) fn rotate(&self) {
        if self.at.lock().1 <= Instant::now() {
            self.go_on();
        }
    }

    /// Moves to the next address, though this one works.
    pub(crate) fn go_on(&self) {
        *self.at.lock() = (self.pool.next(), until());
        let pool = Arc::clone(&self.pool);
        tokio::spawn(async move { pool.refresh().await });
    }
}

fn until() -> Instant {
    Instant::now() + STAY.mul_f64(rand::random_range(0.9..=1.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn pool(urls: &[&str]) -> Arc<Pool> {
        let make = |url: &str, socket: Option<SocketAddr>| {
            let url = socket.map_or_else(|| url.to_owned(), |socket| format!("http://{socket}"));
            Ok(Endpoint::new(url.parse().unwrap(), None, None, SECOND, SECOND).unwrap())
        };
        Pool::new(urls.iter().map(ToString::to_string).collect(), Box::new(make)).unwrap()
    }

    #[tokio::test]
    async fn names_resolve_to_all_their_addresses_and_addresses_stay() {
        let pool = pool(&["http://localhost:7400", "http://127.0.0.9:7400"]);
        pool.look_up().await;
        let addresses = pool.addresses.lock().clone();
        let named: Vec<_> = addresses.iter().filter(|it| it.url.contains("localhost")).collect();
        assert!(!named.is_empty());
        assert!(
            named
                .iter()
                .all(|it| it.socket.is_some_and(|at| at.ip().is_loopback() && at.port() == 7400))
        );
        let given = addresses.iter().filter(|it| it.url.contains("127.0.0.9"));
        assert_eq!(given.map(|it| it.socket).collect::<Vec<_>>(), [None]);
    }

    /// A name may lead to addresses at which no one listens, of the other family of addresses for example.
    #[tokio::test]
    async fn new_addresses_are_left_out_until_they_can_be_reached() {
        let pool = pool(&["http://localhost:1", "http://127.0.0.9:7400"]); // port 1 is closed
        pool.refresh().await;
        let addresses = pool.addresses.lock().clone();
        let (named, given): (Vec<_>, Vec<_>) =
            addresses.iter().partition(|it| it.url.contains("localhost"));
        assert!(!named.is_empty());
        assert!(named.iter().all(|it| it.failed.load(Ordering::Relaxed)));
        assert!((0..9).all(|_| Arc::ptr_eq(&pool.next(), given[0])));
    }

    #[test]
    fn host_names_are_distinguished_from_addresses() {
        assert_eq!(host_and_port("http://queue:7400"), Some(("queue", 7400)));
        assert_eq!(host_and_port("https://queue.example/x"), Some(("queue.example", 443)));
        assert_eq!(host_and_port("http://10.0.0.1:7400"), None);
        assert_eq!(host_and_port("http://[::1]:7400"), None);
    }

    #[tokio::test]
    async fn each_place_takes_the_next_address_and_failed_ones_are_left_out() {
        // Closed ports: what has failed stays so.
        let pool = pool(&["http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3"]);
        let mut taken: Vec<String> = (0..3).map(|_| pool.next().url.clone()).collect();
        taken.sort();
        assert_eq!(taken, pool.urls);
        let place = Location::new(&pool, pool.next());
        let failed = place.address();
        place.fail_over(&failed);
        assert_ne!(place.address().url, failed.url);
        let elsewhere = place.address();
        place.fail_over(&failed);
        assert!(Arc::ptr_eq(&place.address(), &elsewhere), "another call has failed over already");
        assert!((0..9).all(|_| pool.next().url != failed.url));
    }

    #[tokio::test(start_paused = true)]
    async fn no_one_stays_at_one_address_forever() {
        let pool = pool(&["http://127.0.0.1:1", "http://127.0.0.1:2"]);
        let place = Location::new(&pool, pool.next());
        let first = place.address();
        place.rotate();
        assert!(Arc::ptr_eq(&place.address(), &first));
        tokio::time::advance(STAY * 2).await;
        place.rotate();
        assert!(!Arc::ptr_eq(&place.address(), &first));
    }
}
