//! The reasons why a call of a store failed.

/// The reason why a store could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The store cannot be reached, or did not respond in time. The outcome is unknown.
    #[error("the store is unavailable: {reason}")]
    Unavailable {
        /// The driver's message.
        reason: String,
        /// The driver's error.
        #[source]
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
    /// The store has no room for new items, and stored none of them. Existing items can be reserved
    /// and settled.
    #[error("the store is full: {reason}")]
    Full {
        /// The resource that is exhausted.
        reason: String,
    },
    /// The stored data is not what was written. It is not returned.
    #[error("the store is damaged: {reason}")]
    Damaged {
        /// What is wrong with the data.
        reason: String,
        /// The driver's error.
        #[source]
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
    /// This deployment of the store does not support the call. The message says what to change.
    #[error("{0}")]
    Unsupported(String),
    /// A page token or cursor that this store did not issue.
    #[error("not a page token of this broker")]
    BadCursor,
    /// Any other failure: a defect, here or in the store.
    #[error("the store failed: {reason}")]
    Internal {
        /// The driver's message.
        reason: String,
        /// The driver's error.
        #[source]
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
}

/// Result of a store call.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;
