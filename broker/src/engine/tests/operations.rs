//! Operations: they end, are counted, cancelled, and continued by other brokers.

use futures_util::future::join_all;

use super::*;
use crate::{
    domain::{FOREVER, ItemFilter, ItemId, ItemState, OperationId, Timestamp},
    engine::{EngineError, MAY_CREATE_ALL, NewOperation, operations::run_operations},
    store::{Operation, OperationState, RedriveFilter, Selection, Work},
};

fn new(work: Work) -> NewOperation {
    NewOperation {
        work,
        dry_run: false,
        request_id: String::new(),
        started_by: "tester".to_owned(),
    }
}

fn purge() -> Work {
    Work::Purge { queue: name("q") }
}

fn delete(state: Option<ItemState>, max_items: u64, rate: u32) -> Work {
    Work::Delete { queue: name("q"), state, filter: ItemFilter::default(), max_items, rate }
}

fn redrive(to: Option<&str>, max_items: u64, rate: u32) -> Work {
    let (to, filter) = (to.map(name), RedriveFilter::default());
    Work::Redrive { queue: name("q"), to, filter, max_items, rate }
}

/// Redrives the items with exactly this reason.
fn redrive_for(reason: &str) -> Work {
    let filter = RedriveFilter { reason: Some(reason.to_owned()), ..RedriveFilter::default() };
    Work::Redrive { queue: name("q"), to: Some(name("to")), filter, max_items: 0, rate: 0 }
}

fn replay(selection: Selection) -> Work {
    Work::Replay { queue: name("q"), selection, max_items: 0 }
}

impl Bench {
    async fn start(&self, work: Work) -> OperationId {
        self.engine.start_operation(new(work)).await.unwrap().id
    }

    /// Runs operations on the engine of the bench.
    fn run(&self) {
        tokio::spawn(run_operations(Arc::clone(&self.engine)));
    }

    /// Returns another broker on the same store, without faults.
    fn other(&self) -> Arc<Engine> {
        let signals = Arc::new(LocalSignals::new());
        let metrics = Arc::new(Metrics::new());
        Engine::new(Arc::clone(&self.store), signals, metrics, Limits::default())
    }

    async fn operation(&self, id: OperationId) -> Operation {
        self.store.get_operation(id).await.unwrap().expect("the operation is kept")
    }

    async fn until_ended(&self, id: OperationId) -> Operation {
        let has_ended = async || self.operation(id).await.state != OperationState::Running;
        until("the end of an operation", has_ended).await;
        self.operation(id).await
    }

    async fn until_processed(&self, id: OperationId, items: u64) {
        let is_so = async || self.operation(id).await.processed >= items;
        until("progress of an operation", is_so).await;
    }

    async fn run_to_end(&self, work: Work) -> Operation {
        let id = self.start(work).await;
        self.until_ended(id).await
    }

    /// Counts the items with a dry run, which changes nothing.
    async fn dry(&self, work: Work) -> u64 {
        let before = self.items().await;
        let dry = NewOperation { dry_run: true, ..new(work) };
        let id = self.engine.start_operation(dry).await.unwrap().id;
        let ended = self.until_ended(id).await;
        assert_eq!((ended.state, ended.dry_run), (OperationState::Succeeded, true));
        assert_eq!(self.items().await, before, "a dry run changes nothing");
        ended.processed
    }

    async fn ids(&self) -> Vec<ItemId> {
        self.items().await.iter().map(|item| item.id).collect()
    }

    /// Commits all items of the queue, which keeps them.
    async fn commit_all(&self) {
        while !self.engine.pop(&name("q"), 500, Duration::ZERO, None).await.unwrap().is_empty() {}
    }

    async fn keep_history(&self) {
        let keep = |queue: &mut Queue| {
            queue.retention = Duration::from_hours(1);
            Ok(())
        };
        self.engine.update_queue(&name("q"), &keep).await.unwrap();
    }
}

#[tokio::test]
async fn an_operation_works_on_what_was_there_when_it_started() {
    let bench = bench().await;
    bench.push(1_300).await;
    let id = bench.start(purge()).await;
    let started = bench.operation(id).await;
    assert_eq!((started.total, started.state), (1_300, OperationState::Running));
    assert_eq!(started.started_by, "tester");
    bench.clock.advance(Duration::from_secs(1));
    bench.push(3).await;
    bench.run();
    let ended = bench.until_ended(id).await;
    assert_eq!((ended.state, ended.processed), (OperationState::Succeeded, 1_300));
    assert_eq!(bench.items().await.len(), 3);
    let newer = bench.start(purge()).await;
    let listed = bench.engine.list_operations(None, 9).await.unwrap();
    assert_eq!(listed.iter().map(|one| one.id).collect::<Vec<_>>(), [newer, id]);
}

