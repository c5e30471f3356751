//! One case: a transition, a fault at one of its commands, and what is there afterwards.

use std::time::{Duration, Instant};

use sluicegate_checker::{
    Options, check,
    history::{Answer, Listed, QueueAtRest, State, What},
};

use crate::{
    faults::Fault,
    lane::{Lane, Seen},
    transitions::{Stage, Transition},
    wire::Command,
};

/// How long after a fault a queue may hold what it should not. Longer than any lease here, and than the pause between two
/// rounds of the store's upkeep.
const HEALED: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(100);
/// How often a case is run at most whose machine stood still meanwhile.
const TRIES: usize = 4;
/// How many events of a history are shown, the last ones.
const EVENTS: usize = 24;
/// Limit of lines of the broker's log that are shown.
const LOG_LINES: usize = 20;
/// The lease of what is drained.
const DRAIN: Duration = Duration::from_secs(5);

/// What to run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) transition: Transition,
    /// The fault, and at which command it happens.
    pub(crate) fault: Option<(Fault, usize)>,
    /// Clients repeat calls whose outcome is unknown.
    pub(crate) repeats: bool,
    /// A second broker does the same at the same time.
    pub(crate) races: bool,
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.transition.name())?;
        if let Some((fault, at)) = self.fault {
            write!(f, " {} at command {at}", fault.name)?;
        }
        if self.repeats {
            write!(f, ", repeated")?;
        }
        Ok(())
    }
}

/// What came of it.
pub(crate) struct Outcome {
    pub(crate) case: Case,
    pub(crate) commands: Vec<Command>,
    /// Whether what the transition begins with was brought about.
    pub(crate) began: bool,
    /// Whether the fault happened.
    pub(crate) happened: bool,
    /// What is wrong, for people.
    pub(crate) faults: Vec<String>,
    /// How long the slowest call took.
    pub(crate) slowest: Duration,
    /// How long it took from the end of the fault until nothing was left.
    pub(crate) healed: Duration,
}

impl Case {
    /// Runs the case.
    pub(crate) async fn run(self, lane: &mut Lane) -> Outcome {
        let mut tries = 0;
        loop {
            let stalls = lane.stalls();
            let outcome = self.run_once(lane).await;
            tries += 1;
            // What a machine shows that stood still for seconds says nothing.
            let again = outcome.began && lane.stalls() == stalls;
            if again || outcome.faults.is_empty() || tries == TRIES {
                return outcome;
            }
        }
    }

    async fn run_once(self, lane: &mut Lane) -> Outcome {
        let queue = format!("case{}", lane.next_case().await);
        let (log_before, mut faults) = (lane.log().len(), Vec::new());
        let mut clients = lane.clients();
        let beside = if self.transition.needs_two_brokers() || self.races {
            Some(clients.through(lane.beside().await, "beside".to_owned()))
        } else {
            None
        };
        let database = lane.database.clone();
        let other = beside.as_ref();
        // Faults happen to the broker behind the proxy, so that is the one that settles what another one reserved.
        let prepares = beside.as_ref().filter(|_| self.transition.needs_two_brokers());
        let prepares = prepares.unwrap_or(&clients);
        let stage = Stage::new(prepares, other, &queue, &database);
        let held = self.transition.prepare(&stage).await;
        let began = held.is_ok();
        let held = held.unwrap_or_else(|answer| {
            faults.push(format!("cannot begin: {answer:?}"));
            Vec::new()
        });
        clients.recorder.mark(What::Disturbed { begins: true, fault: self.to_string() });
        let (fault, at) = self.fault.filter(|_| began).unzip();
        lane.arm(at.unwrap_or_default(), fault);
        let stage = Stage::new(&clients, other, &queue, &database);
        let racing = async {
            if let Some(beside) = beside.as_ref().filter(|_| self.races) {
                let stage = Stage::new(beside, other, &queue, &database);
                stage.race(&held).await;
            }
        };
        let acting =
            async { if began { self.transition.act(&stage, &held).await } else { Ok(()) } };
        let (answer, ()) = tokio::join!(acting, racing);
        if let (None, false, Err(answer)) = (fault, self.races, &answer) {
            faults.push(format!("answered by {answer:?} without a fault"));
        }
        let Seen { commands, happened } = lane.disarm();
        let mut log = String::new();
        if happened && fault.is_some_and(Fault::kills) {
            log = lane.log().split_off(log_before);
            lane.replace().await;
            clients = clients.through(lane.api.clone(), lane.broker_name());
        }
        clients.recorder.mark(What::Disturbed { begins: false, fault: String::new() });
        let begun = Instant::now();
        let stage = Stage::new(&clients, other, &queue, &database);
        if self.repeats && matches!(answer, Err(Answer::Unknown(_))) {
            let _ = self.transition.act(&stage, &held).await;
        }
        if self.transition == Transition::Tick && began {
            faults.extend(ticked(&stage).await);
        }
        faults.extend(heal(&stage).await);
        let healed = begun.elapsed();
        faults.extend(rest(&stage).await);
        faults.extend(clear(&stage).await);
        if self.transition == Transition::Tick {
            stage.delete_schedules().await;
        }
        lane.answers.extend(clients.answers());
        let (slowest, stuck) = clients.notes();
        faults.extend(stuck.into_iter().map(|call| format!("not answered in time: {call}")));
        let history = clients.recorder.take();
        let report = check(&history, &Options::default());
        if !report.is_clean() {
            faults.push(report.to_string());
        }
        if !faults.is_empty() {
            let last = history.len().saturating_sub(EVENTS);
            faults.extend(history[last..].iter().map(|event| format!("{event:?}")));
            let commands: Vec<String> = commands.iter().map(Command::to_string).collect();
            faults.push(format!("commands: {}", commands.join(", ")));
            // The log of a broker that was killed comes first.
            let log_before = if log.is_empty() { log_before } else { 0 };
            log.push_str(lane.log().get(log_before..).unwrap_or_default());
            let lines =
                log.lines().filter(|line| line.contains(" WARN ") || line.contains(" ERROR "));
            faults.extend(lines.take(LOG_LINES).map(str::to_owned));
        }
        Outcome { case: self, commands, began, happened, faults, slowest, healed }
    }
}

