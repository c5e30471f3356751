//! What brokers report about themselves.

use super::{Env, env::*};
use crate::{
    domain::ConsumerName,
    store::{BrokerReport, ConsumerKind, ConsumerReport},
};

fn report(env: &Env, broker: [u8; 4], consumers: u64) -> BrokerReport {
    let now = env.now();
    let consumer = |number| ConsumerReport {
        queue: name(if number % 2 == 0 { "a" } else { "b.c" }),
        number,
        kind: if number % 3 == 0 { ConsumerKind::Call } else { ConsumerKind::Stream },
        name: ConsumerName::parse("name", &format!("worker-{number}")).ok().filter(|_| number > 1),
        peer: (number > 1).then(|| format!("[::1]:{number}").parse().unwrap()),
        since: now,
        max_in_flight: 32,
        in_flight: number,
        oldest_since: (number > 0).then_some(now),
        oldest_lease_end: (number > 0).then(|| now + LEASE),
        next_lease_end: (number > 2).then(|| now + seconds(1)),
        delivered: number * 2,
        committed: number,
    };
    BrokerReport {
        broker,
        version: "1.2.3".to_owned(),
        host: "machine".to_owned(),
        address: "127.0.0.1:7400".to_owned(),
        start_time: now,
        report_time: now,
        signals_healthy: true,
        draining: false,
        consumers: (0..consumers).map(consumer).collect(),
        left_out: 7,
    }
}

async fn reports(env: &Env) -> Vec<BrokerReport> {
    let mut reports = env.other.broker_reports().await.unwrap();
    reports.sort_by_key(|report| report.broker);
    reports
}

/// Returns false for a store with one broker, which keeps no report but takes one.
async fn keeps_reports(env: &Env) -> bool {
    if env.store.capabilities().shared {
        return true;
    }
    env.store.report_broker(&report(env, [1; 4], 3), seconds(10)).await.unwrap();
    assert_eq!(reports(env).await, []);
    false
}

pub async fn each_broker_has_one_report_that_ends(env: &Env) {
    if !keeps_reports(env).await {
        return;
    }
    assert_eq!(reports(env).await, []);
    let (one, two) = (report(env, [0, 0, 0, 1], 3), report(env, [255; 4], 0));
    env.store.report_broker(&one, seconds(10)).await.unwrap();
    env.other.report_broker(&two, seconds(30)).await.unwrap();
    assert_eq!(reports(env).await, [one.clone(), two.clone()]);
    let draining = BrokerReport { draining: true, ..report(env, one.broker, 1) };
    env.store.report_broker(&draining, seconds(10)).await.unwrap();
    assert_eq!(reports(env).await, [draining, two.clone()]);
    env.pass(seconds(11));
    assert_eq!(reports(env).await, std::slice::from_ref(&two), "the broker was killed");
    env.other.report_broker(&two, seconds(0)).await.unwrap();
    assert_eq!(reports(env).await, [], "the broker has withdrawn its report");
}

pub async fn a_report_of_thousands_of_consumers_is_whole(env: &Env) {
    if !keeps_reports(env).await {
        return;
    }
    for consumers in [5_001, 2_000, 1] {
        let long = report(env, [1; 4], consumers);
        env.store.report_broker(&long, seconds(10)).await.unwrap();
        assert_eq!(reports(env).await, [long], "{consumers} consumers");
    }
    env.store.report_broker(&report(env, [1; 4], 0), seconds(0)).await.unwrap();
    assert_eq!(reports(env).await, []);
}
