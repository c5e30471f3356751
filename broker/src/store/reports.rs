//! What brokers report about themselves and their consumers.

use std::net::SocketAddr;

use crate::domain::{ConsumerName, QueueName, Timestamp};

/// Returns the id of a broker as text.
pub(crate) fn broker_text(broker: [u8; 4]) -> String {
    format!("{:08x}", u32::from_be_bytes(broker))
}

/// Returns the id of a broker from its text.
pub(crate) fn parse_broker(text: &str) -> Option<[u8; 4]> {
    let broker = u32::from_str_radix(text, 16).ok()?.to_be_bytes();
    (broker_text(broker) == text).then_some(broker)
}

/// What a broker says about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokerReport {
    /// The broker, by the first four bytes of its lease tokens.
    pub broker: [u8; 4],
    /// The version of the program.
    pub version: String,
    /// The name of its machine; may be empty.
    pub host: String,
    /// The address on which it serves gRPC; may be empty.
    pub address: String,
    /// When it started.
    pub start_time: Timestamp,
    /// When this was so.
    pub report_time: Timestamp,
    /// False while its signals cannot be sent or received.
    pub signals_healthy: bool,
    /// True from the start of its shutdown on.
    pub draining: bool,
    /// Its consumers, or some of them.
    pub consumers: Vec<ConsumerReport>,
    /// Number of its consumers that are not among these.
    pub left_out: u64,
}

/// How a consumer takes items.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ConsumerKind {
    /// An open stream.
    Stream,
    /// A reserve or pop that waits.
    Call,
}

/// A consumer of a broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerReport {
    /// Its queue.
    pub queue: QueueName,
    /// Its number, which is unique among the consumers of the queue on its broker.
    pub number: u64,
    /// How it takes items.
    pub kind: ConsumerKind,
    /// The name it gave itself.
    pub name: Option<ConsumerName>,
    /// The address it called from.
    pub peer: Option<SocketAddr>,
    /// When it came.
    pub since: Timestamp,
    /// How many items it may hold.
    pub max_in_flight: u64,
    /// How many items it holds.
    pub in_flight: u64,
    /// Since when it has held the item that it has held for the longest.
    pub oldest_since: Option<Timestamp>,
    /// When the lease of that item ends.
    pub oldest_lease_end: Option<Timestamp>,
    /// When the first of the leases ends that it holds.
    pub next_lease_end: Option<Timestamp>,
    /// How many items it was sent.
    pub delivered: u64,
    /// How many of these were committed through its broker.
    pub committed: u64,
}
