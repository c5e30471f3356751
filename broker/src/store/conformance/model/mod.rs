//! Random sequences of calls are made on the store and on a simple model of it, and must give the
//! same results.
//!
//! The clock of a store advances between the calls, so the times in the model keep clear of one
//! another: all spans end half a step away from the times of the calls. Each call is a millisecond
//! after the last one, so that no two calls happen at the same time.

mod world;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use proptest::{
    prelude::*,
    test_runner::{Config, TestCaseError, TestRunner},
};

use self::world::{Model, World};
use super::{
    Env,
    env::{demand, held, last, move_of, seconds},
    first_lease::push_leased,
};
use crate::{
    domain::{
        Cause, DedupId, Delivery, Demand, Eligibility, FailureOutcome, ItemState, Limit, NewItem,
        OrderingKey, Outcome, Priority, Queue, RetryPolicy,
    },
    store::{EndedDelivery, RedriveFilter, Rollback, RollbackTo},
};

/// Time advances in steps of this many seconds. Spans end between two steps.
const STEP: u64 = 100;
const LEASE: u64 = 150;
const TTL: u64 = 350;
const WINDOW: u64 = 250;
const RETENTION: u64 = 1_050;

/// The queues: `A` has a dead-letter queue and a limit, `B` has history and sequence numbers.
const A: usize = 0;
const B: usize = 1;
const DEAD: usize = 2;

#[derive(Debug, Clone)]
enum Step {
    Push {
        queue: usize,
        key: Option<u8>,
        level: i32,
        delay: u64,
        mortal: bool,
        dedup: Option<u8>,
    },
    /// Stores an item of `A` as reserved.
    PushReserved {
        level: i32,
    },
    Reserve {
        queue: usize,
        count: usize,
    },
    Commit(usize),
    /// Rolls back to the queue, or to the dead-letter queue after the last attempt.
    RollBack {
        receipt: usize,
        delay: u64,
    },
    Extend {
        receipt: usize,
        span: u64,
        is_renewal: bool,
    },
    Move {
        receipt: usize,
        to: usize,
        delay: u64,
    },
    Redrive {
        item: usize,
        to: usize,
    },
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let delay = prop_oneof![3 => Just(0), 1 => Just(150), 1 => Just(350)];
    let receipt = 0..1_000_usize;
    prop_oneof![
        8 => (
            A..=B,
            proptest::option::of(0..2_u8),
            prop_oneof![3 => Just(0), 1 => Just(4), 1 => Just(9)],
            delay.clone(),
            proptest::bool::weighted(0.15),
            proptest::option::weighted(0.25, 0..3_u8),
        )
            .prop_map(|(queue, key, level, delay, mortal, dedup)| {
                // Each store decides when it unblocks the successor of an expired item.
                Step::Push { queue, key, level, delay, mortal: mortal && key.is_none(), dedup }
            }),
        2 => prop_oneof![3 => Just(0), 1 => Just(4)].prop_map(|level| Step::PushReserved { level }),
        6 => (A..=DEAD, 1..4_usize).prop_map(|(queue, count)| Step::Reserve { queue, count }),
        4 => receipt.clone().prop_map(Step::Commit),
        4 => (receipt.clone(), delay.clone())
            .prop_map(|(receipt, delay)| Step::RollBack { receipt, delay }),
        1 => (receipt.clone(), prop_oneof![Just(50), Just(450)], any::<bool>())
            .prop_map(|(receipt, span, is_renewal)| Step::Extend { receipt, span, is_renewal }),
        2 => (receipt, A..=B, delay)
            .prop_map(|(receipt, to, delay)| Step::Move { receipt, to, delay }),
        2 => (0..1_000_usize, A..=B).prop_map(|(item, to)| Step::Redrive { item, to }),
        3 => (1..3_u64).prop_map(Step::Pass),
    ]
}

/// The model and the store.
struct Run<'e> {
    env: &'e Env,
    queues: [Arc<Queue>; 3],
    world: World,
    /// The delivery of each receipt, and the queue it came from.
    deliveries: Vec<(usize, Delivery)>,
}

