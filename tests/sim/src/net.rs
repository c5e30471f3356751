//! The ways between brokers and the store, and between brokers: what is delayed, lost, doubled or
//! stuck on them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use sluicegate_broker::{
    domain::Timestamp,
    simulation::Wire,
    store::{Result, StoreError},
};
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    time::{Instant, sleep, sleep_until},
};
use tokio_util::sync::CancellationToken;

use crate::{
    dice::{Dice, split_mix},
    store::Link,
};

/// The store's time at the start of a simulation, in milliseconds.
const EPOCH: i64 = 1_800_000_000_000;

/// How often each fault happens.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Rates {
    /// A call of the store fails before it has an effect.
    pub(crate) refused: f64,
    /// A call of the store takes effect, and its answer is lost.
    pub(crate) unanswered: f64,
    /// A commit takes up to three seconds, and fails before it has an effect.
    pub(crate) commit_refused: f64,
    /// A request or an answer takes up to half a second.
    pub(crate) slow: f64,
    /// A request or an answer takes up to ten seconds.
    pub(crate) stuck: f64,
    /// A signal is lost on its way to one broker.
    pub(crate) signal_lost: f64,
    /// A signal arrives twice.
    pub(crate) signal_doubled: f64,
    /// A broker loses its connection for signals when one is sent.
    pub(crate) signal_cut: f64,
}

/// What all parts of a simulation share.
pub(crate) struct Net {
    pub(crate) dice: Dice,
    start: Instant,
    rates: Mutex<Rates>,
    /// Until then the store has no primary.
    election: Mutex<Option<Instant>>,
    /// By how much the clock of the store was stepped, in milliseconds.
    stepped: AtomicI64,
    steps: AtomicU64,
    digest: AtomicU64,
    receivers: Mutex<Vec<([u8; 4], UnboundedSender<String>)>>,
}

impl Net {
    pub(crate) fn new(dice: Dice) -> Arc<Self> {
        Arc::new(Self {
            dice,
            start: Instant::now(),
            rates: Mutex::default(),
            election: Mutex::default(),
            stepped: AtomicI64::new(0),
            steps: AtomicU64::new(0),
            digest: AtomicU64::new(0),
            receivers: Mutex::default(),
        })
    }

    /// Returns the simulated time since the start.
    pub(crate) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Returns the store's time.
    pub(crate) fn store_time(&self) -> Timestamp {
        let elapsed = self.elapsed().as_millis() as i64;
        Timestamp(EPOCH + elapsed + self.stepped.load(Ordering::Relaxed))
    }

    pub(crate) fn step_clock(&self, millis: i64) {
        self.stepped.fetch_add(millis, Ordering::Relaxed);
    }

    pub(crate) fn set_rates(&self, rates: Rates) {
        *self.rates.lock() = rates;
    }

    pub(crate) fn rates(&self) -> Rates {
        *self.rates.lock()
    }

    pub(crate) fn begin_election(&self, lasting: Duration) {
        *self.election.lock() = Some(Instant::now() + lasting);
    }

    /// Counts a step, and makes it part of the trace.
    pub(crate) fn step(&self, who: &str, what: &str) {
        self.steps.fetch_add(1, Ordering::Relaxed);
        let mut digest = self.digest.load(Ordering::Relaxed);
        let words = who.as_bytes().chunks(8).chain(what.as_bytes().chunks(8));
        let word = |bytes: &[u8]| bytes.iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
        for number in words.map(word).chain([self.elapsed().as_millis() as u64]) {
            digest = split_mix(digest ^ number).1;
        }
        self.digest.store(digest, Ordering::Relaxed);
    }

    pub(crate) fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// Returns a digest of all steps.
    pub(crate) fn digest(&self) -> u64 {
        self.digest.load(Ordering::Relaxed)
    }

    /// Returns how long a message travels.
    fn travel_time(&self) -> Duration {
        let Rates { slow, stuck, .. } = self.rates();
        if self.dice.chance(stuck) {
            self.dice.millis(1_000, 10_000)
        } else if self.dice.chance(slow) {
            self.dice.millis(10, 500)
        } else if self.dice.chance(0.3) {
            self.dice.millis(1, 3)
        } else {
            Duration::ZERO
        }
    }

    async fn travel(&self) {
        let time = self.travel_time();
        if time.is_zero() {
            // What happens at the same time happens in any order.
            for _ in 0..self.dice.number(0, 2) {
                tokio::task::yield_now().await;
            }
        } else {
            sleep(time).await;
        }
    }
}

/// The ways of one broker.
pub(crate) struct BrokerLink {
    pub(crate) name: String,
    pub(crate) id: [u8; 4],
    net: Arc<Net>,
    /// Cancelled when the broker is killed.
    pub(crate) killed: CancellationToken,
    /// Before this nothing of the broker goes in or out.
    frozen_until: Mutex<Option<Instant>>,
    /// By how much the broker's clock differs from the store's, in milliseconds.
    skew: AtomicI64,
    last_time: AtomicI64,
    is_new: AtomicBool,
}

