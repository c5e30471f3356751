//! Sluicegate: PushStream, and ConsumeStream with `commit_up_to`; Push for single items, Reserve and Commit for workers that poll.

use anyhow::{Context, Result, anyhow};
use async_trait::async_trait;
use bytes::Bytes;
use sluicegate_client::{
    Client, NewItem,
    producer::{Producer as Pusher, PushStream, StreamOptions},
    proto::{
        CommitRequest, CommitUpTo, ConsumeRequest, ConsumeStreamRequest, ConsumeStreamResponse,
        CreateQueueRequest, Delivery, Outcome, Queue, ReserveRequest, SettleResult,
        consume_stream_request::Action, consume_stream_response::Event,
    },
    tonic::Streaming,
};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::{Address, BATCH, Confirmation, Consumer, Producer, System, UNCONFIRMED};

const QUEUE: &str = "peers";
/// How long a Reserve waits.
const WAIT: Duration = Duration::from_secs(10);

pub(super) struct Sluicegate(Address);

impl Sluicegate {
    pub(super) async fn new(address: Address) -> Result<Self> {
        let client = Client::connect(&*address.push).await?;
        let queue = Some(Queue { name: QUEUE.to_owned(), ..Default::default() });
        client.admin_service().create_queue(CreateQueueRequest { queue }).await?;
        Ok(Self(address))
    }

    async fn taker(&self) -> Result<Client> {
        Ok(Client::connect(self.0.take.as_deref().unwrap_or(&self.0.push)).await?)
    }
}

#[async_trait]
impl System for Sluicegate {
    async fn producer(&self) -> Result<Box<dyn Producer>> {
        let client = Client::connect(&*self.0.push).await?;
        // The load keeps to its own bound, which for large payloads is smaller.
        let options = StreamOptions { max_in_flight: UNCONFIRMED / BATCH, ..Default::default() };
        Ok(Box::new(Batches(client.producer(QUEUE).stream(options))))
    }

    async fn callers(&self, n: usize) -> Result<Vec<Box<dyn Producer>>> {
        let client = Client::connect(&*self.0.push).await?;
        Ok((0..n).map(|_| Box::new(Calls(client.producer(QUEUE))) as _).collect())
    }

    async fn consumer(&self, prefetch: u16) -> Result<Box<dyn Consumer>> {
        subscriber(&self.taker().await?, prefetch).await
    }

    async fn workers(&self, n: usize) -> Result<Vec<Box<dyn Consumer>>> {
        let client = self.taker().await?;
        let mut workers = Vec::new();
        for _ in 0..n {
            workers.push(subscriber(&client, 1).await?);
        }
        Ok(workers)
    }

    async fn pollers(&self, n: usize) -> Result<Vec<Box<dyn Consumer>>> {
        let client = self.taker().await?;
        let poller = || Poller { client: client.clone(), held: Vec::new() };
        Ok((0..n).map(|_| Box::new(poller()) as _).collect())
    }
}

async fn subscriber(client: &Client, prefetch: u16) -> Result<Box<dyn Consumer>> {
    let (requests, outgoing) = mpsc::channel(usize::from(prefetch) + 2);
    let open = ConsumeRequest {
        queue: QUEUE.to_owned(),
        max_in_flight: prefetch.into(),
        ..Default::default()
    };
    requests.send(ConsumeStreamRequest { action: Some(Action::Open(open)) }).await?;
    let opening = client.queue_service().consume_stream(ReceiverStream::new(outgoing)).await;
    let answers = opening?.into_inner();
    Ok(Box::new(Stream { requests, answers, received: 0, committed: 0 }))
}

struct Batches(PushStream);

#[async_trait]
impl Producer for Batches {
    async fn send(&mut self, payloads: Vec<Bytes>) -> Result<Confirmation> {
        let ticket = self.0.send(payloads.into_iter().map(NewItem::new)).await?;
        Ok(Box::pin(async move { Ok(ticket.await.map(drop)?) }))
    }
}

struct Calls(Pusher);

#[async_trait]
impl Producer for Calls {
    async fn send(&mut self, payloads: Vec<Bytes>) -> Result<Confirmation> {
        let pusher = self.0.clone();
        let items: Vec<NewItem> = payloads.into_iter().map(NewItem::new).collect();
        Ok(Box::pin(async move { Ok(pusher.push_all(items).await.map(drop)?) }))
    }
}

struct Stream {
    requests: mpsc::Sender<ConsumeStreamRequest>,
    answers: Streaming<ConsumeStreamResponse>,
    /// The tag of the last item that was returned.
    received: i64,
    /// How many commits were answered.
    committed: i64,
}

impl Stream {
    /// Returns the deliveries of the next answer, if it has any.
    async fn answer(&mut self) -> Result<Vec<Delivery>> {
        let answer = self.answers.message().await?.context("the broker ended the stream")?;
        match answer.event {
            Some(Event::Deliveries(message)) => Ok(message.deliveries),
            Some(Event::CommittedUpTo(answer)) => {
                settled(&answer.not_committed)?;
                self.committed += i64::from(answer.committed);
                Ok(Vec::new())
            }
            Some(Event::Revoked(revoked)) => Err(anyhow!("revoked: {:?}", revoked.reason())),
            Some(Event::Error(error)) => Err(anyhow!(error.message)),
            _ => Ok(Vec::new()),
        }
    }
}

#[async_trait]
impl Consumer for Stream {
    async fn next(&mut self) -> Result<Vec<Bytes>> {
        loop {
            let deliveries = self.answer().await?;
            if let Some(last) = deliveries.last() {
                self.received = last.delivery_tag;
                return Ok(payloads(deliveries).collect());
            }
        }
    }

    async fn settle(&mut self) -> Result<()> {
        let commit = Action::CommitUpTo(CommitUpTo { delivery_tag: self.received });
        Ok(self.requests.send(ConsumeStreamRequest { action: Some(commit) }).await?)
    }

    async fn finish(&mut self) -> Result<()> {
        while self.committed < self.received {
            self.answer().await?;
        }
        Ok(())
    }
}

struct Poller {
    client: Client,
    held: Vec<String>,
}

#[async_trait]
impl Consumer for Poller {
    async fn next(&mut self) -> Result<Vec<Bytes>> {
        let reserve = ReserveRequest {
            queue: QUEUE.to_owned(),
            max_items: 1,
            wait: Some(WAIT.try_into()?),
            ..Default::default()
        };
        let request = self.client.waiting_request(reserve, WAIT);
        let answer = self.client.queue_service().reserve(request).await?.into_inner();
        self.held.extend(answer.deliveries.iter().map(|delivery| delivery.receipt.clone()));
        Ok(payloads(answer.deliveries).collect())
    }

    async fn settle(&mut self) -> Result<()> {
        let receipts = std::mem::take(&mut self.held);
        let request = self.client.request(CommitRequest { receipts });
        settled(&self.client.queue_service().commit(request).await?.into_inner().results)
    }

    async fn finish(&mut self) -> Result<()> {
        Ok(())
    }
}

fn payloads(deliveries: Vec<Delivery>) -> impl Iterator<Item = Bytes> {
    deliveries.into_iter().map(|delivery| delivery.item.unwrap_or_default().payload)
}

fn settled(results: &[SettleResult]) -> Result<()> {
    match results.iter().find(|result| result.outcome() != Outcome::Ok) {
        Some(result) => Err(anyhow!("a commit was answered with {:?}", result.outcome())),
        None => Ok(()),
    }
}
