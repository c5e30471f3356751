//! The transitions of items, each with what must be there before.

use std::time::Duration;

use sluicegate_checker::history::{
    Answer, Delivery, NewItem, PushEntry, Request, RollbackItem, Settings,
};
use sluicegate_proto::v1 as pb;
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};

use crate::{clients::Clients, database::Database};

/// The lease of what is reserved before a fault.
pub(crate) const LEASE: Duration = Duration::from_millis(1_500);
/// The lease of what is to lapse. Long enough for the answer to come before its end on a machine that is busy.
const SHORT: Duration = Duration::from_millis(500);
const NONE: Duration = Duration::ZERO;
/// A broker that has delivered an item has asked for the next one by then.
const ASKED: Duration = Duration::from_millis(20);

macro_rules! transitions {
    ($($transition:ident = $name:literal),+ $(,)?) => {
        /// A transition.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Transition { $($transition),+ }

        impl Transition {
            pub(crate) const ALL: &[Self] = &[$(Self::$transition),+];

            pub(crate) fn name(self) -> &'static str {
                match self { $(Self::$transition => $name),+ }
            }
        }
    };
}

transitions! {
    PushOne = "push-one",
    PushSegment = "push-segment",
    PushOrdered = "push-ordered",
    PushSequenced = "push-sequenced",
    PushDeduplicated = "push-deduplicated",
    PushDuplicates = "push-duplicates",
    Direct = "direct-delivery",
    DirectSeveral = "direct-several",
    Announced = "announced-delivery",
    ClaimOne = "claim-one",
    ClaimPart = "claim-part",
    ClaimAll = "claim-all",
    ClaimSeveral = "claim-several",
    ClaimOrdered = "claim-ordered",
    Pop = "pop",
    CommitOne = "commit-one",
    CommitPart = "commit-part",
    CommitAll = "commit-all",
    CommitSeveral = "commit-several",
    CommitDeduplicated = "commit-deduplicated",
    CommitOrdered = "commit-ordered",
    CommitRetained = "commit-retained",
    CommitElsewhere = "commit-elsewhere",
    RollBackPart = "rollback-part",
    RollBackAll = "rollback-all",
    RollBackSeveral = "rollback-several",
    RollBackOrdered = "rollback-ordered",
    RollBackElsewhere = "rollback-elsewhere",
    DeadLetter = "dead-letter",
    DeadLetterOrdered = "dead-letter-ordered",
    DeadLetterLapsed = "dead-letter-lapsed",
    Discard = "discard",
    ExtendOne = "extend-one",
    ExtendAll = "extend-all",
    ExtendElsewhere = "extend-elsewhere",
    Move = "move",
    MoveOrdered = "move-ordered",
    CommitAndPush = "commit-and-push",
    Lapse = "lapse",
    Redrive = "redrive",
    Replay = "replay",
    Purge = "purge",
    DeleteItem = "delete-item",
    DeleteQueue = "delete-queue",
    DeleteQueueWithForce = "delete-queue-force",
    Tick = "tick",
}

use Transition as T;

/// The queues and clients of one case.
pub(crate) struct Stage<'a> {
    pub(crate) clients: &'a Clients,
    /// Clients of the other broker, if the transition needs one or it races.
    pub(crate) beside: Option<&'a Clients>,
    pub(crate) queue: &'a str,
    pub(crate) database: &'a Database,
}

impl Transition {
    /// Returns whether another broker takes part: it reserves what is settled, or pushes what is delivered.
    pub(crate) fn needs_two_brokers(self) -> bool {
        matches!(
            self,
            T::CommitElsewhere | T::RollBackElsewhere | T::ExtendElsewhere | T::Announced
        )
    }

    /// Returns whether a client repeats the call if its outcome is unknown.
    pub(crate) fn can_be_repeated(self) -> bool {
        !matches!(
            self,
            T::PushOne
                | T::PushSegment
                | T::PushOrdered
                | T::PushSequenced
                | T::CommitAndPush
                | T::Direct
                | T::DirectSeveral
                | T::Announced
                | T::Tick
        )
    }

    pub(crate) fn settings(self) -> Settings {
        let settings = Settings::default();
        match self {
            T::PushSequenced => Settings { sequenced: true, ..settings },
            T::CommitRetained | T::Replay => Settings { retention: true, ..settings },
            T::DeadLetterLapsed => Settings { max_attempts: 1, ..settings },
            T::Discard => Settings { max_attempts: 1, discard_failed: true, ..settings },
            _ => settings,
        }
    }

