//! Client library of Sluicegate, a durable work-queue broker spoken to over gRPC.
//!
//! # Layout
//!
//! | module | what is in it |
//! |---|---|
//! | [`client`] | [`Client`]: connections, fail-over, credentials; the generated stubs |
//! | [`item`] | [`NewItem`] to push, [`Delivery`] to work on |
//! | [`producer`] | [`Producer`]: pushes, one call at a time; [`PushStream`]: many batches in flight |
//! | [`consumer`] | [`Consumer`]: runs a handler for each item, settles, renews leases, reconnects |
//! | [`station`] | [`Station`]: a consumer whose handler says where the item goes next |
//! | [`retry`] | [`Backoff`], and [`Retry`] for handlers that choose how they fail |
//! | `apply` | (feature `mongodb`) applies work to MongoDB documents in any order, safely |
//! | [`error`] | [`Error`], the only error type |
//! | [`proto`] | messages and stubs generated from the proto files, for everything else |
//!
//! # A minute's tour
//!
//! ```no_run
//! use sluicegate_client::{Client, NewItem};
//!
//! # async fn tour() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::connect("http://127.0.0.1:7400").await?;
//!
//! let orders = client.producer("orders").with_auto_dedup();
//! orders.push(NewItem::new("two pounds of apples")).await?;
//!
//! client
//!     .consumer("orders")
//!     .max_in_flight(16)
//!     .run(|delivery| async move {
//!         println!("{}", delivery.text()?);
//!         Ok::<(), sluicegate_client::Retry>(()) // commits; an error gives the item back
//!     })
//!     .await?;
//! # Ok(())
//! # }
//! ```

#[cfg(feature = "mongodb")]
pub mod apply;
pub mod client;
pub mod consumer;
pub mod error;
pub mod item;
mod pool;
pub mod producer;
pub mod retry;
pub mod station;

pub use client::{Client, ClientBuilder};
pub use consumer::{Consumer, Renewal, Summary};
pub use error::{Error, Result};
pub use item::{Delivery, NewItem};
pub use producer::{Producer, PushStream, PushTicket};
pub use retry::{Backoff, Retry};
pub use station::{Next, Station};

/// Messages, stubs and servers generated from package `sluicegate.v1`.
pub use sluicegate_proto::v1 as proto;
/// For shutting consumers down: cancel it, and they finish what they hold.
pub use tokio_util::sync::CancellationToken;
/// The gRPC library the generated stubs are made with.
pub use tonic;
