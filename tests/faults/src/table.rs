//! What was run: per fault how often, with what result.

use std::{collections::BTreeMap, fmt, time::Duration};

use crate::{cycle::Outcome, plan::Fault};

#[derive(Default)]
struct Line {
    count: usize,
    wrong: usize,
    recovered: Vec<Duration>,
}

/// The sums of all cycles.
#[derive(Default)]
pub(crate) struct Table {
    lines: BTreeMap<Fault, Line>,
    cycles: usize,
    items: u64,
    events: usize,
    pub(crate) wrong: usize,
    /// How many members of a set did not come back and had to copy all data anew; `None` without a set.
    pub(crate) resynced: Option<usize>,
}

impl Table {
    /// Adds a cycle. Its violations count for each of its faults, and recovery for those that were alone.
    pub(crate) fn add(&mut self, outcome: &Outcome, faults: impl Iterator<Item = Fault>) {
        self.cycles += 1;
        self.items += outcome.items;
        self.events += outcome.history.len();
        self.wrong += outcome.wrong.len();
        for fault in faults {
            let line = self.lines.entry(fault).or_default();
            line.count += 1;
            line.wrong += outcome.wrong.len();
        }
        for (faults, time) in &outcome.recovered {
            if let [fault] = faults[..] {
                self.lines.entry(fault).or_default().recovered.push(*time);
            }
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cycles, items, events, wrong, .. } = self;
        writeln!(
            f,
            "{cycles} cycles, {items} items, {events} events, {wrong} with something wrong"
        )?;
        if let Some(resynced) = self.resynced {
            writeln!(f, "resynced members: {resynced}")?;
        }
        writeln!(f, "| fault | count | violations | recovery p50 | max |")?;
        writeln!(f, "|---|---|---|---|---|")?;
        for (fault, line) in &self.lines {
            let mut recovered = line.recovered.clone();
            recovered.sort_unstable();
            let p50 = recovered.get(recovered.len() / 2);
            let shown = |time: Option<&Duration>| {
                time.map_or_else(|| "-".to_owned(), |time| format!("{:.2} s", time.as_secs_f64()))
            };
            let (p50, max) = (shown(p50), shown(recovered.last()));
            writeln!(
                f,
                "| `{}` | {} | {} | {p50} | {max} |",
                fault.name(),
                line.count,
                line.wrong
            )?;
        }
        Ok(())
    }
}
