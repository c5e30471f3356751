//! Whether a broker can be reached: its name, its port, TLS, HTTP/2, the token; and what its clock says.

use std::{
    net::SocketAddr,
    time::{Duration, Instant, SystemTime},
};

use sluicegate_client::{
    Client,
    proto::{Broker, GetBrokerRequest, GetBrokerResponse},
    tonic::{Code, codegen::http::Uri},
};
use tokio::{
    net::{TcpStream, lookup_host},
    time::timeout,
};

use super::Finding;
use crate::{
    context::{Context, explain_at},
    failure::Failure,
};

/// How long an address may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// The largest difference between two clocks that is not worth a word.
pub(super) const CLOCK: Duration = Duration::from_secs(1);

/// What is known of an address, and a client if a broker answers there.
pub(super) struct Reached {
    pub(super) findings: Vec<Finding>,
    pub(super) client: Option<Client>,
}

pub(super) async fn examine(context: &Context, url: &str) -> Result<Reached, Failure> {
    let mut findings = Vec::new();
    let reached = match network(url).await {
        Err(finding) => Err(finding),
        Ok(connected) => {
            findings.extend(connected);
            call(context, url, &mut findings).await?
        }
    };
    let client = reached.map_err(|finding| findings.push(finding)).ok();
    Ok(Reached { findings, client })
}

/// Resolves the name and connects to each of its addresses. Returns those that do not answer, if one does.
async fn network(url: &str) -> Result<Vec<Finding>, Finding> {
    let wrong = |text: String, advice: &str| Finding::wrong(url, text, advice);
    let form = "write http://HOST:PORT or https://HOST:PORT";
    let parsed: Uri = url.parse().map_err(|error| wrong(format!("no URL: {error}"), form))?;
    let (Some(host), Some(scheme)) = (parsed.host(), parsed.scheme_str()) else {
        return Err(wrong("it lacks http:// or https://, or a host".to_owned(), form));
    };
    let port = parsed.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let found = lookup_host((host, port)).await.map_err(|error| {
        wrong(format!("the name {host} does not resolve: {error}"), "check the URL and the DNS")
    })?;
    let mut addresses: Vec<SocketAddr> = found.collect();
    addresses.dedup();
    let mut failed = Vec::new();
    for address in &addresses {
        let error = match timeout(CONNECT, TcpStream::connect(address)).await {
            Ok(Ok(_)) => continue,
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("nothing within {} s", CONNECT.as_secs()),
        };
        failed.push(format!("no connection to {address}: {error}"));
    }
    let advice = "is the broker running there, does it listen on that address, and does a firewall let you through?";
    if failed.len() == addresses.len() {
        return Err(wrong(failed.join("; "), advice));
    }
    Ok(failed.into_iter().map(|text| Finding::note(url, text, advice)).collect())
}

/// Calls the broker: TLS, HTTP/2 and the token.
async fn call(
    context: &Context,
    url: &str,
    findings: &mut Vec<Finding>,
) -> Result<Result<Client, Finding>, Failure> {
    let wrong =
        |failure: &Failure, advice: &str| Finding::wrong(url, failure.with_causes(), advice);
    let client = match context.client_of(Some(url)).await {
        Ok(client) => client,
        Err(failure @ (Failure::Usage(_) | Failure::File { .. })) => return Err(failure),
        Err(failure) => return Ok(Err(unreached(url, failure).await)),
    };
    let (started, before) = (Instant::now(), SystemTime::now());
    let answer = client.admin_service().get_broker(client.request(GetBrokerRequest {})).await;
    let (took, after) = (started.elapsed(), SystemTime::now());
    match answer {
        Ok(answer) => {
            findings.extend(describe(url, &answer.into_inner(), took, before, after));
            Ok(Ok(client))
        }
        Err(status) => Ok(Err(match status.code() {
            Code::Unauthenticated | Code::PermissionDenied => {
                let failure = Failure::from(status);
                wrong(&failure, "give a token that is valid, with --token-file or in a context")
            }
            Code::Unimplemented => {
                wrong(&Failure::from(status), "is there a broker, and is it as new as this tool?")
            }
            _ => unreached(url, status.into()).await,
        })),
    }
}

async fn unreached(url: &str, failure: Failure) -> Finding {
    let failure = explain_at(failure, &[url.to_owned()]).await;
    let advice =
        failure.hint().unwrap_or("the port answers, but a call fails: see the broker's log");
    Finding::wrong(url, failure.with_causes(), advice)
}

fn describe(
    url: &str,
    answer: &GetBrokerResponse,
    took: Duration,
    before: SystemTime,
    after: SystemTime,
) -> Vec<Finding> {
    let broker = answer.broker.clone().unwrap_or_default();
    let mut findings = vec![Finding::good(
        url,
        format!(
            "broker {} of version {} answers in {} ms",
            broker.id,
            broker.version,
            took.as_millis()
        ),
    )];
    findings.push(match clock_difference(&broker, before, after) {
        Some((difference, is_ahead)) => {
            let direction = if is_ahead { "ahead of" } else { "behind" };
            let seconds = difference.as_secs_f64();
            let text =
                format!("the clock of broker {} is {seconds:.1} s {direction} this one", broker.id);
            Finding::wrong(
                url,
                text,
                "run a time service (chrony, systemd-timesyncd) on both machines",
            )
        }
        None => Finding::good(url, "its clock agrees with this one"),
    });
    if answer.features.is_some_and(|features| !features.durable_store) {
        let advice = "give the broker a --store that lasts if the items matter";
        findings.push(Finding::note(url, "its store is in memory: items end with it", advice));
    }
    if broker.version != env!("CARGO_PKG_VERSION") {
        let text =
            format!("this tool is of version {}, the broker of another", env!("CARGO_PKG_VERSION"));
        findings.push(Finding::note(url, text, "install the tool of the broker's version"));
    }
    findings
}

/// Returns by how much the broker's clock differs from this one, if that is worth a word, and whether it is ahead. The broker
/// read its clock between `before` and `after`.
fn clock_difference(
    broker: &Broker,
    before: SystemTime,
    after: SystemTime,
) -> Option<(Duration, bool)> {
    let told: SystemTime = broker.report_time?.try_into().ok()?;
    let ahead = told.duration_since(after).ok().map(|difference| (difference, true));
    let behind = before.duration_since(told).ok().map(|difference| (difference, false));
    ahead.or(behind).filter(|(difference, _)| *difference > CLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_said_to_differ_only_if_no_delay_explains_it() {
        let now = SystemTime::now();
        let second = Duration::from_secs(1);
        let broker = |at: SystemTime| Broker { report_time: Some(at.into()), ..Broker::default() };
        assert_eq!(clock_difference(&broker(now + second), now, now + 2 * second), None);
        assert_eq!(clock_difference(&broker(now - second), now, now), None);
        assert_eq!(
            clock_difference(&broker(now + 9 * second), now, now + 2 * second),
            Some((7 * second, true))
        );
        assert_eq!(
            clock_difference(&broker(now - 5 * second), now, now),
            Some((5 * second, false))
        );
        assert_eq!(clock_difference(&Broker::default(), now, now), None);
    }

    #[tokio::test]
    async fn each_step_of_reaching_has_words_of_its_own() {
        let text = |url: &'static str| async move { network(url).await.unwrap_err().text };
        assert!(text("127.0.0.1").await.contains("lacks http://"));
        assert!(text("http://no-such-host.invalid:1").await.contains("does not resolve"));
        assert!(text("http://127.0.0.1:1").await.contains("no connection to 127.0.0.1:1"));
    }
}
