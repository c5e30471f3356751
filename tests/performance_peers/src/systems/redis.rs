//! Redis Streams with a consumer group: XADD in pipelines; XACK and XDEL in one pipeline with the next XREADGROUP.

use std::time::Duration;

use ::redis::{
    AsyncConnectionConfig, Client, Pipeline, Value, aio::MultiplexedConnection, cmd,
    from_redis_value, pipe,
};
use anyhow::Result;
use async_trait::async_trait;
use bytes::Bytes;

use super::{Address, BATCH, Confirmation, Consumer, Producer, System};

const STREAM: &str = "peers";
const GROUP: &str = "consumers";
/// How long a read waits for items.
const WAIT: Duration = Duration::from_secs(10);

pub(super) struct Redis(Client);

impl Redis {
    pub(super) async fn new(address: Address) -> Result<Self> {
        let this = Self(Client::open(address.push)?);
        let create = cmd("XGROUP").arg(&["CREATE", STREAM, GROUP, "0", "MKSTREAM"]).clone();
        create.exec_async(&mut this.connection().await?).await?;
        Ok(this)
    }

    async fn connection(&self) -> Result<MultiplexedConnection> {
        // A read waits longer than the crate's default lets it.
        let config = AsyncConnectionConfig::new().set_response_timeout(Some(2 * WAIT));
        Ok(self.0.get_multiplexed_async_connection_with_config(&config).await?)
    }

    async fn reader(&self, name: &str, count: usize) -> Result<Box<dyn Consumer>> {
        let read = cmd("XREADGROUP")
            .arg(&["GROUP", GROUP, name])
            .arg("COUNT")
            .arg(count)
            .arg("BLOCK")
            .arg(WAIT.as_millis() as u64)
            .arg(&["STREAMS", STREAM, ">"])
            .clone();
        let connection = self.connection().await?;
        Ok(Box::new(Reader { connection, read, held: Vec::new(), settled: Vec::new() }))
    }
}

#[async_trait]
impl System for Redis {
    async fn producer(&self) -> Result<Box<dyn Producer>> {
        Ok(Box::new(Adds(self.connection().await?)))
    }

    async fn callers(&self, n: usize) -> Result<Vec<Box<dyn Producer>>> {
        let connection = self.connection().await?;
        Ok((0..n).map(|_| Box::new(Adds(connection.clone())) as _).collect())
    }

    async fn consumer(&self, _prefetch: u16) -> Result<Box<dyn Consumer>> {
        // There is no prefetch: a read returns what is there, up to a batch.
        self.reader("consumer", BATCH).await
    }

    /// A blocking read holds up its connection, so each worker has one of its own.
    async fn workers(&self, n: usize) -> Result<Vec<Box<dyn Consumer>>> {
        let mut workers = Vec::new();
        for n in 0..n {
            workers.push(self.reader(&format!("worker-{n}"), 1).await?);
        }
        Ok(workers)
    }
}

struct Adds(MultiplexedConnection);

#[async_trait]
impl Producer for Adds {
    async fn send(&mut self, payloads: Vec<Bytes>) -> Result<Confirmation> {
        let mut adds = pipe();
        for payload in &payloads {
            adds.cmd("XADD").arg(&[STREAM, "*", "payload"]).arg(&payload[..]).ignore();
        }
        let mut connection = self.0.clone();
        // A future does nothing before it is polled, and batches are to be sent in order.
        let answer = tokio::spawn(async move { adds.exec_async(&mut connection).await });
        Ok(Box::pin(async move { Ok(answer.await??) }))
    }
}

struct Reader {
    connection: MultiplexedConnection,
    read: ::redis::Cmd,
    /// Ids of what was returned and is not settled.
    held: Vec<String>,
    /// Ids that the next command settles.
    settled: Vec<String>,
}

impl Reader {
    /// Returns a pipeline that settles what is to be settled.
    fn settling(&mut self) -> Pipeline {
        let mut pipeline = pipe();
        let ids = std::mem::take(&mut self.settled);
        if !ids.is_empty() {
            pipeline.cmd("XACK").arg(&[STREAM, GROUP]).arg(&ids).ignore();
            pipeline.cmd("XDEL").arg(STREAM).arg(&ids).ignore();
        }
        pipeline
    }
}

/// The entries of one stream: ids, and fields and values in turn.
type Entries = Vec<(String, Vec<Vec<u8>>)>;

#[async_trait]
impl Consumer for Reader {
    async fn next(&mut self) -> Result<Vec<Bytes>> {
        loop {
            let mut pipeline = self.settling();
            pipeline.add_command(self.read.clone());
            let (answer,): (Value,) = pipeline.query_async(&mut self.connection).await?;
            let Some(streams) = from_redis_value::<Option<Vec<(String, Entries)>>>(answer)? else {
                continue;
            };
            let mut payloads = Vec::new();
            for (id, mut fields) in streams.into_iter().flat_map(|(_, entries)| entries) {
                self.held.push(id);
                payloads.push(fields.swap_remove(1).into());
            }
            return Ok(payloads);
        }
    }

    async fn settle(&mut self) -> Result<()> {
        self.settled.append(&mut self.held);
        Ok(())
    }

    async fn finish(&mut self) -> Result<()> {
        // What an unanswered read carried is settled: commands are carried out in order.
        if !self.settled.is_empty() {
            self.settling().exec_async(&mut self.connection).await?;
        }
        Ok(())
    }
}
