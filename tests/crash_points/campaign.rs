//! All cases, spread over databases.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use mongodb::{
    Client,
    bson::{Document, doc},
    options::ClientOptions,
};

use crate::{
    case::{Case, Outcome},
    faults::{Effect, FAULTS, Fault},
    lane::{Lane, Server, Stalls},
    sqlite::{self, End, FailingSyncs, Recording},
    transitions::Transition,
    wire::Command,
};

/// Limit of commands of a transition, for background work that counts among them again and again.
const MOST: usize = 40;
/// The same of steps of an SQLite store with its files.
const MOST_STEPS: usize = 400;

/// How brokers of an SQLite store end while clients call at the same time.
const AT_ONCE: [[End; 2]; 3] = [
    [End::Kill, End::FailedSync(FailingSyncs::OfLog)],
    [End::FailedSync(FailingSyncs::OfLog), End::Kill],
    [End::FailedSync(FailingSyncs::OfFile), End::FailedSync(FailingSyncs::OfLog)],
];

/// What to run.
#[derive(Debug)]
pub(crate) struct Choice {
    pub(crate) transition: Option<String>,
    pub(crate) fault: Option<String>,
    pub(crate) at: Option<usize>,
    pub(crate) races: bool,
    /// On SQLite instead of MongoDB.
    pub(crate) sqlite: bool,
    /// Also the cases of which nothing else can come than of others.
    pub(crate) every: bool,
    pub(crate) lanes: usize,
}

/// After so many jobs it is said how many are left.
const PROGRESS: usize = 20;

impl Default for Choice {
    fn default() -> Self {
        Self {
            transition: None,
            fault: None,
            at: None,
            races: false,
            sqlite: false,
            every: false,
            lanes: 12,
        }
    }
}

/// A transition with one kind of fault, at each of its commands; without one, to learn what commands there are.
type Job = (Transition, Option<Fault>);

struct Campaign {
    choice: Choice,
    jobs: Mutex<VecDeque<Job>>,
    /// The commands of each transition, as far as they were seen.
    commands: Mutex<HashMap<&'static str, Vec<Command>>>,
    outcomes: Mutex<Vec<Outcome>>,
    recordings: Mutex<Vec<Recording>>,
    begun: Instant,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the cases, and returns whether nothing was found.
pub(crate) async fn run(choice: Choice) -> bool {
    let server = if choice.sqlite { Server::Sqlite } else { mongo().await };
    // A file has one broker, which is killed: nothing comes between the broker and the file.
    let can_be = |transition: Transition| !choice.sqlite || !transition.needs_two_brokers();
    let can_happen = |fault: Fault| !choice.sqlite || fault.effect == Effect::KillAfter;
    let is_chosen = |wanted: &Option<String>, name: &str| {
        wanted.as_ref().is_none_or(|wanted| wanted.split(',').any(|one| one == name))
    };
    let transitions = Transition::ALL
        .iter()
        .copied()
        .filter(|one| is_chosen(&choice.transition, one.name()) && can_be(*one));
    let transitions: Vec<Transition> = transitions.collect();
    let faults = FAULTS
        .into_iter()
        .filter(|fault| is_chosen(&choice.fault, fault.name) && can_happen(*fault));
    let faults: Vec<Fault> = faults.collect();
    assert!(!transitions.is_empty() && !faults.is_empty(), "no transition or fault of that name");
    // Without faults first, so that the commands are known.
    let fair = transitions.iter().map(|one| (*one, None));
    let faulty = faults.iter().flat_map(|fault| transitions.iter().map(|one| (*one, Some(*fault))));
    let jobs: VecDeque<Job> = fair.chain(faulty).collect();
    let lanes = choice.lanes.min(jobs.len());
    let campaign = Arc::new(Campaign {
        choice,
        jobs: Mutex::new(jobs),
        commands: Mutex::default(),
        outcomes: Mutex::default(),
        recordings: Mutex::default(),
        begun: Instant::now(),
    });
    let mut good = true;
    if campaign.choice.sqlite {
        for found in sqlite::end_of_a_broker().await {
            println!("FOUND: {found}");
            good = false;
        }
        for ends in AT_ONCE {
            let recording = sqlite::record(&ends).await;
            lock(&campaign.recordings).push(recording);
        }
    }
    let stalls = Stalls::default();
    tokio::spawn(stalls.clone().count());
    let running: Vec<_> = (0..lanes)
        .map(|_| {
            let (campaign, server) = (Arc::clone(&campaign), server.clone());
            let stalls = stalls.clone();
            tokio::spawn(async move { campaign.work(&server, stalls).await })
        })
        .collect();
    for lane in running {
        good &= lane.await.unwrap_or(false);
    }
    good &= campaign.print();
    let recordings = std::mem::take(&mut *lock(&campaign.recordings));
    if !recordings.is_empty() {
        let every = campaign.choice.every;
        let examined = tokio::task::spawn_blocking(move || sqlite::examine(&recordings, every));
        good &= examined.await.is_ok_and(|examination| examination.print());
    }
    good
}

/// Returns the MongoDB that the environment names.
async fn mongo() -> Server {
    let uri = std::env::var("SLUICEGATE_TEST_MONGODB_URI").unwrap_or_else(|_| {
        panic!("this needs a MongoDB replica set: run it by tests/run crash_points, or set SLUICEGATE_TEST_MONGODB_URI")
    });
    let primary = primary(&uri).await;
    Server::Mongo { uri, primary }
}

/// Returns the address of the server that takes writes.
async fn primary(uri: &str) -> String {
    let options = ClientOptions::parse(uri).await.expect("the address of a MongoDB");
    let first = options.hosts[0].to_string();
    let client = Client::with_options(options).expect("a client");
    let hello: Document = client
        .database("admin")
        .run_command(doc! { "hello": 1 })
        .await
        .expect("a MongoDB that answers");
    hello.get_str("primary").map_or(first, str::to_owned)
}

impl Campaign {
    /// Runs jobs until there are none. Returns false if a transaction was left open.
    async fn work(&self, server: &Server, stalls: Stalls) -> bool {
        let mut lane = Lane::start(server, stalls).await;
        loop {
            let (job, left) = {
                let mut jobs = lock(&self.jobs);
                (jobs.pop_front(), jobs.len())
            };
            let Some((transition, fault)) = job else { break };
            if left % PROGRESS == 0 {
                println!(
                    "{left} pairs of a transition and a fault are left ({:.0?})",
                    self.begun.elapsed()
                );
            }
            match fault {
                None => drop(self.run_one(&mut lane, transition, None).await),
                Some(fault) => self.run_all(&mut lane, transition, fault).await,
            }
        }
        let is_good = lane.has_no_open_transaction().await;
        if !is_good {
            println!("FOUND transactions that stay open");
        }
        let recording = lane.finish().await;
        lock(&self.recordings).extend(recording);
        is_good
    }

