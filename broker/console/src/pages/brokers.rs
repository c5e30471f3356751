//! The brokers of the store.

use maud::{Markup, html};
use sluicegate_proto::v1::{Broker, BrokerFeatures, BrokerLimits, GetBrokerResponse};
use tonic::{Code, Status};

use super::{
    answer::{Answer, shown},
    consumers::of_broker,
    frame::{Section, badge, page},
    live,
};
use crate::{api::Api, text, visitor::Visitor};

/// What the page shows.
struct Shown {
    this: GetBrokerResponse,
    /// All brokers, the answering one included.
    brokers: Vec<Broker>,
    /// False if the visitor may view the answering broker only.
    is_whole: bool,
    /// Why the other brokers are not known.
    problem: Option<Status>,
}

async fn read(api: Api) -> Result<Shown, Status> {
    let (this, listed) = tokio::join!(api.this_broker(), api.brokers());
    let this = this?;
    let own = this.broker.clone().unwrap_or_default();
    let (listed, problem) = match listed {
        Ok(listed) => (listed, None),
        Err(status) if status.code() == Code::Unauthenticated => return Err(status),
        // The answering broker can say how it is while its store does not answer.
        Err(status) => (None, Some(status)),
    };
    let is_whole = listed.is_some();
    let mut brokers = listed.unwrap_or_default();
    brokers.retain(|broker| broker.id != own.id);
    brokers.push(own);
    brokers.sort_by(|a, b| (&a.host, &a.address, &a.id).cmp(&(&b.host, &b.address, &b.id)));
    Ok(Shown { this, brokers, is_whole, problem })
}

pub(super) async fn show(visitor: Visitor) -> Answer {
    let found = read(visitor.api()).await?;
    let body = html! {
        div.heading { h1 { "Brokers" } }
        div #live data-live="/broker-events" { (part(&found)) }
    };
    Ok(shown(page(&visitor, "Brokers", Section::Brokers, &body)))
}

pub(super) async fn events(visitor: Visitor) -> Answer {
    let api = visitor.api();
    live::follow(&visitor, move || read(api.clone()), part)
}

fn part(found: &Shown) -> Markup {
    let own = found.this.broker.as_ref().map_or("", |broker| broker.id.as_str());
    let silent = found.brokers.iter().filter(|broker| !broker.store_healthy).count();
    let consumers = found.brokers.iter().map(|broker| broker.consumers).sum();
    let limits = found.this.limits.unwrap_or_default();
    let features = found.this.features.unwrap_or_default();
    html! {
        @if let Some(problem) = &found.problem { (live::not_up_to_date(problem)) }
        dl.tiles {
            div { dt { "Brokers" } dd { (text::count(found.brokers.len() as i64)) } }
            div.bad[silent > 0] { dt { "Not well" } dd { (text::count(silent as i64)) } }
            div { dt { "Consumers" } dd { (text::count(consumers)) } }
        }
        @if !found.is_whole && found.problem.is_none() {
            p.quiet { "Other brokers are shown to those who may view all queues." }
        }
        table.brokers {
            thead { tr {
                th scope="col" { "Broker" }
                th.middle scope="col" { "Address" }
                th.middle scope="col" { "Version" }
                th.figure scope="col" { "Up" }
                th scope="col" { "Store" }
                th.middle scope="col" { "Signals" }
                th.figure scope="col" title="Open streams and waiting calls" { "Consumers" }
                th.figure.wide scope="col" title="When this was so" { "Reported" }
            } }
            tbody { @for broker in &found.brokers { (line(broker, broker.id == own)) } }
        }
        h2 { "What this broker accepts" }
        (facts(&limits, features))
    }
}

