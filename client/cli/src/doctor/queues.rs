//! Queues whose settings or depths look wrong.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use sluicegate_client::{
    Client,
    proto::{Queue, QueueStats},
    tonic::Code,
};

use super::Finding;
use crate::{
    brokers::list_consumers,
    failure::Failure,
    output,
    queue::dead_letter_queue,
    stats::{Which, batch, list_queues},
    values,
};

/// Items that were ready for this long without a consumer are forgotten rather than late.
const FORGOTTEN: i64 = 3_600;
/// A history longer than this is rarely meant: its items stay in the store.
const LONG_HISTORY: i64 = 30 * 86_400;

/// A queue as it was seen twice.
struct Observed {
    queue: Queue,
    first: QueueStats,
    last: QueueStats,
    /// Consumers on all brokers.
    consumers: usize,
}

pub(super) async fn examine(client: &Client, sample: Duration) -> Result<Vec<Finding>, Failure> {
    let queues = list_queues(client, &Which::default()).await?;
    let names: Vec<String> = queues.iter().map(|queue| queue.name.clone()).collect();
    let by_name = |stats: Vec<QueueStats>| -> HashMap<String, QueueStats> {
        stats.into_iter().map(|stats| (stats.queue.clone(), stats)).collect()
    };
    let mut first = by_name(batch(client, &names).await?.stats);
    tokio::time::sleep(sample).await;
    let mut last = by_name(batch(client, &names).await?.stats);
    let mut consumers: HashMap<String, usize> = HashMap::new();
    match list_consumers(client, "", "").await {
        Ok(listed) => {
            for consumer in listed {
                *consumers.entry(consumer.queue).or_default() += 1;
            }
        }
        // Who may not see them may know how many there are.
        Err(Failure::Client(error)) if error.code() == Some(Code::PermissionDenied) => {
            for (name, stats) in &last {
                consumers.insert(name.clone(), stats.consumers_of_all_brokers.max(0) as usize);
            }
        }
        Err(failure) => return Err(failure),
    }
    let observed: Vec<Observed> = queues
        .into_iter()
        .filter_map(|queue| {
            // A queue that was deleted meanwhile is left out.
            let (first, last) = (first.remove(&queue.name)?, last.remove(&queue.name)?);
            let consumers = consumers.get(&queue.name).copied().unwrap_or(0);
            Some(Observed { queue, first, last, consumers })
        })
        .collect();
    let mut findings = judge(&observed);
    if findings.is_empty() {
        let text = format!("nothing looks wrong in {} of them", observed.len());
        findings.push(Finding::good("queues", text));
    }
    Ok(findings)
}

fn judge(observed: &[Observed]) -> Vec<Finding> {
    let dead_letters: HashSet<String> =
        observed.iter().filter_map(|of| dead_letter_queue(&of.queue)).collect();
    let mut findings = Vec::new();
    for of in observed {
        let is_dead_letters = dead_letters.contains(&of.queue.name);
        judge_depth(of, is_dead_letters, &mut findings);
        judge_settings(&of.queue, &of.last, &mut findings);
    }
    findings
}

fn judge_depth(of: &Observed, is_dead_letters: bool, findings: &mut Vec<Finding>) {
    let Observed { queue, first, last, consumers } = of;
    let subject = format!("queue {}", queue.name);
    let name = &queue.name;
    let unsettled = depth(last);
    let age = last.oldest_ready_age.as_ref().map_or(0, |age| age.seconds);
    if is_dead_letters && *consumers == 0 && unsettled > 0 {
        let advice = format!(
            "`sluice peek {name}` shows the reasons; when the cause is mended, `sluice redrive {name}`"
        );
        let held = output::items(unsettled);
        findings.push(if unsettled > depth(first) {
            let text = format!("dead letters that nobody consumes, and more are coming: {held}");
            Finding::wrong(&subject, text, advice)
        } else {
            Finding::note(&subject, format!("dead letters that nobody consumes: {held}"), advice)
        });
    } else if queue.paused && unsettled > 0 {
        let text = format!("paused, with {}", output::items(unsettled));
        let advice = format!("if that is over: `sluice queue resume {name}`");
        findings.push(Finding::note(&subject, text, advice));
    } else if *consumers == 0 && age >= FORGOTTEN {
        let age = last.oldest_ready_age.as_ref().map(values::show_duration).unwrap_or_default();
        let text =
            format!("{} ready, the first since {age}, and no consumer", output::items(last.ready));
        let advice =
            format!("start consumers, or `sluice queue purge {name}` if nobody needs them");
        findings.push(Finding::wrong(&subject, text, advice));
    }
    if queue.max_depth > 0 && unsettled >= queue.max_depth {
        let text =
            format!("full: {} of at most {}, pushes are refused", unsettled, queue.max_depth);
        let advice = format!("add consumers, or `sluice queue update {name} --max-depth N`");
        findings.push(Finding::wrong(&subject, text, advice));
    }
}