#[tokio::test]
async fn a_dry_run_counts_what_is_done_then() {
    let bench = bench().await;
    bench.run();
    bench.keep_history().await;
    bench.push(700).await;
    let delayed = NewItem {
        eligibility: crate::domain::Eligibility::After(Duration::from_hours(1)),
        ..NewItem::default()
    };
    bench.engine.push(&name("q"), vec![delayed; 30], None).await.unwrap();
    bench.clock.advance(Duration::from_secs(1));
    let works = [
        (delete(Some(ItemState::Ready), 20, 0), 20),
        (delete(Some(ItemState::Delayed), 0, 0), 30),
        (redrive(Some("to"), 600, 0), 600),
        (redrive_for("why"), 0),
        (redrive_for(""), 80),
        (redrive(Some("to"), 0, 0), 0),
        (purge(), 0),
    ];
    for (work, items) in works {
        assert_eq!(bench.dry(work.clone()).await, items, "{work:?}");
        let ended = bench.run_to_end(work.clone()).await;
        assert_eq!((ended.state, ended.processed), (OperationState::Succeeded, items), "{work:?}");
        bench.clock.advance(Duration::from_secs(1));
    }
    bench.push(610).await;
    bench.commit_all().await;
    bench.clock.advance(Duration::from_secs(1));
    let all = || replay(Selection::Processed { start: Timestamp(0), end: FOREVER });
    let few = replay(Selection::Ids(bench.ids().await[..3].to_vec()));
    for (work, items) in [(few, 3), (all(), 607), (purge(), 610)] {
        assert_eq!(bench.dry(work.clone()).await, items, "{work:?}");
        let ended = bench.run_to_end(work.clone()).await;
        assert_eq!((ended.state, ended.processed), (OperationState::Succeeded, items), "{work:?}");
    }
}

#[tokio::test]
async fn a_filter_decides_what_is_deleted() {
    let bench = bench().await;
    bench.run();
    bench.push(200).await;
    let filter = ItemFilter { payload_contains: "7".into(), ..ItemFilter::default() };
    let work = Work::Delete { queue: name("q"), state: None, filter, max_items: 0, rate: 0 };
    let with_7 = (0..200).filter(|n: &usize| n.to_string().contains('7')).count();
    let ended = bench.run_to_end(work).await;
    assert_eq!((ended.total, ended.processed), (200, with_7 as u64));
    let left = bench.items().await;
    assert!(left.len() == 200 - with_7 && !payloads(&left).iter().any(|text| text.contains('7')));
}

/// What is done stays done, and is counted.
#[tokio::test]
async fn a_cancelled_operation_stops_between_two_batches() {
    let bench = bench().await;
    bench.run();
    bench.push(1_000).await;
    let id = bench.start(delete(None, 0, 100)).await;
    bench.until_processed(id, 10).await;
    let cancelled = bench.engine.cancel_operation(id).await.unwrap();
    assert_eq!(cancelled.state, OperationState::Cancelled);
    // The broker learns of it, and lets the claim go.
    let is_idle = async || bench.engine.tasks.is_empty();
    until("the end of its work", is_idle).await;
    let ended = bench.operation(id).await;
    assert_eq!(ended.state, OperationState::Cancelled);
    assert!(ended.processed < 1_000, "{}", ended.processed);
    assert_eq!(bench.items().await.len() as u64, 1_000 - ended.processed);
    let again = bench.engine.cancel_operation(id).await.unwrap();
    assert_eq!(again, ended, "a second time changes nothing");
}

