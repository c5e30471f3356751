//! Leases of many items at once: that nobody sees them but where they are, and that none outlives what it leases.

use std::os::unix::fs::FileExt;

use super::*;
use crate::{
    domain::{Delivery, ItemState, Totals},
    store::{EndedDelivery, Extension, Rollback, RollbackTo, sqlite::runs::Runs},
};

const LEASE: Duration = Duration::from_mins(1);

struct Setup {
    store: SqliteStore,
    clock: Arc<Clock>,
    queue: Arc<Queue>,
}

impl Setup {
    fn open(uri: &str) -> Self {
        let clock = Arc::new(Clock::system());
        let store = SqliteStore::open_with(uri, clock.clone(), NO_SWEEP).unwrap();
        let queue = queue(&store);
        Self { store, clock, queue }
    }

    fn in_memory() -> Self {
        Self::open("sqlite::memory:")
    }

    /// Pushes items, which were due before the next reserve.
    async fn push(&self, items: usize) {
        let pushes = (0..items).map(|n| push_of(&self.queue, &n.to_string())).collect();
        self.store.push(pushes).await.unwrap();
        self.clock.advance(Duration::from_millis(5));
    }

    async fn reserve_for(&self, demands: &[Demand]) -> Vec<(usize, Delivery)> {
        let mut reserver = self.store.reserver(&self.queue.name);
        reserver.reserve(&self.queue, demands, Appeared::Nothing).await.unwrap().deliveries
    }

    /// Returns the payloads of the items and their reservations.
    async fn reserve(&self, items: usize) -> (Vec<usize>, Vec<Reservation>) {
        let demand = Demand { max_items: items, lease: LEASE, ..want() };
        self.reserve_for(&[demand])
            .await
            .into_iter()
            .map(|(_, delivery)| {
                let payload = std::str::from_utf8(&delivery.item.payload).unwrap();
                let held = Reservation { queue: self.queue.clone(), receipt: delivery.receipt };
                (payload.parse::<usize>().unwrap(), held)
            })
            .unzip()
    }

    async fn commit(&self, held: &[Reservation]) -> Vec<Outcome> {
        self.store.commit(held.to_vec()).await.unwrap()
    }

    /// Returns the numbers of items of the runs, and the number of items that have a lease themselves.
    async fn leases(&self) -> (Vec<i64>, i64) {
        let read = self.store.inner.writer.call(Kind::Reserve, |tx| {
            let mut runs = tx.conn.prepare("SELECT last - first + 1 FROM runs ORDER BY first")?;
            let runs = runs.query_map([], |row| row.get(0))?.collect::<rusqlite::Result<_>>()?;
            let locked = "SELECT count(*) FROM items WHERE lock IS NOT NULL";
            Ok((runs, tx.conn.query_row(locked, [], |row| row.get(0))?))
        });
        read.await.unwrap()
    }
}

#[tokio::test]
async fn who_looks_at_an_item_finds_its_lease() {
    let it = Setup::in_memory();
    it.push(10).await;
    let (_, held) = it.reserve(8).await;
    assert_eq!(it.leases().await, (vec![8], 0));

    let item = it.store.get_item(&it.queue, held[3].receipt.item).await.unwrap().unwrap();
    assert_eq!((item.state, item.deliveries, item.attempt), (ItemState::Reserved, 1, 1));
    assert!(item.due_time.unwrap() < it.store.now());
    assert_eq!(it.leases().await, (vec![], 8));
    let depth = it.store.depth(&it.queue).await.unwrap();
    assert_eq!((depth.ready, depth.reserved), (2, 8));
    assert_eq!(it.commit(&held).await, [Outcome::Ok; 8]);
}

#[tokio::test]
async fn the_next_reserve_begins_behind_and_finds_what_became_ready() {
    let it = Setup::in_memory();
    let mut pushes: Vec<Push> = (0..6).map(|n| push_of(&it.queue, &n.to_string())).collect();
    pushes[5].item.priority = crate::domain::Priority::parse("priority", 9).unwrap();
    it.store.push(pushes).await.unwrap();
    it.clock.advance(Duration::from_millis(5));
    assert_eq!(it.reserve(1).await.0, [5]);
    let (first, held) = it.reserve(3).await;
    assert_eq!(first, [0, 1, 2]);
    assert_eq!(it.leases().await, (vec![3, 1], 0));

    // What comes back is where it was before.
    let rollback = Rollback {
        held: held[1].clone(),
        to: RollbackTo::Queue {
            eligible_time: long_ago(&it),
            attempt: 2,
            ended: EndedDelivery::Counted,
        },
        reason: None,
    };
    assert_eq!(it.store.rollback(vec![rollback]).await.unwrap(), [Outcome::Ok]);
    it.push(7).await;
    assert_eq!(it.reserve(4).await.0, [1, 3, 4, 0]);
    assert_eq!(it.reserve(99).await.0, [1, 2, 3, 4, 5, 6]);
    assert_eq!(it.reserve(99).await.0, [] as [usize; 0]);
}

