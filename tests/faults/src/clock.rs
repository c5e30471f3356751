//! Clocks that step: those of brokers and of MongoDB servers, and what is known of the store's meanwhile.
//!
//! Brokers and servers are started with the library of `tests/false_clock`, and so have wall clocks of their own. The history is
//! on the clock of this machine, which nobody steps: times that brokers tell are brought onto it by what the store's clock is ahead.

use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use sluicegate_checker::{Recorder, history::What};
use sluicegate_proto::v1 as pb;

use crate::{
    harness::{self, at},
    plan::{Blow, Fault},
    world::{Node, World},
};

/// Steps in seconds, from and to: those that are as long as leases of the load, and that brokers on MongoDB may hold their clocks back for,
/// and longer ones.
const SHORT: (u64, u64) = (2, 9);
const LONG: (u64, u64) = (45, 180);
/// How far off a reading of a clock may be, in milliseconds, that is to tell whether it was stepped.
const ROUGH_MS: i64 = 500;
/// How far a broker's clock may be from the store's by what is measured, beside the time that measuring takes.
const TOLERANCE_MS: i64 = 20;
/// How many readings of a broker's clock there are for one that counts.
const READINGS: usize = 5;
/// How long brokers may take to notice that the clock of their server was stepped: they read it every three seconds.
const FOLLOWED: Duration = Duration::from_secs(4);
/// How long clocks may take to follow a step.
const LIMIT: Duration = Duration::from_mins(1);
const PAUSE: Duration = Duration::from_millis(50);

/// The wall clock of processes, which can be stepped while they run.
#[derive(Clone)]
pub(crate) struct FalseClock {
    folder: Arc<tempfile::TempDir>,
    file: Arc<File>,
    /// By how many milliseconds it is ahead of the machine's.
    lead: Arc<AtomicI64>,
}

impl FalseClock {
    /// Returns a clock that agrees with the machine's.
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let file = File::create(folder.path().join("clock")).expect("a file for a clock");
        let clock = Self { folder: Arc::new(folder), file: Arc::new(file), lead: Arc::default() };
        clock.set(0);
        clock
    }

    /// Returns the variables of the environment of a process that is to have this clock.
    pub(crate) fn variables(&self) -> Vec<(&'static str, PathBuf)> {
        let library = harness::binary("libsluicegate_false_clock.so");
        vec![("LD_PRELOAD", library), ("FALSE_CLOCK_FILE", self.folder.path().join("clock"))]
    }

    /// Steps the clock to so many milliseconds ahead of the machine's.
    pub(crate) fn set(&self, lead: i64) {
        self.file.write_all_at(&lead.to_ne_bytes(), 0).expect("the file of a clock");
        self.lead.store(lead, Ordering::Relaxed);
    }

    /// Returns by how many milliseconds the clock is ahead of the machine's.
    pub(crate) fn lead(&self) -> i64 {
        self.lead.load(Ordering::Relaxed)
    }
}

/// What is known of the store's clock.
#[derive(Default)]
pub(crate) struct StoreClock {
    reading: parking_lot::Mutex<Reading>,
    /// Held while it is found out anew.
    asking: tokio::sync::Mutex<()>,
    /// Held by the one who steps clocks.
    stepping: tokio::sync::Mutex<()>,
}

/// By how many milliseconds the store's clock is ahead of this machine's.
#[derive(Clone, Copy, Default)]
struct Reading {
    lead: i64,
    /// Since then it loses time by running at half its speed, until it is ahead by `target` only.
    slow_since: Option<Instant>,
    target: i64,
}

impl Reading {
    fn lead_at(self, now: Instant) -> i64 {
        let Some(since) = self.slow_since else { return self.lead };
        let lost = now.saturating_duration_since(since).as_millis() as i64 / 2;
        self.lead - lost.min(self.lead - self.target)
    }
}

impl StoreClock {
    fn lead(&self) -> i64 {
        self.reading.lock().lead_at(Instant::now())
    }

    /// Returns when a time of the store comes by the clock of this machine.
    pub(crate) fn on_this_machine(&self, time: SystemTime) -> SystemTime {
        let lead = self.lead();
        let span = Duration::from_millis(lead.unsigned_abs());
        if lead < 0 { time + span } else { time.checked_sub(span).unwrap_or(time) }
    }

