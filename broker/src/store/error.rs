//! Why a call of a store failed.

/// Why a store could not do as asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// It cannot be reached, or did not answer in time: the outcome is unknown.
    #[error("the store is unavailable: {reason}")]
    Unavailable {
        /// What the driver said.
        reason: String,
        /// The driver's error.
        #[source]
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
    /// It has no room for what was to be stored; nothing was. What is there can be taken and settled.
    #[error("the store is full: {reason}")]
    Full {
        /// What there is no room on.
        reason: String,
    },
    /// What is stored is not what was stored: it is not answered with.
    #[error("the store is damaged: {reason}")]
    Damaged {
        /// What is wrong with it.
        reason: String,
        /// The driver's error.
        #[source]
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
    /// This deployment of the store cannot do that; the message says what to change.
    #[error("{0}")]
    Unsupported(String),
    /// A page token or cursor that this store did not give out.
    #[error("not a page token of this broker")]
    BadCursor,
    /// Anything else: a defect, here or in the store.
    #[error("the store failed: {reason}")]
    Internal {
        /// What the driver said.
        reason: String,
        /// The driver's error.
        #[source]
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
}

/// Result of a store call.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;