/// Returns a time before that of all items.
fn long_ago(it: &Setup) -> Timestamp {
    Timestamp(it.store.now().0 - 1_000)
}

#[tokio::test]
async fn commits_take_items_out_of_the_beginning_the_end_and_the_middle() {
    let it = Setup::in_memory();
    it.push(20).await;
    let (_, held) = it.reserve(20).await;
    for (rows, left) in [
        (0..2, vec![18]),
        (19..20, vec![17]),
        (10..12, vec![8, 7]),
        (2..4, vec![6, 7]),
        (12..19, vec![6]),
        (4..10, vec![]),
    ] {
        let held = &held[rows.clone()];
        assert_eq!(it.commit(held).await, vec![Outcome::Ok; held.len()], "{rows:?}");
        assert_eq!(it.leases().await, (left, 0), "{rows:?}");
        assert_eq!(it.commit(held).await, vec![Outcome::Gone; held.len()], "{rows:?}");
    }
}

#[tokio::test]
async fn one_commit_ends_runs_that_follow_each_other() {
    let it = Setup::in_memory();
    it.push(20).await;
    let (_, held) = it.reserve(20).await;
    assert_eq!(it.commit(&held[9..11]).await, [Outcome::Ok; 2]);
    // Two of these are gone already.
    let outcomes = it.commit(&held).await;
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == Outcome::Ok).count(), 18);
    assert_eq!(outcomes[9..11], [Outcome::Gone; 2]);
    assert_eq!(it.leases().await, (vec![], 0));
}

#[tokio::test]
async fn commits_here_and_there_leave_a_bounded_number_of_runs() {
    let it = Setup::in_memory();
    it.push(40).await;
    let (_, held) = it.reserve(40).await;
    for (cuts, one) in held.iter().skip(1).step_by(2).enumerate() {
        assert_eq!(it.commit(std::slice::from_ref(one)).await, [Outcome::Ok]);
        let (runs, leased) = it.leases().await;
        if cuts < 7 {
            assert_eq!((runs.len(), leased), (cuts + 2, 0));
        } else {
            assert_eq!((runs.len(), leased), (0, 39 - cuts as i64));
        }
    }
}

#[tokio::test]
async fn a_lease_in_a_run_lapses() {
    let it = Setup::in_memory();
    it.push(5).await;
    let (_, held) = it.reserve(5).await;
    it.clock.advance(LEASE);
    let again = it.reserve_for(&[Demand { lease: LEASE, ..want() }]).await;
    let counted: Vec<_> = again
        .iter()
        .map(|(_, d)| (d.receipt.deliveries, d.receipt.attempt, d.former_lease))
        .collect();
    assert_eq!(counted, [(2, 2, Some(held[0].receipt.token)); 5]);
    assert_eq!(it.commit(&held).await, [Outcome::LeaseLost; 5]);
    assert_eq!(it.leases().await, (vec![], 5));
}

#[tokio::test]
async fn a_reserver_is_told_when_the_lease_of_a_run_ends() {
    let (_folder, path) = file();
    let it = Setup::open(&format!("sqlite:{}", path.display()));
    let before = long_ago(&it);
    it.push(5).await;
    let ends = it.reserve_for(&[Demand { lease: LEASE, ..want() }]).await[0].1.lease_expire_time;
    let mut reserver = it.store.reserver(&it.queue.name);
    for after in [it.store.now(), before] {
        let next = reserver.next_eligible(&it.queue, after).await.unwrap();
        assert_eq!(next, Some(ends));
    }
    assert_eq!(reserver.next_eligible(&it.queue, ends).await.unwrap(), None);
    assert_eq!(it.leases().await, (vec![5], 0), "the question has not moved it");
}

