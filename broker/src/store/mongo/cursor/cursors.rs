//! The heads of all queues that this broker has to do with. Those of queues that are consumed here stay; of others, which
//! are pushed to, moved to or counted, so many are kept as a cache.

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

/// QueueCursors kept, about a kilobyte each, before those are dropped that nobody uses. One that is dropped costs its queue's next
/// push two more commands.
const MAX_CURSORS: usize = 10_000;

/// QueueCursors by queue.
pub(crate) struct QueueCursors(Mutex<Known>);

struct Known {
    cursors: HashMap<QueueName, Arc<QueueCursor>>,
    /// The map is cleared of unused heads when it reaches this size.
    clear_at: usize,
    /// The size below which it is never cleared.
    min: usize,
}

impl QueueCursors {
    pub(crate) fn new() -> Self {
        Self::with_room_for(MAX_CURSORS)
    }

    fn with_room_for(min: usize) -> Self {
        Self(Mutex::new(Known { cursors: HashMap::new(), clear_at: min, min }))
    }

    /// Returns the head of a queue. A new one knows nothing: the next find starts from the start.
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

    /// Forgets what is known of a queue that was deleted.
    pub(crate) fn forget(&self, queue: &QueueName) {
        self.0.lock().cursors.remove(queue);
    }

    /// Returns the queues that are consumed here and that something was asked of, with their groups.
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
    /// Drops the heads that nobody holds and that were not asked for since the last time; all that nobody holds if these
    /// are too few. Nobody can take hold of one meanwhile: that needs this lock.
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

/// A head whose queue is consumed through it.
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
    fn heads_do_not_grow_with_the_names_of_queues() {
        let cursors = QueueCursors::with_room_for(100);
        let held = ConsumedCursor::new(cursors.get(&name(0)));
        held.consumed.lock().group = Some(GroupName::default());
        for number in 1..10_000 {
            cursors.get(&name(number));
            assert!(cursors.0.lock().cursors.len() <= 101);
        }
        assert!(Arc::ptr_eq(&held, &cursors.get(&name(0))), "it is in use");
        assert_eq!(cursors.consumed(), [(name(0), GroupName::default())]);
        drop(held);
        assert_eq!(cursors.consumed(), []);
    }

    #[test]
    fn heads_that_are_asked_for_again_stay_longer() {
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
