//! The errors of the engine. `grpc::status` maps each to a gRPC status.

use std::{num::NonZeroU64, sync::Arc};

use crate::{
    domain::{GroupName, Invalid, ItemState, OperationId, Pattern, Queue, QueueName, ScheduleName},
    store::StoreError,
};

/// Result of an engine call.
pub(crate) type Result<T, E = EngineError> = std::result::Result<T, E>;

/// The reason why the engine could not do what was asked. Cheap to clone, as one failure may be
/// reported to many callers.
#[derive(Debug, Clone, thiserror::Error)]
pub enum EngineError {
    /// A value that is not accepted.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The queue does not exist and is not created automatically.
    #[error("queue {0} does not exist")]
    QueueNotFound(QueueName),
    /// There is no such queue, and the caller may not create it.
    #[error("queue {0} does not exist, and the permission create@{0} is missing")]
    MayNotCreate(QueueName),
    /// There are as many queues as there may be.
    #[error("{setting} is {most}, and there are so many queues")]
    TooManyQueues {
        /// What sets the limit.
        setting: &'static str,
        /// The limit.
        most: u32,
    },
    /// The queue has no such item.
    #[error("item {id} is not in queue {queue}")]
    ItemNotFound {
        /// The queue.
        queue: QueueName,
        /// The requested id.
        id: String,
    },
    /// The item is not in the state in which it was to be deleted. Nothing was changed.
    #[error("item {id} of queue {queue} is {state}")]
    ItemInOtherState {
        /// The queue.
        queue: QueueName,
        /// The item.
        id: String,
        /// The state it is in.
        state: ItemState,
    },
    /// The schedule does not exist.
    #[error("schedule {0} does not exist")]
    ScheduleNotFound(ScheduleName),
    /// There is no such operation, or it is no longer kept.
    #[error("there is no operation {0}")]
    OperationNotFound(OperationId),
    /// The id of the request belongs to an operation that does something else.
    #[error("the request_id belongs to operation {0}, which does something else")]
    OperationExists(OperationId),
    /// Too many operations are running.
    #[error("{0} operations are running, and there may be no more")]
    TooManyOperations(u64),
    /// There are as many schedules as there may be.
    #[error("there are {0} schedules, and there may be no more")]
    TooManySchedules(usize),
    /// There is no template of that pattern.
    #[error("template {0} does not exist")]
    TemplateNotFound(Pattern),
    /// A template of that pattern exists with other settings.
    #[error("template {0} exists with other settings")]
    TemplateExists(Pattern),
    /// There are as many templates as there may be.
    #[error("there are {0} templates, and there may be no more")]
    TooManyTemplates(usize),
    /// Other updates change the same template, which was not changed.
    #[error("the settings of template {0} are being changed by others")]
    TemplateConflict(Pattern),
    /// A queue of that name exists with other settings.
    #[error("queue {0} exists with other settings")]
    QueueExists(QueueName),
    /// A schedule of that name exists with other settings.
    #[error("schedule {0} exists with other settings")]
    ScheduleExists(ScheduleName),
    /// An item cannot be moved to another group.
    #[error("an item cannot move from group {from} to group {to}")]
    DifferentGroup {
        /// The group of the item.
        from: GroupName,
        /// The requested group.
        to: GroupName,
    },
    /// The queue still holds items.
    #[error("queue {queue} holds {items} items")]
    QueueNotEmpty {
        /// The queue.
        queue: QueueName,
        /// The number of items it holds.
        items: u64,
    },
    /// The queue is the dead-letter queue of others and cannot be deleted.
    #[error("queue {queue} is the dead-letter queue of {}", list(.sources))]
    DeadLetterQueueInUse {
        /// The queue.
        queue: QueueName,
        /// The queues that dead-letter into it.
        sources: Vec<QueueName>,
    },
    /// Dead letters would eventually return to their queue.
    #[error("dead letters of {} would go round in a ring: {}", .0[0], ring(.0))]
    DeadLetterRing(Vec<QueueName>),
    /// A dead-letter queue must be in the same group as the queues that dead-letter into it.
    #[error(
        "queue {queue} cannot be in group {group}: it is the dead-letter queue of {from}, in group {from_group}"
    )]
    DeadLetterGroup {
        /// The queue.
        queue: QueueName,
        /// The requested group.
        group: GroupName,
        /// A queue that dead-letters into it.
        from: QueueName,
        /// The group of that queue.
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
    /// Other updates change the same settings, or links between queues. The queue was not changed. Its
    /// dead-letter queue may have been created.
    #[error("the settings of queue {0} are being changed by others")]
    Conflict(QueueName),
    /// The broker is shutting down. The caller may retry with another broker, or with this one
    /// after a moment.
    #[error("the broker is shutting down")]
    ShuttingDown,
    /// The stream has reached its maximum age. The client may open another one.
    #[error("the stream has been open for longer than max_connection_age")]
    StreamTooOld,
    /// The client of a stream with `auto_commit` did not read, and there is no room for what it left: items that were not sent are lost.
    #[error("items were not read, and there is no room for them")]
    NotRead,
    /// The store failed.
    #[error(transparent)]
    Store(Arc<StoreError>),
}

impl EngineError {
    /// Returns the error of a queue that has no room below its `max_depth`.
    pub(super) fn queue_full(queue: &Queue) -> Self {
        let max_depth = queue.max_depth.map_or(0, NonZeroU64::get);
        Self::QueueFull { queue: queue.name.clone(), max_depth }
    }

    /// Returns what is kept for users to read. What the store said may name hosts, and is for the log only.
    pub(super) fn in_words(&self) -> String {
        match self {
            Self::Store(_) => "the store failed: the broker's log says more".to_owned(),
            error => error.to_string(),
        }
    }
}

impl From<StoreError> for EngineError {
    fn from(error: StoreError) -> Self {
        Self::Store(Arc::new(error))
    }
}

/// Returns the names as a list for an error message.
fn list(names: &[QueueName]) -> String {
    names.iter().map(QueueName::as_str).collect::<Vec<_>>().join(", ")
}

/// Returns the names of a ring in order, ending with the first.
fn ring(names: &[QueueName]) -> String {
    let way = names.iter().chain(names.first()).map(QueueName::as_str);
    way.collect::<Vec<_>>().join(" -> ")
}