    /// Returns how many items there are.
    fn count(self) -> usize {
        match self {
            T::PushOne | T::Direct | T::ClaimOne | T::CommitOne => 1,
            T::ClaimSeveral | T::CommitSeveral | T::RollBackSeveral => 8,
            _ => 4,
        }
    }

    fn items(self, stage: &Stage<'_>) -> Vec<NewItem> {
        let item = |number: usize| {
            let name = stage.name(number);
            let item = NewItem { name: name.clone(), ..NewItem::default() };
            match self {
                T::PushOrdered
                | T::ClaimOrdered
                | T::CommitOrdered
                | T::RollBackOrdered
                | T::DeadLetterOrdered
                | T::MoveOrdered => NewItem { ordering_key: format!("key {}", number % 2), ..item },
                T::PushDeduplicated | T::PushDuplicates | T::CommitDeduplicated | T::Purge => {
                    NewItem { dedup_id: name, ..item }
                }
                _ => item,
            }
        };
        (0..self.count()).map(item).collect()
    }

    /// Brings about what the transition begins with. No fault happens. Returns what is held.
    pub(crate) async fn prepare(self, stage: &Stage<'_>) -> Result<Vec<Delivery>, Answer> {
        let Stage { clients, queue, .. } = *stage;
        clients.create(queue, &self.settings()).await?;
        let items = self.items(stage);
        match self {
            T::PushOne
            | T::PushSegment
            | T::PushOrdered
            | T::PushSequenced
            | T::PushDeduplicated
            | T::Direct
            | T::DirectSeveral
            | T::Announced => {}
            // Two segments, so that one command has a statement for each.
            T::ClaimSeveral | T::CommitSeveral | T::RollBackSeveral => {
                clients.push(queue, &items[..4]).await?;
                clients.push(queue, &items[4..]).await?;
            }
            T::PushDuplicates => drop(clients.push(queue, &items[1..3]).await?),
            T::Tick => stage.schedule(queue).await?,
            T::Move | T::MoveOrdered | T::CommitAndPush => {
                clients.create(&stage.other_queue(), &Settings::default()).await?;
                clients.push(queue, &items).await?;
            }
            _ => drop(clients.push(queue, &items).await?),
        }
        match self {
            T::CommitOne => stage.held(1, 1).await,
            T::CommitSeveral | T::RollBackSeveral => stage.held(8, 6).await,
            T::CommitAll | T::CommitDeduplicated | T::RollBackAll | T::ExtendAll => {
                stage.held(4, 4).await
            }
            T::CommitOrdered
            | T::RollBackOrdered
            | T::DeadLetterOrdered
            | T::MoveOrdered
            | T::CommitRetained => stage.held(2, 2).await,
            T::CommitPart
            | T::RollBackPart
            | T::DeadLetter
            | T::CommitElsewhere
            | T::RollBackElsewhere
            | T::ExtendElsewhere => stage.held(3, 2).await,
            T::ExtendOne | T::Move | T::CommitAndPush => stage.held(2, 1).await,
            T::DeadLetterLapsed | T::Discard | T::Lapse => {
                stage.held_for(2, SHORT).await?;
                // Nothing tells when a lease has ended.
                sleep(SHORT).await;
                Ok(Vec::new())
            }
            T::Redrive => {
                let held = stage.held(3, 3).await?;
                clients.roll_back(held.iter().map(dead_letter).collect()).await?;
                Ok(Vec::new())
            }
            T::Replay => {
                clients.commit(receipts(&stage.held(3, 3).await?)).await?;
                Ok(Vec::new())
            }
            T::Purge | T::DeleteItem | T::DeleteQueueWithForce => {
                clients.commit(receipts(&stage.held(2, 1).await?)).await?;
                Ok(Vec::new())
            }
            T::DeleteQueue => {
                clients.commit(receipts(&stage.held(4, 4).await?)).await?;
                Ok(Vec::new())
            }
            _ => Ok(Vec::new()),
        }
    }

