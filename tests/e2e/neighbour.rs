//! A client that behaves well beside one that does not.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::{Duration, Instant},
};

use tokio::{
    net::{TcpSocket, TcpStream},
    time::sleep,
};
use tonic::transport::Channel;

use super::access::{self, push};
use crate::harness::{Broker, Launch, until, within};

/// How long an attack lasts, unless the broker ends it sooner.
pub(super) const ATTACK: Duration = Duration::from_secs(3);
/// How often an attack is measured at most.
const ATTEMPTS: u32 = 3;
/// Where attacks come from that show what becomes of other addresses.
const ELSEWHERE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
/// How soon a new client is served after an attack.
const SOON: Duration = Duration::from_secs(1);

/// Returns a channel from elsewhere.
pub(super) async fn elsewhere(address: &str) -> Channel {
    let endpoint = Channel::from_shared(address.to_owned()).expect("an address");
    endpoint.local_address(Some(ELSEWHERE)).connect().await.expect("a connection")
}

/// Opens a connection from elsewhere.
pub(super) async fn socket(address: &str) -> TcpStream {
    let to: SocketAddr = address.trim_start_matches("http://").parse().expect("an address");
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(SocketAddr::new(ELSEWHERE, 0)).expect("a port");
    socket.connect(to).await.expect("a connection")
}

/// How a client was served before and during an attack.
struct Served {
    calm: Latencies,
    attacked: Latencies,
    /// What the attack returned.
    count: u32,
    /// How long a new client waited for its first answer afterwards.
    afterwards: Duration,
    rest: String,
}

impl fmt::Display for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { calm, attacked, count, afterwards, rest } = self;
        write!(f, "{count} times: before: {calm}; meanwhile: {attacked}; ")?;
        write!(f, "a new client is served after {afterwards:.1?}; {rest}")
    }
}

/// How long pushes of a client took, one after the other.
struct Latencies(Vec<Duration>);

impl Latencies {
    /// Returns the latency that so many hundredths of the pushes did not exceed.
    fn part(&self, hundredths: usize) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        sorted.get(sorted.len() * hundredths / 100).copied().unwrap_or_default()
    }
}

impl fmt::Display for Latencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (median, tail) = (self.part(50), self.part(99));
        write!(f, "{} pushes, median {median:.1?}, 99th percentile {tail:.1?}", self.0.len())
    }
}

/// Pushes one item at a time until `attack` has ended. Returns how long the pushes took.
async fn beside<T>(
    channel: &Channel,
    token: &str,
    attack: impl Future<Output = T>,
) -> (Latencies, T) {
    let mut latencies = Vec::new();
    tokio::pin!(attack);
    loop {
        let begun = Instant::now();
        let pushed = within("others are served", push(channel, token, "beside")).await;
        pushed.expect("an item of another client");
        latencies.push(begun.elapsed());
        tokio::select! {
            result = &mut attack => return (Latencies(latencies), result),
            () = sleep(Duration::from_millis(5)) => {}
        }
    }
}

/// Like [`serves_others`], with a broker of the usual settings.
pub(super) async fn survives<F: Future<Output = u32>>(
    name: &str,
    attack: impl Fn(String) -> F + Copy + Send + 'static,
) {
    // In memory, because the latency of a disk says nothing about attacks.
    let launch = Launch::new().flag("store", "sqlite::memory:");
    serves_others(name, &launch, "none is asked for", attack).await;
}

/// Attacks brokers of these flags. Others, who show this token, are hardly slower meanwhile, new clients are served soon afterwards, and the memory that
/// it took is free again but for a tenth of what there was: twenty milliseconds are for machines on which other tests run, and so are further attempts.
pub(super) async fn serves_others<F: Future<Output = u32>>(
    name: &str,
    launch: &Launch,
    token: &str,
    attack: impl Fn(String) -> F + Copy + Send + 'static,
) {
    serves_and_stores(name, launch, token, 0, attack).await;
}

/// Does the same with an attack that leaves so many bytes of items in a store in memory.
pub(super) async fn serves_and_stores<F: Future<Output = u32>>(
    name: &str,
    launch: &Launch,
    token: &str,
    stored: usize,
    attack: impl Fn(String) -> F + Copy + Send + 'static,
) {
    for left in (0..ATTEMPTS).rev() {
        let served = serves_beside(name, launch, token, stored, attack).await;
        println!("{name}, {served}");
        assert!(served.count > 0, "nothing was refused");
        let (calm, attacked) = (served.calm.part(50), served.attacked.part(50));
        if attacked <= 2 * calm + Duration::from_millis(20) && served.afterwards <= SOON {
            break;
        }
        let afterwards = served.afterwards;
        assert!(
            left > 0,
            "{attacked:?} instead of {calm:?}, {afterwards:?} afterwards, or more, in all attempts"
        );
    }
}

/// Runs an attack in a thread of its own beside a client that behaves well, looks at what is left of the attack, and returns how the client was
/// served.
async fn serves_beside<F: Future<Output = u32>>(
    name: &str,
    launch: &Launch,
    token: &str,
    stored: usize,
    attack: impl FnOnce(String) -> F + Send + 'static,
) -> Served {
    let broker = launch.start().await;
    let channel = access::channel(&broker).await;
    let (calm, ()) = beside(&channel, token, sleep(Duration::from_secs(1))).await;
    let before = broker.memory();
    let used = broker.processor_time();
    let (address, runtime) = (broker.address.clone(), tokio::runtime::Handle::current());
    let attack = tokio::task::spawn_blocking(move || runtime.block_on(attack(address)));
    let (attacked, count) = within(name, beside(&channel, token, attack)).await;
    let used = broker.processor_time().saturating_sub(used);
    let begun = Instant::now();
    let other = within("a connection", access::channel(&broker)).await;
    within("a push", push(&other, token, "beside")).await.expect("a push of a new client");
    let afterwards = begun.elapsed();
    until(&format!("{name}: memory is given back"), || async {
        (broker.memory() <= before + before / 10 + stored).then_some(())
    })
    .await;
    // Whoever attacks does not fill the log either.
    let log = broker.log();
    assert!(log.len() < 64 << 10, "{} bytes of log, which begins with:\n{log:.2000}", log.len());
    let count = count.expect("an attack");
    let rest = format!("{used:.1?} of a processor; {}", memory(&broker, before));
    broker.stop().await;
    Served { calm, attacked, count, afterwards, rest }
}

fn memory(broker: &Broker, before: usize) -> String {
    let [before, most, after] = [before, broker.peak_memory(), broker.memory()].map(|m| m >> 20);
    format!("memory {before} MiB before, {most} MiB at most, {after} MiB after")
}