fn judge_settings(queue: &Queue, stats: &QueueStats, findings: &mut Vec<Finding>) {
    let subject = format!("queue {}", queue.name);
    let name = &queue.name;
    if queue.max_attempts == Some(0) {
        let text = "max_attempts is 0: an item that always fails is tried for ever";
        let advice = format!("`sluice queue update {name} --max-attempts 25`");
        findings.push(Finding::note(&subject, text, advice));
    }
    if let Some(retention) = queue.retention.as_ref().filter(|time| time.seconds > LONG_HISTORY) {
        let (time, kept) = (values::show_duration(retention), output::items(stats.processed));
        let text = format!("committed items are kept for {time}: {kept} at present");
        let advice =
            format!("`sluice queue update {name} --retention 7d` if so much is not needed");
        findings.push(Finding::note(&subject, text, advice));
    }
}

fn depth(stats: &QueueStats) -> i64 {
    stats.ready + stats.delayed + stats.reserved + stats.blocked
}

#[cfg(test)]
mod tests {
    use super::{super::Level, *};

    fn observed(queue: Queue, first: i64, last: i64, consumers: usize) -> Observed {
        let stats =
            |ready| QueueStats { queue: queue.name.clone(), ready, ..QueueStats::default() };
        Observed { first: stats(first), last: stats(last), queue, consumers }
    }

    fn named(name: &str) -> Queue {
        Queue { name: name.to_owned(), ..Queue::default() }
    }

    fn aged(mut of: Observed, seconds: i64) -> Observed {
        of.last.oldest_ready_age = Some(prost_types::Duration { seconds, nanos: 0 });
        of
    }

    fn levels(observed: &[Observed]) -> Vec<(Level, String)> {
        judge(observed).into_iter().map(|finding| (finding.level, finding.subject)).collect()
    }

    #[test]
    fn dead_letters_that_nobody_consumes_are_wrong_once_they_grow() {
        let dead = || "queue q.dead".to_owned();
        let q = || observed(named("q"), 0, 0, 1);
        let growing = observed(named("q.dead"), 1, 2, 0);
        assert_eq!(levels(&[q(), growing]), [(Level::Wrong, dead())]);
        let resting = observed(named("q.dead"), 2, 2, 0);
        assert_eq!(levels(&[q(), resting]), [(Level::Note, dead())]);
        assert_eq!(levels(&[q(), observed(named("q.dead"), 1, 2, 1)]), []);
        let other = Queue { dead_letter_queue: "morgue".to_owned(), ..named("q") };
        let found = levels(&[observed(other, 0, 0, 1), observed(named("morgue"), 0, 2, 0)]);
        assert_eq!(found, [(Level::Wrong, "queue morgue".to_owned())]);
    }

    #[test]
    fn queues_that_hold_items_for_nobody_are_named() {
        let q = || "queue q".to_owned();
        assert_eq!(levels(&[aged(observed(named("q"), 5, 5, 0), 3_700)]), [(Level::Wrong, q())]);
        assert_eq!(levels(&[aged(observed(named("q"), 5, 5, 1), 3_700)]), []);
        assert_eq!(levels(&[aged(observed(named("q"), 5, 5, 0), 3_500)]), []);
        let paused = || Queue { paused: true, ..named("q") };
        assert_eq!(levels(&[aged(observed(paused(), 5, 5, 0), 3_700)]), [(Level::Note, q())]);
        assert_eq!(levels(&[observed(paused(), 0, 0, 0)]), []);
    }

    #[test]
    fn settings_that_look_wrong_are_named() {
        let full = Queue { max_depth: 5, ..named("q") };
        assert_eq!(levels(&[observed(full, 5, 5, 1)])[0].0, Level::Wrong);
        let endless = Queue { max_attempts: Some(0), ..named("q") };
        assert_eq!(levels(&[observed(endless, 0, 0, 0)])[0].0, Level::Note);
        let retention = Some(prost_types::Duration { seconds: 90 * 86_400, nanos: 0 });
        let found = judge(&[observed(Queue { retention, ..named("q") }, 0, 0, 0)]);
        assert!(
            found[0].text.contains("90d") && found[0].advice.contains("--retention"),
            "{found:?}"
        );
    }
}