#[tokio::test]
async fn a_run_that_begins_after_a_lapse_keeps_older_receipts_out() {
    let it = Setup::in_memory();
    it.push(5).await;
    let (_, stale) = it.reserve(5).await;
    it.clock.advance(LEASE + Duration::from_millis(5));
    let (_, held) = it.reserve(5).await;
    it.clock.advance(Duration::from_millis(5));
    assert_eq!(it.leases().await, (vec![5], 5));
    assert_eq!(it.commit(&stale).await, [Outcome::LeaseLost; 5]);
    assert_eq!(it.commit(&held).await, [Outcome::Ok; 5]);
}

#[tokio::test]
async fn an_item_that_expires_is_not_committed_with_the_others() {
    let it = Setup::in_memory();
    let mut pushes: Vec<Push> = (0..3).map(|n| push_of(&it.queue, &n.to_string())).collect();
    pushes[1].item.ttl = Some(Duration::from_secs(10));
    it.store.push(pushes).await.unwrap();
    it.clock.advance(Duration::from_millis(5));
    let (_, held) = it.reserve(3).await;
    it.clock.advance(Duration::from_secs(11));
    assert_eq!(it.leases().await, (vec![3], 0));
    assert_eq!(it.commit(&held).await, [Outcome::Ok, Outcome::Gone, Outcome::Ok]);
    assert_eq!(it.store.totals(&it.queue.name).await.unwrap().expired, 1);
}

#[tokio::test]
async fn runs_are_bounded() {
    let it = Setup::in_memory();
    it.push(20).await;
    for _ in 0..10 {
        it.reserve(1).await;
    }
    assert_eq!(it.leases().await, (vec![1; 8], 2));
    it.store.depth(&it.queue).await.unwrap();
    it.push(5_100).await;
    for items in [1_500, 1_500, 1_001, 1_000] {
        it.reserve(items).await;
    }
    assert_eq!(it.leases().await, (vec![1_500, 1_500, 1_000], 10 + 1_001));
}

#[tokio::test]
async fn a_reader_keeps_runs_out_as_long_as_it_reads() {
    let (_folder, path) = file();
    let it = Setup::open(&format!("sqlite:{}", path.display()));
    it.push(9).await;
    it.reserve(3).await;
    let reading = it.store.inner.writer.leases_in_items().await.unwrap();
    assert_eq!(it.leases().await, (vec![], 3));
    it.reserve(3).await;
    assert_eq!(it.leases().await, (vec![], 6));
    drop(reading);
    it.reserve(3).await;
    assert_eq!(it.leases().await, (vec![3], 6));
}

#[tokio::test]
async fn only_what_one_commit_is_likely_to_end_becomes_a_run() {
    let it = Setup::in_memory();
    it.push(20).await;
    let ten = Demand { max_items: 5, ..want() };
    assert_eq!(it.reserve_for(&[ten.clone(), ten.clone()]).await.len(), 10);
    assert_eq!(it.leases().await, (vec![], 10), "items of two consumers, in turn");
    let spare = Demand { spare: true, ..ten.clone() };
    assert_eq!(it.reserve_for(&[spare]).await.len(), 5);
    assert_eq!(it.leases().await, (vec![], 15), "items of nobody yet");
    let queue = Arc::new(Queue { retention: Duration::from_secs(9), ..(*it.queue).clone() });
    let mut reserver = it.store.reserver(&queue.name);
    assert_eq!(
        reserver.reserve(&queue, &[ten], Appeared::Nothing).await.unwrap().deliveries.len(),
        5
    );
    assert_eq!(it.leases().await, (vec![], 20), "items that become history");
}

#[tokio::test]
async fn items_with_ordering_keys_are_leased_by_themselves() {
    let it = Setup::in_memory();
    let mut pushes: Vec<Push> = (0..3).map(|n| push_of(&it.queue, &n.to_string())).collect();
    pushes[1].item.ordering_key = OrderingKey::new("k");
    it.store.push(pushes).await.unwrap();
    it.clock.advance(Duration::from_millis(5));
    let (_, held) = it.reserve(3).await;
    assert_eq!(it.leases().await, (vec![], 3));
    assert_eq!(it.commit(&held).await, [Outcome::Ok; 3]);
}

#[tokio::test]
async fn leases_outlive_a_broker() {
    let (_folder, path) = file();
    let uri = format!("sqlite:{}", path.display());
    let it = Setup::open(&uri);
    it.push(5).await;
    let (_, held) = it.reserve(3).await;
    assert_eq!(it.leases().await, (vec![3], 0));
    drop(it);

    let it = Setup::open(&uri);
    assert_eq!(it.leases().await, (vec![], 3));
    assert_eq!(it.reserve(9).await.0, [3, 4]);
    assert_eq!(it.commit(&held).await, [Outcome::Ok; 3]);
}

