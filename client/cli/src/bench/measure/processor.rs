//! Processor time of local servers, from `/proc`.

use std::{fs, time::Instant};

use tokio::task::JoinHandle;

use super::figures::Window;

/// Clock ticks a second, as Linux shows them to user space on every architecture.
const TICKS: f64 = 100.0;

/// Measures the processor time that servers use inside a window.
#[derive(Debug)]
pub(crate) struct ProcessorTime {
    servers: Vec<u32>,
    /// Resolves to the readings at the begin of the window and, if that is known beforehand, at its end.
    readings: JoinHandle<(Option<f64>, Option<f64>)>,
}

impl ProcessorTime {
    /// Begins to measure these processes.
    pub(crate) fn start(servers: &[u32], window: Window) -> Self {
        let servers = servers.to_vec();
        let at = servers.clone();
        let readings = tokio::spawn(async move {
            wait(window.from).await;
            let begin = read(&at);
            let Some(to) = window.to else { return (begin, None) };
            wait(to).await;
            (begin, read(&at))
        });
        Self { servers, readings }
    }

    /// Returns the seconds; `None` if there are no processes, or they could not be read.
    pub(crate) async fn finish(self) -> Option<f64> {
        let (begin, end) = self.readings.await.ok()?;
        Some(end.or_else(|| read(&self.servers))? - begin?)
    }
}

async fn wait(until: Instant) {
    if Instant::now() < until {
        tokio::time::sleep_until(until.into()).await;
    }
}

/// Returns the processor time that all these processes have used, in seconds.
fn read(processes: &[u32]) -> Option<f64> {
    if processes.is_empty() {
        return None;
    }
    let ticks = processes.iter().map(|pid| ticks(*pid)).sum::<Option<u64>>()?;
    Some(ticks as f64 / TICKS)
}

fn ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut number = || fields.next()?.parse::<u64>().ok();
    Some(number()? + number()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_a_process_uses_inside_the_window_is_measured() {
        let window = Window { from: Instant::now(), to: None };
        let time = ProcessorTime::start(&[std::process::id()], window);
        tokio::task::yield_now().await;
        let begin = read(&[std::process::id()]).unwrap();
        while read(&[std::process::id()]).unwrap() < begin + 0.05 {
            std::hint::spin_loop();
        }
        let used = time.finish().await.unwrap();
        assert!(used >= 0.05, "{used}");
    }

    #[tokio::test]
    async fn without_processes_there_is_nothing_to_report() {
        assert_eq!(ProcessorTime::start(&[], Window::none()).finish().await, None);
    }
}
