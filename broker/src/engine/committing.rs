//! Commits that are being written. A consumer that asks for a commit has finished with the item, so that its stream is handed another
//! one while the commit is written. If the commit fails, the item takes its place in the stream again.

use super::{Engine, dispatch::Dispatcher};
use crate::domain::Receipt;

/// The reservations of a commit that is being written. If this is dropped before the [end](Self::end), they take their places in streams of
/// this broker again.
pub(super) struct Committing<'a> {
    engine: &'a Engine,
    receipts: &'a [Receipt],
}

impl<'a> Committing<'a> {
    /// Gives their places to other items.
    pub(super) fn begin(engine: &'a Engine, receipts: &'a [Receipt]) -> Self {
        let committing = Self { engine, receipts };
        committing.tell(|dispatcher, receipts| {
            dispatcher.commits_begin(receipts.iter(), engine.now());
        });
        committing
    }

    /// Notes that the store has answered. The caller frees the reservations.
    pub(super) fn end(mut self) {
        self.receipts = &[];
    }

    fn tell(&self, tell: impl Fn(&Dispatcher, &[Receipt])) {
        for of_queue in self.receipts.chunk_by(|a, b| a.queue == b.queue) {
            if let Some(dispatcher) = self.engine.dispatcher(&of_queue[0].queue) {
                tell(&dispatcher, of_queue);
            }
        }
    }
}

impl Drop for Committing<'_> {
    fn drop(&mut self) {
        self.tell(|dispatcher, receipts| dispatcher.commits_fail(receipts.iter()));
    }
}
