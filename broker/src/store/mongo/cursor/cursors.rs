//! The cursors of all queues that this broker handles. Cursors of queues that are consumed here stay. Those of other
//! queues, which are pushed to, moved to or counted, are kept as a cache of limited size.

use std::{
    collections::HashMap,
    ops::Deref,
    sync::{Arc, atomic::Ordering},
};

use parking_lot::Mutex;

use crate::{
    domain::{GroupName, QueueName},
    store::mongo::cursor::watermarks::QueueCursor,
};

/// Number of cursors, of about a kilobyte each, above which unused ones are dropped. Without its cursor, the next push
/// to a queue takes two more commands.
const MAX_CURSORS: usize = 10_000;

/// Cursors by queue.
pub(crate) struct QueueCursors(Mutex<Known>);

struct Known {
    cursors: HashMap<QueueName, Arc<QueueCursor>>,
    /// Unused cursors are dropped when the map reaches this size.
    clear_at: usize,
    /// The size below which nothing is dropped.
    min: usize,
}

impl QueueCursors {
    pub(crate) fn new() -> Self {
        Self::with_room_for(MAX_CURSORS)
    }

    fn with_room_for(min: usize) -> Self {
        Self(Mutex::new(Known { cursors: HashMap::new(), clear_at: min, min }))
    }

    /// Returns the cursor of a queue. A new cursor knows nothing: the next find starts from the start.
    pub(crate) fn get(&self, queue: &QueueName) -> Arc<QueueCursor> {
        let mut known = self.0.lock();
        if let Some(cursor) = known.cursors.get(queue) {
            cursor.recently_used.store(true, Ordering::Relaxed);
            return Arc::clone(cursor);
        }
        if known.cursors.len() >= known.clear_at {
            known.clear();
        }
        let cursor = Arc::new(QueueCursor::new());
        known.cursors.insert(queue.clone(), Arc::clone(&cursor));
        cursor
    }

    /// Drops the cursor of a queue that was deleted.
    pub(crate) fn forget(&self, queue: &QueueName) {
        self.0.lock().cursors.remove(queue);
    }

    /// Returns the queues, with their groups, that are consumed here and whose handles were used.
    pub(crate) fn consumed(&self) -> Vec<(QueueName, GroupName)> {
        let known = self.0.lock();
        let consumed = known.cursors.iter().filter_map(|(queue, cursor)| {
            let consumed = cursor.consumed.lock();
            let group = consumed.group.clone().filter(|_| consumed.handles > 0)?;
            Some((queue.clone(), group))
        });
        consumed.collect()
    }
}

impl Known {
    /// Drops the cursors that nobody holds and that were not asked for since the last time. If the rest is still large,
    /// drops all that nobody holds. Nobody can take hold of a cursor meanwhile, because that needs this lock.
    fn clear(&mut self) {
        let is_held = |cursor: &Arc<QueueCursor>| Arc::strong_count(cursor) > 1;
        self.cursors.retain(|_, cursor| {
            is_held(cursor) || cursor.recently_used.swap(false, Ordering::Relaxed)
        });
        if self.cursors.len() > self.min / 2 {
            self.cursors.retain(|_, cursor| is_held(cursor));
        }
        self.clear_at = self.min.max(2 * self.cursors.len());
    }
}

/// A cursor through which its queue is consumed.
pub(crate) struct ConsumedCursor(Arc<QueueCursor>);

impl ConsumedCursor {
    pub(crate) fn new(cursor: Arc<QueueCursor>) -> Self {
        cursor.consumed.lock().handles += 1;
        Self(cursor)
    }
}

impl Deref for ConsumedCursor {
    type Target = Arc<QueueCursor>;
    fn deref(&self) -> &Arc<QueueCursor> {
        &self.0
    }
}

impl Drop for ConsumedCursor {
    fn drop(&mut self) {
        self.0.consumed.lock().handles -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(number: usize) -> QueueName {
        QueueName::parse("queue", &format!("q{number}")).unwrap()
    }

    #[test]
    fn cursors_do_not_grow_with_the_names_of_queues() {
        let cursors = QueueCursors::with_room_for(100);
        let held = ConsumedCursor::new(cursors.get(&name(0)));
        held.consumed.lock().group = Some(GroupName::default());
        for number in 1..10_000 {
            cursors.get(&name(number));
            assert!(cursors.0.lock().cursors.len() <= 101);
        }
        assert!(Arc::ptr_eq(&held, &cursors.get(&name(0))), "the cursor is in use");
        assert_eq!(cursors.consumed(), [(name(0), GroupName::default())]);
        drop(held);
        assert_eq!(cursors.consumed(), []);
    }

    #[test]
    fn cursors_that_are_asked_for_again_stay_longer() {
        let cursors = QueueCursors::with_room_for(100);
        let often: Vec<_> =
            (0..10).map(|number| Arc::downgrade(&cursors.get(&name(number)))).collect();
        for number in 10..101 {
            cursors.get(&name(number));
            (0..10).for_each(|number| drop(cursors.get(&name(number))));
        }
        assert!(often.iter().all(|cursor| cursor.strong_count() == 1));
        assert_eq!(cursors.0.lock().cursors.len(), 11);
    }
}
