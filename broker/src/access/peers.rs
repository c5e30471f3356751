//! The other ends of connections, and how much of the broker each of them uses.
//!
//! Addresses are what clients cannot choose freely. With IPv6 everyone has 2^64 of them, so the first half of such an
//! address counts.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;

/// The other end of a connection.
#[derive(Debug, Clone, Default)]
pub(crate) struct Peer {
    /// Where the other end is.
    pub(crate) address: Option<SocketAddr>,
    /// The names in its certificate, once the TLS handshake is complete. Empty without a certificate.
    pub(crate) names: Arc<OnceLock<Vec<String>>>,
    /// What all connections from there use.
    pub(crate) usage: Arc<Usage>,
}

impl Peer {
    /// Returns the network from which the connection comes.
    pub(crate) fn network(&self) -> Option<IpAddr> {
        self.address.map(|address| network(address.ip()))
    }
}

/// How much of the broker is in use by one network, or by all.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    /// Open connections.
    pub(crate) connections: Count,
    /// Those of them that have to wait until they are served.
    pub(crate) waiting: Count,
    /// Calls under way that are not streams.
    pub(crate) requests: Count,
    /// Open streams.
    pub(crate) streams: Count,
    /// Bytes of answers that were not read yet.
    pub(crate) unread_bytes: AtomicUsize,
    /// Whose turn it is among calls that are slowed down.
    pub(crate) turn: tokio::sync::Mutex<()>,
}

/// A number of things that are in use.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicUsize);

impl Count {
    /// Counts one more, unless there are `most` already. Returns whether it was counted.
    pub(crate) fn take(&self, most: usize) -> bool {
        let fits = self.0.fetch_add(1, Ordering::Relaxed) < most;
        if !fits {
            self.release();
        }
        fits
    }

    /// Counts one less.
    pub(crate) fn release(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What every network uses from which there is a connection.
#[derive(Debug, Default)]
pub(crate) struct Peers(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    usage: HashMap<IpAddr, Weak<Usage>>,
    /// The number of entries at which those without connections are removed.
    look_at: usize,
}

impl Peers {
    /// Returns what is in use by the network of this address, the same for all of its connections.
    pub(crate) fn usage(&self, address: IpAddr) -> Arc<Usage> {
        let mut known = self.0.lock();
        if known.usage.len() >= known.look_at {
            known.usage.retain(|_, usage| usage.strong_count() > 0);
            known.look_at = 2 * known.usage.len() + 1_000;
        }
        let entry = known.usage.entry(network(address)).or_default();
        entry.upgrade().unwrap_or_else(|| {
            let usage = Arc::default();
            *entry = Arc::downgrade(&usage);
            usage
        })
    }
}

/// Returns the network of an address, which is what counts of it.
pub(crate) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let bits = address.to_bits() >> 64 << 64;
            IpAddr::V6(Ipv6Addr::from_bits(bits))
        }
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_of_one_network_count_together_for_as_long_as_there_are_any() {
        let peers = Peers::default();
        let usage = |text: &str| peers.usage(text.parse().unwrap());
        let first = usage("192.0.2.1");
        assert!(first.connections.take(1) && !usage("192.0.2.1").connections.take(1));
        assert!(usage("192.0.2.2").connections.take(1));
        assert!(!usage("::ffff:192.0.2.1").connections.take(1), "the same address");
        let v6 = usage("2001:db8::1");
        assert!(v6.connections.take(1) && !usage("2001:db8::ffff").connections.take(1));
        assert!(usage("2001:db8:0:1::1").connections.take(1));
        drop(first);
        assert!(usage("192.0.2.1").connections.take(1));
        for n in 0..100_000_u32 {
            peers.usage(IpAddr::V4(n.into()));
        }
        assert!(peers.0.lock().usage.len() < 3_000);
    }
}
