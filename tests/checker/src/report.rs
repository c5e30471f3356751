//! What a check found.

use std::{collections::HashMap, fmt, iter};

use crate::{
    Rule,
    history::{Event, Focus, describe},
};

/// A promise that was broken.
#[derive(Debug, Clone)]
pub struct Violation {
    /// The promise.
    pub rule: Rule,
    /// The id of the item, or nothing if the violation is about a queue.
    pub id: String,
    /// The name of the item, or of the queue.
    pub name: String,
    /// Id and name of another item that the proof is about.
    pub related: Option<(String, String)>,
    /// What is wrong.
    pub explanation: String,
    /// The numbers of the events that prove it: their places in the history, from 0.
    pub events: Vec<u64>,
    /// The same events as text, once [`Report::explain`] has seen the history.
    pub evidence: Vec<String>,
}

/// The violations that were kept, and how much was checked.
#[derive(Debug, Default)]
pub struct Report {
    /// The first violations.
    pub violations: Vec<Violation>,
    /// How many more there were.
    pub omitted: u64,
    /// How many events were checked.
    pub events: u64,
    /// How many items were seen.
    pub items: u64,
    /// The largest number of items that were open at a time.
    pub most_open: u64,
}

impl Report {
    /// Returns whether no promise was broken.
    pub fn is_clean(&self) -> bool {
        self.violations.is_empty()
    }

    /// Returns the rules that were broken, without repetition.
    pub fn rules(&self) -> Vec<Rule> {
        let mut rules: Vec<Rule> = self.violations.iter().map(|violation| violation.rule).collect();
        rules.sort_unstable();
        rules.dedup();
        rules
    }

    /// Reads the history again and adds to each violation the events that prove it.
    pub fn explain(&mut self, history: impl IntoIterator<Item = impl AsEvent>) {
        let mut wanted: HashMap<u64, Vec<usize>> = HashMap::new();
        for (index, violation) in self.violations.iter_mut().enumerate() {
            violation.evidence.clear();
            for event in &violation.events {
                wanted.entry(*event).or_default().push(index);
            }
        }
        if wanted.is_empty() {
            return;
        }
        let mut focuses: Vec<Focus> = self.violations.iter().map(focus).collect();
        let mut origin = None;
        for (number, event) in history.into_iter().enumerate() {
            let event = event.as_event();
            let origin = *origin.get_or_insert(event.at);
            for &index in wanted.get(&(number as u64)).into_iter().flatten() {
                let text = describe(event, origin, &mut focuses[index]);
                self.violations[index].evidence.push(text);
            }
        }
    }
}

fn focus(violation: &Violation) -> Focus {
    if violation.id.is_empty() {
        return Focus::default();
    }
    let main = (violation.id.clone(), violation.name.clone());
    let (ids, names) = iter::once(main).chain(violation.related.clone()).unzip();
    Focus { ids, names, ..Focus::default() }
}

/// An event or a reference to one.
pub trait AsEvent {
    /// Returns the event.
    fn as_event(&self) -> &Event;
}

impl AsEvent for Event {
    fn as_event(&self) -> &Event {
        self
    }
}

impl AsEvent for &Event {
    fn as_event(&self) -> &Event {
        self
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.rule, self.name)?;
        if !self.id.is_empty() {
            write!(f, " ({})", self.id)?;
        }
        writeln!(f, ": {}", self.explanation)?;
        writeln!(f, "  promise: {}", self.rule.promise())?;
        self.evidence.iter().try_for_each(|event| writeln!(f, "  {event}"))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { events, items, most_open, .. } = self;
        let broken = self.violations.len() as u64 + self.omitted;
        writeln!(
            f,
            "{broken} violations in {events} events of {items} items, at most {most_open} open at a time"
        )?;
        self.violations.iter().try_for_each(|violation| write!(f, "{violation}"))?;
        if self.omitted > 0 {
            writeln!(f, "and {} more", self.omitted)?;
        }
        Ok(())
    }
}
