//! Signals over Redis: one channel per database, one message per signal.
//!
//! The subscription has a connection of its own, which is pinged, because a broker that only reads
//! from a half-open socket cannot tell it from an idle one. The publisher uses another connection,
//! which every batch tests.

use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use redis::{
    AsyncConnectionConfig, Client, RedisError,
    aio::{MultiplexedConnection, PubSubSink, PubSubStream},
};
use tokio::time::sleep;

use super::{
    message::Message,
    relay::{Lost, Receiving, STEP_TIMEOUT, Transport, bounded},
};

/// The pause between pings of the subscription. A dead connection is noticed after this pause and [`STEP_TIMEOUT`]
/// together.
const PING_PAUSE: Duration = Duration::from_secs(2);

/// A Redis server.
pub(super) struct Redis {
    client: Client,
    broker: [u8; 4],
    channel: String,
    description: String,
}

impl From<RedisError> for Lost {
    fn from(error: RedisError) -> Self {
        Self(error.to_string())
    }
}

impl Redis {
    /// Reads the address, without connecting. The channel is `sluicegate:<namespace>`.
    pub(super) fn new(
        uri: &str,
        broker: [u8; 4],
        namespace: &str,
        description: String,
    ) -> Result<Self, RedisError> {
        let channel = format!("sluicegate:{namespace}");
        Ok(Self { client: Client::open(uri)?, broker, channel, description })
    }
}

#[async_trait]
impl Transport for Redis {
    type Outlet = MultiplexedConnection;

    fn describe(&self) -> String {
        self.description.clone()
    }

    async fn connect(&self) -> Result<MultiplexedConnection, Lost> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(STEP_TIMEOUT))
            .set_response_timeout(Some(STEP_TIMEOUT));
        let mut outlet = self.client.get_multiplexed_async_connection_with_config(&config).await?;
        let () = redis::cmd("PING").query_async(&mut outlet).await?;
        Ok(outlet)
    }

    async fn send(
        &self,
        outlet: &mut MultiplexedConnection,
        messages: &[Message],
    ) -> Result<(), Lost> {
        let mut pipe = redis::Pipeline::with_capacity(messages.len());
        for message in messages {
            pipe.cmd("PUBLISH").arg(&self.channel).arg(message.encode(self.broker)).ignore();
        }
        let () = pipe.query_async(outlet).await?;
        Ok(())
    }

    async fn receive(&self, receiving: &Receiving) -> Lost {
        let (sink, stream) = match bounded(self.subscribe()).await {
            Ok(connection) => connection,
            Err(lost) => return lost,
        };
        receiving.listening();
        tokio::select! {
            lost = listen(stream, receiving) => lost,
            lost = supervise(sink) => lost,
        }
    }
}

impl Redis {
    async fn subscribe(&self) -> Result<(PubSubSink, PubSubStream), Lost> {
        let mut connection = self.client.get_async_pubsub().await?;
        connection.subscribe(&self.channel).await?;
        Ok(connection.split())
    }
}

/// Passes on messages until the connection ends.
async fn listen(mut stream: PubSubStream, receiving: &Receiving) -> Lost {
    while let Some(message) = stream.next().await {
        let decoded = message.get_payload::<String>().ok().and_then(|text| Message::decode(&text));
        if let Some((from, message)) = decoded {
            receiving.received(from, message);
        } else {
            tracing::debug!("a message on the signal channel is not a signal");
        }
    }
    Lost("the connection was closed".to_owned())
}

/// Pings until there is no answer.
async fn supervise(mut sink: PubSubSink) -> Lost {
    loop {
        sleep(PING_PAUSE).await;
        let answered = async { Ok(sink.ping::<redis::Value>().await?) };
        if let Err(lost) = bounded(answered).await {
            return lost;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::test_servers::RedisServer, *};

    #[tokio::test]
    async fn tls_to_a_plain_server_is_an_error_not_a_panic() {
        let server = RedisServer::started().await;
        let uri = format!("rediss://{}/", server.address());
        let redis = Redis::new(&uri, [1; 4], "any", uri.clone()).unwrap();
        assert!(bounded(redis.connect()).await.is_err());
        assert!(bounded(redis.subscribe()).await.is_err());
    }
}