impl Run<'_> {
    async fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        self.pass(Duration::from_millis(1));
        match *step {
            Step::Push { queue, key, level, delay, mortal, dedup } => {
                self.push(queue, key, level, delay, mortal, dedup).await
            }
            Step::PushReserved { level } => {
                self.push_reserved(level).await;
                Ok(())
            }
            Step::Reserve { queue, count } => self.reserve(queue, count).await,
            Step::Pass(steps) => {
                self.pass(seconds(steps * STEP));
                Ok(())
            }
            Step::Redrive { item, to } => self.redrive(item, to).await,
            _ if self.deliveries.is_empty() => Ok(()),
            Step::Commit(receipt) => self.commit(receipt % self.deliveries.len()).await,
            Step::RollBack { receipt, delay } => {
                self.roll_back(receipt % self.deliveries.len(), delay).await
            }
            Step::Extend { receipt, span, is_renewal } => {
                self.extend(receipt % self.deliveries.len(), span, is_renewal).await
            }
            Step::Move { receipt, to, delay } => {
                self.move_item(receipt % self.deliveries.len(), to, delay).await
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        self.env.pass(time);
        self.world.now += time.as_millis() as u64;
        self.world.expire();
    }

    async fn push(
        &mut self,
        queue: usize,
        key: Option<u8>,
        level: i32,
        delay: u64,
        mortal: bool,
        dedup: Option<u8>,
    ) -> Result<(), TestCaseError> {
        let text = |n: Option<u8>| n.map_or(String::new(), |n| format!("x{n}"));
        let n = self.world.arrivals;
        let new = NewItem {
            payload: n.to_string().into(),
            priority: Priority::parse("priority", level).unwrap(),
            eligibility: Eligibility::After(seconds(delay)),
            ttl: mortal.then_some(seconds(TTL)),
            ordering_key: OrderingKey::new(text(key)),
            dedup_id: DedupId::new(text(dedup)),
            ..NewItem::default()
        };
        let pushed = self.env.push_one(&self.queues[queue], new).await;
        let world = &mut self.world;
        if let Some(dedup) = dedup
            && let Some((first, until)) = world.remembered.get(&(queue, dedup))
            && *until > world.now
        {
            prop_assert_eq!((pushed.deduplicated, pushed.id), (true, *first));
            return Ok(());
        }
        prop_assert!(!pushed.deduplicated);
        world.arrivals += 1;
        let expires = mortal.then(|| world.after(TTL));
        world.items.insert(n, Model { key, expires, ..Model::new(pushed.id, queue, level) });
        world.arrive(n, queue, world.after(delay), true);
        prop_assert_eq!(pushed.eligible_time.is_none(), world.items[&n].blocked);
        if let Some(dedup) = dedup {
            let until = world.after(WINDOW);
            world.remembered.insert((queue, dedup), (pushed.id, until));
        }
        Ok(())
    }

    async fn push_reserved(&mut self, level: i32) {
        let n = self.world.arrivals;
        let new = NewItem {
            payload: n.to_string().into(),
            priority: Priority::parse("priority", level).unwrap(),
            ..NewItem::default()
        };
        let delivery = push_leased(self.env, &self.queues[A], new, seconds(LEASE)).await;
        let world = &mut self.world;
        world.arrivals += 1;
        world.items.insert(n, Model::new(delivery.item.id, A, level));
        world.arrive(n, A, world.now, true);
        let (receipt, end) = (world.receipts.len(), world.after(LEASE));
        world.receipts.push(n);
        let item = world.items.get_mut(&n).unwrap();
        (item.holder, item.when, item.deliveries) = (Some(receipt), end, 1);
        self.deliveries.push((A, delivery));
    }

    async fn reserve(&mut self, queue: usize, count: usize) -> Result<(), TestCaseError> {
        let mut ready = self.world.ready(queue);
        let settings = &self.queues[queue];
        let failure_outcome = |item: &Model| match item.holder {
            Some(_) => settings.failure_outcome(Cause::Lapse, item.attempt, item.deliveries, 0.0),
            None => FailureOutcome::Retry { attempt: item.attempt, delay: Duration::ZERO },
        };
        let doomed = |n: &usize| {
            matches!(failure_outcome(&self.world.items[n]), FailureOutcome::Limit { .. })
        };
        let dying: Vec<usize> = ready.iter().copied().filter(doomed).collect();
        // Each store decides how far behind the last live item it scans for items at a limit. This
        // reserve scans everything.
        let count = if dying.is_empty() { count } else { 100_000 };
        for n in &dying {
            self.world.bury(*n);
        }
        if !dying.is_empty() {
            ready = self.world.ready(queue);
        }
        ready.truncate(count);
        let (mut taken, demand) = (Vec::new(), Demand { lease: seconds(LEASE), ..demand(count) });
        loop {
            let demand = Demand { max_items: count - taken.len(), ..demand.clone() };
            let reserved = self.env.reserve(&self.queues[queue], &[demand]).await;
            let end = self.world.after(LEASE);
            taken.extend(reserved.deliveries.into_iter().map(|(_, delivery)| (delivery, end)));
            if taken.len() == count || !reserved.more {
                break;
            }
            // The leases of a later call end later.
            self.pass(Duration::from_millis(1));
        }
        let number = |delivery: &Delivery| -> usize {
            String::from_utf8_lossy(&delivery.item.payload).parse().unwrap_or(usize::MAX)
        };
        let mut got: Vec<usize> = taken.iter().map(|(delivery, _)| number(delivery)).collect();
        // Items that reached their limit in one call, or were unblocked by one, may have the same
        // time.
        if !dying.is_empty() || queue == DEAD {
            got.sort_unstable();
            if queue == DEAD && count < 100_000 {
                let all = self.world.ready(queue);
                prop_assert_eq!(got.len(), all.len().min(count));
                prop_assert!(got.iter().all(|n| all.contains(n)), "{:?} of {:?}", got, all);
                ready.clone_from(&got);
            }
            ready.sort_unstable();
        }
        prop_assert_eq!(got, ready);
        for (delivery, end) in taken {
            let receipt = self.world.receipts.len();
            let n = number(&delivery);
            self.world.receipts.push(n);
            let item = self.world.items.get_mut(&n).unwrap();
            item.attempt += u32::from(item.holder.is_some());
            item.deliveries += 1;
            (item.holder, item.when) = (Some(receipt), end);
            let counts = (delivery.item.attempt, delivery.item.deliveries);
            prop_assert_eq!(counts, (item.attempt, item.deliveries), "of {}", n);
            self.deliveries.push((queue, delivery));
        }
        Ok(())
    }

    fn held(&self, receipt: usize) -> crate::store::Reservation {
        let (queue, delivery) = &self.deliveries[receipt];
        held(&self.queues[*queue], delivery)
    }

    async fn commit(&mut self, receipt: usize) -> Result<(), TestCaseError> {
        let expected = self.world.holds(receipt);
        let holds = self.env.store.holds(vec![self.held(receipt)]).await.unwrap();
        prop_assert_eq!(holds, [expected.is_ok()]);
        let outcome = self.env.store.commit(vec![self.held(receipt)]).await.unwrap();
        prop_assert_eq!(outcome, [expected.err().unwrap_or(Outcome::Ok)]);
        if let Ok(n) = expected {
            self.world.settle(n);
        }
        Ok(())
    }

    async fn roll_back(&mut self, receipt: usize, delay: u64) -> Result<(), TestCaseError> {
        let expected = self.world.holds(receipt);
        let (queue, delivery) = &self.deliveries[receipt];
        let receipt_of = &delivery.receipt;
        let deliveries = receipt_of.deliveries_here();
        let failure_outcome = self.queues[*queue].failure_outcome(
            Cause::Rollback,
            receipt_of.attempt,
            deliveries,
            0.0,
        );
        let to = match failure_outcome {
            FailureOutcome::Limit { .. } => last(&self.queues[*queue], delivery),
            FailureOutcome::Retry { attempt, .. } => RollbackTo::Queue {
                eligible_time: self.env.now() + seconds(delay),
                attempt,
                ended: EndedDelivery::Counted,
            },
        };
        let rollback = Rollback { held: self.held(receipt), to, reason: None };
        let outcome = self.env.store.rollback(vec![rollback]).await.unwrap();
        let at_limit = matches!(failure_outcome, FailureOutcome::Limit { .. });
        let ok = if at_limit { Outcome::DeadLettered } else { Outcome::Ok };
        prop_assert_eq!(outcome, [expected.err().unwrap_or(ok)]);
        match (expected, failure_outcome) {
            (Ok(n), FailureOutcome::Retry { attempt, .. }) => {
                let when = self.world.after(delay);
                let item = self.world.items.get_mut(&n).unwrap();
                (item.holder, item.attempt, item.when) = (None, attempt, when);
            }
            (Ok(n), FailureOutcome::Limit { .. }) => self.world.bury(n),
            (Err(_), _) => {}
        }
        Ok(())
    }

    async fn extend(
        &mut self,
        receipt: usize,
        span: u64,
        is_renewal: bool,
    ) -> Result<(), TestCaseError> {
        let expected = self.world.holds(receipt);
        let (held, until) = (vec![self.held(receipt)], self.env.now() + seconds(span));
        let outcome = if is_renewal {
            self.env.renew(&self.env.store, held, until).await
        } else {
            self.env.extend(held, until).await
        };
        prop_assert_eq!(outcome, [expected.err().unwrap_or(Outcome::Ok)]);
        if let Ok(n) = expected {
            let when = self.world.after(span);
            let item = self.world.items.get_mut(&n).unwrap();
            item.when = if is_renewal { item.when.max(when) } else { when };
        }
        Ok(())
    }

    async fn move_item(
        &mut self,
        receipt: usize,
        to: usize,
        delay: u64,
    ) -> Result<(), TestCaseError> {
        let expected = self.world.holds(receipt);
        let (queue, delivery) = &self.deliveries[receipt];
        let mut order = move_of(&self.queues[*queue], delivery, &self.queues[to]);
        order.eligible_time = self.env.now() + seconds(delay);
        let outcome = self.env.store.move_items(vec![order]).await.unwrap();
        prop_assert_eq!(outcome, [expected.err().unwrap_or(Outcome::Ok)]);
        if let Ok(n) = expected {
            let left = self.world.items[&n].clone();
            self.world.arrive(n, to, self.world.after(delay), true);
            self.world.pass_turn(&left);
        }
        Ok(())
    }

    async fn redrive(&mut self, item: usize, to: usize) -> Result<(), TestCaseError> {
        let ready = self.world.ready(DEAD);
        if ready.is_empty() {
            return Ok(());
        }
        let n = ready[item % ready.len()];
        let left = self.world.items[&n].clone();
        let filter = RedriveFilter { ids: vec![left.id], ..RedriveFilter::default() };
        let (dead, queue) = (&self.queues[DEAD], &self.queues[to]);
        prop_assert_eq!(
            self.env.store.redrive(dead, queue, &filter, None, 10).await.unwrap().items,
            1
        );
        self.world.arrive(n, to, self.world.now, left.origin != Some(to));
        Ok(())
    }

    /// Compares all items in the store with the model.
    async fn compare(&self) -> Result<(), TestCaseError> {
        for (number, queue) in self.queues.iter().enumerate() {
            let listed = self.env.list(queue, None).await;
            let mut got: Vec<_> = listed
                .iter()
                .map(|item| {
                    let origin = item.origin_queue.clone();
                    (item.id, item.state, item.attempt, item.deliveries, origin)
                })
                .collect();
            let items = self.world.items.values().filter(|item| item.queue == number);
            let mut expected: Vec<_> = items
                .map(|item| {
                    let origin = item.origin.map(|origin| self.queues[origin].name.clone());
                    (item.id, self.world.state(item), item.attempt, item.deliveries, origin)
                })
                .collect();
            got.sort_by_key(|item| item.0);
            expected.sort_by_key(|item| item.0);
            prop_assert_eq!(&got, &expected, "in {}", queue.name);
            let depth = self.env.store.depth(queue).await.unwrap();
            let count = |state| got.iter().filter(|item| item.1 == state).count() as u64;
            let counted = [depth.ready, depth.delayed, depth.reserved, depth.blocked];
            let states =
                [ItemState::Ready, ItemState::Delayed, ItemState::Reserved, ItemState::Blocked];
            prop_assert_eq!(counted, states.map(count));
            prop_assert_eq!(depth.processed, count(ItemState::Processed));
        }
        Ok(())
    }
}

