//! The links from queues to their dead-letter queues. The links never form a ring, never leave a
//! group and never lead to a deleted queue. [`QueueStore::links`](crate::store::QueueStore::links)
//! fences every change of a link by an operator, and every link that a template makes. Without a
//! template a queue that a push creates has only the link that its name implies, to a queue that
//! exists again with the first dead letter.

use crate::{
    domain::{GroupName, Queue, QueueName, Timestamp},
    engine::{EngineError, Result},
    store::{Deleted, Store},
};

/// Returns the name of the queue's dead-letter queue, whether that exists or not.
pub(super) fn target(queue: &Queue) -> Option<QueueName> {
    queue.dead_letter_target()
}

/// Returns the queues that dead-letter into this one: those that name it, and the one after which
/// it is named.
pub(super) async fn sources(store: &dyn Store, name: &QueueName) -> Result<Vec<Queue>> {
    let mut sources = store.dead_letter_sources(name).await?;
    let base = name.as_str().strip_suffix(".dead");
    if let Some(base) = base.and_then(|base| QueueName::parse("queue", base).ok())
        && let Some(base) = store.get_queue(&base).await?
        && target(&base).as_ref() == Some(name)
        && sources.iter().all(|source| source.name != base.name)
    {
        sources.push(base);
    }
    Ok(sources)
}

/// Refuses to delete a queue that is the dead-letter queue of others.
pub(super) async fn check_unused(store: &dyn Store, name: &QueueName) -> Result<()> {
    let sources: Vec<QueueName> =
        sources(store, name).await?.into_iter().map(|source| source.name).collect();
    if sources.is_empty() {
        return Ok(());
    }
    Err(EngineError::DeadLetterQueueInUse { queue: name.clone(), sources })
}

/// Refuses a queue whose group differs from that of the queues that dead-letter into it.
pub(super) async fn check_group(
    store: &dyn Store,
    name: &QueueName,
    group: &GroupName,
) -> Result<()> {
    for source in sources(store, name).await? {
        if source.group != *group {
            return Err(EngineError::DeadLetterGroup {
                queue: name.clone(),
                group: group.clone(),
                from: source.name,
                from_group: source.group,
            });
        }
    }
    Ok(())
}

/// Refuses a queue whose group differs from that of its dead-letter queue, which is `<name>.dead` if
/// the settings name none.
pub(super) async fn check_target_group(store: &dyn Store, queue: &Queue) -> Result<()> {
    let Some(name) = target(queue) else { return Ok(()) };
    match store.get_queue(&name).await? {
        Some(there) if there.group != queue.group => Err(EngineError::DeadLetterGroup {
            queue: name,
            group: there.group,
            from: queue.name.clone(),
            from_group: queue.group.clone(),
        }),
        _ => Ok(()),
    }
}

/// Looks at the groups again once a queue was created, because a queue that it dead-letters into, or
/// that dead-letters into it, may have been created at the same time by another broker. Of both
/// creators at least the later one sees that. If the groups differ, the new queue is deleted again,
/// unless it holds items already.
pub(super) async fn confirm_group(store: &dyn Store, created: &Queue) -> Result<()> {
    let differs = match check_group(store, &created.name, &created.group).await {
        Ok(()) => check_target_group(store, created).await,
        differs => differs,
    };
    let Err(differs @ EngineError::DeadLetterGroup { .. }) = differs else { return differs };
    let links = store.links().await?;
    match store.delete_queue(created, false, links).await? {
        Deleted::Done(_) => Err(differs),
        Deleted::NotEmpty | Deleted::Overtaken => {
            tracing::warn!(queue = %created.name, error = %differs, "created all the same");
            Ok(())
        }
    }
}