fn line(broker: &Broker, is_this: bool) -> Markup {
    let is_silent = !is_this && !broker.store_healthy;
    let host = if broker.host.is_empty() { "no name" } else { &broker.host };
    html! {
        tr id={ "broker-" (broker.id) } {
            th scope="row" {
                (host)
                @if is_this { " " (badge("active", "this one")) }
                @if broker.draining { " " (badge("warn", "shutting down")) }
                @if is_silent { " " (badge("bad", "silent")) }
                br; small.mono { (broker.id) }
            }
            td.middle.mono { (broker.address) }
            td.middle { (broker.version) }
            td.figure { @if is_silent { "–" } @else { (text::since(broker.start_time.as_ref())) } }
            td { (store(broker, is_this)) }
            td.middle { @if is_silent { span.quiet { "not known" } } @else { (signals(broker)) } }
            td.figure { a.row href=(of_broker(&broker.id)) { (text::count(broker.consumers)) } }
            td.figure.wide.late[is_silent] { (text::away(broker.report_time.as_ref())) }
        }
    }
}

fn store(broker: &Broker, is_this: bool) -> Markup {
    match (broker.store_healthy, is_this) {
        (true, _) => badge("active", "well"),
        (false, true) => badge("bad", "does not answer"),
        (false, false) => {
            html! { span.late { "nothing heard for " (text::since(broker.report_time.as_ref())) } }
        }
    }
}

fn signals(broker: &Broker) -> Markup {
    if broker.signals_healthy {
        return badge("active", "well");
    }
    html! { (badge("warn", "not well")) br; small { "deliveries go on, later" } }
}

fn facts(limits: &BrokerLimits, features: BrokerFeatures) -> Markup {
    let length = |length: Option<&prost_types::Duration>| {
        text::length(length.copied().map(text::duration).unwrap_or_default())
    };
    let queues = match limits.max_queues {
        0 => "any number".to_owned(),
        most => format!("{} at most", text::count(most)),
    };
    let unused = limits.unused_queue_ttl.as_ref();
    html! {
        dl.facts {
            dt { "Payload" } dd { "up to " (text::bytes(usize::try_from(limits.max_payload_bytes).unwrap_or_default())) }
            dt { "Items of one call" } dd { "up to " (text::count(i64::from(limits.max_batch))) }
            dt { "Lease" } dd { (length(limits.default_lease.as_ref())) " unless asked for, up to " (length(limits.max_lease.as_ref())) }
            dt { "Queues" } dd { (queues) @if features.auto_create_queues { "; a push creates its queue" } @else { "; only an operator creates them" } }
            dt { "Unused queues" } dd { @if unused.is_some() { "are deleted after " (length(unused)) } @else { "stay" } }
            dt { "Store" } dd {
                @if features.shared_store { "shared by all brokers" } @else { "of this broker alone" }
                @if !features.durable_store { "; gone when the broker ends" }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn broker(id: &str, store_healthy: bool) -> Broker {
        let host = format!("host-of-{id}");
        let signals_healthy = true;
        Broker { id: id.to_owned(), host, store_healthy, signals_healthy, ..Broker::default() }
    }

    fn shown(brokers: Vec<Broker>) -> Shown {
        let this = GetBrokerResponse { broker: brokers.first().cloned(), ..Default::default() };
        Shown { this, brokers, is_whole: true, problem: None }
    }

    #[test]
    fn a_broker_that_has_not_reported_lately_stands_out() {
        let well = part(&shown(vec![broker("a", true), broker("b", true)])).into_string();
        assert!(!well.contains("silent") && well.contains("this one"), "{well}");
        let page = part(&shown(vec![broker("a", true), broker("b", false)])).into_string();
        let (own, other) = page.split_once("broker-b").expect("a line of each");
        assert!(!own.contains("silent") && other.contains("silent"), "{page}");
        assert!(other.contains("nothing heard for") && other.contains("not known"), "{page}");
    }

    /// The answering broker speaks for itself: it is there, and its store is not.
    #[test]
    fn the_answering_broker_is_not_silent_while_its_store_is_away() {
        let problem = Some(Status::unavailable("the store does not answer"));
        let page = part(&Shown { problem, is_whole: false, ..shown(vec![broker("a", false)]) });
        let page = page.into_string();
        assert!(page.contains("does not answer") && !page.contains("silent"), "{page}");
        assert!(page.contains("not up to date"), "{page}");
    }

    #[test]
    fn who_may_not_view_the_others_is_told_so() {
        let page = part(&Shown { is_whole: false, ..shown(vec![broker("a", true)]) });
        assert!(page.into_string().contains("Other brokers are shown to those"));
    }
}
