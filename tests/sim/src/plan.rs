//! What a seed decides about a simulation as a whole.

use std::time::Duration;

use sluicegate_checker::history::Settings;

use crate::{dice::Dice, net::Rates};

/// What a simulation consists of.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) brokers: u64,
    pub(crate) producers: u64,
    pub(crate) consumers: u64,
    pub(crate) operators: u64,
    pub(crate) schedules: u64,
    /// In which second of two minutes schedules tick that tick rarely, so that no tick takes the place of one that is lost.
    pub(crate) rare_ticks: Vec<u64>,
    /// Whether there are times with many items and fast workers.
    pub(crate) rushes: bool,
    pub(crate) queues: Vec<(String, Settings)>,
    /// The leases that clients ask for: one of these spans in milliseconds, and some time in it.
    pub(crate) leases: &'static [(u64, u64)],
    /// How often an item is settled at the end of its lease: a little before it, or a little after it.
    pub(crate) close_calls: f64,
    /// Lengths of payloads in bytes.
    pub(crate) payloads: &'static [usize],
    /// Limits of the bytes that a stream holds; 0: none.
    pub(crate) limits_of_bytes: &'static [u64],
    /// How long a producer pauses at most between two pushes, in milliseconds.
    pub(crate) push_pause: u64,
    /// How often a client hangs up before its call is answered.
    pub(crate) hang_ups: f64,
    /// Whether callers of `Pop` hang up too, after which lost items cannot be told from taken ones.
    pub(crate) careless_pops: bool,
    /// How often an item fails in one way or the other.
    pub(crate) failures: f64,
    /// The time between storms.
    pub(crate) calm: Duration,
    /// The times in which faults happen.
    pub(crate) storms: Vec<Storm>,
    /// Faults that happen all the time: signals may always be lost.
    pub(crate) always: Rates,
    /// How often a stream of deliveries breaks.
    pub(crate) breaks: f64,
    /// How often a client does not read its stream for a while.
    pub(crate) stalls: f64,
    /// Whether clients change the flow of their streams.
    pub(crate) flows: bool,
    /// What the run was asked to be like.
    pub(crate) weather: Weather,
}

/// A time with faults.
#[derive(Debug, Clone)]
pub(crate) struct Storm {
    pub(crate) lasting: Duration,
    pub(crate) rates: Rates,
    /// How often, on average, something happens to a broker, in milliseconds; 0: never.
    pub(crate) blows: u64,
    /// The clock of the store is stepped ahead.
    pub(crate) clock_steps: bool,
}

/// The faults that a run may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weather {
    /// One broker and no faults.
    Fair,
    /// What the seed says.
    Seeded,
    /// The same, but all producers push several batches at a time on a stream, most of them of plain items, and all consumers are streams: these are what
    /// direct delivery is for.
    Bursts,
    /// The same with large payloads among them: their pushes wait until they can go directly.
    LargeBursts,
    /// What the seed says, and on each `ConsumeStream` most items are committed together, all up to one.
    UpTo,
}

/// The least that a broker takes: such a lease has lapsed by the time many a settle arrives.
const LEAST: (u64, u64) = (100, 100);
const SHORT: (u64, u64) = (101, 1_000);
const COMMON: (u64, u64) = (200, 5_000);
/// Leases that several consumers have, so that these can share what a broker reserves ahead.
pub(crate) const SHARED: [(u64, u64); 2] = [(10_000, 10_000), (15_000, 15_000)];
/// Longer than most streams live, and than items wait unsent.
const LONG: (u64, u64) = (10_000, LONGEST_LEASE);
/// Longest lease in milliseconds.
pub(crate) const LONGEST_LEASE: u64 = 30_000;

/// What a plan chooses among.
const LEASES: [&[(u64, u64)]; 5] =
    [&[LEAST], &[SHORT], &[COMMON, SHARED[0]], &[LONG, SHARED[1]], &[LEAST, SHORT, COMMON, LONG]];

/// Of these lengths of payloads a plan chooses one row. 0: that of the name.
const PAYLOADS: [&[usize]; 3] = [&[0], &[0, 100, 300, 1_000], &[0, 0, 0, 5_000]];
const LARGE_PAYLOADS: &[usize] = &[0, 0, 40_000];
/// Likewise. Some items are larger than a limit, others fill it several at a time.
const LIMITS_OF_BYTES: [&[u64]; 3] = [&[0], &[0, 50, 1_000], &[400, 2_000, 6_000]];

/// How many schedules tick rarely for each storm, so many seconds apart.
const RARE_SCHEDULES: u64 = 2;
pub(crate) const RARELY: u64 = 120;

