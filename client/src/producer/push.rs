//! Pushing by unary calls.

use prost::Message;
use tokio::time::Instant;
use tonic::{Code, Status};

use crate::{
    client::Client,
    error::{Error, Result, is_transient},
    item::NewItem,
    proto::{self, PushRequest, PushResult},
    retry::Backoff,
    transport::{is_broken, is_unsent},
};

/// The broker accepts at most this many items in one call.
pub const MAX_BATCH_ITEMS: usize = sluicegate_proto::codec::MAX_ENTRIES;

/// Pushes items into one queue. Clones are cheap. [`Client::producer`] returns one.
#[derive(Debug, Clone)]
#[must_use = "a producer does nothing until it pushes"]
pub struct Producer {
    pub(super) client: Client,
    pub(super) queue: String,
    pub(super) name: String,
    auto_dedup: bool,
    pub(super) backoff: Backoff,
    max_batch_bytes: usize,
}

impl Client {
    /// Returns a producer for `queue`, at the next address.
    pub fn producer(&self, queue: impl Into<String>) -> Producer {
        Producer::new(self.elsewhere(), queue.into())
    }
}

impl Producer {
    fn new(client: Client, queue: String) -> Self {
        Self {
            client,
            queue,
            name: String::new(),
            auto_dedup: false,
            backoff: Backoff::default(),
            max_batch_bytes: 3 << 20,
        }
    }

    /// Sets the name of the producer, which is shown with each item. The rules of queue names apply.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Assigns each item without a `dedup_id` a random one, so that a push whose answer was lost can be repeated safely.
    pub fn with_auto_dedup(mut self) -> Self {
        self.auto_dedup = true;
        self
    }

    /// Sets how calls are repeated while no broker can be reached. A call that may have reached one is repeated only if
    /// each of its items has a `dedup_id`: others could be stored twice. `give_up_after` should be below the queue's
    /// `dedup_window`.
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.backoff = backoff;
        self
    }

    /// Sets how many bytes one call may have when many items are pushed; a larger item is pushed alone. Default 3 MiB,
    /// which every broker accepts.
    pub fn max_batch_bytes(mut self, bytes: usize) -> Self {
        self.max_batch_bytes = bytes;
        self
    }

    /// Returns the queue into which items are pushed.
    pub fn queue(&self) -> &str {
        &self.queue
    }

    /// Pushes one item and returns when it is durable.
    ///
    /// # Errors
    /// [`Error::Status`] if the broker refuses it, or no broker could be reached for too long: nothing was stored.
    /// [`Error::OutcomeUnknown`] if the connection broke under the call, or the broker lost its store, and the item has no
    /// `dedup_id`, retries took too long, or the broker refused a retry; and if the call ended as `INTERNAL` or `UNKNOWN`.
    pub async fn push(&self, item: impl Into<NewItem>) -> Result<PushResult> {
        let mut results = self.push_all([item.into()]).await?;
        // The broker returns one result per item.
        results.pop().ok_or_else(|| Status::internal("push answered without a result").into())
    }

    /// Pushes items in order and returns one result for each when all are durable. More than 1,000 items, or
    /// more bytes than [`Producer::max_batch_bytes`], are split into several calls, made one after the other.
    ///
    /// # Errors
    /// As [`Producer::push`]; [`Error::PartlyPushed`] if calls before the failing one succeeded.
    pub async fn push_all<I>(&self, items: I) -> Result<Vec<PushResult>>
    where
        I: IntoIterator,
        I::Item: Into<NewItem>,
    {
        let mut results = Vec::new();
        for items in self.batches(items.into_iter().map(Into::into)) {
            match self.push_batch(items).await {
                Ok(answered) if results.is_empty() => results = answered,
                Ok(answered) => results.extend(answered),
                Err(source) if results.is_empty() => return Err(source),
                Err(source) => {
                    return Err(Error::PartlyPushed { results, source: Box::new(source) });
                }
            }
        }
        Ok(results)
    }

    /// Makes one call, and repeats it while that is safe and may help.
    async fn push_batch(&self, items: Vec<proto::NewItem>) -> Result<Vec<PushResult>> {
        let safe = is_repeatable(&items);
        let message = PushRequest { queue: self.queue.clone(), items, producer: self.name.clone() };
        let give_up = Instant::now() + self.backoff.give_up_after;
        let (mut tries, mut maybe_stored) = (0, false);
        self.client.rotate();
        loop {
            let address = self.client.address_in_use();
            let request = self.client.request(message.clone());
            let status = match self.client.queue_service().push(request).await {
                Ok(response) => return Ok(response.into_inner().results),
                Err(status) => status,
            };
            maybe_stored |= may_be_stored(&status);
            if !is_transient(&status) {
                return Err(Error::refused(status, maybe_stored));
            }
            self.client.fail_over(&address);
            let delay = self.backoff.delay(tries, Some(&status));
            if (maybe_stored && !safe) || Instant::now() + delay > give_up {
                return Err(Error::refused(status, maybe_stored));
            }
            tracing::debug!(queue = self.queue, ?delay, %status, "push is repeated");
            tokio::time::sleep(delay).await;
            tries += 1;
        }
    }

    /// Splits items into batches that the broker accepts.
    pub(super) fn batches(
        &self,
        items: impl Iterator<Item = NewItem>,
    ) -> impl Iterator<Item = Vec<proto::NewItem>> {
        let (auto_dedup, max_bytes) = (self.auto_dedup, self.max_batch_bytes);
        let mut items = items
            .map(move |item| {
                let mut item = item.into_proto();
                if auto_dedup && item.dedup_id.is_empty() {
                    item.dedup_id = random_id();
                }
                #[cfg(feature = "opentelemetry")]
                crate::trace::carry(&mut item.headers);
                item
            })
            .peekable();
        std::iter::from_fn(move || {
            let first = items.next()?;
            let mut bytes = first.encoded_len();
            let mut batch = vec![first];
            while batch.len() < MAX_BATCH_ITEMS {
                let Some(next) = items.next_if(|next| bytes + next.encoded_len() <= max_bytes)
                else {
                    break;
                };
                bytes += next.encoded_len();
                batch.push(next);
            }
            Some(batch)
        })
    }
}