/// Changes the file by `sql` while it has a run of three items, and returns the items that a broker finds then. Before, a check finds this
/// fault.
async fn found_after(sql: &str, fault: &str) -> Vec<usize> {
    let (_folder, path) = file();
    let uri = format!("sqlite:{}", path.display());
    let it = Setup::open(&uri);
    it.push(5).await;
    it.reserve(3).await;
    drop(it);
    assert!(checked(&path).is_whole());
    assert_eq!(Connection::open(&path).unwrap().execute(sql, []).unwrap(), 1);
    assert_eq!(checked(&path).faults, [fault]);
    let it = Setup::open(&uri);
    it.clock.advance(Duration::from_millis(5));
    let found = it.reserve(9).await.0;
    assert_eq!(it.leases().await.0, [found.len() as i64]);
    found
}

#[tokio::test]
async fn damage_ends_leases_and_nothing_else() {
    let leased = "lease of the items 0000000000000001 to 0000000000000003 of queue";
    let lost =
        found_after("DELETE FROM items WHERE id = 2", &format!("{leased} q: 2 of 3 are there"))
            .await;
    assert_eq!(lost, [3, 4], "the others are leased");
    let damaged = found_after(
        "UPDATE runs SET priority = 300",
        "leases: Integer 300 out of range at index 3",
    )
    .await;
    assert_eq!(damaged, [0, 1, 2, 3, 4], "which of them were leased is not known any more");
}

#[tokio::test]
async fn what_a_run_leases_is_settled_otherwise_too() {
    let it = Setup::in_memory();
    it.push(6).await;
    let (_, held) = it.reserve(6).await;
    let until = it.store.now() + 2 * LEASE;
    let extension = Extension { held: held[0].clone(), until, is_renewal: false };
    assert_eq!(it.store.extend(vec![extension]).await.unwrap(), [Outcome::Ok]);
    assert_eq!(it.leases().await, (vec![], 6));
    let ends = it.store.lease_ends(held.clone()).await.unwrap();
    assert_eq!(ends[0], Some(until));
    assert!(ends[1..].iter().all(|end| end.is_some_and(|end| end < until)));
}

#[tokio::test]
async fn a_run_is_committed_under_settings_that_keep_history() {
    let it = Setup::in_memory();
    it.push(3).await;
    let (_, mut held) = it.reserve(3).await;
    let queue = Arc::new(Queue { retention: Duration::from_secs(9), ..(*it.queue).clone() });
    for one in &mut held {
        one.queue = Arc::clone(&queue);
    }
    assert_eq!(it.commit(&held).await, [Outcome::Ok; 3]);
    assert_eq!(it.store.depth(&queue).await.unwrap().processed, 3);
}

#[tokio::test]
async fn reserves_of_a_queue_follow_each_other() {
    let it = Setup::in_memory();
    it.push(7).await;
    for expected in [vec![0, 1], vec![2, 3, 4], vec![5, 6], vec![]] {
        assert_eq!(it.reserve(expected.len().max(1)).await.0, expected);
    }
    assert_eq!(it.leases().await, (vec![2, 3, 2], 0));
}

#[tokio::test]
async fn large_items_are_leased_by_themselves() {
    let it = Setup::in_memory();
    let large = "x".repeat(300 << 10);
    it.store.push(vec![push_of(&it.queue, &large), push_of(&it.queue, &large)]).await.unwrap();
    it.clock.advance(Duration::from_millis(5));
    assert_eq!(it.reserve_for(&[want()]).await.len(), 2);
    assert_eq!(it.leases().await, (vec![], 2), "to write them out would take long");
}

#[tokio::test]
async fn what_is_no_item_leaves_runs_alone() {
    let (_folder, path) = file();
    let it = Setup::open(&format!("sqlite:{}", path.display()));
    it.push(3).await;
    it.reserve(3).await;
    it.store.ping().await.unwrap();
    it.store.links().await.unwrap();
    it.store.create_queue(&it.queue).await.unwrap();
    it.store.get_queue(&it.queue.name).await.unwrap();
    it.store.add_totals(vec![(it.queue.name.clone(), Totals::default())]).await.unwrap();
    it.store.totals(&it.queue.name).await.unwrap();
    assert_eq!(it.leases().await, (vec![3], 0));
}

