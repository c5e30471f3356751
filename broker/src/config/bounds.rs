//! The settings that bound how much of a broker its clients may use.

use std::time::Duration;

use super::{
    ConfigError,
    checks::{DAY, span},
    sources::Given,
    values,
};

const MIB: usize = 1 << 20;

/// How much of the broker its clients may use. A limit of a number is zero where there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// Most gRPC connections. There are never more than three quarters of the files that the process may open.
    pub max_connections: u32,
    /// Most connections of one peer.
    pub max_connections_per_peer: u32,
    /// Most calls under way that are not streams.
    pub max_requests: u32,
    /// Most of them of one peer.
    pub max_requests_per_peer: u32,
    /// Most open streams.
    pub max_streams: u32,
    /// Most open streams of one peer.
    pub max_streams_per_peer: u32,
    /// Most bytes of large requests that are held before they are decoded, and as many of the batches of push streams
    /// until they are stored.
    pub max_incoming_bytes: usize,
    /// Most bytes of large answers that clients have not read yet.
    pub max_unread_bytes: usize,
    /// How long a large answer is kept of which the client reads nothing; streams are exempt.
    pub unread_timeout: Duration,
    /// Most bytes of the metadata of a call.
    pub max_metadata_bytes: u32,
    /// Most calls that a client may cancel before the broker has seen them, and most faulty calls, until its connection is
    /// closed.
    pub max_resets: u32,
    /// How long the beginning of a connection may take, TLS included, and each request over HTTP.
    pub handshake_timeout: Duration,
    /// Most queues.
    pub max_queues: u32,
    /// How long a queue that no operator created or changed may be empty and unused until it is deleted; zero: forever.
    pub unused_queue_ttl: Duration,
    /// How often a silent connection is tested.
    pub ping_interval: Duration,
    /// How long the answer to a test may take.
    pub ping_timeout: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            max_connections: 10_000,
            max_connections_per_peer: 1_000,
            max_requests: 20_000,
            max_requests_per_peer: 5_000,
            max_streams: 20_000,
            max_streams_per_peer: 5_000,
            max_incoming_bytes: 256 * MIB,
            max_unread_bytes: 256 * MIB,
            unread_timeout: Duration::from_secs(30),
            max_metadata_bytes: 16 << 10,
            max_resets: 1_024,
            handshake_timeout: Duration::from_secs(10),
            max_queues: 10_000,
            unused_queue_ttl: DAY * 7,
            ping_interval: Duration::from_secs(15),
            ping_timeout: Duration::from_secs(10),
        }
    }
}

impl Given {
    pub(super) fn bounds(&self) -> Result<Bounds, ConfigError> {
        let bytes = |key, least, most| {
            self.required(key, move |text| match values::bytes(text)? {
                bytes if (least..=most).contains(&bytes) => Ok(bytes),
                _ => Err(format!("{text} is not within {least} and {most} bytes")),
            })
        };
        let count = |key| self.required(key, values::count);
        let time = |key| self.required(key, span(Duration::from_millis(100), DAY));
        Ok(Bounds {
            max_connections: count("max_connections")?,
            max_connections_per_peer: count("max_connections_per_peer")?,
            max_requests: count("max_requests")?,
            max_requests_per_peer: count("max_requests_per_peer")?,
            max_streams: count("max_streams")?,
            max_streams_per_peer: count("max_streams_per_peer")?,
            max_incoming_bytes: bytes("max_incoming_bytes", MIB, u32::MAX as usize)?,
            max_unread_bytes: bytes("max_unread_bytes", MIB, u32::MAX as usize)?,
            unread_timeout: time("unread_timeout")?,
            max_metadata_bytes: bytes("max_metadata_bytes", 1 << 10, MIB)? as u32,
            max_resets: count("max_resets")?,
            handshake_timeout: time("handshake_timeout")?,
            max_queues: count("max_queues")?,
            unused_queue_ttl: self
                .required("unused_queue_ttl", span(Duration::ZERO, DAY * 3_650))?,
            ping_interval: time("ping_interval")?,
            ping_timeout: time("ping_timeout")?,
        })
    }
}