/// Returns true if pushing these items twice stores them once.
pub(super) fn is_repeatable(items: &[proto::NewItem]) -> bool {
    items.iter().all(|item| !item.dedup_id.is_empty())
}

/// Returns true if the items of a push that ended so may be stored.
pub(super) fn may_be_stored(status: &Status) -> bool {
    match status.code() {
        _ if is_broken(status) => !is_unsent(status),
        // A broker says so when its work went wrong, and a proxy of a call that it has passed on.
        Code::Unknown | Code::Internal => true,
        _ => is_transient(status),
    }
}

/// 128 random bits in hexadecimal, like a UUID without its dashes.
fn random_id() -> String {
    format!("{:032x}", rand::random::<u128>())
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;
    use tonic::codegen::http::Response;

    use super::*;

    fn producer() -> Producer {
        let client = Client::builder("http://127.0.0.1:1").connect_lazy().unwrap();
        client.producer("q")
    }

    #[tokio::test]
    async fn large_pushes_are_split_by_count_and_by_bytes_in_order() {
        let items = (0..2_500).map(|n| NewItem::new(n.to_string()));
        let sizes: Vec<_> = producer().batches(items).map(|batch| batch.len()).collect();
        assert_eq!(sizes, [1_000, 1_000, 500]);

        let items = (0..5_u8).map(|n| NewItem::new(vec![n; 1_000]));
        let batches: Vec<_> = producer().max_batch_bytes(2_500).batches(items).collect();
        let firsts: Vec<Vec<u8>> = batches
            .iter()
            .map(|batch| batch.iter().map(|item| item.payload[0]).collect())
            .collect();
        assert_eq!(firsts, [vec![0, 1], vec![2, 3], vec![4]]);
    }

    #[tokio::test]
    async fn a_broker_that_failed_within_may_have_stored_the_items() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            let mut connection =
                h2::server::handshake(listener.accept().await.unwrap().0).await.unwrap();
            for code in [Code::Internal, Code::Unknown, Code::InvalidArgument] {
                let (_, mut respond) = connection.accept().await.unwrap().unwrap();
                let answer = Response::builder()
                    .header("content-type", "application/grpc")
                    .header("grpc-status", code as i32);
                respond.send_response(answer.body(()).unwrap(), true).unwrap();
            }
            while connection.accept().await.is_some() {}
        });
        let producer = Client::builder(url).connect_lazy().unwrap().producer("q");
        for code in [Code::Internal, Code::Unknown] {
            let error = producer.push("x").await.unwrap_err();
            assert!(matches!(error, Error::OutcomeUnknown(_)), "{error:?}");
            assert_eq!(error.code(), Some(code));
        }
        let error = producer.push("x").await.unwrap_err();
        assert!(matches!(error, Error::Status(_)), "{error:?}");
    }

    #[tokio::test]
    async fn auto_dedup_keeps_given_ids_and_never_repeats_its_own() {
        let items = [NewItem::new("a").dedup_id("mine"), NewItem::new("b"), NewItem::new("b")];
        let batch = producer().with_auto_dedup().batches(items.into_iter()).next().unwrap();
        assert_eq!(batch[0].dedup_id, "mine");
        assert_ne!(batch[1].dedup_id, batch[2].dedup_id);
        assert!(is_repeatable(&batch));
    }
}
