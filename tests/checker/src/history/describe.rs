//! Events as text, for people who read what proves a violation.

use std::{
    collections::HashSet,
    fmt::{self, Write},
};

use super::{Answer, Delivery, Event, NewItem, Pushed, Request, Response, Time, What};

/// What a description is about: of a call with many items only these are shown.
#[derive(Default)]
pub(crate) struct Focus {
    pub(crate) ids: Vec<String>,
    pub(crate) names: Vec<String>,
    /// Receipts of the items, which are collected from the deliveries that were described.
    pub(crate) receipts: HashSet<String>,
}

impl Focus {
    fn is_empty(&self) -> bool {
        self.ids.is_empty() && self.names.is_empty()
    }
}

fn takes(wanted: &[String], value: &str) -> bool {
    wanted.is_empty() || wanted.iter().any(|wanted| wanted == value)
}

/// Returns one line of text.
pub(crate) fn describe(event: &Event, origin: Time, focus: &mut Focus) -> String {
    let mut text = String::new();
    let at = event.at.saturating_sub(origin) as f64 / 1e6;
    let _ = write!(text, "{at:>12.6} s  ");
    let _ = what(&mut text, &event.what, origin, focus);
    text
}

fn what(out: &mut String, what: &What, origin: Time, focus: &mut Focus) -> fmt::Result {
    match what {
        What::Start { call, client, broker, request } => {
            write!(out, "#{call} {client} → {broker}: ")?;
            self::request(out, request, focus)
        }
        What::Delivered { call, deliveries } => {
            write!(out, "#{call} ← delivered")?;
            self::deliveries(out, deliveries, origin, focus)
        }
        What::Revoked { call, receipt } => write!(out, "#{call} ← revoked {}", short(receipt)),
        What::End { call, answer } => {
            write!(out, "#{call} ← ")?;
            match answer {
                Answer::Refused(code) => write!(out, "refused: {code}"),
                Answer::Unknown(code) => write!(out, "outcome unknown: {code}"),
                Answer::Ok(response) => self::response(out, response, origin, focus),
            }
        }
        What::Disturbed { begins, fault } => {
            write!(out, "fault {}: {fault}", if *begins { "begins" } else { "ends" })
        }
        What::ClockStepped => write!(out, "a clock is stepped"),
        What::ClocksFollow { begins: true } => write!(out, "clocks follow one that is stepped"),
        What::ClocksFollow { begins: false } => write!(out, "clocks agree again"),
        What::ClockSlow { begins: true } => write!(out, "the clock of the store runs slowly"),
        What::ClockSlow { begins: false } => {
            write!(out, "the clock of the store runs evenly again")
        }
        What::Rest { queues } => {
            write!(out, "at rest")?;
            for queue in queues {
                write!(out, "; {}: {} items", queue.queue, queue.items.len())?;
                for item in queue.items.iter().filter(|item| focus.ids.contains(&item.id)) {
                    write!(out, ", {} ({}) {:?}", item.name, item.id, item.state)?;
                }
                if let (true, Some(figures)) = (focus.is_empty(), &queue.figures) {
                    write!(out, ", {figures:?}")?;
                }
            }
            Ok(())
        }
    }
}

fn request(out: &mut String, request: &Request, focus: &mut Focus) -> fmt::Result {
    match request {
        Request::Push { queue, items, stream } => {
            write!(out, "Push to {queue}, {} items", items.len())?;
            if let Some(stream) = stream {
                write!(out, " on stream {stream}")?;
            }
            items.iter().try_for_each(|item| new_item(out, item, focus))
        }
        Request::Commit { receipts } => {
            write!(out, "Commit")?;
            receipts.iter().try_for_each(|receipt| self::receipt(out, receipt, focus))
        }
        Request::Extend { receipts, lease } => {
            write!(out, "Extend by {} ms", lease / 1000)?;
            receipts.iter().try_for_each(|receipt| self::receipt(out, receipt, focus))
        }
        Request::Rollback { items } => {
            write!(out, "Rollback")?;
            for item in items {
                if focus.is_empty() || focus.receipts.contains(&item.receipt) {
                    write!(out, ", {item:?}")?;
                }
            }
            Ok(())
        }
        Request::CommitAndPush { receipt, pushes } => {
            write!(out, "CommitAndPush")?;
            self::receipt(out, receipt, focus)?;
            pushes.iter().try_for_each(|push| new_item(out, &push.item, focus))
        }
        other => write!(out, "{other:?}"),
    }
}

fn response(out: &mut String, response: &Response, origin: Time, focus: &mut Focus) -> fmt::Result {
    match response {
        Response::Pushed(results) => pushed(out, results, focus),
        Response::Deliveries(deliveries) => {
            write!(out, "{} deliveries", deliveries.len())?;
            self::deliveries(out, deliveries, origin, focus)
        }
        other => write!(out, "{other:?}"),
    }
}

fn pushed(out: &mut String, results: &[Pushed], focus: &mut Focus) -> fmt::Result {
    write!(out, "pushed {}", results.len())?;
    for result in results.iter().filter(|result| takes(&focus.ids, &result.id)) {
        write!(out, ", {}", result.id)?;
        if result.deduplicated {
            write!(out, " (deduplicated)")?;
        }
        if result.sequence > 0 {
            write!(out, " sequence {}", result.sequence)?;
        }
    }
    Ok(())
}

fn deliveries(
    out: &mut String,
    deliveries: &[Delivery],
    origin: Time,
    focus: &mut Focus,
) -> fmt::Result {
    for item in deliveries {
        if !takes(&focus.ids, &item.id) {
            continue;
        }
        focus.receipts.insert(item.receipt.clone());
        let Delivery { id, name, queue, attempt, deliveries, .. } = item;
        write!(out, ", {name} ({id}) of {queue}, attempt {attempt}, delivery {deliveries}")?;
        if item.bytes > item.name.len() {
            write!(out, ", {} bytes", item.bytes)?;
        }
        if item.sequence > 0 {
            write!(out, ", sequence {}", item.sequence)?;
        }
        if item.lease_end > 0 {
            let end = item.lease_end.saturating_sub(origin) as f64 / 1e6;
            write!(out, ", leased until {end:.6} s, receipt {}", short(&item.receipt))?;
        }
    }
    Ok(())
}

fn new_item(out: &mut String, item: &NewItem, focus: &Focus) -> fmt::Result {
    if !takes(&focus.names, &item.name) {
        return Ok(());
    }
    write!(out, ", {}", item.name)?;
    for (what, value) in [("key", &item.ordering_key), ("dedup id", &item.dedup_id)] {
        if !value.is_empty() {
            write!(out, " {what} {value}")?;
        }
    }
    if item.delay > 0 {
        write!(out, " delay {} ms", item.delay / 1000)?;
    }
    if let Some(ttl) = item.ttl {
        write!(out, " ttl {} ms", ttl / 1000)?;
    }
    Ok(())
}

fn receipt(out: &mut String, receipt: &str, focus: &Focus) -> fmt::Result {
    if focus.is_empty() || focus.receipts.contains(receipt) {
        write!(out, ", {}", short(receipt))?;
    }
    Ok(())
}

/// Receipts differ at their ends.
fn short(receipt: &str) -> &str {
    let start = receipt.char_indices().rev().nth(11).map_or(0, |(at, _)| at);
    &receipt[start..]
}