/// A delivery that is taken back is not counted, so that the next one has the same number.
#[tokio::test]
async fn a_receipt_of_another_reserve_commits_nothing_of_a_run() {
    let it = Setup::in_memory();
    it.push(1).await;
    let (_, old) = it.reserve(1).await;
    let to = RollbackTo::Queue {
        eligible_time: long_ago(&it),
        attempt: 1,
        ended: EndedDelivery::Unsent { former_lease: None },
    };
    let rollback = Rollback { held: old[0].clone(), to, reason: None };
    assert_eq!(it.store.rollback(vec![rollback]).await.unwrap(), [Outcome::Ok]);
    let (_, held) = it.reserve(1).await;
    assert_eq!(it.leases().await, (vec![1], 0));
    assert_eq!(held[0].receipt.deliveries, old[0].receipt.deliveries);
    assert_eq!(it.commit(&old).await, [Outcome::LeaseLost]);
    assert_eq!(it.commit(&held).await, [Outcome::Ok]);
}

#[tokio::test]
async fn a_damaged_run_ends_while_the_broker_is_at_work() {
    let it = Setup::in_memory();
    it.push(5).await;
    it.reserve(3).await;
    let damage = |tx: &Tx<'_>| tx.conn.execute("UPDATE runs SET priority = 300", []);
    assert_eq!(it.store.inner.writer.call(Kind::Reserve, damage).await.unwrap(), 1);
    let depth = it.store.depth(&it.queue).await;
    assert!(matches!(depth, Err(StoreError::Unavailable { .. })), "{depth:?}");
    assert_eq!(it.store.depth(&it.queue).await.unwrap().ready, 5);
    assert_eq!(it.reserve(9).await.0, [0, 1, 2, 3, 4]);
}

/// Damage costs the damaged item, as anywhere, and the leases of those beside it.
#[tokio::test]
async fn damage_to_an_item_of_a_run_holds_up_nobody_else() {
    let (_folder, path) = file();
    let uri = format!("sqlite:{}", path.display());
    let it = Setup::open(&uri);
    let payload = |n: u8| char::from(b'a' + n).to_string().repeat(3_000);
    it.store.push((0..5).map(|n| push_of(&it.queue, &payload(n))).collect()).await.unwrap();
    drop(it);
    let it = Setup::open(&uri);
    it.clock.advance(Duration::from_millis(5));
    assert_eq!(it.reserve_for(&[Demand { max_items: 3, ..want() }]).await.len(), 3);

    let beside = Connection::open(&path).unwrap();
    let forget_pages = "UPDATE meta SET value = value + 1 WHERE key = 'pinged'";
    beside.execute_batch(forget_pages).unwrap();
    beside.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let page = bytes
        .chunks(4_096)
        .position(|page| page.windows(2_900).any(|part| part.iter().all(|byte| *byte == b'b')));
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[0x7f; 8], page.unwrap() as u64 * 4_096).unwrap();
    beside.execute_batch(forget_pages).unwrap();

    let other =
        Arc::new(Queue { name: QueueName::parse("queue", "o").unwrap(), ..(*it.queue).clone() });
    let depth = it.store.depth(&other).await;
    assert!(matches!(depth, Err(StoreError::Unavailable { .. })), "{depth:?}");
    it.store.depth(&other).await.unwrap();
    let mut found = 0;
    let mut reserver = it.store.reserver(&it.queue.name);
    for _ in 0..9 {
        let demand = Demand { max_items: 1, ..want() };
        if let Ok(reserved) = reserver.reserve(&it.queue, &[demand], Appeared::Nothing).await {
            found += reserved.deliveries.len();
        }
    }
    assert_eq!(found, 4);
}

#[tokio::test]
async fn a_file_opens_that_has_no_room_for_its_leases() {
    let (_folder, path) = file();
    let it = Setup::open(&format!("sqlite:{}", path.display()));
    it.push(2_000).await;
    let demand = Demand { max_items: 1_500, ..want() };
    assert_eq!(it.reserve_for(&[demand]).await.len(), 1_500);
    drop(it);
    let conn = Connection::open(&path).unwrap();
    let limit = |pages: i64| conn.pragma_update(None, "max_page_count", pages).unwrap();
    limit(1); // of those that are there none is taken away
    assert!(Runs::found(&conn).unwrap().any(), "later calls write them out");
    limit(1 << 20);
    assert!(!Runs::found(&conn).unwrap().any());
}
