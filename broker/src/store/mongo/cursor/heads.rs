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
    store::mongo::cursor::watermarks::Head,
};

/// Heads kept, about a kilobyte each, before those are dropped that nobody uses. One that is dropped costs its queue's next
/// push two more commands.
const MAX_HEADS: usize = 10_000;

/// Heads by queue.
pub(crate) struct Heads(Mutex<Known>);

struct Known {
    heads: HashMap<QueueName, Arc<Head>>,
    /// The map is cleared of unused heads when it reaches this size.
    clear_at: usize,
    /// The size below which it is never cleared.
    min: usize,
}

impl Heads {
    pub(crate) fn new() -> Self {
        Self::with_room_for(MAX_HEADS)
    }

    fn with_room_for(min: usize) -> Self {
        Self(Mutex::new(Known { heads: HashMap::new(), clear_at: min, min }))
    }

    /// Returns the head of a queue. A new one knows nothing: the next find starts from the start.
    pub(crate) fn get(&self, queue: &QueueName) -> Arc<Head> {
        let mut known = self.0.lock();
        if let Some(head) = known.heads.get(queue) {
            head.recently_used.store(true, Ordering::Relaxed);
            return Arc::clone(head);
        }
        if known.heads.len() >= known.clear_at {
            known.clear();
        }
        let head = Arc::new(Head::new());
        known.heads.insert(queue.clone(), Arc::clone(&head));
        head
    }

    /// Forgets what is known of a queue that was deleted.
    pub(crate) fn forget(&self, queue: &QueueName) {
        self.0.lock().heads.remove(queue);
    }

    /// Returns the queues that are consumed here and that something was asked of, with their groups.
    pub(crate) fn consumed(&self) -> Vec<(QueueName, GroupName)> {
        let known = self.0.lock();
        let consumed = known.heads.iter().filter_map(|(queue, head)| {
            let consumed = head.consumed.lock();
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
        let is_held = |head: &Arc<Head>| Arc::strong_count(head) > 1;
        self.heads
            .retain(|_, head| is_held(head) || head.recently_used.swap(false, Ordering::Relaxed));
        if self.heads.len() > self.min / 2 {
            self.heads.retain(|_, head| is_held(head));
        }
        self.clear_at = self.min.max(2 * self.heads.len());
    }
}

/// A head whose queue is consumed through it.
pub(crate) struct ConsumedHead(Arc<Head>);

impl ConsumedHead {
    pub(crate) fn new(head: Arc<Head>) -> Self {
        head.consumed.lock().handles += 1;
        Self(head)
    }
}

impl Deref for ConsumedHead {
    type Target = Arc<Head>;
    fn deref(&self) -> &Arc<Head> {
        &self.0
    }
}

impl Drop for ConsumedHead {
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
        let heads = Heads::with_room_for(100);
        let held = ConsumedHead::new(heads.get(&name(0)));
        held.consumed.lock().group = Some(GroupName::default());
        for number in 1..10_000 {
            heads.get(&name(number));
            assert!(heads.0.lock().heads.len() <= 101);
        }
        assert!(Arc::ptr_eq(&held, &heads.get(&name(0))), "it is in use");
        assert_eq!(heads.consumed(), [(name(0), GroupName::default())]);
        drop(held);
        assert_eq!(heads.consumed(), []);
    }

    #[test]
    fn heads_that_are_asked_for_again_stay_longer() {
        let heads = Heads::with_room_for(100);
        let often: Vec<_> =
            (0..10).map(|number| Arc::downgrade(&heads.get(&name(number)))).collect();
        for number in 10..101 {
            heads.get(&name(number));
            (0..10).for_each(|number| drop(heads.get(&name(number))));
        }
        assert!(often.iter().all(|head| head.strong_count() == 1));
        assert_eq!(heads.0.lock().heads.len(), 11);
    }
}