/// A broker that is cut off from the store for longer than its claim lasts does not go on.
#[tokio::test]
async fn another_broker_continues_after_the_claim_has_ended() {
    let bench = bench().await;
    bench.run();
    bench.push(300).await;
    let id = bench.start(redrive(Some("to"), 0, 100)).await;
    bench.until_processed(id, 20).await;
    bench.faults.set("redrive", Fault::HeldBefore);
    for call in ["advance_operation", "claim_operation"] {
        bench.faults.set(call, Fault::Fails);
    }
    let first = bench.operation(id).await.claim.unwrap();
    bench.clock.advance(Duration::from_secs(20));
    tokio::spawn(run_operations(bench.other()));
    let taken = async || bench.operation(id).await.claim != Some(first);
    until("another claim", taken).await;
    let ended = bench.until_ended(id).await;
    assert_eq!(ended.state, OperationState::Succeeded);
    // What the first broker had done and could not say is missing.
    assert!((150..=300).contains(&ended.processed), "{}", ended.processed);
    assert!(bench.items().await.is_empty());
    let to = Arc::new(bench.store.get_queue(&name("to")).await.unwrap().unwrap());
    assert_eq!(bench.store.depth(&to).await.unwrap().ready, 300, "each item was moved once");
    // The first broker comes back, and changes nothing.
    bench.faults.set("redrive", Fault::None);
    bench.faults.set("advance_operation", Fault::None);
    until("the end of the first broker's work", async || bench.engine.tasks.is_empty()).await;
    assert_eq!(bench.operation(id).await, ended);
}

/// Items that an earlier broker replayed may have been processed again meanwhile.
#[tokio::test]
async fn a_continued_replay_takes_no_item_twice() {
    let bench = bench().await;
    bench.keep_history().await;
    bench.push(5).await;
    bench.commit_all().await;
    bench.clock.advance(Duration::from_secs(1));
    let id = bench.start(replay(Selection::Ids(bench.ids().await))).await;
    bench.faults.set("advance_operation", Fault::Fails);
    bench.run();
    bench.faults.until_done("replay", 1).await;
    bench.faults.set("claim_operation", Fault::Fails);
    bench.clock.advance(Duration::from_secs(1));
    assert_eq!(bench.engine.pop(&name("q"), 3, Duration::ZERO, None).await.unwrap().len(), 3);
    bench.clock.advance(Duration::from_secs(20));
    tokio::spawn(run_operations(bench.other()));
    let ended = bench.until_ended(id).await;
    assert_eq!((ended.state, ended.processed), (OperationState::Succeeded, 0), "nothing was left");
    let depth = bench.store.depth(&*bench.queue().await).await.unwrap();
    assert_eq!((depth.ready, depth.processed), (2, 3));
}

#[tokio::test]
async fn an_operation_waits_for_a_store_that_is_away() {
    let bench = bench().await;
    bench.run();
    bench.push(10).await;
    bench.faults.set("purge_step", Fault::Fails);
    let id = bench.start(purge()).await;
    bench.faults.until_begun("purge_step", 3).await;
    assert_eq!(bench.operation(id).await.state, OperationState::Running);
    bench.faults.set("purge_step", Fault::None);
    let ended = bench.until_ended(id).await;
    assert_eq!((ended.state, ended.processed), (OperationState::Succeeded, 10));
}

/// A dry run that begins anew counts anew.
#[tokio::test]
async fn a_dry_run_counts_each_item_once_though_the_store_was_away() {
    let bench = bench().await;
    bench.run();
    bench.push(200).await;
    bench.clock.advance(Duration::from_secs(1));
    bench.faults.set("list_items", Fault::HeldAfter);
    let dry = NewOperation { dry_run: true, ..new(redrive(Some("to"), 0, 0)) };
    let id = bench.engine.start_operation(dry).await.unwrap().id;
    bench.faults.until_done("list_items", 1).await;
    // The second page fails.
    bench.faults.set("list_items", Fault::Fails);
    bench.faults.until_begun("list_items", 3).await;
    bench.faults.set("list_items", Fault::None);
    assert_eq!(bench.until_ended(id).await.processed, 200);
}

/// A deletion reads many pages for one batch where few items match.
#[tokio::test]
async fn a_cancelled_deletion_reads_no_further() {
    let bench = bench().await;
    bench.run();
    for _ in 0..3 {
        bench.push(1_000).await;
    }
    bench.clock.advance(Duration::from_secs(1));
    bench.faults.set("list_items", Fault::HeldAfter);
    let filter = ItemFilter { reason_contains: "no such".to_owned(), ..ItemFilter::default() };
    let work = Work::Delete { queue: name("q"), state: None, filter, max_items: 0, rate: 0 };
    let id = bench.start(work).await;
    bench.faults.until_done("list_items", 1).await;
    bench.engine.cancel_operation(id).await.unwrap();
    let said = bench.faults.done("advance_operation");
    bench.faults.until_done("advance_operation", said + 2).await;
    bench.faults.set("list_items", Fault::None);
    bench.faults.until_done("advance_operation", said + 3).await;
    assert_eq!(bench.faults.begun("list_items"), 1);
}

