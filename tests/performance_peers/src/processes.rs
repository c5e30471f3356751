//! Processor time, from `/proc`.

use std::fs;

/// Clock ticks a second, as Linux shows them to user space on every architecture.
const TICKS: f64 = 100.0;

/// Returns the processor time that processes have used, in seconds.
pub(crate) fn cpu_seconds(processes: &[u32]) -> f64 {
    processes.iter().filter_map(|pid| ticks(*pid)).sum::<u64>() as f64 / TICKS
}

fn ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut number = || fields.next()?.parse::<u64>().ok();
    Some(number()? + number()?)
}
