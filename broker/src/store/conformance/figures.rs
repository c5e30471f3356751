//! Past figures of queues.

use std::time::Duration;

use super::{Env, env::*};
use crate::{
    domain::Timestamp,
    store::{FiguresPlace, KeptFigures, QueueFigures},
};

const HOUR: Duration = Duration::from_hours(1);

/// Returns figures of that many queues.
fn kept(time: Timestamp, step: u32, broker: [u8; 4], queues: i64) -> KeptFigures {
    let figures = |n: i64| QueueFigures {
        queue: format!("queue-{n}"),
        ready: n,
        delayed: 0,
        reserved: n * 2,
        blocked: 1,
        pushed: i64::MAX - n,
        left: n * 3,
    };
    let place = FiguresPlace { time, step, broker };
    KeptFigures { place, queues: (0..queues).map(figures).collect() }
}

async fn all(env: &Env) -> Vec<KeptFigures> {
    env.other.kept_figures(None, 100).await.unwrap()
}

pub async fn figures_of_several_brokers_stand_side_by_side(env: &Env) {
    assert_eq!(all(env).await, []);
    let now = env.now();
    let later = now + seconds(60);
    let expected = [
        kept(now, 60, [0, 0, 0, 1], 2),
        kept(now, 60, [255; 4], 1),
        kept(now, 480, [0, 0, 0, 1], 0),
        kept(later, 60, [0; 4], 1_000),
    ];
    for at in [3, 1, 0, 2] {
        let store = if at % 2 == 0 { &env.store } else { &env.other };
        store.keep_figures(&expected[at], HOUR).await.unwrap();
    }
    assert_eq!(all(env).await, expected);
    let again = kept(now, 60, [255; 4], 3);
    env.store.keep_figures(&again, HOUR).await.unwrap();
    assert_eq!(all(env).await[1], again, "in place of those before, and of no others");
    assert_eq!(all(env).await.len(), expected.len());
}

pub async fn figures_are_read_in_pages(env: &Env) {
    let now = env.now();
    let mut expected = Vec::new();
    for n in 0..7_u64 {
        let figures = kept(now + seconds(n / 2), 60, [n as u8; 4], 1);
        env.store.keep_figures(&figures, HOUR).await.unwrap();
        expected.push(figures);
    }
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let page = env.store.kept_figures(after, 3).await.unwrap();
        assert!(page.len() <= 3);
        let Some(last) = page.last() else { break };
        after = Some(last.place);
        found.extend(page);
    }
    assert_eq!(found, expected);
}

pub async fn figures_end_when_their_time_is_over(env: &Env) {
    let now = env.now();
    let (short, long) = (kept(now, 60, [1; 4], 1), kept(now, 480, [1; 4], 1));
    env.store.keep_figures(&short, seconds(10)).await.unwrap();
    env.store.keep_figures(&long, HOUR).await.unwrap();
    assert_eq!(all(env).await, [short, long.clone()]);
    env.pass(seconds(11));
    assert_eq!(all(env).await, std::slice::from_ref(&long));
    let next = kept(env.now(), 480, [1; 4], 1);
    env.store.keep_figures(&next, HOUR).await.unwrap();
    assert_eq!(all(env).await, [long, next]);
}
