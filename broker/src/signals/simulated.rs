//! The transport of a simulation.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::mpsc::UnboundedReceiver;

use super::{
    message::Message,
    relay::{Lost, Receiving, Transport, bounded},
};

/// The way of signals between brokers. Messages are text.
#[async_trait]
pub trait Wire: Send + Sync + 'static {
    /// Sends a message to all brokers.
    async fn send(&self, message: String) -> Result<(), String>;

    /// Connects for receiving. The connection is lost when the sender of these messages is dropped.
    async fn listen(&self) -> Result<UnboundedReceiver<String>, String>;
}

/// Messages as text, over the way that a simulation provides.
pub(super) struct Simulated {
    pub(super) wire: Arc<dyn Wire>,
    pub(super) broker: [u8; 4],
}

#[async_trait]
impl Transport for Simulated {
    type Outlet = ();

    fn describe(&self) -> String {
        "simulated".to_owned()
    }

    async fn connect(&self) -> Result<(), Lost> {
        Ok(())
    }

    async fn send(&self, (): &mut (), messages: &[Message]) -> Result<(), Lost> {
        for message in messages {
            self.wire.send(message.encode(self.broker)).await.map_err(Lost)?;
        }
        Ok(())
    }

    async fn receive(&self, receiving: &Receiving) -> Lost {
        let listen = async { self.wire.listen().await.map_err(Lost) };
        let mut messages = match bounded(listen).await {
            Ok(messages) => messages,
            Err(lost) => return lost,
        };
        receiving.listening();
        while let Some(text) = messages.recv().await {
            if let Some((from, message)) = Message::decode(&text) {
                receiving.received(from, message);
            }
        }
        Lost("the connection was closed".to_owned())
    }
}
