//! RabbitMQ: a quorum queue, confirms in flight, acknowledgements of all that has come at once.

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{FutureExt, StreamExt};
use lapin::{
    BasicProperties, Channel, Connection, ConnectionProperties,
    options::{
        BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions,
        ConfirmSelectOptions, QueueDeclareOptions,
    },
    types::{AMQPValue, FieldTable, ShortString},
};

use super::{Address, BATCH, Confirmation, Consumer, Producer, System};

const QUEUE: &str = "peers";
/// What delivers a message to the queue by its name.
const DEFAULT_EXCHANGE: &str = "";
/// The delivery mode of a message that is stored.
const PERSISTENT: u8 = 2;

pub(super) struct RabbitMq(String);

impl RabbitMq {
    pub(super) async fn new(address: Address) -> Result<Self> {
        let this = Self(address.push);
        let channel = this.connection().await?.create_channel().await?;
        declare(&channel, QueueDeclareOptions { durable: true, ..Default::default() }).await?;
        Ok(this)
    }

    async fn connection(&self) -> Result<Connection> {
        Ok(Connection::connect(&self.0, ConnectionProperties::default()).await?)
    }
}

async fn declare(channel: &Channel, options: QueueDeclareOptions) -> Result<()> {
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    channel.queue_declare(QUEUE.into(), options, arguments).await?;
    Ok(())
}

async fn publisher(connection: &Connection) -> Result<Box<dyn Producer>> {
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    Ok(Box::new(Publisher(channel)))
}

async fn subscriber(connection: &Connection, prefetch: u16) -> Result<Box<dyn Consumer>> {
    let channel = connection.create_channel().await?;
    channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
    let options = BasicConsumeOptions::default();
    let tag = ShortString::default();
    let deliveries =
        channel.basic_consume(QUEUE.into(), tag, options, FieldTable::default()).await?;
    Ok(Box::new(Subscriber { channel, deliveries, last: None }))
}

#[async_trait]
impl System for RabbitMq {
    async fn producer(&self) -> Result<Box<dyn Producer>> {
        publisher(&self.connection().await?).await
    }

    async fn callers(&self, n: usize) -> Result<Vec<Box<dyn Producer>>> {
        let connection = self.connection().await?;
        let mut callers = Vec::new();
        for _ in 0..n {
            callers.push(publisher(&connection).await?);
        }
        Ok(callers)
    }

    async fn consumer(&self, prefetch: u16) -> Result<Box<dyn Consumer>> {
        subscriber(&self.connection().await?, prefetch).await
    }

    async fn workers(&self, n: usize) -> Result<Vec<Box<dyn Consumer>>> {
        let connection = self.connection().await?;
        let mut workers = Vec::new();
        for _ in 0..n {
            workers.push(subscriber(&connection, 1).await?);
        }
        Ok(workers)
    }
}

struct Publisher(Channel);

#[async_trait]
impl Producer for Publisher {
    async fn send(&mut self, payloads: Vec<Bytes>) -> Result<Confirmation> {
        let mut confirms = Vec::with_capacity(payloads.len());
        for payload in payloads {
            let properties = BasicProperties::default().with_delivery_mode(PERSISTENT);
            let options = BasicPublishOptions::default();
            let (exchange, key) = (DEFAULT_EXCHANGE.into(), QUEUE.into());
            confirms
                .push(self.0.basic_publish(exchange, key, options, &payload, properties).await?);
        }
        Ok(Box::pin(async move {
            for confirm in confirms {
                ensure!(confirm.await?.is_ack(), "a message was not confirmed");
            }
            Ok(())
        }))
    }
}

struct Subscriber {
    channel: Channel,
    deliveries: lapin::Consumer,
    /// The tag of the last delivery that was returned and is not acknowledged.
    last: Option<u64>,
}

#[async_trait]
impl Consumer for Subscriber {
    async fn next(&mut self) -> Result<Vec<Bytes>> {
        let mut payloads = Vec::new();
        let mut delivery = self.deliveries.next().await;
        while let Some(next) = delivery {
            let next = next?;
            self.last = Some(next.delivery_tag);
            payloads.push(next.data.into());
            if payloads.len() == BATCH {
                break;
            }
            delivery = self.deliveries.next().now_or_never().flatten();
        }
        ensure!(!payloads.is_empty(), "the broker cancelled the consumer");
        Ok(payloads)
    }

    async fn settle(&mut self) -> Result<()> {
        let last = self.last.take().context("there is nothing to acknowledge")?;
        Ok(self.channel.basic_ack(last, BasicAckOptions { multiple: true }).await?)
    }

    async fn finish(&mut self) -> Result<()> {
        // The broker answers a channel's commands in order.
        declare(&self.channel, QueueDeclareOptions { passive: true, ..Default::default() }).await
    }
}