    fn runs_evenly(&self, lead: i64) {
        *self.reading.lock() = Reading { lead, slow_since: None, target: lead };
    }

    /// The machine's clock is ahead by `target`, and the store's by `lead`, which it loses slowly.
    fn runs_slowly(&self, lead: i64, target: i64) {
        *self.reading.lock() = Reading { lead, slow_since: Some(Instant::now()), target };
    }
}

/// Returns by how many milliseconds a broker's clock is ahead of this machine's, and how far off that may be.
async fn ask(node: &Node) -> Option<(i64, i64)> {
    let mut best: Option<(i64, i64)> = None;
    for _ in 0..READINGS {
        let begun = Instant::now();
        let request = node.client.request(pb::GetBrokerRequest {});
        let answer = node.client.admin_service().get_broker(request).await.ok()?.into_inner();
        // A broker looks at its clock last, after it has asked the store how it is.
        let (now, took) = (SystemTime::now(), begun.elapsed().as_millis() as i64);
        let shown = at(answer.broker.unwrap_or_default().report_time.as_ref());
        let lead = match shown.duration_since(now) {
            Ok(ahead) => ahead.as_millis() as i64,
            Err(behind) => -(behind.duration().as_millis() as i64),
        };
        if best.is_none_or(|(_, before)| took < before) {
            best = Some((lead, took));
        }
    }
    best
}

/// Steps of a clock, one after the other, by what it is ahead of the machine's: away and back, and at the end to where nothing that
/// was stored meanwhile is still to come.
fn excursion(base: i64, blow: Blow) -> Vec<i64> {
    let number = blow.seed / 2;
    let (from, to) = if number.is_multiple_of(4) { SHORT } else { LONG };
    let by = (from + number / 4 % (to - from + 1)) as i64 * 1_000;
    if blow.seed.is_multiple_of(2) {
        vec![base - by, base]
    } else {
        vec![base + by, base, base + by]
    }
}

impl World {
    /// Lets the store's clock be found out anew, as a broker on a file has begun to go on from the last time in it.
    pub(crate) async fn know_clock(&self) {
        let _asking = self.clock.asking.lock().await;
        let machine = self.nodes[0].clock.lead();
        let mut best: Option<(i64, i64)> = None;
        let begun = Instant::now();
        while best.is_none_or(|(_, off)| off > TOLERANCE_MS) && begun.elapsed() < LIMIT {
            match ask(&self.nodes[0]).await {
                Some(read) if best.is_none_or(|(_, off)| read.1 < off) => best = Some(read),
                _ => tokio::time::sleep(PAUSE).await,
            }
        }
        match best {
            Some((lead, _)) if lead > machine + TOLERANCE_MS => {
                self.clock.runs_slowly(lead, machine);
            }
            Some(_) => self.clock.runs_evenly(machine),
            None => self.wrong.lock().push("a broker does not tell its time".to_owned()),
        }
    }

    /// Steps a clock away and back.
    pub(crate) async fn strike_clock(&self, blow: Blow, recorder: &Recorder) -> Instant {
        let _stepping = self.clock.stepping.lock().await;
        match (blow.fault, &self.members) {
            (Fault::ServerClockStep, Some(members)) => {
                let members = members.lock().await;
                let clocks = members.clocks();
                self.step_member(blow, &clocks[blow.victim % clocks.len()], clocks, recorder).await;
            }
            (Fault::ServerClockStep, None) => self.step_server(blow, recorder).await,
            _ if self.disk.is_some() => self.step_store(blow, recorder).await,
            _ => self.step_broker(blow).await,
        }
        Instant::now()
    }

    /// Splits the brokers between an old and a new primary. Every other time the old one lingers, by a clock that is set back and that
    /// one broker follows.
    pub(crate) async fn split(&self, blow: Blow, broker: usize, recorder: &Recorder) -> Instant {
        let _stepping = self.clock.stepping.lock().await;
        let mut members = self.members.as_ref().expect("a set").lock().await;
        let (lingers, lead) = (blow.seed.is_multiple_of(2), members.clocks()[0].lead());
        let follow = |begins| recorder.mark(What::ClocksFollow { begins });
        if lingers {
            follow(true);
        }
        members.split(broker, blow.lasting, lingers).await;
        if lingers {
            self.follow(recorder, || (), lead).await;
            follow(false);
        }
        Instant::now()
    }

