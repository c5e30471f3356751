//! A million events take a few seconds, and memory is bounded by what is open.

use std::time::Instant;

use sluicegate_checker::{
    Checker, Options,
    history::{Delivery, Event, Outcome, Pushed, Request, Response},
};

use crate::story::{MS, Story, item, pushed, reserve};

/// Items that are open at a time.
const OPEN: usize = 1_000;

/// Tells of single pushes, reserves and commits, with the given number of items between push and delivery.
fn load(items: usize) -> Vec<Event> {
    let mut story = Story::default();
    for n in 0..items + OPEN {
        story.at(n as u64);
        if n < items {
            story.push(item(&format!("item {n}")));
        }
        if n >= OPEN {
            let id = format!("item {}", n - OPEN);
            let receipt = format!("{id}/1");
            let delivery = Delivery {
                receipt: receipt.clone(),
                name: id.clone(),
                id,
                queue: "work".to_owned(),
                attempt: 1,
                deliveries: 1,
                lease_end: (n as u64 + 30_000) * MS,
                ..Delivery::default()
            };
            story.at(n as u64).call(reserve(1, 0), Response::Deliveries(vec![delivery]));
            story.at(n as u64).commit(&receipt, Outcome::Ok);
        }
    }
    story.events
}

fn batches(pushes: usize) -> Vec<Event> {
    let mut story = Story::default();
    for n in 0..pushes {
        let names: Vec<String> = (0..500).map(|index| format!("{n}-{index}")).collect();
        let results: Vec<Pushed> = names.iter().map(|name| pushed(name)).collect();
        let items = names.iter().map(|name| item(name)).collect();
        let push = Request::Push { queue: "work".to_owned(), items, stream: None };
        story.at(n as u64 * 10).call(push, Response::Pushed(results));
        let deliveries = names.iter().map(|name| story.leased(crate::story::delivery(name, 1)));
        let deliveries = deliveries.collect();
        story.call(reserve(500, 0), Response::Deliveries(deliveries));
        let receipts = names.iter().map(|name| format!("{name}/1")).collect();
        story.call(Request::Commit { receipts }, Response::Settled(vec![Outcome::Ok; 500]));
    }
    story.events
}

fn measure(what: &str, events: Vec<Event>) {
    let mut events = events;
    events.sort_by_key(|event| event.at);
    let count = events.len();
    let mut checker = Checker::new(Options { remember: 60_000 * MS, ..Options::default() });
    let started = Instant::now();
    for event in events {
        checker.observe(event);
    }
    let report = checker.finish();
    let took = started.elapsed();
    assert!(report.is_clean(), "{report}");
    assert!(report.most_open <= 2 * OPEN as u64, "{report}");
    println!("{what}: {count} events of {} items in {took:?}", report.items);
}

#[test]
fn a_million_events() {
    measure("single calls", load(1_000_000 / 6));
    measure("batches of 500", batches(400));
}
