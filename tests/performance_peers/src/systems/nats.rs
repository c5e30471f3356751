//! NATS JetStream: a stream with work-queue retention in files, and a durable pull consumer.

use std::{future::IntoFuture, time::Duration};

use anyhow::{Result, anyhow, ensure};
use async_nats::{
    Client,
    jetstream::{
        self, Context, Message,
        consumer::{AckPolicy, PullConsumer, pull},
        stream::{self, RetentionPolicy, StorageType},
    },
};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{FutureExt, StreamExt};

use super::{Address, BATCH, Confirmation, Consumer, PREFETCH, Producer, System};

const NAME: &str = "peers";
/// How long an answer may take: a slow server is to be measured, not given up.
const PATIENCE: Duration = Duration::from_mins(1);

pub(super) struct Nats(String);

impl Nats {
    pub(super) async fn new(address: Address) -> Result<Self> {
        let this = Self(address.push);
        let stream = this
            .context()
            .await?
            .create_stream(stream::Config {
                name: NAME.to_owned(),
                subjects: vec![NAME.to_owned()],
                retention: RetentionPolicy::WorkQueue,
                storage: StorageType::File,
                ..Default::default()
            })
            .await?;
        stream
            .create_consumer(pull::Config {
                durable_name: Some(NAME.to_owned()),
                // A stream with work-queue retention allows no other policy.
                ack_policy: AckPolicy::Explicit,
                max_ack_pending: PREFETCH.into(),
                ..Default::default()
            })
            .await?;
        Ok(this)
    }

    async fn context(&self) -> Result<Context> {
        let mut context = jetstream::new(async_nats::connect(&self.0).await?);
        context.set_timeout(PATIENCE);
        Ok(context)
    }
}

async fn puller(client: &Client, batch: usize) -> Result<Box<dyn Consumer>> {
    let stream = jetstream::new(client.clone()).get_stream(NAME).await?;
    let consumer: PullConsumer = stream.get_consumer(NAME).await.map_err(|error| anyhow!(error))?;
    let messages = consumer.stream().max_messages_per_batch(batch).messages().await?;
    Ok(Box::new(Puller { client: client.clone(), messages, held: Vec::new() }))
}

#[async_trait]
impl System for Nats {
    async fn producer(&self) -> Result<Box<dyn Producer>> {
        Ok(Box::new(Publisher(self.context().await?)))
    }

    async fn callers(&self, n: usize) -> Result<Vec<Box<dyn Producer>>> {
        let context = self.context().await?;
        Ok((0..n).map(|_| Box::new(Publisher(context.clone())) as _).collect())
    }

    async fn consumer(&self, prefetch: u16) -> Result<Box<dyn Consumer>> {
        puller(&async_nats::connect(&self.0).await?, prefetch.into()).await
    }

    async fn workers(&self, n: usize) -> Result<Vec<Box<dyn Consumer>>> {
        let client = async_nats::connect(&self.0).await?;
        let mut workers = Vec::new();
        for _ in 0..n {
            workers.push(puller(&client, 1).await?);
        }
        Ok(workers)
    }
}

struct Publisher(Context);

#[async_trait]
impl Producer for Publisher {
    async fn send(&mut self, payloads: Vec<Bytes>) -> Result<Confirmation> {
        let mut answers = Vec::with_capacity(payloads.len());
        for payload in payloads {
            answers.push(self.0.publish(NAME, payload).await?);
        }
        Ok(Box::pin(async move {
            for answer in answers {
                answer.into_future().await?;
            }
            Ok(())
        }))
    }
}

struct Puller {
    client: Client,
    messages: pull::Stream,
    /// What was returned and is not acknowledged.
    held: Vec<Message>,
}

#[async_trait]
impl Consumer for Puller {
    async fn next(&mut self) -> Result<Vec<Bytes>> {
        let mut payloads = Vec::new();
        let mut message = self.messages.next().await;
        while let Some(next) = message {
            let next = next?;
            payloads.push(next.payload.clone());
            self.held.push(next);
            if payloads.len() == BATCH {
                break;
            }
            message = self.messages.next().now_or_never().flatten();
        }
        ensure!(!payloads.is_empty(), "the server ended the consumer");
        Ok(payloads)
    }

    async fn settle(&mut self) -> Result<()> {
        for message in self.held.drain(..) {
            message.ack().await.map_err(|error| anyhow!(error))?;
        }
        Ok(())
    }

    async fn finish(&mut self) -> Result<()> {
        Ok(self.client.flush().await?)
    }
}
