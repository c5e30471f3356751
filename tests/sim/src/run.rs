//! One simulation, from its seed to the report of the checker.

use std::{sync::Arc, time::Duration};

use sluicegate_checker::{
    Options, Recorder, Report, check,
    history::{Event, What},
};
use tokio::time::{Instant, sleep};

use crate::{
    clients::{Clients, TICKS, rest, set_queue, settings_of_ticks},
    cluster::Cluster,
    dice::Dice,
    entropy,
    net::{Net, Rates},
    plan::{AFTERMATH, Plan, SCRATCH, Storm, Weather},
};

/// How often a store removes what has expired.
const SWEEP: Duration = Duration::from_secs(10);
/// How long a broker that was killed or shut down is away at most, in milliseconds.
const AWAY: u64 = 5_000;

/// What came of a simulation.
#[derive(Debug)]
pub struct Outcome {
    /// The seed.
    pub seed: u64,
    /// What the checker says.
    pub report: Report,
    /// What the clients asked and were told.
    pub history: Vec<Event>,
    /// Number of messages that were sent or received: by clients, brokers and the store.
    pub steps: u64,
    /// A digest of all steps in their order.
    pub digest: u64,
    /// How long it was in simulated time.
    pub simulated: Duration,
}

/// Runs a simulation. It has a thread of its own, and all that happens follows from the seed.
///
/// # Panics
/// If the simulation panics.
pub fn simulate(seed: u64, weather: Weather) -> Outcome {
    let run = move || {
        entropy::seed_thread(seed);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime");
        runtime.block_on(run(seed, weather))
    };
    let thread = std::thread::Builder::new().name(format!("seed {seed}"));
    let thread = thread.spawn(run).expect("a thread");
    thread.join().unwrap_or_else(|_| panic!("the simulation with seed {seed} panicked"))
}

async fn run(seed: u64, weather: Weather) -> Outcome {
    let plan = Plan::of(&Dice::new(seed, 1), weather);
    let net = Net::new(Dice::new(seed, 2));
    let start = Instant::now();
    let recorder = Recorder::with_clock(Arc::new(move || start.elapsed().as_micros() as u64));
    let cluster = Cluster::new(Arc::clone(&net));
    for _ in 0..plan.brokers {
        cluster.start().await;
    }
    let dice = Dice::new(seed, 3);
    let clients = Clients::new(Arc::clone(&cluster), recorder, dice, plan.clone());
    if let Some(node) = cluster.any() {
        for (name, settings) in plan.queues.iter().filter(|(name, _)| name != SCRATCH) {
            set_queue(&clients, &node, name, settings).await.expect("no fault happens yet");
        }
        set_queue(&clients, &node, TICKS, &settings_of_ticks()).await.expect("no fault yet");
    }
    net.set_rates(plan.always);
    tokio::spawn(sweep(Arc::clone(&cluster)));
    clients.start();
    for storm in &plan.storms {
        sleep(plan.calm).await;
        rage(&clients, storm).await;
        net.set_rates(plan.always);
    }
    sleep(plan.calm).await;
    clients.stop.cancel();
    net.set_rates(Rates::default());
    clients.tasks.close();
    clients.tasks.wait().await;
    rest(&clients).await;
    let history = clients.recorder.take();
    let report = check(&history, &Options::default());
    Outcome {
        seed,
        report,
        history,
        steps: net.steps(),
        digest: net.digest(),
        simulated: net.elapsed(),
    }
}

async fn sweep(cluster: Arc<Cluster>) {
    loop {
        sleep(SWEEP).await;
        cluster.database.sweep(cluster.net.store_time());
    }
}

/// Lets faults happen for a while.
async fn rage(clients: &Clients, storm: &Storm) {
    let (cluster, dice) = (&clients.cluster, &clients.cluster.net.dice);
    let disturbed = |begins| What::Disturbed { begins, fault: "storm".to_owned() };
    clients.recorder.mark(disturbed(true));
    cluster.net.set_rates(storm.rates);
    let end = Instant::now() + storm.lasting;
    let mut missing = 0;
    loop {
        if storm.blows == 0 {
            break;
        }
        let pause = dice.millis(1, storm.blows * 2);
        if Instant::now() + pause >= end {
            break;
        }
        sleep(pause).await;
        match dice.number(0, 9) {
            0..=2 => {
                cluster.kill_one();
                missing += 1;
            }
            3 => {
                cluster.shut_down_one();
                missing += 1;
            }
            4 => cluster.net.begin_election(dice.millis(100, 8_000)),
            5 if storm.clock_steps => {
                clients.recorder.mark(What::ClockStepped);
                // As long as a short lease, or longer than most.
                let most = *dice.one_of(&[500, 120_000]).unwrap_or(&500);
                cluster.net.step_clock(dice.number(1, most) as i64);
                clients.recorder.mark(What::ClockStepped);
            }
            6 => {
                if let Some(node) = cluster.any() {
                    node.link.set_skew(dice.number(0, 20) as i64 - 10);
                }
            }
            _ => {
                if let Some(node) = cluster.any() {
                    node.link.freeze(dice.millis(100, 10_000));
                }
            }
        }
        if missing > 0 && dice.chance(0.5) {
            sleep(dice.millis(0, AWAY)).await;
            cluster.start().await;
            missing -= 1;
        }
    }
    tokio::time::sleep_until(end).await;
    cluster.net.set_rates(Rates::default());
    for _ in 0..missing {
        cluster.start().await;
    }
    sleep(AFTERMATH).await;
    clients.recorder.mark(disturbed(false));
}