fn unavailable(reason: &str) -> StoreError {
    StoreError::Unavailable { reason: reason.to_owned(), source: None }
}

impl BrokerLink {
    pub(crate) fn new(net: &Arc<Net>, name: String, id: [u8; 4]) -> Arc<Self> {
        Arc::new(Self {
            name,
            id,
            net: Arc::clone(net),
            killed: CancellationToken::new(),
            frozen_until: Mutex::default(),
            skew: AtomicI64::new(0),
            last_time: AtomicI64::new(0),
            is_new: AtomicBool::new(true),
        })
    }

    pub(crate) fn freeze(&self, lasting: Duration) {
        *self.frozen_until.lock() = Some(Instant::now() + lasting);
    }

    pub(crate) fn set_skew(&self, millis: i64) {
        self.skew.store(millis, Ordering::Relaxed);
    }

    /// Says that the broker has started, so that faults reach it.
    pub(crate) fn started(&self) {
        self.is_new.store(false, Ordering::Relaxed);
    }

    /// Waits while the broker is frozen, and for ever if it is killed.
    pub(crate) async fn pass(&self) {
        loop {
            if self.killed.is_cancelled() {
                std::future::pending::<()>().await;
            }
            let until = *self.frozen_until.lock();
            match until {
                Some(until) if until > Instant::now() => sleep_until(until).await,
                _ => return,
            }
        }
    }

    fn has_faults(&self) -> bool {
        !self.is_new.load(Ordering::Relaxed)
    }

    /// Waits for the end of an election, or fails.
    async fn primary(&self) -> Result<()> {
        let until = *self.net.election.lock();
        let Some(until) = until.filter(|until| *until > Instant::now()) else { return Ok(()) };
        if self.has_faults() && self.net.dice.chance(0.5) {
            sleep(self.net.dice.millis(0, 3_000)).await;
            return Err(unavailable("no primary"));
        }
        sleep_until(until).await;
        Ok(())
    }
}

impl Link for BrokerLink {
    async fn request(&self, call: &'static str) -> Result<()> {
        self.pass().await;
        self.net.step(&self.name, call);
        self.net.travel().await;
        self.primary().await?;
        self.pass().await;
        if call == "commit" && self.net.dice.chance(self.net.rates().commit_refused) {
            self.net.step(&self.name, "commit refused");
            sleep(self.net.dice.millis(100, 3_000)).await;
            return Err(unavailable("commit refused"));
        }
        if self.has_faults() && self.net.dice.chance(self.net.rates().refused) {
            self.net.step(&self.name, "refused");
            return Err(unavailable("refused"));
        }
        Ok(())
    }

    async fn answer(&self, call: &'static str) -> Result<()> {
        if self.killed.is_cancelled() {
            self.pass().await;
        }
        let lost = self.has_faults() && self.net.dice.chance(self.net.rates().unanswered);
        self.net.travel().await;
        self.pass().await;
        self.net.step(&self.name, call);
        if lost {
            self.net.step(&self.name, "unanswered");
            return Err(unavailable("unanswered"));
        }
        Ok(())
    }

    fn is_alive(&self) -> bool {
        !self.killed.is_cancelled()
    }

    fn now(&self) -> Timestamp {
        let now = self.net.store_time().0 + self.skew.load(Ordering::Relaxed);
        Timestamp(self.last_time.fetch_max(now, Ordering::Relaxed).max(now))
    }
}

#[async_trait]
impl Wire for BrokerLink {
    async fn send(&self, message: String) -> Result<(), String> {
        self.pass().await;
        let (net, rates) = (&self.net, self.net.rates());
        let receivers = net.receivers.lock().clone();
        for (id, receiver) in receivers {
            if net.dice.chance(rates.signal_cut) {
                net.receivers.lock().retain(|(other, _)| *other != id);
                net.step(&self.name, "cut");
                continue;
            }
            let copies = u64::from(!net.dice.chance(rates.signal_lost))
                + u64::from(net.dice.chance(rates.signal_doubled));
            for _ in 0..copies {
                net.step(&self.name, &message);
                let (receiver, message) = (receiver.clone(), message.clone());
                let time = net.travel_time();
                if time.is_zero() {
                    let _ = receiver.send(message); // the receiver may be gone
                } else {
                    tokio::spawn(async move {
                        sleep(time).await;
                        let _ = receiver.send(message);
                    });
                }
            }
        }
        Ok(())
    }

    async fn listen(&self) -> Result<UnboundedReceiver<String>, String> {
        self.pass().await;
        let (sender, receiver) = unbounded_channel();
        let mut receivers = self.net.receivers.lock();
        receivers.retain(|(id, _)| *id != self.id);
        receivers.push((self.id, sender));
        Ok(receiver)
    }
}
