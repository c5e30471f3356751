//! What makes the load: the `producer`s and `consumer`s, the `backlog_limit` between them, and their `pace`.

pub(crate) mod backlog_limit;
pub(crate) mod consumer;
pub(crate) mod pace;
pub(crate) mod producer;