/// What is stuck or frozen at the end of a storm ends within this time.
pub(crate) const AFTERMATH: Duration = Duration::from_secs(12);

/// Number of queues that are there from the start.
const QUEUES: u64 = 3;

/// The queue that pushes create, with the settings of the broker, and that operators delete.
pub(crate) const SCRATCH: &str = "scratch";

impl Plan {
    /// Whether clients are streams, and batches come several at a time.
    pub(crate) fn has_bursts(&self) -> bool {
        matches!(self.weather, Weather::Bursts | Weather::LargeBursts)
    }

    pub(crate) fn of(dice: &Dice, weather: Weather) -> Self {
        let fair = weather == Weather::Fair;
        let storms = if fair { 0 } else { dice.number(0, 2) };
        let rate = |most: f64| if fair || dice.chance(0.5) { 0.0 } else { most };
        let calm = dice.millis(5_000, 40_000);
        let storms: Vec<Storm> = (0..storms).map(|_| Storm::of(dice)).collect();
        Self {
            brokers: if fair { 1 } else { dice.number(1, 3) },
            producers: dice.number(1, 3),
            consumers: dice.number(2, 6),
            operators: dice.number(0, 1),
            schedules: dice.number(0, 2),
            rare_ticks: rare_ticks(calm, &storms, dice),
            rushes: dice.chance(0.3),
            queues: (1..=QUEUES)
                .map(|number| queue(number, dice))
                .chain([(SCRATCH.to_owned(), Settings::default())])
                .collect(),
            leases: dice.one_of(&LEASES).copied().unwrap_or(&[COMMON]),
            close_calls: *dice.one_of(&[0.0, 0.1, 0.5]).unwrap_or(&0.1),
            payloads: match dice.one_of(&PAYLOADS) {
                _ if weather == Weather::LargeBursts => LARGE_PAYLOADS,
                lengths => lengths.copied().unwrap_or(&[0]),
            },
            limits_of_bytes: dice.one_of(&LIMITS_OF_BYTES).copied().unwrap_or(&[0]),
            push_pause: *dice.one_of(&[200, 800, 3_000]).unwrap_or(&800),
            hang_ups: rate(0.05),
            careless_pops: !fair && dice.chance(0.3),
            failures: *dice.one_of(&[0.0, 0.1, 0.4]).unwrap_or(&0.1),
            calm,
            storms,
            always: Rates {
                signal_lost: if fair {
                    0.0
                } else {
                    *dice.one_of(&[0.0, 0.2, 1.0]).unwrap_or(&0.0)
                },
                signal_doubled: rate(0.1),
                signal_cut: rate(0.01),
                slow: rate(0.02),
                ..Rates::default()
            },
            breaks: rate(0.05),
            stalls: rate(0.1),
            flows: dice.chance(0.5),
            weather,
        }
    }
}

impl Storm {
    fn of(dice: &Dice) -> Self {
        let rate = |most: f64| if dice.chance(0.5) { 0.0 } else { most };
        Self {
            lasting: dice.millis(1_000, 15_000),
            rates: Rates {
                refused: rate(0.1),
                unanswered: rate(0.1),
                slow: rate(0.1),
                commit_refused: rate(0.3),
                stuck: rate(0.01),
                signal_lost: rate(0.5),
                signal_doubled: rate(0.2),
                signal_cut: rate(0.05),
            },
            blows: if dice.chance(0.7) { dice.number(500, 4_000) } else { 0 },
            clock_steps: dice.chance(0.25),
        }
    }
}

/// Returns seconds of two minutes in which there is a storm.
fn rare_ticks(calm: Duration, storms: &[Storm], dice: &Dice) -> Vec<u64> {
    let (mut seconds, mut begins) = (Vec::new(), calm);
    for storm in storms {
        let tick = || (begins + dice.millis(0, storm.lasting.as_millis() as u64)).as_secs();
        seconds.extend((0..RARE_SCHEDULES).map(|_| tick() % RARELY));
        begins += storm.lasting + AFTERMATH + calm;
    }
    seconds
}

/// Returns a queue and its settings.
fn queue(number: u64, dice: &Dice) -> (String, Settings) {
    let settings = Settings {
        max_attempts: *dice.one_of(&[2, 3, 25]).unwrap_or(&3),
        max_deliveries: *dice.one_of(&[0, 4, 100]).unwrap_or(&100),
        dead_letter_queue: String::new(),
        discard_failed: dice.chance(0.2),
        retention: dice.chance(0.2),
        dedup_window: dice.number(1, 60) * 1_000_000,
        sequenced: dice.chance(0.3),
    };
    (format!("queue{number}"), settings)
}
