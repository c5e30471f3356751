//! Queues that no operator created or changed, and that nobody uses, on both stores.

use super::*;
use crate::{
    domain::{Pattern, QueueTemplate, Schedule, ScheduleName, Timestamp},
    engine::MAY_CREATE_ALL,
    store::{Created, conformance::Env},
};

const DAY: Duration = Duration::from_hours(24);

fn engine_on(store: Arc<dyn Store>) -> Arc<Engine> {
    let signals = Arc::new(LocalSignals::new());
    Engine::new(store, signals, Arc::new(Metrics::new()), Limits::default())
}

/// Two brokers on one store.
struct Brokers {
    env: Env,
    one: Arc<Engine>,
    other: Arc<Engine>,
}

impl Brokers {
    fn new(env: Env) -> Self {
        let one = engine_on(Arc::clone(env.store.store()));
        let other = engine_on(Arc::clone(env.other.store()));
        Self { env, one, other }
    }

    /// Pushes an item, which creates the queue, through a broker that is then gone.
    async fn fill(&self, queue: &str) {
        let engine = engine_on(Arc::clone(self.env.store.store()));
        engine.push(&name(queue), vec![NewItem::default()], None).await.unwrap();
        engine.flush_totals().await.unwrap();
    }

    /// Consumes an item, likewise.
    async fn empty(&self, queue: &str) {
        let engine = engine_on(Arc::clone(self.env.store.store()));
        assert_eq!(engine.pop(&name(queue), 1, Duration::ZERO, None).await.unwrap().len(), 1);
        engine.flush_totals().await.unwrap();
    }

    async fn use_once(&self, queue: &str) {
        self.fill(queue).await;
        self.empty(queue).await;
    }

    /// Lets a day pass, in which one broker looks twice.
    async fn day(&self) {
        for part in [DAY / 2, DAY / 2] {
            self.env.pass(part);
            self.one.delete_unused_queues().await.unwrap();
        }
    }

    async fn queues(&self) -> Vec<String> {
        let queues = self.env.store.list_queues("", None, 100).await.unwrap();
        queues.into_iter().map(|queue| queue.name.to_string()).collect()
    }
}

macro_rules! on_both_stores {
    ($($name:ident),+ $(,)?) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                let env = crate::store::sqlite::tests::env("sqlite::memory:", ());
                super::$name(super::Brokers::new(env)).await;
            })+
        }
        mod mongodb {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                let env = crate::store::mongo::tests::open_shared().await;
                super::$name(super::Brokers::new(env)).await;
            })+
        }
    };
}

on_both_stores! {
    only_queues_that_use_created_and_nobody_uses_are_deleted,
    a_queue_with_history_stays_until_that_has_ended,
    a_consumer_of_another_broker_keeps_its_queue,
    a_deleted_queue_is_there_again_with_its_next_push,
}

/// Those queues stay that hold items, get items now and then, are those of schedules, or were created or changed by an
/// operator, and dead-letter queues of queues that stay.
async fn only_queues_that_use_created_and_nobody_uses_are_deleted(brokers: Brokers) {
    let (engine, store) = (&brokers.one, &brokers.env.store);
    for queue in ["adopted", "changed", "pushed", "scheduled", "unused"] {
        brokers.use_once(queue).await;
    }
    brokers.fill("full").await;
    for dead in ["full.dead", "unused.dead"] {
        let dead = Queue::created_by_use(name(dead), engine.now());
        assert!(matches!(store.create_queue(&dead).await.unwrap(), Created::New(_)));
    }
    for created in ["adopted", "created"] {
        let queue = Queue::with_defaults(name(created), engine.now());
        engine.create_queue(queue, MAY_CREATE_ALL).await.unwrap();
    }
    let change = |queue: &mut Queue| {
        queue.lease = Some(LEASE);
        Ok(())
    };
    engine.update_queue(&name("changed"), &change).await.unwrap();
    let schedule = Schedule {
        name: ScheduleName::parse("name", "yearly").unwrap(),
        queue: name("scheduled"),
        cron: "0 0 1 1 *".to_owned(),
        time_zone: "UTC".to_owned(),
        item: NewItem::default(),
        paused: true,
        create_time: Timestamp(0),
        done_until: Timestamp(0),
        last_time: None,
    };
    engine.create_schedule(schedule).await.unwrap();
    let stay = ["adopted", "changed", "created", "full", "full.dead", "pushed", "scheduled"];
    let mut all: Vec<_> = stay.into_iter().chain(["unused", "unused.dead"]).collect();
    all.sort_unstable();
    for day in 1..=7 {
        brokers.use_once("pushed").await;
        brokers.day().await;
        assert_eq!(brokers.queues().await, all, "day {day}");
    }
    for _ in 0..4 {
        brokers.use_once("pushed").await;
        brokers.day().await;
    }
    assert_eq!(brokers.queues().await, stay);
    // The week of a queue that held items begins when it is empty.
    engine.purge_queue(&name("full")).await.unwrap();
    brokers.day().await;
    assert!(brokers.queues().await.contains(&"full".to_owned()));
}

/// A template can give such a queue a history, which is not deleted before its time.
async fn a_queue_with_history_stays_until_that_has_ended(brokers: Brokers) {
    let mut settings = QueueTemplate::default_settings();
    settings.retention = DAY * 30;
    let of = Pattern::new("kept");
    brokers.one.create_template(of, settings).await.unwrap();
    brokers.use_once("kept").await;
    brokers.use_once("plain").await;
    for _ in 0..30 {
        brokers.day().await;
    }
    assert_eq!(brokers.queues().await, ["kept"]);
    for _ in 0..10 {
        brokers.day().await;
    }
    assert!(brokers.queues().await.is_empty());
}

/// The broker that looks at the queues does not see the consumer, which waits for items.
async fn a_consumer_of_another_broker_keeps_its_queue(brokers: Brokers) {
    brokers.use_once("q").await;
    for _ in 0..7 {
        brokers.day().await;
    }
    let _stream = brokers.other.consume(Bench::options()).await.unwrap();
    let is_noted = async || {
        let queue = brokers.env.store.get_queue(&name("q")).await.unwrap().expect("the queue");
        queue.unused_since.is_some_and(|since| since.until(brokers.env.now()) < DAY)
    };
    until("the consumer is noted", is_noted).await;
    for _ in 0..6 {
        brokers.day().await;
    }
    assert_eq!(brokers.queues().await, ["q"]);
}

/// Nothing is lost, although the broker that pushes does not know yet that the queue was deleted.
async fn a_deleted_queue_is_there_again_with_its_next_push(brokers: Brokers) {
    brokers.use_once("q").await;
    brokers.other.push(&name("q"), vec![NewItem::default()], None).await.unwrap();
    brokers.empty("q").await;
    for _ in 0..9 {
        brokers.day().await;
    }
    assert!(brokers.queues().await.is_empty());
    assert!(brokers.other.knows_queue(&name("q")));
    brokers.other.push(&name("q"), vec![NewItem::default()], None).await.unwrap();
    let is_there = async || brokers.queues().await == ["q"];
    until("the queue is there again", is_there).await;
    let queue = brokers.env.store.get_queue(&name("q")).await.unwrap().expect("the queue");
    assert_eq!(brokers.env.store.depth(&queue).await.unwrap().ready, 1);
}
