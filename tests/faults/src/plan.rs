//! What a seed decides about a cycle: which faults happen, to whom, when and for how long.

use std::{fmt, time::Duration};

use clap::ValueEnum;

use crate::dice::Dice;

/// Where the brokers keep their items.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Store {
    /// One broker on a file
    Sqlite,
    /// Brokers on a MongoDB replica set of one member, through proxies
    Mongodb,
    /// Brokers on a MongoDB replica set of three members
    Set,
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sqlite => "sqlite",
            Self::Mongodb => "mongodb",
            Self::Set => "set",
        })
    }
}

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Fault {
    /// A broker is killed (SIGKILL) and started again
    BrokerKill,
    /// A broker is frozen (SIGSTOP) for longer than leases last
    BrokerFreeze,
    /// The only mongod is killed (SIGKILL) and started again on its data
    ServerKill,
    /// The only mongod is frozen
    ServerFreeze,
    /// All connections between a broker and its mongod end, and for a while none can be made
    LinkCut,
    /// What a broker and its mongod send each other comes late
    LinkDelay,
    /// What a broker and its mongod send each other does not arrive, and nobody is told; then the connections end
    LinkHalfOpen,
    /// Redis is killed and started again
    SignalsKill,
    /// Redis is frozen
    SignalsFreeze,
    /// Thousands of signals come at once
    SignalsFlood,
    /// Somebody forges signals
    SignalsForge,
    /// Consumers vanish without a FIN
    ConsumersVanish,
    /// The wall clock of a broker is stepped by minutes, and back
    ClockStep,
    /// The wall clock of a mongod is stepped by minutes, and back
    ServerClockStep,
    /// The primary of three members steps down
    StepDown,
    /// The primary of three members is killed, and started again after the election
    PrimaryKill,
    /// The primary of three members is frozen, and wakes after the election
    PrimaryFreeze,
    /// The primary of three members goes on, and the other members and it do not reach each other
    PrimaryDeserted,
    /// The primary of three members goes on, and neither members nor brokers reach it
    PrimaryCutOff,
    /// One broker reaches only the primary of three members, and the others only the two members that elect another one
    PrimarySplit,
    /// A second broker is started on the file
    SecondBroker,
    /// The disk is full for a while
    DiskFull,
    /// Bytes of a database file are flipped (a store of its own)
    FlipFile,
    /// Bytes of the log beside a database file are flipped (a store of its own)
    FlipLog,
}

impl Fault {
    /// Returns whether the fault can happen to brokers on this store.
    pub(crate) fn can_happen_on(self, store: Store) -> bool {
        match self {
            Self::BrokerKill | Self::BrokerFreeze | Self::ConsumersVanish | Self::ClockStep => true,
            Self::SecondBroker | Self::DiskFull | Self::FlipFile | Self::FlipLog => {
                store == Store::Sqlite
            }
            Self::ServerKill
            | Self::ServerFreeze
            | Self::LinkCut
            | Self::LinkDelay
            | Self::LinkHalfOpen => store == Store::Mongodb,
            Self::SignalsKill
            | Self::SignalsFreeze
            | Self::SignalsFlood
            | Self::SignalsForge
            | Self::ServerClockStep => store != Store::Sqlite,
            Self::StepDown
            | Self::PrimaryKill
            | Self::PrimaryFreeze
            | Self::PrimaryDeserted
            | Self::PrimaryCutOff
            | Self::PrimarySplit => store == Store::Set,
        }
    }

    /// Returns for how long the fault lasts, in milliseconds: from and to.
    fn lasting(self) -> (u64, u64) {
        match self {
            // Longer than the longest lease of the load.
            Self::BrokerFreeze => (2_200, 3_500),
            Self::LinkHalfOpen => (500, 4_000),
            Self::ConsumersVanish => (2_000, 3_000),
            Self::PrimarySplit => (500, 6_000),
            _ => (0, 2_000),
        }
    }

    /// Returns the name, as on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// A fault to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Blow {
    pub(crate) fault: Fault,
    /// After how much calm it comes.
    pub(crate) after: Duration,
    pub(crate) lasting: Duration,
    /// Which broker it hits, modulo their number.
    pub(crate) victim: usize,
    /// Decides what else there is to decide.
    pub(crate) seed: u64,
}

/// What happens in a cycle: storms, one after the other, of faults that overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) storms: Vec<Vec<Blow>>,
}

impl Plan {
    /// Returns what happens in a cycle. Each of `faults` is the main one in turn.
    pub(crate) fn of(seed: u64, cycle: u64, faults: &[Fault]) -> Self {
        let mut turns = faults.to_vec();
        let round = faults.len() as u64;
        Dice::new(seed, cycle / round, 0).shuffle(&mut turns);
        let dice = Dice::new(seed, cycle, 1);
        let main = turns[(cycle % round) as usize];
        let mut storms = vec![vec![blow(main, &dice)]];
        if dice.chance(0.3) {
            storms[0].push(blow(*dice.one_of(faults), &dice));
        }
        if dice.chance(0.5) {
            storms.push(vec![blow(*dice.one_of(faults), &dice)]);
        }
        Self { storms }
    }

    pub(crate) fn faults(&self) -> impl Iterator<Item = Fault> {
        self.storms.iter().flatten().map(|blow| blow.fault)
    }
}

fn blow(fault: Fault, dice: &Dice) -> Blow {
    let (from, to) = fault.lasting();
    Blow {
        fault,
        after: dice.millis(50, 700),
        lasting: dice.millis(from, to),
        victim: dice.number(0, 11) as usize,
        seed: dice.number(0, u64::MAX),
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let storm = |storm: &Vec<Blow>| {
            let names: Vec<String> = storm.iter().map(|blow| blow.fault.name()).collect();
            names.join(" with ")
        };
        let storms: Vec<String> = self.storms.iter().map(storm).collect();
        f.write_str(&storms.join(", then "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_decides_the_plan_and_each_fault_has_its_turn() {
        for store in [Store::Sqlite, Store::Mongodb, Store::Set] {
            let faults: Vec<Fault> = Fault::value_variants()
                .iter()
                .copied()
                .filter(|fault| fault.can_happen_on(store))
                .collect();
            let plans = |seed| -> Vec<Plan> {
                (0..faults.len() as u64).map(|cycle| Plan::of(seed, cycle, &faults)).collect()
            };
            assert_eq!(plans(7), plans(7));
            assert_ne!(plans(7), plans(8));
            let mut main: Vec<Fault> =
                plans(7).iter().map(|plan| plan.storms[0][0].fault).collect();
            main.sort_unstable();
            assert_eq!(main, faults);
        }
    }
}
