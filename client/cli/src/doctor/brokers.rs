//! The brokers of the store: versions, health, clocks.

use std::{
    collections::BTreeSet,
    time::{Duration, SystemTime},
};

use sluicegate_client::{
    Client,
    proto::{Broker, ListBrokersRequest},
    tonic::Code,
};

use super::{Finding, reach::CLOCK};
use crate::failure::Failure;

/// A broker that is well reports every 15 seconds.
const SILENT: Duration = Duration::from_secs(25);

pub(super) async fn examine(client: &Client) -> Result<Vec<Finding>, Failure> {
    let request = client.request(ListBrokersRequest {});
    match client.admin_service().list_brokers(request).await {
        Ok(answer) => Ok(judge(&answer.into_inner().brokers, SystemTime::now())),
        Err(status) if status.code() == Code::PermissionDenied => {
            let advice = "a token with view@* shows them";
            Ok(vec![Finding::note("brokers", "this token may not list them", advice)])
        }
        Err(status) => Err(status.into()),
    }
}

fn judge(brokers: &[Broker], now: SystemTime) -> Vec<Finding> {
    let mut findings = Vec::new();
    for broker in brokers {
        let subject = match broker.host.as_str() {
            "" => format!("broker {}", broker.id),
            host => format!("broker {} on {host}", broker.id),
        };
        let before = findings.len();
        let mut wrong = |text: &str, advice: &str| {
            findings.push(Finding::wrong(&subject, text, advice));
        };
        let report: Option<SystemTime> = broker.report_time.and_then(|time| time.try_into().ok());
        let is_silent = report
            .is_some_and(|time| now.duration_since(time).is_ok_and(|silence| silence > SILENT));
        if !broker.store_healthy || is_silent {
            wrong(
                "it cannot reach the store, or was killed",
                "see its log; one that was killed leaves the list after 45 seconds",
            );
        }
        if !broker.signals_healthy {
            wrong(
                "signals are not sent or received: deliveries go on by polls, later",
                "see its log, and whether the server of its `signals` setting runs",
            );
        }
        if report.is_some_and(|time| time.duration_since(now).is_ok_and(|ahead| ahead > CLOCK)) {
            wrong(
                "its clock is ahead of this one by more than a second",
                "run a time service (chrony, systemd-timesyncd) on both machines",
            );
        }
        if broker.draining {
            findings.push(Finding::note(&subject, "it is shutting down", ""));
        }
        if findings.len() == before {
            let text = format!("version {}, store and signals are well", broker.version);
            findings.push(Finding::good(&subject, text));
        }
    }
    let versions: BTreeSet<&str> = brokers.iter().map(|broker| broker.version.as_str()).collect();
    if versions.len() > 1 {
        let versions: Vec<&str> = versions.into_iter().collect();
        let text = format!("they are of the versions {}", versions.join(", "));
        findings.push(Finding::note("brokers", text, "finish the upgrade"));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::{super::Level, *};

    fn well(id: &str, now: SystemTime) -> Broker {
        Broker {
            id: id.to_owned(),
            version: "0.1.0".to_owned(),
            report_time: Some(now.into()),
            store_healthy: true,
            signals_healthy: true,
            ..Broker::default()
        }
    }

    #[test]
    fn each_illness_of_a_broker_is_named() {
        let now = SystemTime::now();
        let levels = |broker: Broker| -> Vec<Level> {
            judge(&[broker], now).iter().map(|finding| finding.level).collect()
        };
        assert_eq!(levels(well("a", now)), [Level::Good]);
        assert_eq!(levels(Broker { store_healthy: false, ..well("a", now) }), [Level::Wrong]);
        assert_eq!(levels(Broker { signals_healthy: false, ..well("a", now) }), [Level::Wrong]);
        assert_eq!(levels(Broker { draining: true, ..well("a", now) }), [Level::Note]);
        let time = |time: SystemTime| Broker { report_time: Some(time.into()), ..well("a", now) };
        assert_eq!(levels(time(now - Duration::from_secs(40))), [Level::Wrong]);
        assert_eq!(levels(time(now + Duration::from_secs(3))), [Level::Wrong]);
        let newer = Broker { version: "0.2.0".to_owned(), ..well("b", now) };
        let mixed = judge(&[well("a", now), newer], now);
        assert!(mixed.iter().any(|finding| finding.text.contains("0.1.0, 0.2.0")), "{mixed:?}");
    }
}