    /// Makes the call of the transition.
    pub(crate) async fn act(self, stage: &Stage<'_>, held: &[Delivery]) -> Result<(), Answer> {
        let Stage { clients, queue, .. } = *stage;
        match self {
            T::PushOne
            | T::PushSegment
            | T::PushOrdered
            | T::PushSequenced
            | T::PushDeduplicated
            | T::PushDuplicates => clients.push(queue, &self.items(stage)).await.map(drop),
            T::Direct | T::DirectSeveral => {
                let items = self.items(stage);
                let push = |_| async { clients.push(queue, &items).await.map(drop) };
                let patience = LEASE * 2;
                let (came, pushed) =
                    clients.consume_during(queue, items.len(), patience, push).await;
                let committed = clients.commit(receipts(&came)).await;
                pushed.and(committed)
            }
            T::Announced => announced(stage, &self.items(stage)).await,
            T::ClaimOne | T::ClaimPart | T::ClaimOrdered | T::ClaimAll | T::ClaimSeveral => {
                let all = matches!(self, T::ClaimAll | T::ClaimSeveral);
                let most = if all { 10 } else { 2 };
                let begun = std::time::Instant::now();
                let claimed = clients.reserve(queue, most, NONE, LEASE).await?;
                match claimed.len() {
                    0 => Err(Answer::Unknown(format!("nothing after {:?}", begun.elapsed()))),
                    _ => Ok(()),
                }
            }
            T::Pop => clients.pop(queue, 2).await,
            T::CommitOne
            | T::CommitPart
            | T::CommitAll
            | T::CommitSeveral
            | T::CommitDeduplicated
            | T::CommitOrdered
            | T::CommitRetained
            | T::CommitElsewhere => clients.commit(receipts(held)).await,
            T::RollBackPart
            | T::RollBackAll
            | T::RollBackSeveral
            | T::RollBackOrdered
            | T::RollBackElsewhere => clients.roll_back(held.iter().map(rollback).collect()).await,
            T::DeadLetter | T::DeadLetterOrdered => {
                clients.roll_back(held.iter().map(dead_letter).collect()).await
            }
            T::DeadLetterLapsed | T::Discard | T::Lapse => {
                // The first call finds what was never reserved, the second what has lapsed.
                clients.reserve(queue, 2, NONE, LEASE).await?;
                clients.reserve(queue, 2, NONE, LEASE).await.map(drop)
            }
            T::ExtendOne | T::ExtendAll | T::ExtendElsewhere => {
                clients.extend(receipts(held), LEASE * 2).await
            }
            T::Move | T::MoveOrdered => {
                for delivery in held {
                    clients.move_item(&delivery.receipt, &stage.other_queue()).await?;
                }
                Ok(())
            }
            T::CommitAndPush => commit_and_push(stage, &held[0]).await,
            T::Redrive => clients.redrive(&format!("{queue}.dead")).await,
            T::Replay => clients.replay(queue).await,
            T::Purge => clients.purge(queue).await,
            T::DeleteItem => {
                let items = clients.list(queue).await.unwrap_or_default();
                match items.first() {
                    Some(item) => clients.delete_item(queue, &item.id).await,
                    None => Ok(()),
                }
            }
            T::DeleteQueue => clients.delete_queue(queue, false).await,
            T::DeleteQueueWithForce => clients.delete_queue(queue, true).await,
            T::Tick => stage.tick().await,
        }
    }
}

/// Delivers items that another broker pushes one by one. The broker that delivers asks for the next one after each, so that all but the
/// first are announced to it.
async fn announced(stage: &Stage<'_>, items: &[NewItem]) -> Result<(), Answer> {
    let Stage { clients, queue, .. } = *stage;
    let beside = stage.beside.unwrap_or(clients);
    let push = async |mut came: watch::Receiver<usize>| {
        for (before, item) in items.iter().enumerate() {
            // With a fault an item may come late, or not at all.
            let _ = timeout(LEASE, came.wait_for(|count| *count >= before)).await;
            sleep(ASKED).await;
            beside.push(queue, std::slice::from_ref(item)).await?;
        }
        Ok(())
    };
    let (came, pushed) = clients.consume_during(queue, items.len(), LEASE * 2, push).await;
    let committed = clients.commit(receipts(&came)).await;
    pushed.and(committed)
}

/// Commits an item, and pushes one into each queue.
async fn commit_and_push(stage: &Stage<'_>, held: &Delivery) -> Result<(), Answer> {
    let item = |number: usize| NewItem { name: stage.name(10 + number), ..NewItem::default() };
    let keyed = NewItem { ordering_key: "key".to_owned(), ..item(1) };
    let pushes = vec![
        PushEntry { queue: stage.queue.to_owned(), item: item(0) },
        PushEntry { queue: stage.other_queue(), item: keyed },
    ];
    stage.clients.commit_and_push(&held.receipt, pushes).await
}