/// Refuses settings with which failed items would eventually return to their queue.
pub(super) async fn check_ring(store: &dyn Store, queue: &Queue) -> Result<()> {
    let mut ring = vec![queue.name.clone()];
    let mut next = target(queue);
    while let Some(name) = next {
        if name == queue.name {
            return Err(EngineError::DeadLetterRing(ring));
        }
        if ring.contains(&name) {
            return Ok(()); // an older ring that does not include this queue
        }
        // A queue that does not exist will be created with the dead-letter queue that its name
        // implies: here templates make no links, because the queue is one for dead letters.
        let queue = store.get_queue(&name).await?;
        let queue = queue.unwrap_or_else(|| Queue::with_defaults(name.clone(), Timestamp(0)));
        next = target(&queue);
        ring.push(name);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        domain::{AtLimit, Clock, NewItem},
        engine::{Engine, Limits, MAY_CREATE_ALL},
        metrics::Metrics,
        signals::LocalSignals,
        store::sqlite::SqliteStore,
    };

    fn engine() -> Arc<Engine> {
        let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
        let signals = Arc::new(LocalSignals::new());
        Engine::new(Arc::new(store), signals, Arc::new(Metrics::new()), Limits::default())
    }

    fn name(text: &str) -> QueueName {
        QueueName::parse("queue", text).unwrap()
    }

    fn queue(text: &str, to: Option<&str>) -> Queue {
        let queue = Queue::with_defaults(name(text), Timestamp(0));
        Queue { dead_letter_queue: to.map(name), ..queue }
    }

    fn grouped(text: &str, to: Option<&str>, group: &str) -> Queue {
        Queue { group: GroupName::parse("group", group).unwrap(), ..queue(text, to) }
    }

    /// A dead-letter queue is not deleted, even with force, while any queue uses it.
    #[tokio::test]
    async fn a_dead_letter_queue_in_use_is_not_deleted() {
        let engine = engine();
        engine.create_queue(queue("a", Some("dead")), MAY_CREATE_ALL).await.unwrap();
        engine.create_queue(queue("b", Some("dead")), MAY_CREATE_ALL).await.unwrap();
        for force in [false, true] {
            let refused = engine.delete_queue(&name("dead"), force).await.unwrap_err();
            let EngineError::DeadLetterQueueInUse { queue, sources } = &refused else {
                panic!("{refused}")
            };
            assert_eq!((queue, &sources[..]), (&name("dead"), &[name("a"), name("b")][..]));
        }
        engine.delete_queue(&name("a"), false).await.unwrap();
        let away = |queue: &mut Queue| {
            queue.dead_letter_queue = Some(name("other"));
            Ok(())
        };
        engine.update_queue(&name("b"), &away).await.unwrap();
        engine.delete_queue(&name("dead"), false).await.unwrap();
    }

    /// The last link of a ring is refused, whichever call would make it.
    #[tokio::test]
    async fn rings_of_dead_letter_queues_are_refused() {
        let engine = engine();
        engine.create_queue(queue("a", Some("b")), MAY_CREATE_ALL).await.unwrap();
        let to = |to: &'static str| {
            move |queue: &mut Queue| {
                queue.dead_letter_queue = Some(name(to));
                Ok(())
            }
        };
        engine.update_queue(&name("b"), &to("c")).await.unwrap();
        for (last, first) in [("c", "a"), ("c", "b"), ("b", "a")] {
            let refused = engine.update_queue(&name(last), &to(first)).await.unwrap_err();
            let EngineError::DeadLetterRing(ring) = &refused else { panic!("{refused}") };
            assert!(ring.contains(&name(first)) && ring.contains(&name(last)), "{refused}");
        }
        engine.update_queue(&name("b"), &to("d")).await.unwrap();
        engine.update_queue(&name("c"), &to("a")).await.unwrap();
    }

    /// A missing queue would dead-letter into `<name>.dead`. A ring through such a queue is refused
    /// too, and nothing of it is created.
    #[tokio::test]
    async fn a_ring_through_a_queue_to_be_made_is_refused() {
        let engine = engine();
        let refused =
            engine.create_queue(queue("r.dead", Some("r")), MAY_CREATE_ALL).await.unwrap_err();
        assert!(matches!(refused, EngineError::DeadLetterRing(_)), "{refused}");
        for name in [name("r"), name("r.dead")] {
            assert_eq!(engine.store().get_queue(&name).await.unwrap(), None);
        }
    }

    /// A queue is neither created nor changed if its items at a limit would have no queue to go to.
    #[tokio::test]
    async fn a_queue_is_in_the_group_of_its_dead_letter_queue() {
        let engine = engine();
        engine.create_queue(grouped("q.dead", None, "g"), MAY_CREATE_ALL).await.unwrap();
        let refused = engine.create_queue(queue("q", None), MAY_CREATE_ALL).await.unwrap_err();
        let EngineError::DeadLetterGroup { queue: dead, from, .. } = &refused else {
            panic!("{refused}")
        };
        assert_eq!((dead, from), (&name("q.dead"), &name("q")));
        // The same holds for a queue created by a push.
        let refused = engine.push(&name("q"), vec![NewItem::default()], None).await.unwrap_err();
        assert!(matches!(refused, EngineError::DeadLetterGroup { .. }), "{refused}");
        assert_eq!(engine.store().get_queue(&name("q")).await.unwrap(), None);
        // A queue with a named dead-letter queue or none is accepted.
        let discarding = Queue { discard_failed: true, ..queue("q", None) };
        engine.create_queue(discarding, MAY_CREATE_ALL).await.unwrap();
        let keep = |queue: &mut Queue| {
            queue.discard_failed = false;
            Ok(())
        };
        let refused = engine.update_queue(&name("q"), &keep).await.unwrap_err();
        assert!(matches!(refused, EngineError::DeadLetterGroup { .. }), "{refused}");
        let name_one = |queue: &mut Queue| {
            queue.dead_letter_queue = Some(name("other"));
            keep(queue)
        };
        engine.update_queue(&name("q"), &name_one).await.unwrap();
        engine.create_queue(grouped("r.dead", None, "g"), MAY_CREATE_ALL).await.unwrap();
        engine.create_queue(grouped("r", None, "g"), MAY_CREATE_ALL).await.unwrap();
    }

    /// A dead-letter queue is in the group of its sources, whichever call creates it.
    #[tokio::test]
    async fn a_dead_letter_queue_is_in_the_group_of_its_sources() {
        let engine = engine();
        engine.create_queue(grouped("a", Some("dead"), "g"), MAY_CREATE_ALL).await.unwrap();
        assert_eq!(engine.get_queue(&name("dead")).await.unwrap().group.as_str(), "g");
        // Earlier versions allowed the deletion.
        let links = engine.store().links().await.unwrap();
        let dead = engine.get_queue(&name("dead")).await.unwrap();
        engine.store().delete_queue(&dead, true, links).await.unwrap();
        engine.queues.forget(&name("dead"));
        let refused = engine.create_queue(queue("dead", None), MAY_CREATE_ALL).await.unwrap_err();
        assert!(matches!(refused, EngineError::DeadLetterGroup { .. }), "{refused}");
        let refused =
            engine.create_queue(queue("b", Some("dead")), MAY_CREATE_ALL).await.unwrap_err();
        assert!(matches!(refused, EngineError::DeadLetterGroup { .. }), "{refused}");
        engine.push(&name("dead"), vec![NewItem::default()], None).await.unwrap();
        assert_eq!(engine.get_queue(&name("dead")).await.unwrap().group.as_str(), "g");
    }

    /// A queue does not go on dead-lettering into a queue that was deleted meanwhile, which nobody
    /// would see.
    #[tokio::test]
    async fn a_dead_letter_queue_that_was_deleted_is_created_again() {
        let engine = engine();
        engine.create_queue(queue("q", None), MAY_CREATE_ALL).await.unwrap();
        engine.refresh_settings().await.unwrap();
        let dead = name("q.dead");
        for _ in 0..2 {
            let queue = engine.queues.get(&name("q")).await.unwrap();
            let noted = engine.with_known_limit(&queue).await.unwrap();
            assert_eq!(noted.at_limit, AtLimit::DeadLetter(dead.clone()));
            // Deleted by another broker, which did not see the link in time.
            let links = engine.store().links().await.unwrap();
            let made = engine.store().get_queue(&dead).await.unwrap().expect("a dead-letter queue");
            engine.store().delete_queue(&made, true, links).await.unwrap();
            engine.refresh_settings().await.unwrap();
        }
    }
}
