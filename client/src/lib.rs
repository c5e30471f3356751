//! Client library of Sluicegate, a durable work-queue broker spoken to over gRPC.
//!
//! # Layout
//!
//! | module | what is in it |
//! |---|---|
//! | [`client`] | [`Client`]: connections, fail-over, credentials; the generated stubs |
//! | [`item`] | [`NewItem`] to push, [`Delivery`] to work on |
//! | [`producer`] | [`Producer`]: pushes, one call at a time; [`PushStream`]: many batches in flight |
//! | [`consumer`] | [`Consumer`]: runs a handler for each item, settles the item, renews leases, reconnects |
//! | [`station`] | [`Station`]: a consumer whose handler says where the item goes next |
//! | [`retry`] | [`Backoff`], and [`Retry`] for handlers that choose how they fail |
//! | `apply` | (feature `mongodb`) applies work to MongoDB documents in any order, safely |
//! | [`error`] | [`Error`], the only error type |
//! | [`proto`] | messages and stubs generated from the proto files, for calls without a method of their own here |
//!
//! # Traces
//!
//! With the feature `opentelemetry`, items carry the trace of the span in which they are pushed (the header `traceparent` of W3C),
//! unless they carry one already. Each handler runs in a span `process <queue>` of its own, of the crate `tracing` with the target
//! `sluicegate_client` and the level INFO: a child of the span in which the item was pushed, and linked to it. Spans within
//! the handler are its children, and what the handler pushes carries its trace on. An item that is rolled back makes the span one of
//! an error. All that is left to do is to add the layer of the crate `tracing-opentelemetry`: see `examples/traced.rs`.
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
//!         Ok::<(), sluicegate_client::Retry>(()) // commits; an error rolls the item back
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
pub mod proto;
pub mod retry;
pub mod station;
#[cfg(feature = "opentelemetry")]
mod trace;
mod transport;

pub use client::{Client, ClientBuilder};
pub use consumer::{Consumer, Renewal, Summary};
pub use error::{Error, Result};
pub use item::{Delivery, NewItem};
pub use producer::{Producer, PushStream, PushTicket};
pub use retry::{Backoff, Retry};
pub use station::{Next, Station};

/// Shuts consumers down: when it is cancelled, they finish the items they hold and end.
pub use tokio_util::sync::CancellationToken;
/// The gRPC library that the generated stubs use.
pub use tonic;
