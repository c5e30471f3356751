//! Who consumes, on all brokers.

use std::{collections::HashMap, time::Duration};

use axum::extract::Query as Address;
use maud::{Markup, html};
use serde::Deserialize;
use sluicegate_proto::v1::{
    Broker, Consumer, ConsumerKind, ListConsumersRequest, ListConsumersResponse,
};
use tonic::Status;

use super::{
    answer::{Answer, queue_address, shown},
    frame::{Section, badge, page},
    live,
};
use crate::{api::Api, text, visitor::Visitor};

/// Consumers on a page.
const PAGE: i32 = 100;
/// Consumers on the page of their queue.
pub(super) const OF_QUEUE: i32 = 10;
/// The time between the two reports from which a rate comes.
const SPAN: Duration = Duration::from_secs(3);
/// The shortest such time, from which the first rate comes.
const FIRST_SPAN: Duration = Duration::from_secs(1);

/// What the address of the page asks for.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Query {
    /// The beginning of the queue's name.
    search: String,
    queue: String,
    broker: String,
    /// The token of the page.
    after: String,
}

impl Query {
    /// Returns the address of what this asks for.
    fn address(&self, path: &str) -> String {
        let parts = [
            ("search", &self.search),
            ("queue", &self.queue),
            ("broker", &self.broker),
            ("after", &self.after),
        ];
        let parts = parts.into_iter().filter(|(_, value)| !value.is_empty());
        let parts: Vec<_> =
            parts.map(|(name, value)| format!("{name}={}", text::encode(value))).collect();
        if parts.is_empty() { path.to_owned() } else { format!("{path}?{}", parts.join("&")) }
    }

    fn request(&self) -> ListConsumersRequest {
        ListConsumersRequest {
            queue: self.queue.clone(),
            broker: self.broker.clone(),
            page_size: PAGE,
            page_token: self.after.clone(),
            queue_prefix: self.search.trim().to_owned(),
        }
    }
}

/// Returns the address of the consumers of one queue.
pub(super) fn of_queue(queue: &str) -> String {
    Query { queue: queue.to_owned(), ..Query::default() }.address("/consumers")
}

/// Returns the address of the consumers of one broker.
pub(super) fn of_broker(broker: &str) -> String {
    Query { broker: broker.to_owned(), ..Query::default() }.address("/consumers")
}

/// Items per second that consumers are sent, each from two reports.
#[derive(Default)]
pub(super) struct Rates(HashMap<String, Sample>);

/// A report, and the rate up to it.
#[derive(Clone, Copy)]
struct Sample {
    delivered: i64,
    at: Duration,
    rate: Option<f64>,
}

impl Rates {
    /// Takes in the latest reports, and forgets the consumers that are not among them.
    pub(super) fn take(&mut self, consumers: &[Consumer]) {
        let before = std::mem::take(&mut self.0);
        for consumer in consumers {
            let at = consumer.report_time.unwrap_or_default();
            let at = Duration::new(at.seconds.max(0).cast_unsigned(), at.nanos.max(0) as u32);
            let fresh = Sample { delivered: consumer.delivered, at, rate: None };
            let sample = before.get(&consumer.id).map_or(fresh, |last| last.followed_by(fresh));
            self.0.insert(consumer.id.clone(), sample);
        }
    }

    fn of(&self, consumer: &Consumer) -> Option<f64> {
        self.0.get(&consumer.id)?.rate
    }
}

impl Sample {
    /// Returns the sample from which the next rate comes.
    fn followed_by(self, next: Self) -> Self {
        let passed = next.at.saturating_sub(self.at);
        if passed < if self.rate.is_none() { FIRST_SPAN } else { SPAN } {
            return self;
        }
        let items = (next.delivered - self.delivered).max(0) as f64;
        Self { rate: Some(items / passed.as_secs_f64()), ..next }
    }
}

/// What the page shows.
struct Shown {
    answer: ListConsumersResponse,
    /// Empty if the visitor may not view them.
    brokers: Vec<Broker>,
}