fn receipts(held: &[Delivery]) -> Vec<String> {
    held.iter().map(|delivery| delivery.receipt.clone()).collect()
}

fn rollback(delivery: &Delivery) -> RollbackItem {
    RollbackItem { receipt: delivery.receipt.clone(), delay: Some(0), ..RollbackItem::default() }
}

fn dead_letter(delivery: &Delivery) -> RollbackItem {
    RollbackItem { receipt: delivery.receipt.clone(), dead_letter: true, ..RollbackItem::default() }
}

impl<'a> Stage<'a> {
    pub(crate) const fn new(
        clients: &'a Clients,
        beside: Option<&'a Clients>,
        queue: &'a str,
        database: &'a Database,
    ) -> Self {
        Self { clients, beside, queue, database }
    }

    /// Reserves so many items, and returns the first of them.
    async fn held(&self, count: u32, first: usize) -> Result<Vec<Delivery>, Answer> {
        let mut held = self.held_for(count, LEASE).await?;
        held.truncate(first);
        Ok(held)
    }

    /// Reserves so many items. Fewer come only if the answer is late.
    async fn held_for(&self, count: u32, lease: Duration) -> Result<Vec<Delivery>, Answer> {
        let held = self.clients.reserve(self.queue, count, NONE, lease).await?;
        if held.len() == count as usize {
            return Ok(held);
        }
        Err(Answer::Unknown(format!("{} of {count} items", held.len())))
    }

    /// Returns the name of an item.
    fn name(&self, number: usize) -> String {
        format!("{} item {number}", self.queue)
    }

    /// Returns the name of the queue into which items are moved.
    pub(crate) fn other_queue(&self) -> String {
        format!("{}-to", self.queue)
    }

    /// Takes items and settles what another broker handed out.
    pub(crate) async fn race(&self, held: &[Delivery]) {
        let taken = self.clients.reserve(self.queue, 2, NONE, LEASE).await.unwrap_or_default();
        let theirs = held.last().map(|delivery| delivery.receipt.clone());
        let all: Vec<String> =
            receipts(&taken[..taken.len().min(1)]).into_iter().chain(theirs).collect();
        if !all.is_empty() {
            let _ = self.clients.commit(all).await;
        }
    }

    /// Returns all queues of the case.
    pub(crate) fn queues(&self) -> Vec<String> {
        let dead = |queue: &str| format!("{queue}.dead");
        let (queue, other) = (self.queue.to_owned(), self.other_queue());
        vec![queue.clone(), other.clone(), dead(&queue), dead(&other)]
    }

    /// Creates a schedule that does not tick in this test, unless a tick was missed.
    async fn schedule(&self, name: &str) -> Result<(), Answer> {
        let item = pb::NewItem { payload: self.name(0).into(), ..pb::NewItem::default() };
        let schedule = pb::Schedule {
            name: name.to_owned(),
            queue: self.queue.to_owned(),
            cron: "0 0 * * *".to_owned(),
            time_zone: "UTC".to_owned(),
            item: Some(item),
            ..pb::Schedule::default()
        };
        let request = pb::CreateScheduleRequest { schedule: Some(schedule) };
        let made = self.clients.api.schedule.clone().create_schedule(request).await;
        made.map(drop).map_err(|status| Answer::from_code(&format!("{:?}", status.code())))
    }

    /// Makes the last tick one that was missed, and waits a while until it is done.
    async fn tick(&self) -> Result<(), Answer> {
        let pushed = Request::Push {
            queue: self.queue.to_owned(),
            items: vec![NewItem { name: self.name(0), ..NewItem::default() }],
            stream: None,
        };
        let _call = self.clients.recorder.start("schedule", "any", pushed);
        self.database.miss_tick(self.queue).await;
        // The broker looks at all schedules when there is a new one.
        self.schedule(&self.other_schedule()).await?;
        let soon = Instant::now() + Duration::from_millis(500);
        while !self.has_ticked().await && Instant::now() < soon {
            sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    /// Returns whether a tick of the schedule was noted.
    pub(crate) async fn has_ticked(&self) -> bool {
        self.database.has_ticked(self.queue).await
    }

    /// Deletes the schedules of this case.
    pub(crate) async fn delete_schedules(&self) {
        for name in [self.queue.to_owned(), self.other_schedule()] {
            let request = pb::DeleteScheduleRequest { name };
            let _ = self.clients.api.schedule.clone().delete_schedule(request).await;
        }
    }

    fn other_schedule(&self) -> String {
        format!("{}-other", self.queue)
    }
}
