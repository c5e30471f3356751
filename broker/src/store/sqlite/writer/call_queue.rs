//! The calls that wait for the writer, and which of them share a transaction.

use std::{
    collections::{HashMap, VecDeque},
    sync::mpsc,
};

use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::super::{
    super::Result,
    failure::{Failure, ended},
    runs,
    tx::Tx,
};
use crate::domain::QueueName;

/// Limit of calls of each kind in one transaction, which bounds how long the first waits for the last.
const MAX_GROUP: usize = 512;
/// Limit of items settled in one transaction, unless a single call settles more.
const MAX_SETTLED: usize = 4_000;
/// Limit of items pushed in one transaction, unless a single call pushes more. Producers that push without pause leave
/// room to consumers, because items that are not consumed only make the queue longer.
const MAX_PUSHED: usize = 1_000;
/// Limit of bytes pushed in one transaction, in the same way. With a fourth of it an item of another queue waits a fifth
/// less, and many producers of large items store a twentieth less.
const MAX_PUSHED_BYTES: usize = 8 << 20;

/// What a call does, as far as the writer needs to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) enum Kind {
    /// Stores items in a queue.
    Push { queue: QueueName, items: usize, bytes: usize },
    /// Commits this many items.
    Commit(usize),
    /// Settles this many items, otherwise.
    Settle(usize),
    /// Reserves items. This is the one kind whose answer does not wait for the disk.
    Reserve,
    /// Settles an item and stores others, which have so many bytes.
    SettleAndPush { bytes: usize },
    /// Changes items in another way.
    Items,
    /// Changes other things than items.
    Other,
}

impl Kind {
    /// Returns true if the call can run again after its transaction was rolled back.
    pub(super) fn is_repeatable(&self) -> bool {
        matches!(self, Self::Commit(_) | Self::Settle(_) | Self::Reserve)
    }

    /// Returns true if the call finds all leases in their items, and none in [`runs`].
    fn finds_leases(&self) -> bool {
        matches!(self, Self::Settle(_) | Self::SettleAndPush { .. } | Self::Items)
    }

    /// Returns true if the call takes more room on the disk than it frees.
    pub(super) fn grows(&self) -> bool {
        matches!(self, Self::Push { .. } | Self::SettleAndPush { .. })
    }
}

/// A call that waits for the writer.
pub(super) trait Job: Send {
    fn kind(&self) -> &Kind;
    /// Returns true if nobody waits for the answer any more.
    fn abandoned(&self) -> bool;
    /// Does the work. Called again after a rollback only if the kind is repeatable.
    fn run(&mut self, tx: &Tx<'_>) -> rusqlite::Result<()>;
    fn answer(self: Box<Self>, failure: Option<Failure>);
}

pub(super) struct Call<F, T> {
    pub(super) kind: Kind,
    pub(super) work: F,
    pub(super) result: Option<T>,
    pub(super) reply: oneshot::Sender<Result<T>>,
    pub(super) _permit: OwnedSemaphorePermit,
}

impl<F, T> Job for Call<F, T>
where
    F: FnMut(&Tx<'_>) -> rusqlite::Result<T> + Send,
    T: Send,
{
    fn kind(&self) -> &Kind {
        &self.kind
    }

    fn abandoned(&self) -> bool {
        self.reply.is_closed()
    }

    fn run(&mut self, tx: &Tx<'_>) -> rusqlite::Result<()> {
        if self.kind.finds_leases() {
            runs::write_out(tx)?;
        }
        self.result = Some((self.work)(tx)?);
        Ok(())
    }

    fn answer(self: Box<Self>, failure: Option<Failure>) {
        let answer = match (failure, self.result) {
            (None, Some(result)) => Ok(result),
            (Some(failure), _) => Err(failure.told(self.kind.grows()).into_error(None)),
            (None, None) => Err(ended()),
        };
        let _ = self.reply.send(answer); // the caller may have gone
    }
}

/// The waiting calls by kind, in the order of their arrival.
#[derive(Default)]
pub(super) struct CallQueue {
    others: VecDeque<Box<dyn Job>>,
    pushes: Pushes,
    reserves: VecDeque<Box<dyn Job>>,
}

impl CallQueue {
    pub(super) fn add(&mut self, job: Box<dyn Job>) {
        match job.kind() {
            Kind::Push { queue, .. } => self.pushes.add(queue.clone(), job),
            Kind::Reserve => self.reserves.push_back(job),
            Kind::Commit(_)
            | Kind::Settle(_)
            | Kind::SettleAndPush { .. }
            | Kind::Items
            | Kind::Other => {
                self.others.push_back(job);
            }
        }
    }

    /// Adds all calls that have come.
    pub(super) fn add_all(&mut self, arrivals: &mpsc::Receiver<Box<dyn Job>>) {
        for job in arrivals.try_iter() {
            self.add(job);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.others.is_empty() && self.pushes.turns.is_empty() && self.reserves.is_empty()
    }

    /// Returns the calls of the next transaction. Reserves come last, so that they find items that are rolled back or
    /// pushed in it.
    pub(super) fn next_group(&mut self) -> Vec<Box<dyn Job>> {
        let mut group = Vec::new();
        take(|| self.others.pop_front(), MAX_SETTLED, &mut group);
        take(|| self.pushes.next(), MAX_PUSHED, &mut group);
        take(|| self.reserves.pop_front(), MAX_GROUP, &mut group);
        group
    }
}

/// The waiting pushes. Those into one queue keep their order. The queues take turns, so that whoever pushes a little does
/// not wait for all that others push into their queues.
#[derive(Default)]
struct Pushes {
    by_queue: HashMap<QueueName, VecDeque<Box<dyn Job>>>,
    /// The queues of `by_queue`, none of which is empty.
    turns: VecDeque<QueueName>,
}

impl Pushes {
    fn add(&mut self, queue: QueueName, job: Box<dyn Job>) {
        let calls = self.by_queue.entry(queue).or_insert_with_key(|queue| {
            self.turns.push_back(queue.clone());
            VecDeque::new()
        });
        calls.push_back(job);
    }

    fn next(&mut self) -> Option<Box<dyn Job>> {
        let queue = self.turns.pop_front()?;
        let calls = self.by_queue.get_mut(&queue)?;
        let job = calls.pop_front();
        if calls.is_empty() {
            self.by_queue.remove(&queue);
        } else {
            self.turns.push_back(queue);
        }
        job
    }
}

/// Adds calls to the group, until they have `max_items` items together, or many bytes.
fn take(
    mut next: impl FnMut() -> Option<Box<dyn Job>>,
    max_items: usize,
    group: &mut Vec<Box<dyn Job>>,
) {
    let (mut calls, mut items, mut bytes) = (0, 0, 0);
    while calls < MAX_GROUP
        && items < max_items
        && bytes < MAX_PUSHED_BYTES
        && let Some(job) = next()
    {
        if job.abandoned() {
            continue;
        }
        calls += 1;
        let (of_items, of_bytes) = match job.kind() {
            Kind::Push { items, bytes, .. } => (*items, *bytes),
            Kind::Commit(items) | Kind::Settle(items) => (*items, 0),
            Kind::SettleAndPush { bytes } => (1, *bytes),
            Kind::Reserve | Kind::Items | Kind::Other => (1, 0),
        };
        items += of_items;
        bytes += of_bytes;
        group.push(job);
    }
}
