//! What can go wrong in the engine. `grpc::status` turns it into a gRPC status, once.

use std::sync::Arc;

use crate::{
    domain::{GroupName, Invalid, ItemState, QueueName, ScheduleName},
    store::StoreError,
};

/// Result of an engine call.
pub(crate) type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Why the engine could not do as asked. Cheap to clone: one failure may be told to many callers.
#[derive(Debug, Clone, thiserror::Error)]
pub enum EngineError {
    /// A value that cannot be taken.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// There is no such queue, and it is not made by itself.
    #[error("queue {0} is not there")]
    QueueNotFound(QueueName),
    /// There is no such item in the queue.
    #[error("item {id} is not in queue {queue}")]
    ItemNotFound {
        /// The queue.
        queue: QueueName,
        /// The id asked for.
        id: String,
    },
    /// The item is not in the state in which it was to be deleted; nothing was changed.
    #[error("item {id} of queue {queue} is {state}")]
    ItemInOtherState {
        /// The queue.
        queue: QueueName,
        /// The item.
        id: String,
        /// The state it is in.
        state: ItemState,
    },
    /// There is no such schedule.
    #[error("schedule {0} is not there")]
    ScheduleNotFound(ScheduleName),
    /// A queue of that name exists with other settings.
    #[error("queue {0} exists with other settings")]
    QueueExists(QueueName),
    /// A schedule of that name exists with other settings.
    #[error("schedule {0} exists with other settings")]
    ScheduleExists(ScheduleName),
    /// An item cannot move between groups in one step.
    #[error("an item cannot move from group {from} to group {to}")]
    DifferentGroup {
        /// The group it is in.
        from: GroupName,
        /// The group it was to go to.
        to: GroupName,
    },
    /// The queue still holds items.
    #[error("queue {queue} holds {items} items")]
    QueueNotEmpty {
        /// The queue.
        queue: QueueName,
        /// How many items it holds.
        items: u64,
    },
    /// Other queues dead-letter into the queue: it cannot be deleted.
    #[error("queue {queue} is the dead-letter queue of {}", list(.sources))]
    DeadLetterQueueInUse {
        /// The queue.
        queue: QueueName,
        /// Those that dead-letter into it.
        sources: Vec<QueueName>,
    },
    /// Dead letters would come back to their queue in the end.
    #[error("dead letters of {} would go round in a ring: {}", .0[0], ring(.0))]
    DeadLetterRing(Vec<QueueName>),
    /// A dead-letter queue has to be in the group of those that dead-letter into it.
    #[error(
        "queue {queue} cannot be in group {group}: it is the dead-letter queue of {from}, in group {from_group}"
    )]
    DeadLetterGroup {
        /// The queue.
        queue: QueueName,
        /// The group it was to be in.
        group: GroupName,
        /// One that dead-letters into it.
        from: QueueName,
        /// The group of that.
        from_group: GroupName,
    },
    /// The queue is at its `max_depth`.
    #[error("queue {queue} is full: it may hold {max_depth} items")]
    QueueFull {
        /// The queue.
        queue: QueueName,
        /// Its limit.
        max_depth: u64,
    },
    /// The queue was deleted while it was consumed.
    #[error("queue {0} was deleted")]
    QueueDeleted(QueueName),
    /// Somebody else changes the same settings; nothing was changed.
    #[error("the settings of queue {0} are being changed by others")]
    Conflict(QueueName),
    /// The broker is shutting down: ask another one, or this one again in a moment.
    #[error("the broker is shutting down")]
    ShuttingDown,
    /// The stream has been open for long enough: open another one.
    #[error("the stream has been open for longer than max_connection_age")]
    StreamTooOld,
    /// The store failed.
    #[error(transparent)]
    Store(Arc<StoreError>),
}

impl From<StoreError> for EngineError {
    fn from(error: StoreError) -> Self {
        Self::Store(Arc::new(error))
    }
}

/// Names in a sentence.
fn list(names: &[QueueName]) -> String {
    names.iter().map(QueueName::as_str).collect::<Vec<_>>().join(", ")
}

/// The way round a ring.
fn ring(names: &[QueueName]) -> String {
    let way = names.iter().chain(names.first()).map(QueueName::as_str);
    way.collect::<Vec<_>>().join(" -> ")
}