async fn run(env: &Env, steps: &[Step]) -> Result<(), TestCaseError> {
    static RUNS: AtomicU32 = AtomicU32::new(0);
    let number = RUNS.fetch_add(1, Ordering::Relaxed);
    let window = |queue: &mut Queue| {
        queue.dedup_window = seconds(WINDOW);
        queue.retry_policy = Some(RetryPolicy::default());
    };
    let dead = env.queue_with(&format!("dead{number}"), window).await;
    let limited = |queue: &mut Queue| {
        window(queue);
        queue.max_attempts = Some(Limit::of(2));
        queue.dead_letter_queue = Some(dead.name.clone());
    };
    let a = env.queue_with(&format!("a{number}"), limited).await;
    let kept = |queue: &mut Queue| {
        window(queue);
        queue.retention = seconds(RETENTION);
        queue.sequenced = true;
    };
    let b = env.queue_with(&format!("b{number}"), kept).await;
    let queues = [a, b, dead];
    let mut run = Run { env, queues, world: World::default(), deliveries: Vec::new() };
    for (n, step) in steps.iter().enumerate() {
        run.step(step).await?;
        if n % 8 == 7 {
            run.compare().await?;
        }
    }
    run.compare().await
}

pub async fn random_sequences_agree_with_the_model(env: &Env) {
    random_sequences_agree(env, 48).await;
}

/// Compares a store with the model in so many random sequences of operations, or `PROPTEST_CASES`.
pub async fn random_sequences_agree(env: &Env, cases: u32) {
    let mut config = Config { failure_persistence: None, ..Config::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = cases;
    }
    let sequences = proptest::collection::vec(step(), 1..60);
    let answer = tokio::task::block_in_place(|| {
        TestRunner::new(config)
            .run(&sequences, |steps| tokio::runtime::Handle::current().block_on(run(env, &steps)))
    });
    if let Err(error) = answer {
        panic!("{error}");
    }
}
