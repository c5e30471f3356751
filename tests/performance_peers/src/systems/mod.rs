//! The systems that are measured, each behind the same two traits.

mod mongodb;
mod nats;
mod rabbitmq;
mod redis;
mod sluicegate;

use anyhow::Result;
use async_trait::async_trait;
use bytes::Bytes;
use clap::ValueEnum;
use futures_util::future::BoxFuture;

/// Items that a consumer may hold.
pub(crate) const PREFETCH: u16 = 1_000;
/// Items in a batch.
pub(crate) const BATCH: usize = 500;
/// Items that may be pushed and not confirmed.
pub(crate) const UNCONFIRMED: usize = 2_000;

/// Which system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// A broker
    Sluicegate,
    /// RabbitMQ, a quorum queue
    Rabbitmq,
    /// NATS JetStream, a stream with work-queue retention in files
    Nats,
    /// Redis Streams
    Redis,
    /// The driver of MongoDB alone, which only inserts: for latency
    Mongodb,
}

/// Where the system is.
#[derive(Debug, Clone)]
pub(crate) struct Address {
    pub(crate) push: String,
    /// Where consumers connect, if elsewhere.
    pub(crate) take: Option<String>,
}

/// Resolves when the system has said that the batch is stored.
pub(crate) type Confirmation = BoxFuture<'static, Result<()>>;

/// Pushes items.
#[async_trait]
pub(crate) trait Producer: Send {
    /// Sends a batch. Returns when it is sent, or queued for sending.
    async fn send(&mut self, payloads: Vec<Bytes>) -> Result<Confirmation>;
}

/// Takes items and settles them.
#[async_trait]
pub(crate) trait Consumer: Send {
    /// Waits for items and returns those that are there, up to [`BATCH`].
    async fn next(&mut self) -> Result<Vec<Bytes>>;

    /// Settles all that was returned, in the way that suits the system best; does not wait for the system to answer.
    async fn settle(&mut self) -> Result<()>;

    /// Waits until the system has worked off what was settled.
    async fn finish(&mut self) -> Result<()>;
}

/// A system with one empty queue.
#[async_trait]
pub(crate) trait System: Send + Sync {
    /// Returns a producer with a connection of its own, on which many batches are in flight.
    async fn producer(&self) -> Result<Box<dyn Producer>>;

    /// Returns producers of single items, which share one connection.
    async fn callers(&self, n: usize) -> Result<Vec<Box<dyn Producer>>>;

    /// Returns a consumer with a connection of its own, which holds at most `prefetch` items.
    async fn consumer(&self, prefetch: u16) -> Result<Box<dyn Consumer>>;

    /// Returns consumers that take one item at a time, and share one connection where the system allows it.
    async fn workers(&self, n: usize) -> Result<Vec<Box<dyn Consumer>>>;

    /// Returns consumers that ask for each item by a call, and settle it by another, which is answered.
    async fn pollers(&self, _: usize) -> Result<Vec<Box<dyn Consumer>>> {
        anyhow::bail!("only Sluicegate is measured with calls for single items")
    }
}

/// Connects to a system and creates its queue.
pub(crate) async fn connect(kind: Kind, address: Address) -> Result<Box<dyn System>> {
    Ok(match kind {
        Kind::Sluicegate => Box::new(sluicegate::Sluicegate::new(address).await?),
        Kind::Rabbitmq => Box::new(rabbitmq::RabbitMq::new(address).await?),
        Kind::Nats => Box::new(nats::Nats::new(address).await?),
        Kind::Redis => Box::new(redis::Redis::new(address).await?),
        Kind::Mongodb => Box::new(mongodb::MongoDb::new(address).await?),
    })
}