#[tokio::test]
async fn an_operation_that_cannot_be_done_says_why() {
    let bench = bench().await;
    bench.run();
    bench.push(10).await;
    let mut away = Queue::with_defaults(name("away"), bench.engine.now());
    away.group = crate::domain::GroupName::parse("group", "elsewhere").unwrap();
    bench.engine.create_queue(away, MAY_CREATE_ALL).await.unwrap();
    let failed = bench.run_to_end(redrive(Some("away"), 0, 0)).await;
    assert_eq!((failed.state, failed.processed), (OperationState::Failed, 0));
    assert!(failed.error.contains("from group default to group elsewhere"), "{}", failed.error);
    let mut small = Queue::with_defaults(name("small"), bench.engine.now());
    small.max_depth = std::num::NonZeroU64::new(4);
    bench.engine.create_queue(small, MAY_CREATE_ALL).await.unwrap();
    let failed = bench.run_to_end(redrive(Some("small"), 0, 0)).await;
    assert_eq!((failed.state, failed.processed), (OperationState::Failed, 4));
    assert!(failed.error.contains("queue small is full"), "{}", failed.error);
    let missing = Work::Purge { queue: name("missing") };
    let refused = bench.engine.start_operation(new(missing)).await.unwrap_err();
    assert!(matches!(refused, EngineError::QueueNotFound(_)), "{refused}");
}

#[tokio::test]
async fn a_repeated_start_returns_the_operation_of_the_first() {
    let bench = bench().await;
    let start = async |work: Work, request_id: &str| {
        let request_id = request_id.to_owned();
        bench.engine.start_operation(NewOperation { request_id, ..new(work) }).await
    };
    let first = start(purge(), "a").await.unwrap();
    bench.clock.advance(Duration::from_secs(1));
    assert_eq!(start(purge(), "a").await.unwrap(), first);
    assert_ne!(start(purge(), "b").await.unwrap().id, first.id);
    assert_ne!(start(purge(), "").await.unwrap().id, start(purge(), "").await.unwrap().id);
    let refused = start(delete(None, 0, 0), "a").await.unwrap_err();
    assert!(matches!(refused, EngineError::OperationExists(id) if id == first.id), "{refused}");
}

#[tokio::test]
async fn only_so_many_operations_run() {
    let bench = bench().await;
    let mut last = None;
    for _ in 0..100 {
        last = Some(bench.start(purge()).await);
    }
    let refused = bench.engine.start_operation(new(purge())).await.unwrap_err();
    assert!(matches!(refused, EngineError::TooManyOperations(100)), "{refused}");
    bench.engine.cancel_operation(last.unwrap()).await.unwrap();
    bench.start(purge()).await;
}

#[tokio::test]
async fn operations_that_are_started_at_once_are_not_more_than_there_may_be() {
    let bench = bench().await;
    for _ in 0..99 {
        bench.start(purge()).await;
    }
    let started = join_all((0..10).map(|_| bench.engine.start_operation(new(purge())))).await;
    assert_eq!(started.iter().filter(|started| started.is_ok()).count(), 1, "{started:?}");
    assert_eq!(bench.store.running_operations().await.unwrap(), 100);
    // Two calls for one operation have one outcome.
    let running = bench.engine.list_operations(None, 1).await.unwrap().remove(0);
    bench.engine.cancel_operation(running.id).await.unwrap();
    let once = NewOperation { request_id: "once".to_owned(), ..new(purge()) };
    let both = join_all([once.clone(), once].map(|new| bench.engine.start_operation(new))).await;
    let ids: Vec<OperationId> = both.into_iter().map(|one| one.unwrap().id).collect();
    assert_eq!(ids[0], ids[1]);
}

/// Another broker need not wait for the end of the claim.
#[tokio::test]
async fn a_broker_that_drains_lets_its_operations_go() {
    let bench = bench().await;
    bench.run();
    bench.push(300).await;
    let id = bench.start(delete(None, 0, 10)).await;
    bench.until_processed(id, 1).await;
    bench.engine.drain().await;
    within("the end of its work", bench.engine.close()).await;
    let left = bench.operation(id).await;
    assert_eq!(left.state, OperationState::Running);
    let done = left.processed;
    assert_eq!(bench.items().await.len() as u64, 300 - done, "all that is done was said");
    let claim = crate::store::Claim { broker: [1; 4], number: 1 };
    let taken = bench.store.claim_operation(claim, Duration::from_secs(1)).await.unwrap();
    assert_eq!(taken.map(|operation| operation.id), Some(id));
}