/// Waits until the missed tick is noted; its item is there then.
async fn ticked(stage: &Stage<'_>) -> Option<String> {
    let begun = Instant::now();
    while begun.elapsed() < HEALED {
        if stage.has_ticked().await {
            let items = stage.clients.list(stage.queue).await.unwrap_or_default().len();
            return (items != 1).then(|| format!("{items} items of one tick"));
        }
        tokio::time::sleep(PAUSE).await;
    }
    Some("a missed tick is not done".to_owned())
}

/// Takes out of all queues what is in them, until nothing but history is left.
async fn heal(stage: &Stage<'_>) -> Vec<String> {
    let begun = Instant::now();
    loop {
        let odd = stage.database.contradictions(&stage.queues()).await;
        if !odd.is_empty() {
            return odd;
        }
        let left = stage.database.unsettled(&stage.queues()).await;
        if left.is_empty() {
            return Vec::new();
        }
        if begun.elapsed() > HEALED {
            let mut stuck = Vec::new();
            for queue in left {
                let items = stage.clients.list(&queue).await;
                stuck.push(format!(
                    "{queue} still holds items {HEALED:?} after the fault: {items:?}"
                ));
            }
            return stuck;
        }
        let mut taken = 0;
        for queue in left {
            let items = stage.clients.reserve(&queue, 100, Duration::ZERO, DRAIN).await;
            let receipts: Vec<String> =
                items.unwrap_or_default().into_iter().map(|one| one.receipt).collect();
            taken += receipts.len();
            if !receipts.is_empty() {
                let _ = stage.clients.commit(receipts).await;
            }
        }
        if taken == 0 {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Goes on consuming until the documents are gone that should not be there. A segment of which nothing is left is deleted at
/// the latest when its first lease would have ended, if somebody consumes the queue.
async fn clear(stage: &Stage<'_>) -> Vec<String> {
    let begun = Instant::now();
    loop {
        let (wrong, queues) = stage.database.leftovers(&stage.queues()).await;
        if wrong.is_empty() || begun.elapsed() > HEALED {
            return wrong;
        }
        for queue in queues {
            let _ = stage.clients.reserve(&queue, 1, Duration::ZERO, DRAIN).await;
        }
        tokio::time::sleep(PAUSE * 2).await;
    }
}

fn is_unsettled(item: &Listed) -> bool {
    item.state != State::Processed
}

/// Records what is left when nothing is under way any more, with figures, which may be a second old.
async fn rest(stage: &Stage<'_>) -> Vec<String> {
    let begun = Instant::now();
    loop {
        let (mut queues, mut differs) = (Vec::new(), false);
        for queue in stage.queues() {
            let Ok(items) = stage.clients.list(&queue).await else {
                return vec![format!("{queue} cannot be listed")];
            };
            let figures = stage.clients.figures(&queue).await.ok();
            let unsettled =
                figures.map_or(0, |all| all.ready + all.delayed + all.reserved + all.blocked);
            let processed = figures.map_or(0, |all| all.processed);
            differs |= unsettled as usize != items.iter().filter(|item| is_unsettled(item)).count();
            differs |=
                processed as usize != items.iter().filter(|item| !is_unsettled(item)).count();
            if !items.is_empty() || figures.is_some() {
                queues.push(QueueAtRest { queue, items, figures });
            }
        }
        if !differs || begun.elapsed() > Duration::from_secs(5) {
            stage.clients.recorder.mark(What::Rest { queues });
            return Vec::new();
        }
        tokio::time::sleep(PAUSE).await;
    }
}
