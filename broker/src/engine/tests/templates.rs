//! Queues that come into being by use, and templates.

use futures_util::future::join_all;

use super::*;
use crate::{
    domain::{GroupName, Limit, Pattern, QueueTemplate, limits::MAX_TEMPLATES},
    engine::{EngineError, MAY_CREATE_ALL},
};

fn pattern(text: &str) -> Pattern {
    Pattern::of_queues(text).unwrap()
}

impl Bench {
    async fn template(&self, of: &str, set: impl FnOnce(&mut Queue)) {
        let mut settings = QueueTemplate::default_settings();
        set(&mut settings);
        self.engine.create_template(pattern(of), settings).await.unwrap();
    }

    /// Returns the settings of a queue that is created by a push.
    async fn pushed_to(&self, queue: &str) -> Queue {
        self.engine.push(&name(queue), vec![NewItem::default()], None).await.unwrap();
        self.stored(queue).await.expect(queue)
    }

    async fn stored(&self, queue: &str) -> Option<Queue> {
        self.store.get_queue(&name(queue)).await.unwrap()
    }
}

fn attempts(queue: &Queue) -> Option<u32> {
    queue.max_attempts.map(Limit::number)
}

fn link(queue: &Queue) -> Option<&str> {
    queue.dead_letter_queue.as_ref().map(QueueName::as_str)
}

#[tokio::test]
async fn queues_that_use_creates_have_the_settings_of_their_template() {
    let bench = bench().await;
    let before = bench.pushed_to("orders.old").await;
    bench.template("*", |settings| settings.max_attempts = Some(Limit::of(1))).await;
    bench.template("orders.*", |settings| settings.sequenced = true).await;
    bench.template("orders.*.dead", |settings| settings.max_attempts = Some(Limit::of(9))).await;
    let queue = bench.pushed_to("orders.eu").await;
    assert!(queue.sequenced && queue.unused_since.is_some());
    assert_eq!(attempts(&queue), None, "settings of two templates are not merged");
    assert_eq!(attempts(&bench.pushed_to("mail").await), Some(1));
    assert_eq!(bench.pushed_to("orders.old").await, before, "it was there before");
    // So has the queue of its dead letters, of whose name another one says more.
    let queue = bench.engine.queues.get(&name("orders.eu")).await.unwrap();
    bench.engine.with_known_limit(&queue).await.unwrap();
    let dead = bench.stored("orders.eu.dead").await.expect("a dead-letter queue");
    assert_eq!((attempts(&dead), dead.unused_since.is_some()), (Some(9), true));
    // An operator says what the settings are.
    let plain = Queue::with_defaults(name("orders.us"), bench.engine.now());
    let created = bench.engine.create_queue(plain, MAY_CREATE_ALL).await.unwrap();
    assert!(!created.sequenced);

    let change = |settings: &mut Queue| {
        settings.sequenced = false;
        settings.max_attempts = Some(Limit::of(4));
        Ok(())
    };
    bench.engine.update_template(&pattern("orders.*"), &change).await.unwrap();
    assert_eq!(attempts(&bench.pushed_to("orders.new").await), Some(4));
    assert!(bench.stored("orders.eu").await.unwrap().sequenced);
    bench.engine.delete_template(&pattern("orders.*")).await.unwrap();
    assert_eq!(attempts(&bench.pushed_to("orders.newer").await), Some(1));
}

/// As CreateQueue does. A pattern that matches the dead-letter queue of its own template makes no ring.
#[tokio::test]
async fn a_template_can_name_one_dead_letter_queue_for_all() {
    let bench = bench().await;
    bench.template("*", |settings| settings.dead_letter_queue = Some(name("failed"))).await;
    assert_eq!(link(&bench.pushed_to("a").await), Some("failed"));
    let failed = bench.stored("failed").await.expect("a dead-letter queue");
    assert_eq!((link(&failed), failed.unused_since.is_some()), (None, true));
    assert_eq!(link(&bench.pushed_to("b").await), Some("failed"));
    let refused = bench.engine.delete_queue(&name("failed"), true).await.unwrap_err();
    let EngineError::DeadLetterQueueInUse { sources, .. } = refused else { panic!("{refused}") };
    assert_eq!(sources, [name("a"), name("b")]);
    // What leads back is left out, whichever queue comes first.
    assert_eq!(link(&bench.pushed_to("failed.dead").await), None);
    let other = super::bench().await;
    other.template("*", |settings| settings.dead_letter_queue = Some(name("failed"))).await;
    assert_eq!(link(&other.pushed_to("failed.dead").await), None);
    assert_eq!(link(&other.pushed_to("failed").await), None);
    assert_eq!(link(&other.pushed_to("a").await), Some("failed"));
}

#[tokio::test]
async fn templates_that_name_each_others_queues_make_no_ring() {
    let bench = bench().await;
    for (of, to) in [("a", "b"), ("b", "c"), ("c", "a")] {
        bench.template(of, |settings| settings.dead_letter_queue = Some(name(to))).await;
    }
    assert_eq!(link(&bench.pushed_to("a").await), Some("b"));
    for queue in ["b", "c"] {
        bench.pushed_to(queue).await;
    }
    let mut at = name("a");
    for _ in 0..9 {
        let next = match bench.store.get_queue(&at).await.unwrap() {
            Some(queue) => queue.dead_letter_target(),
            None => None,
        };
        match next {
            Some(next) => at = next,
            None => return,
        }
    }
    panic!("dead letters go round through {at}");
}