    /// Runs a transition with one kind of fault, at each command.
    async fn run_all(&self, lane: &mut Lane, transition: Transition, fault: Fault) {
        if let Some(at) = self.choice.at {
            self.run_one(lane, transition, Some((fault, at))).await;
            return;
        }
        let most = if self.choice.sqlite { MOST_STEPS } else { MOST };
        for at in 1..=most {
            let known = lock(&self.commands)
                .get(transition.name())
                .and_then(|all| all.get(at - 1).cloned());
            let is_needed = |command: Command| {
                fault.can_happen_at(&command)
                    && (self.choice.every || fault.makes_a_difference_at(at, &command))
            };
            if known.is_some_and(|command| !is_needed(command)) {
                continue;
            }
            let count = self.run_one(lane, transition, Some((fault, at))).await;
            if count < at {
                return; // the transition needed no such command
            }
        }
    }

    /// Runs a case, with clients that repeat calls or with such that do not. Returns how many commands were counted.
    async fn run_one(
        &self,
        lane: &mut Lane,
        transition: Transition,
        fault: Option<(Fault, usize)>,
    ) -> usize {
        let mut count = 0;
        let both = self.choice.every || self.choice.at.is_some();
        for repeats in [false, true] {
            if repeats && (fault.is_none() || !transition.can_be_repeated()) {
                break;
            }
            // In turn, if not both.
            if fault.is_some_and(|(_, at)| {
                !both && transition.can_be_repeated() && (at % 2 == 0) != repeats
            }) {
                continue;
            }
            let case = Case { transition, fault, repeats, races: self.choice.races };
            let outcome = case.run(lane).await;
            count = count.max(outcome.commands.len());
            if fault.is_none() {
                lock(&self.commands).insert(transition.name(), outcome.commands.clone());
            }
            let goes_on = outcome.happened;
            self.note(outcome);
            if !goes_on {
                break;
            }
        }
        count
    }

    fn note(&self, outcome: Outcome) {
        let at = self.begun.elapsed().as_secs();
        for fault in &outcome.faults {
            println!("FOUND at {at} s: {}: {fault}", outcome.case);
        }
        lock(&self.outcomes).push(outcome);
    }

    /// Prints what was run, and returns whether nothing was found.
    fn print(&self) -> bool {
        let outcomes = lock(&self.outcomes);
        let happened = outcomes.iter().filter(|outcome| outcome.happened).count();
        let bad: Vec<&Outcome> =
            outcomes.iter().filter(|outcome| !outcome.faults.is_empty()).collect();
        let mut healed: Vec<Duration> = outcomes.iter().map(|outcome| outcome.healed).collect();
        healed.sort_unstable();
        let slowest = outcomes.iter().max_by_key(|outcome| outcome.slowest);
        let last = outcomes.iter().max_by_key(|outcome| outcome.healed);
        for transition in Transition::ALL {
            if let Some(commands) = lock(&self.commands).get(transition.name()) {
                if self.choice.sqlite {
                    println!("{}: {} steps", transition.name(), commands.len());
                    continue;
                }
                let commands: Vec<String> = commands.iter().map(Command::to_string).collect();
                println!(
                    "{}: {} commands: {}",
                    transition.name(),
                    commands.len(),
                    commands.join(", ")
                );
            }
        }
        println!(
            "{} cases in {} s, {happened} of them with a fault, {} with something wrong",
            outcomes.len(),
            self.begun.elapsed().as_secs(),
            bad.len()
        );
        if let (Some(slowest), Some(last)) = (slowest, last) {
            println!("the slowest call: {:?} ({})", slowest.slowest, slowest.case);
            println!(
                "until nothing was left: median {:?}, longest {:?} ({})",
                healed[healed.len() / 2],
                last.healed,
                last.case
            );
        }
        for outcome in &bad {
            println!("WRONG {}", outcome.case);
        }
        bad.is_empty()
    }
}
