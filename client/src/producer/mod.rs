//! Pushing items.
//!
//! A push is answered after its items are durable. [`Producer::push_all`] makes one call after the other;
//! [`Producer::stream`] keeps many batches in flight on one stream.

mod push;
mod stream;

pub use self::{
    push::{MAX_BATCH_ITEMS, Producer},
    stream::{PushStream, PushTicket, StreamOptions},
};