/// As with CreateQueue: items cannot move to another group, and a push says so.
#[tokio::test]
async fn a_template_whose_dead_letter_queue_is_of_another_group_refuses_pushes() {
    let bench = bench().await;
    let group = |text: &str| GroupName::parse("group", text).unwrap();
    let eu = |settings: &mut Queue| {
        settings.group = group("eu");
        settings.dead_letter_queue = Some(name("failed"));
    };
    bench.template("eu.*", eu).await;
    assert_eq!(bench.pushed_to("eu.a").await.group, group("eu"));
    assert_eq!(bench.stored("failed").await.unwrap().group, group("eu"));
    bench.template("us.*", |settings| settings.dead_letter_queue = Some(name("failed"))).await;
    let refused = bench.engine.push(&name("us.a"), vec![NewItem::default()], None).await;
    let refused = refused.unwrap_err();
    assert!(matches!(refused, EngineError::DeadLetterGroup { .. }), "{refused}");
    assert_eq!(bench.stored("us.a").await, None);
    // A queue that others dead-letter into is in their group, whatever its template says.
    bench.template("x.dead", |settings| settings.group = group("us")).await;
    bench.pushed_to("x").await;
    assert_eq!(bench.pushed_to("x.dead").await.group, GroupName::default());
}

/// Links change one at a time; nobody is refused for that.
#[tokio::test(flavor = "multi_thread")]
async fn many_queues_of_a_template_are_created_at_once() {
    let bench = bench().await;
    bench.template("t.*", |settings| settings.dead_letter_queue = Some(name("failed"))).await;
    let pushes = (0..100).map(|n| {
        let (engine, queue) = (Arc::clone(&bench.engine), name(&format!("t.{}", n % 50)));
        tokio::spawn(async move { engine.push(&queue, vec![NewItem::default()], None).await })
    });
    for push in pushes.collect::<Vec<_>>() {
        within("a push", push).await.unwrap().unwrap();
    }
    for n in 0..50 {
        let queue = bench.stored(&format!("t.{n}")).await.expect("created");
        assert_eq!(link(&queue), Some("failed"));
        assert_eq!(bench.store.depth(&queue).await.unwrap().ready, 2);
    }
}

#[tokio::test]
async fn templates_are_created_once_and_changed_by_setting() {
    let bench = bench().await;
    let engine = &bench.engine;
    let create = |attempts| {
        let mut settings = QueueTemplate::default_settings();
        settings.max_attempts = Some(Limit::of(attempts));
        engine.create_template(pattern("q*"), settings)
    };
    let first = create(1).await.unwrap();
    assert_eq!(create(1).await.unwrap(), first);
    assert!(matches!(create(2).await, Err(EngineError::TemplateExists(_))));
    let nothing = |_: &mut Queue| Ok(());
    assert_eq!(engine.update_template(&pattern("q*"), &nothing).await.unwrap(), first);
    let both = |settings: &mut Queue| {
        settings.discard_failed = true;
        settings.dead_letter_queue = Some(name("dead"));
        Ok(())
    };
    let refused = engine.update_template(&pattern("q*"), &both).await.unwrap_err();
    let EngineError::Invalid(refused) = refused else { panic!("{refused}") };
    assert_eq!(refused.field, "template.settings.discard_failed");
    assert_eq!(engine.get_template(&pattern("q*")).await.unwrap(), first);

    // Changes at the same time all take effect.
    let sequenced = |settings: &mut Queue| {
        settings.sequenced = true;
        Ok(())
    };
    let paused = |settings: &mut Queue| {
        settings.paused = true;
        Ok(())
    };
    let of = pattern("q*");
    let (one, other) =
        tokio::join!(engine.update_template(&of, &sequenced), engine.update_template(&of, &paused));
    one.unwrap();
    other.unwrap();
    let both = engine.get_template(&of).await.unwrap();
    assert!(both.settings.sequenced && both.settings.paused);
    assert!(both.create_time == first.create_time && both.update_time >= first.update_time);

    engine.delete_template(&of).await.unwrap();
    let gone = engine.delete_template(&of).await.unwrap_err();
    assert!(matches!(gone, EngineError::TemplateNotFound(_)), "{gone}");
    assert!(matches!(engine.get_template(&of).await, Err(EngineError::TemplateNotFound(_))));
    let gone = engine.update_template(&of, &nothing).await.unwrap_err();
    assert!(matches!(gone, EngineError::TemplateNotFound(_)), "{gone}");
}

#[tokio::test]
async fn there_are_only_so_many_templates() {
    let bench = bench().await;
    for n in 0..MAX_TEMPLATES {
        bench.template(&format!("q{n}"), |_| {}).await;
    }
    let create = |of| bench.engine.create_template(pattern(of), QueueTemplate::default_settings());
    assert!(matches!(create("more").await, Err(EngineError::TooManyTemplates(MAX_TEMPLATES))));
    create("q0").await.expect("it is there");
    bench.engine.delete_template(&pattern("q7")).await.unwrap();
    create("more").await.unwrap();
}

#[tokio::test]
async fn templates_that_are_created_at_once_are_not_more_than_there_may_be() {
    let bench = bench().await;
    for n in 1..MAX_TEMPLATES {
        bench.template(&format!("q{n}"), |_| {}).await;
    }
    let new: Vec<String> = (0..10).map(|n| format!("new{n}")).collect();
    let create =
        |of: &String| bench.engine.create_template(pattern(of), QueueTemplate::default_settings());
    let created = join_all(new.iter().map(create)).await;
    assert_eq!(created.iter().filter(|created| created.is_ok()).count(), 1, "{created:?}");
    let refused = created.into_iter().filter_map(Result::err);
    assert!(refused.into_iter().all(|why| matches!(why, EngineError::TooManyTemplates(_))));
    assert_eq!(bench.engine.list_templates().await.unwrap().len(), MAX_TEMPLATES);
}
