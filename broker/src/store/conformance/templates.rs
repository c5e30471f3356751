//! Templates of queues.

use super::{Env, env::*, settings::everything_set};
use crate::{
    domain::{Limit, Pattern, Queue, QueueTemplate, Timestamp},
    store::Created,
};

pub(super) fn template(pattern: &str, now: Timestamp) -> QueueTemplate {
    let settings = QueueTemplate::default_settings();
    let pattern = Pattern::of_queues(pattern).unwrap();
    QueueTemplate { pattern, settings, create_time: now, update_time: now, revision: 0 }
}

/// Returns settings of which none is the default.
fn everything(now: Timestamp) -> Queue {
    let plain = QueueTemplate::default_settings();
    Queue {
        name: plain.name,
        create_time: plain.create_time,
        unused_since: None,
        ..everything_set("q", now)
    }
}

async fn patterns(env: &Env) -> Vec<String> {
    let all = env.other.list_templates().await.unwrap();
    all.into_iter().map(|template| template.pattern.to_string()).collect()
}

pub async fn a_template_has_the_settings_of_its_creation(env: &Env) {
    let now = env.now();
    for template in [
        QueueTemplate { settings: everything(now), ..template("full.*", now) },
        template("plain.*", now),
    ] {
        assert_eq!(env.store.get_template(&template.pattern).await.unwrap(), None);
        let expected = QueueTemplate { revision: 1, ..template.clone() };
        let created = env.store.create_template(&template).await.unwrap();
        assert_eq!(created, Created::New(expected.clone()));
        let mut changed = template.clone();
        changed.settings.max_attempts = Some(Limit::of(99));
        let again = env.other.create_template(&changed).await.unwrap();
        assert_eq!(again, Created::Existing(expected.clone()));
        let found = env.other.get_template(&template.pattern).await.unwrap();
        assert_eq!(found, Some(expected));
    }
}

pub async fn racing_creations_make_one_template(env: &Env) {
    let racers: Vec<_> = (0..8)
        .map(|n| {
            let store = if n % 2 == 0 { env.store.clone() } else { env.other.clone() };
            let mut template = template("q*", store.now());
            template.settings.max_attempts = Some(Limit::of(n));
            tokio::spawn(async move { store.create_template(&template).await.unwrap() })
        })
        .collect();
    let (mut new, mut all) = (0, Vec::new());
    for racer in racers {
        all.push(match racer.await.unwrap() {
            Created::New(template) => {
                new += 1;
                template
            }
            Created::Existing(template) => template,
        });
    }
    assert_eq!(new, 1);
    assert!(all.iter().all(|template| *template == all[0]));
}

pub async fn templates_are_listed_by_pattern(env: &Env) {
    assert_eq!(patterns(env).await, Vec::<String>::new());
    let mut expected: Vec<String> = (0..120).map(|n| format!("q{n}.*")).collect();
    expected.extend(["*", "Z*", "_*", "a*b", "a.b"].map(str::to_owned));
    for pattern in &expected {
        env.store.create_template(&template(pattern, env.now())).await.unwrap();
    }
    expected.sort();
    assert_eq!(patterns(env).await, expected);
}

pub async fn updates_of_templates_are_fenced_by_the_revision(env: &Env) {
    let now = env.now();
    let first = template("q*", now);
    assert_eq!(env.store.update_template(&first).await.unwrap(), None, "there is none");
    let Created::New(first) = env.store.create_template(&first).await.unwrap() else { panic!() };
    env.pass(seconds(1));
    let later = env.now();
    let change = QueueTemplate {
        settings: everything(now),
        create_time: Timestamp(1),
        update_time: later,
        ..first.clone()
    };
    let second = env.store.update_template(&change).await.unwrap().expect("it is as it was read");
    assert_eq!(second, QueueTemplate { create_time: now, revision: 2, ..change });
    assert_eq!(env.other.get_template(&first.pattern).await.unwrap(), Some(second.clone()));
    assert_eq!(env.other.update_template(&first).await.unwrap(), None, "of an old revision");
    assert_eq!(env.other.get_template(&first.pattern).await.unwrap(), Some(second.clone()));
    // Settings that an update leaves out are gone.
    let plain = QueueTemplate { settings: QueueTemplate::default_settings(), ..second };
    let third = env.other.update_template(&plain).await.unwrap();
    assert_eq!(third, Some(QueueTemplate { revision: 3, ..plain }));
    assert_eq!(env.store.get_template(&first.pattern).await.unwrap(), third);
}

pub async fn a_deleted_template_is_gone(env: &Env) {
    for pattern in ["a*", "b*"] {
        env.store.create_template(&template(pattern, env.now())).await.unwrap();
    }
    let gone = Pattern::new("a*");
    assert!(env.other.delete_template(&gone).await.unwrap());
    assert!(!env.store.delete_template(&gone).await.unwrap());
    assert_eq!(env.store.get_template(&gone).await.unwrap(), None);
    assert_eq!(patterns(env).await, ["b*"]);
    let again = env.store.create_template(&template("a*", env.now())).await.unwrap();
    assert!(matches!(again, Created::New(QueueTemplate { revision: 1, .. })), "{again:?}");
}