    /// The clock of a broker that follows its server's: nothing may come of it.
    async fn step_broker(&self, blow: Blow) {
        let clock = &self.nodes[blow.victim % self.nodes.len()].clock;
        for lead in excursion(0, blow).into_iter().chain([0]) {
            clock.set(lead);
            tokio::time::sleep(blow.lasting).await;
        }
    }

    /// The clock of a broker on a file, which the store follows ahead at once, and back slowly.
    async fn step_store(&self, blow: Blow, recorder: &Recorder) {
        let clock = &self.nodes[0].clock;
        let mut is_slow = false;
        for lead in excursion(clock.lead(), blow) {
            if lead < clock.lead() {
                recorder.mark(What::ClockSlow { begins: true });
                is_slow = true;
                let _asking = self.clock.asking.lock().await;
                clock.set(lead);
                self.clock.runs_slowly(self.clock.lead(), lead);
            } else {
                self.follow(recorder, || clock.set(lead), lead).await;
                if std::mem::take(&mut is_slow) {
                    recorder.mark(What::ClockSlow { begins: false });
                }
            }
            tokio::time::sleep(blow.lasting).await;
        }
    }

    /// The clock of the only server, which all brokers follow.
    async fn step_server(&self, blow: Blow, recorder: &Recorder) {
        for lead in excursion(self.server_clock.lead(), blow) {
            self.follow(recorder, || self.server_clock.set(lead), lead).await;
            tokio::time::sleep(blow.lasting).await;
        }
    }

    /// The clock of one of several members. Brokers follow that of the primary, which may be another one at any time, so no times
    /// are judged until all members agree.
    async fn step_member(
        &self,
        blow: Blow,
        clock: &FalseClock,
        all: &[FalseClock],
        recorder: &Recorder,
    ) {
        recorder.mark(What::ClocksFollow { begins: true });
        let leads = excursion(clock.lead(), blow);
        for lead in &leads {
            clock.set(*lead);
            tokio::time::sleep(FOLLOWED + blow.lasting).await;
        }
        let lead = leads[leads.len() - 1];
        self.follow(recorder, || all.iter().for_each(|clock| clock.set(lead)), lead).await;
        recorder.mark(What::ClocksFollow { begins: false });
    }

    /// Lets a step happen and waits until all brokers show what the store's clock shows then.
    async fn follow(&self, recorder: &Recorder, step: impl FnOnce(), lead: i64) {
        recorder.mark(What::ClocksFollow { begins: true });
        let asking = self.clock.asking.lock().await;
        step();
        self.clock.runs_evenly(lead);
        let begun = Instant::now();
        for node in &self.nodes {
            let follows = |(shown, off): (i64, i64)| {
                off <= ROUGH_MS && (shown - lead).abs() <= off + TOLERANCE_MS
            };
            loop {
                let shown = ask(node).await;
                if shown.is_some_and(follows) {
                    break;
                }
                if begun.elapsed() > LIMIT {
                    let name = node.name();
                    let why =
                        format!("the clock of {name} shows {shown:?}, and not {lead} ms ahead");
                    self.wrong.lock().push(why);
                    break;
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
        drop(asking);
        recorder.mark(What::ClocksFollow { begins: false });
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_sees_the_wall_clock_that_it_is_given() {
        let clock = FalseClock::new();
        let seconds = || -> i64 {
            let date = Command::new("date").arg("+%s").envs(clock.variables()).output().unwrap();
            String::from_utf8(date.stdout).unwrap().trim().parse().unwrap()
        };
        let before = seconds();
        clock.set(-100_000_000);
        let behind = before - seconds();
        assert!((98_000..=100_000).contains(&behind), "{behind} s");
    }

    #[test]
    fn a_slow_clock_loses_what_it_is_ahead_at_half_its_speed() {
        let begun = Instant::now();
        let reading = Reading { lead: 1_000, slow_since: Some(begun), target: -500 };
        let lead = |ms| reading.lead_at(begun + Duration::from_millis(ms));
        assert_eq!([0, 1_000, 3_000, 9_000].map(lead), [1_000, 500, -500, -500]);
    }
}