async fn read(api: Api, request: ListConsumersRequest) -> Result<Shown, Status> {
    let (answer, brokers) = tokio::join!(api.consumers(request), api.brokers());
    Ok(Shown { answer: answer?, brokers: brokers?.unwrap_or_default() })
}

pub(super) async fn show(visitor: Visitor, Address(query): Address<Query>) -> Answer {
    let found = read(visitor.api(), query.request()).await?;
    let body = html! {
        div.heading {
            h1 { "Consumers" }
            form.search role="search" action="/consumers" {
                input #search type="search" name="search" value=(query.search) placeholder="Queues that begin with" autocomplete="off"
                    aria-label="Queues that begin with" spellcheck="false" maxlength="128";
                @if !query.broker.is_empty() { input type="hidden" name="broker" value=(query.broker); }
            }
        }
        div #live data-live=(query.address("/consumer-events")) { (part(&found, &query, &Rates::default())) }
    };
    Ok(shown(page(&visitor, "Consumers", Section::Consumers, &body)))
}

pub(super) async fn events(visitor: Visitor, Address(query): Address<Query>) -> Answer {
    let (api, request, mut rates) = (visitor.api(), query.request(), Rates::default());
    live::follow(
        &visitor,
        move || read(api.clone(), request.clone()),
        move |found: &Shown| {
            rates.take(&found.answer.consumers);
            part(found, &query, &rates)
        },
    )
}

fn part(found: &Shown, query: &Query, rates: &Rates) -> Markup {
    let Shown { answer, brokers } = found;
    html! {
        (filters(found, query))
        @if answer.consumers.is_empty() { (nothing(query)) } @else { (table(&answer.consumers, brokers, rates, true)) }
        nav.pager aria-label="Pages of consumers" {
            @if !query.after.is_empty() {
                a href=(Query { after: String::new(), ..query.clone() }.address("/consumers")) { "First" }
            }
            span { (text::counted(answer.total_size, "consumer")) }
            @if !answer.next_page_token.is_empty() {
                a rel="next" href=(Query { after: answer.next_page_token.clone(), ..query.clone() }.address("/consumers")) { "Next" }
            }
        }
    }
}

fn filters(found: &Shown, query: &Query) -> Markup {
    let to = |broker: &str| {
        let target = Query { broker: broker.to_owned(), after: String::new(), ..query.clone() };
        target.address("/consumers")
    };
    let all = Query { queue: String::new(), after: String::new(), ..query.clone() };
    let is_known = found.brokers.iter().any(|broker| broker.id == query.broker);
    html! {
        @if !query.queue.is_empty() {
            p { "Of the queue " a href=(queue_address(&query.queue)) { (query.queue) } ". " a href=(all.address("/consumers")) { "Of all queues" } }
        }
        @if found.brokers.len() > 1 || !query.broker.is_empty() {
            nav.filters aria-label="Broker" {
                a href=(to("")) aria-current=[query.broker.is_empty().then_some("true")] { "All brokers" }
                @for broker in &found.brokers {
                    a href=(to(&broker.id)) aria-current=[(broker.id == query.broker).then_some("true")] {
                        (broker_name(broker)) " " span.number { (text::count(broker.consumers)) }
                    }
                }
                @if !query.broker.is_empty() && !is_known { a href=(to(&query.broker)) aria-current="true" { (query.broker) } }
            }
        }
    }
}

/// Returns the name by which people know a broker. Several brokers may run on one machine.
pub(super) fn broker_name(broker: &Broker) -> String {
    match broker.host.as_str() {
        "" => broker.id.clone(),
        host => format!("{host} · {}", broker.id),
    }
}

fn nothing(query: &Query) -> Markup {
    html! {
        div.nothing {
            @if *query == Query::default() {
                p { "Nobody is connected. A consumer is a stream, or a call that waits for items:" }
                pre { code { "sluice consume hello" } }
            } @else { p { "No such consumer is connected just now." } }
        }
    }
}

/// Returns the consumers as a table.
pub(super) fn table(
    consumers: &[Consumer],
    brokers: &[Broker],
    rates: &Rates,
    has_queues: bool,
) -> Markup {
    html! {
        table.consumers {
            thead { tr {
                th scope="col" { "Consumer" }
                @if has_queues { th scope="col" { "Queue" } }
                th.middle scope="col" { "Broker" }
                th.figure scope="col" title="Items that it holds, of those that it may hold" { "Holds" }
                th.figure.middle scope="col" title="How long it has held the item that it has held for the longest" { "Longest" }
                th.figure.middle scope="col" title="When the first of its leases ends" { "Next lease end" }
                th.figure.middle scope="col" title="Items that it is sent per second" { "Items /s" }
                th.figure.wide scope="col" { "Connected" }
            } }
            tbody { @for consumer in consumers { (line(consumer, brokers, rates, has_queues)) } }
        }
    }
}

fn line(consumer: &Consumer, brokers: &[Broker], rates: &Rates, has_queues: bool) -> Markup {
    let broker = brokers.iter().find(|broker| broker.id == consumer.broker);
    let is_call = consumer.kind() == ConsumerKind::Call;
    let rate = rates.of(consumer).filter(|_| !is_call);
    html! {
        tr id={ "consumer-" (consumer.id) } {
            th scope="row" {
                @if consumer.name.is_empty() { span.quiet { "no name" } } @else { (consumer.name) }
                @if is_call { " " (badge("", "waiting call")) }
                br; small.mono { (consumer.peer) }
            }
            @if has_queues { td.name { a.row href=(queue_address(&consumer.queue)) { (consumer.queue) } } }
            td.middle { a href=(of_broker(&consumer.broker)) { (broker.map_or(consumer.broker.as_str(), |broker| broker.host.as_str())) }
                @if broker.is_some() { br; small.mono { (consumer.broker) } } }
            @if is_call { td.figure.zero { "up to " (consumer.max_in_flight) } }
            @else { td.figure.zero[consumer.in_flight == 0] { (text::count(consumer.in_flight)) small { " of " (text::count(consumer.max_in_flight)) } } }
            (when(consumer.oldest_since.is_some(), &text::since(consumer.oldest_since.as_ref())))
            (when(consumer.next_lease_end_time.is_some(), &text::away(consumer.next_lease_end_time.as_ref())))
            td.figure.middle.zero[rate.is_none_or(|rate| rate < 0.05)] { (rate.map_or_else(|| "–".to_owned(), text::rate)) }
            td.figure.wide { (text::since(consumer.since.as_ref())) }
        }
    }
}

fn when(is_set: bool, words: &str) -> Markup {
    html! { td.figure.middle.zero[!is_set] { @if is_set { (words) } @else { "–" } } }
}

#[cfg(test)]
mod tests {
    use prost_types::Timestamp;

    use super::*;

    fn report(id: &str, seconds: i64, delivered: i64) -> Consumer {
        let report_time = Some(Timestamp { seconds, nanos: 0 });
        Consumer { id: id.to_owned(), delivered, report_time, ..Consumer::default() }
    }

    #[test]
    fn rates_come_from_two_reports_that_differ_in_time() {
        let mut rates = Rates::default();
        let mut rate_at = |seconds, delivered| {
            let consumer = report("a", seconds, delivered);
            rates.take(std::slice::from_ref(&consumer));
            rates.of(&consumer)
        };
        assert_eq!(rate_at(100, 50), None);
        assert_eq!(rate_at(100, 50), None, "the same report");
        assert_eq!(rate_at(102, 70), Some(10.0), "the first rate comes soon");
        assert_eq!(rate_at(103, 99), Some(10.0), "a rate over one second would be unsteady");
        assert_eq!(rate_at(106, 78), Some(2.0));
        assert_eq!(rate_at(109, 0), Some(0.0), "never below zero");
        rates.take(&[]);
        assert!(rates.0.is_empty(), "who has left is forgotten");
    }

    #[test]
    fn addresses_keep_what_they_ask_for() {
        let query =
            Query { search: "a b".to_owned(), broker: "0001ff03".to_owned(), ..Query::default() };
        assert_eq!(query.address("/consumers"), "/consumers?search=a%20b&broker=0001ff03");
        assert_eq!(of_queue("a.b"), "/consumers?queue=a.b");
        assert_eq!(Query::default().address("/consumers"), "/consumers");
    }
}
