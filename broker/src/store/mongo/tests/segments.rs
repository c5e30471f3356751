//! Items that share documents: what brokers do to each other's segments, and writes whose answers are lost.

use super::{
    own_server::{Server, held_up, times, unsure},
    *,
};
use crate::{
    domain::{DedupId, Eligibility, ItemId, ItemState, Pushed},
    store::{RedriveFilter, mongo::reserve::claims::Handover},
};

const SIZE: SegmentSize = SegmentSize { max: 10, alone: true };

/// Two brokers on documents of up to ten items.
async fn two() -> (Scratch, Arc<Clock>, Vec<Arc<Broker<MongoStore>>>, Arc<Queue>) {
    let (scratch, clock) = (Scratch::with_segments(SIZE), Arc::new(Clock::system()));
    let stores = brokers(&scratch, &clock, 2).await;
    let queue = make(&stores[0], queue_named("q")).await;
    (scratch, clock, stores, queue)
}

fn numbers(range: std::ops::Range<usize>) -> Vec<String> {
    range.map(|n| n.to_string()).collect()
}

async fn push(store: &Broker<MongoStore>, queue: &Arc<Queue>, count: usize) {
    let pushes = numbers(0..count).iter().map(|n| push_of(queue, n, 0)).collect();
    store.push(pushes).await.unwrap();
}

fn payloads(deliveries: &[Delivery]) -> Vec<String> {
    let text = |d: &Delivery| String::from_utf8(d.item.payload.to_vec()).unwrap();
    deliveries.iter().map(text).collect()
}

async fn commit(
    store: &Broker<MongoStore>,
    queue: &Arc<Queue>,
    items: &[Delivery],
) -> Vec<Outcome> {
    store.commit(items.iter().map(|delivery| held(queue, delivery)).collect()).await.unwrap()
}

fn back(queue: &Arc<Queue>, delivery: &Delivery) -> Rollback {
    let to = RollbackTo::Queue {
        eligible_time: delivery.previous_eligible_time,
        attempt: 1,
        ended: EndedDelivery::Unsent { former_lease: None },
    };
    Rollback { held: held(queue, delivery), to, reason: None }
}

fn move_of(queue: &Arc<Queue>, to: &Arc<Queue>, delivery: &Delivery) -> Move {
    Move {
        held: held(queue, delivery),
        to: to.clone(),
        payload: None,
        content_type: None,
        headers: [].into(),
        priority: None,
        eligible_time: delivery.previous_eligible_time,
    }
}

fn items_of(store: &MongoStore) -> mongodb::Collection<Document> {
    store.inner.db.collection("items.default")
}

/// How many documents are segments, and how many are items.
async fn documents(store: &MongoStore) -> (u64, u64) {
    let items = items_of(store);
    let segments = items.count_documents(doc! { "left": { "$exists": true } });
    let own = doc! { "payload": { "$exists": true } };
    (segments.await.unwrap(), items.count_documents(own).await.unwrap())
}

async fn tombstones(store: &MongoStore) -> u64 {
    let tombstone = schema::layout::millis(schema::layout::TOMBSTONE);
    let tombstones = doc! { "when": tombstone, "expires": { "$exists": true } };
    items_of(store).count_documents(tombstones).await.unwrap()
}

/// Waits until nothing is left, not even an empty segment.
async fn until_nothing_is_left(store: &MongoStore) {
    until("nothing is left", async || documents(store).await == (0, 0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn items_that_are_pushed_together_share_a_document_to_their_end() {
    let (_scratch, _clock, stores, queue) = two().await;
    push(&stores[0], &queue, 25).await;
    assert_eq!(documents(&stores[0]).await, (3, 0));
    let first = take(&stores[0], &queue, 13).await;
    let rest = take(&stores[1], &queue, 100).await;
    assert_eq!(payloads(&first), numbers(0..13));
    assert_eq!(payloads(&rest), numbers(13..25));
    let depth = stores[1].depth(&queue).await.unwrap();
    assert_eq!((depth.ready, depth.reserved), (0, 25));
    assert_eq!(commit(&stores[0], &queue, &first[5..]).await, [Outcome::Ok; 8]);
    assert_eq!(commit(&stores[1], &queue, &rest).await, [Outcome::Ok; 12]);
    assert_eq!(stores[0].depth(&queue).await.unwrap().reserved, 5);
    assert_eq!(commit(&stores[0], &queue, &first[..5]).await, [Outcome::Ok; 5]);
    assert_eq!(documents(&stores[0]).await.1, 0, "nothing was detached");
    assert_eq!(tombstones(&stores[0]).await, 0, "nor committed by itself");
    until_nothing_is_left(&stores[0]).await;
    assert_eq!(commit(&stores[0], &queue, &first).await, [Outcome::Gone; 13]);
    assert_eq!(stores[0].depth(&queue).await.unwrap().unsettled(), 0);
}

/// No item of them has a deduplication id, or each takes its id along.
#[tokio::test(flavor = "multi_thread")]
async fn segments_that_all_items_have_left_are_deleted() {
    let (_scratch, _clock, stores, queue) = two().await;
    push(&stores[0], &queue, 4).await;
    push_ids(&stores[0], &queue, &["a", "b", "c", "d"]).await;
    assert_eq!(documents(&stores[0]).await, (2, 0));
    let taken = take(&stores[0], &queue, 8).await;
    let rollbacks = taken.iter().map(|delivery| back(&queue, delivery)).collect();
    assert_eq!(stores[0].rollback(rollbacks).await.unwrap(), [Outcome::Ok; 8]);
    assert_eq!(documents(&stores[0]).await, (0, 8));
    assert_eq!(tombstones(&stores[0]).await, 0, "no document remembers ids that another has");
}

#[tokio::test(flavor = "multi_thread")]
async fn half_a_run_that_lapses_comes_back_and_the_other_half_does_not() {
    let (_scratch, clock, stores, queue) = two().await;
    push(&stores[0], &queue, 10).await;
    let taken = take(&stores[0], &queue, 8).await;
    assert_eq!(commit(&stores[0], &queue, &taken[..4]).await, [Outcome::Ok; 4]);
    clock.advance(LEASE + Duration::from_secs(1));
    assert_eq!(stores[1].depth(&queue).await.unwrap().ready, 6);
    let again = take(&stores[1], &queue, 100).await;
    assert_eq!(payloads(&again), ["8", "9", "4", "5", "6", "7"]);
    let attempts: Vec<u32> = again.iter().map(|delivery| delivery.item.attempt).collect();
    assert_eq!(attempts, [1, 1, 2, 2, 2, 2]);
    let expected = [[Outcome::Gone; 4], [Outcome::LeaseLost; 4]].concat();
    assert_eq!(commit(&stores[0], &queue, &taken).await, expected);
    assert_eq!(commit(&stores[1], &queue, &again).await, [Outcome::Ok; 6]);
    assert_eq!(stores[0].depth(&queue).await.unwrap().unsettled(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_receipt_changes_nothing_whatever_is_asked() {
    let (_scratch, clock, stores, queue) = two().await;
    let to = make(&stores[0], queue_named("to")).await;
    push(&stores[0], &queue, 8).await;
    let stale = take(&stores[0], &queue, 8).await;
    clock.advance(LEASE + Duration::from_secs(1));
    let taken = take(&stores[1], &queue, 8).await;
    assert_eq!(payloads(&taken), numbers(0..8));
    for store in &stores {
        let receipts = || stale.iter().map(|delivery| held(&queue, delivery));
        assert_eq!(store.lease_ends(receipts().collect()).await.unwrap(), [None; 8]);
        assert_eq!(commit(store, &queue, &stale).await, [Outcome::LeaseLost; 8]);
        let until = store.now() + LEASE * 2;
        let extended = store.extend(receipts().map(|held| extension(held, until)).collect());
        assert_eq!(extended.await.unwrap(), [Outcome::LeaseLost; 8]);
        let rollbacks = stale.iter().map(|delivery| back(&queue, delivery)).collect();
        assert_eq!(store.rollback(rollbacks).await.unwrap(), [Outcome::LeaseLost; 8]);
        let moves = stale.iter().map(|delivery| move_of(&queue, &to, delivery)).collect();
        assert_eq!(store.move_items(moves).await.unwrap(), [Outcome::LeaseLost; 8]);
        let pushed = store.commit_and_push(held(&queue, &stale[0]), vec![push_of(&to, "x", 0)]);
        assert_eq!(pushed.await.unwrap(), (Outcome::LeaseLost, vec![]));
    }
    assert_eq!(commit(&stores[1], &queue, &taken).await, [Outcome::Ok; 8]);
    assert_eq!(stores[1].depth(&to).await.unwrap().unsettled(), 0);
}

/// Receipts of a segment that nobody else touched, against each transition that takes items out of it.
#[tokio::test(flavor = "multi_thread")]
async fn every_fate_leaves_the_rest_of_a_segment_as_it_is() {
    let (_scratch, _clock, stores, queue) = two().await;
    let to = make(&stores[0], queue_named("to")).await;
    for store in &stores {
        push(&stores[0], &queue, 10).await;
        let taken = take(&stores[0], &queue, 8).await;
        let until = store.now() + LEASE * 2;
        let extended = store.extend(vec![extension(held(&queue, &taken[0]), until)]).await.unwrap();
        assert_eq!(extended, [Outcome::Ok]);
        let moved = store.move_items(vec![move_of(&queue, &to, &taken[1])]).await.unwrap();
        assert_eq!(moved, [Outcome::Ok]);
        let pushed = store.commit_and_push(held(&queue, &taken[2]), vec![push_of(&to, "x", 0)]);
        assert_eq!(pushed.await.unwrap().0, Outcome::Ok);
        let deleted = store.delete_item(&queue, taken[3].item.id, None).await.unwrap();
        assert_eq!(deleted, crate::store::ItemDeleted::Done);
        let listed = store.list_items(&queue, None, None, 100).await.unwrap();
        assert_eq!(listed.entries.len(), 7);
        let rolled_back = store.rollback(vec![back(&queue, &taken[4])]).await.unwrap();
        assert_eq!(rolled_back, [Outcome::Ok]);
        let depth = store.depth(&queue).await.unwrap();
        assert_eq!((depth.ready, depth.reserved), (3, 4));
        let rest: Vec<Delivery> = [&taken[..1], &taken[5..]].concat().into_iter().collect();
        assert_eq!(commit(store, &queue, &rest).await, [Outcome::Ok; 4]);
        let again = take(store, &queue, 10).await;
        assert_eq!(payloads(&again), ["4", "8", "9"]);
        assert_eq!(commit(store, &queue, &again).await, [Outcome::Ok; 3]);
        assert_eq!(store.depth(&queue).await.unwrap().unsettled(), 0);
        let moved = take(store, &to, 10).await;
        assert_eq!(commit(store, &to, &moved).await, [Outcome::Ok; 2]);
    }
}

fn push_with_id(queue: &Arc<Queue>, id: &str) -> Push {
    let mut push = push_of(queue, id, 0);
    push.item.dedup_id = DedupId::new(id);
    push
}

async fn push_ids(store: &MongoStore, queue: &Arc<Queue>, ids: &[&str]) -> Vec<Pushed> {
    store.push(ids.iter().map(|id| push_with_id(queue, id)).collect()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn deduplication_ids_are_remembered_wherever_their_items_are() {
    let (_scratch, clock, stores, queue) = two().await;
    let window = queue.dedup_window;
    let first = push_ids(&stores[0], &queue, &["a", "b", "c", "d"]).await;
    assert_eq!(documents(&stores[0]).await, (1, 0));
    let ids: Vec<ItemId> = first.iter().map(|pushed| pushed.id).collect();
    // In a segment, ready or reserved; in a document of its own; committed with others left, and without.
    let taken = take(&stores[0], &queue, 3).await;
    assert_eq!(taken[1].item.dedup_id, DedupId::new("b"));
    assert_eq!(stores[0].rollback(vec![back(&queue, &taken[2])]).await.unwrap(), [Outcome::Ok]);
    assert_eq!(commit(&stores[0], &queue, &taken[..1]).await, [Outcome::Ok]);
    let again = async |store: &MongoStore| {
        let again = push_ids(store, &queue, &["a", "b", "c", "d"]).await;
        assert!(again.iter().all(|pushed| pushed.deduplicated));
        assert_eq!(again.iter().map(|pushed| pushed.id).collect::<Vec<_>>(), ids);
    };
    again(&stores[1]).await;
    assert_eq!(commit(&stores[1], &queue, &taken[1..2]).await, [Outcome::Ok], "another broker");
    again(&stores[0]).await;
    let rest = all_of(&stores[0], &queue, 2).await;
    assert_eq!(payloads(&rest), ["c", "d"]);
    assert_eq!(commit(&stores[0], &queue, &rest).await, [Outcome::Ok; 2]);
    again(&stores[1]).await;
    assert_eq!(stores[0].depth(&queue).await.unwrap().unsettled(), 0);
    assert_eq!(documents(&stores[0]).await, (0, 0), "only tombstones");

    // What is new is stored beside duplicates, in its place.
    let mixed = push_ids(&stores[0], &queue, &["e", "a", "f", "e", "g"]).await;
    let duplicates: Vec<bool> = mixed.iter().map(|pushed| pushed.deduplicated).collect();
    assert_eq!(duplicates, [false, true, false, true, false]);
    assert_eq!((mixed[1].id, mixed[3].id), (ids[0], mixed[0].id));
    let taken = take(&stores[1], &queue, 10).await;
    assert_eq!(payloads(&taken), ["e", "f", "g"]);
    assert_eq!(taken[1].item.id, mixed[2].id);
    assert_eq!(commit(&stores[1], &queue, &taken).await, [Outcome::Ok; 3]);
    clock.advance(window + Duration::from_secs(1));
    let later = push_ids(&stores[0], &queue, &["a", "b", "e"]).await;
    assert!(later.iter().all(|pushed| !pushed.deduplicated));
    assert_eq!(payloads(&take(&stores[0], &queue, 10).await), ["a", "b", "e"]);
}

/// Whole segments of which nothing is left become tombstones too, if whoever sets the last bit does not know it.
#[tokio::test(flavor = "multi_thread")]
async fn a_purge_keeps_the_ids_of_committed_items_and_forgets_the_others() {
    let (_scratch, _clock, stores, queue) = two().await;
    push_ids(&stores[0], &queue, &["a", "b", "c"]).await;
    let taken = take(&stores[0], &queue, 1).await;
    assert_eq!(commit(&stores[0], &queue, &taken).await, [Outcome::Ok]);
    assert_eq!(stores[1].purge(&queue).await.unwrap(), 2);
    let again = push_ids(&stores[0], &queue, &["a", "b", "c"]).await;
    let duplicates: Vec<bool> = again.iter().map(|pushed| pushed.deduplicated).collect();
    assert_eq!(duplicates, [true, false, false]);
    assert_eq!(payloads(&take(&stores[0], &queue, 10).await), ["b", "c"]);
}

/// What others take or commit meanwhile is not among it.
#[tokio::test(flavor = "multi_thread")]
async fn a_purge_counts_what_it_deletes() {
    let (_scratch, _clock, stores, queue) = two().await;
    for _ in 0..10 {
        push(&stores[0], &queue, 300).await;
        let consume = async {
            let mut committed = 0;
            loop {
                let taken = take(&stores[1], &queue, 20).await;
                if taken.is_empty() {
                    return committed;
                }
                let outcomes = commit(&stores[1], &queue, &taken).await;
                committed += outcomes.iter().filter(|outcome| **outcome == Outcome::Ok).count();
            }
        };
        let (committed, purged) = tokio::join!(consume, stores[0].purge(&queue));
        assert_eq!(committed as u64 + purged.unwrap(), 300);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_change_nothing_and_show_everything_page_by_page() {
    let (_scratch, _clock, stores, queue) = two().await;
    push(&stores[0], &queue, 25).await;
    push(&stores[1], &queue, 3).await;
    let taken = take(&stores[0], &queue, 7).await;
    assert_eq!(commit(&stores[0], &queue, &taken[2..4]).await, [Outcome::Ok; 2]);
    assert_eq!(stores[0].rollback(vec![back(&queue, &taken[6])]).await.unwrap(), [Outcome::Ok]);
    let before = documents(&stores[0]).await;
    for (state, count) in [(None, 26), (Some(ItemState::Ready), 22), (Some(ItemState::Reserved), 4)]
    {
        let whole = stores[1].list_items(&queue, state, None, 100).await.unwrap();
        assert_eq!((whole.entries.len(), whole.next), (count, None));
        for limit in [1, 3, 10] {
            let (mut all, mut next) = (Vec::new(), None);
            loop {
                let cursor: Option<String> = next.take();
                let page =
                    stores[1].list_items(&queue, state, cursor.as_deref(), limit).await.unwrap();
                assert!(page.entries.len() <= limit);
                all.extend(page.entries);
                next = page.next;
                if next.is_none() {
                    break;
                }
            }
            assert_eq!(all, whole.entries, "{state:?} {limit}");
        }
        for item in &whole.entries {
            let alone = stores[1].get_item(&queue, item.id).await.unwrap();
            assert_eq!(alone.as_ref(), Some(item));
        }
    }
    assert_eq!(documents(&stores[0]).await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn extending_all_of_a_claim_moves_its_end_in_place() {
    let (_scratch, clock, stores, queue) = two().await;
    push(&stores[0], &queue, 10).await;
    let taken = take(&stores[0], &queue, 8).await;
    assert_eq!(commit(&stores[0], &queue, &taken[..2]).await, [Outcome::Ok; 2]);
    for _ in 0..3 {
        clock.advance(LEASE / 2);
        let until = stores[0].now() + LEASE;
        let rest = taken[2..].iter().map(|delivery| held(&queue, delivery));
        let rest = rest.map(|held| extension(held, until)).collect();
        assert_eq!(stores[0].extend(rest).await.unwrap(), [Outcome::Ok; 6]);
        assert!(stores[1].depth(&queue).await.unwrap().next_eligible.is_some());
    }
    assert_eq!(documents(&stores[0]).await, (1, 0), "nothing was detached");
    assert_eq!(payloads(&take(&stores[1], &queue, 10).await), ["8", "9"]);
    // One alone leaves; the others end as they were.
    let until = stores[0].now() + LEASE * 2;
    let one = vec![extension(held(&queue, &taken[2]), until)];
    assert_eq!(stores[0].extend(one).await.unwrap(), [Outcome::Ok]);
    clock.advance(LEASE + Duration::from_secs(1));
    let lapsed = all_of(&stores[1], &queue, 7).await;
    assert_eq!(payloads(&lapsed), numbers(3..10));
    assert_eq!(commit(&stores[0], &queue, &taken[2..3]).await, [Outcome::Ok]);
    assert_eq!(commit(&stores[0], &queue, &taken[3..]).await, [Outcome::LeaseLost; 5]);
}

#[tokio::test(flavor = "multi_thread")]
async fn commits_through_another_broker_leave_tombstones_for_the_one_that_claimed() {
    let (_scratch, _clock, stores, queue) = two().await;
    push(&stores[0], &queue, 10).await;
    let taken = take(&stores[0], &queue, 10).await;
    assert_eq!(commit(&stores[1], &queue, &taken[..4]).await, [Outcome::Ok; 4]);
    assert_eq!(documents(&stores[0]).await, (1, 0), "nothing was detached");
    let gone = [[Outcome::Gone; 4].as_slice(), &[Outcome::Ok; 6]].concat();
    assert_eq!(commit(&stores[0], &queue, &taken).await, gone);
    assert_eq!(commit(&stores[1], &queue, &taken).await, [Outcome::Gone; 10]);
    assert_eq!(stores[0].depth(&queue).await.unwrap().unsettled(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redrive_finds_items_of_segments_by_their_ids() {
    let (_scratch, _clock, stores, queue) = two().await;
    let to = make(&stores[0], queue_named("to")).await;
    push(&stores[0], &queue, 5).await;
    let listed = stores[0].list_items(&queue, None, None, 10).await.unwrap().entries;
    let filter =
        RedriveFilter { ids: vec![listed[1].id, listed[3].id], ..RedriveFilter::default() };
    let moved = stores[1].redrive(&queue, &to, &filter, None, 10).await.unwrap();
    assert_eq!(moved.items, 2);
    assert_eq!(payloads(&take(&stores[0], &to, 10).await), ["1", "3"]);
    assert_eq!(payloads(&take(&stores[0], &queue, 10).await), ["0", "2", "4"]);
}

/// Whoever reads the database finds one document per item in the view.
#[tokio::test(flavor = "multi_thread")]
async fn the_flat_view_shows_each_item() {
    let scratch = Scratch::with_segments(SegmentSize { max: 1_000, alone: true });
    let clock = Arc::new(Clock::system());
    let stores = brokers(&scratch, &clock, 2).await;
    let queue = make(&stores[0], queue_named("q")).await;
    push(&stores[0], &queue, 700).await;
    let taken = take(&stores[0], &queue, 600).await;
    assert_eq!(commit(&stores[0], &queue, &taken[40..120]).await, [Outcome::Ok; 80]);
    assert_eq!(stores[0].rollback(vec![back(&queue, &taken[599])]).await.unwrap(), [Outcome::Ok]);
    let view = stores[0].inner.db.collection::<Document>("items_flat.default");
    let mut cursor = view.find(doc! { "q": "q" }).sort(doc! { "_id": 1 }).await.unwrap();
    let mut shown = Vec::new();
    while cursor.advance().await.unwrap() {
        let item = cursor.deserialize_current().unwrap();
        let id = ItemId(item.get_object_id("_id").unwrap().bytes());
        shown.push((id, item.get("lock").is_some()));
    }
    let mut listed: Vec<(ItemId, bool)> = stores[0]
        .list_items(&queue, None, None, 1_000)
        .await
        .unwrap()
        .entries
        .iter()
        .map(|item| (item.id, item.state == ItemState::Reserved))
        .collect();
    listed.sort_unstable();
    assert_eq!(listed.len(), 620);
    assert_eq!(shown, listed);
    let find = doc! { "find": "items_flat.default", "filter": { "q": "q" } };
    let explained = doc! { "explain": find, "verbosity": "queryPlanner" };
    let plan = stores[0].inner.db.run_command(explained).await.unwrap().to_string();
    assert!(plan.contains("IXSCAN") && !plan.contains("COLLSCAN"), "{plan}");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_small_claims_take_a_segment_apart_and_miss_nothing() {
    let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
    let stores = brokers(&scratch, &clock, 2).await;
    let queue = make(&stores[0], queue_named("q")).await;
    push(&stores[0], &queue, 100).await;
    let mut all = Vec::new();
    while all.len() < 100 {
        let taken = take_all(&stores[all.len() % 2], &queue, 1).await;
        assert_eq!(commit(&stores[all.len() % 2], &queue, &taken).await, [Outcome::Ok]);
        all.extend(payloads(&taken));
    }
    assert_eq!(all, numbers(0..100));
    assert_eq!(stores[0].depth(&queue).await.unwrap().unsettled(), 0);
}

/// One statement claims all four. While it is on its way, another broker claims the first.
#[tokio::test(flavor = "multi_thread")]
async fn whole_segments_that_another_broker_takes_first_are_left_out() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let slow = server.open_with(&clock, "a", SIZE).await;
    let quick = server.open_with(&clock, "b", SIZE).await;
    let queue = make(&slow, queue_named("q")).await;
    push(&slow, &queue, 40).await;
    server.fail("update", times(1), held_up(Duration::from_secs(2))).await;
    let first = async {
        server.until_failing().await;
        take(&quick, &queue, 10).await
    };
    let (others, first) = tokio::join!(take(&slow, &queue, 40), first);
    assert_eq!(payloads(&first), numbers(0..10));
    assert_eq!(payloads(&others), numbers(10..40));
    assert_eq!(commit(&quick, &queue, &first).await, [Outcome::Ok; 10]);
    assert_eq!(commit(&slow, &queue, &others).await, [Outcome::Ok; 30]);
    assert_eq!(slow.depth(&queue).await.unwrap().unsettled(), 0);
}

/// Claims items for a caller that goes away before it has them, and returns them as they were claimed.
async fn abandon(store: &Broker<MongoStore>, queue: &Arc<Queue>, count: usize) -> Vec<Delivery> {
    let inner = &store.inner;
    let cursor = inner.cursor(&queue.name);
    let claimed = reserve::reserve(inner, &cursor, queue, &[want(count, LEASE)], None).await;
    let Handover { reserved, claim } = claimed.unwrap();
    drop(claim);
    reserved.deliveries.into_iter().map(|(_, delivery)| delivery).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_is_undone_leaves_others_of_its_segment_as_they_are() {
    let (_scratch, _clock, stores, queue) = two().await;
    push(&stores[0], &queue, 10).await;
    let taken = take(&stores[0], &queue, 3).await;
    assert_eq!(payloads(&abandon(&stores[0], &queue, 4).await), numbers(3..7));
    let rest = take(&stores[0], &queue, 10).await;
    assert_eq!(payloads(&rest), numbers(3..10));
    assert_untouched(&rest);
    assert_eq!(commit(&stores[0], &queue, &taken).await, [Outcome::Ok; 3]);
    assert_eq!(commit(&stores[0], &queue, &rest).await, [Outcome::Ok; 7]);
}

/// What was rolled back or was delayed is in the place where it was, not in that of its push.
#[tokio::test(flavor = "multi_thread")]
async fn items_of_a_claim_that_is_undone_are_in_their_places() {
    let (_scratch, clock, stores, queue) = two().await;
    let later = Duration::from_secs(5);
    let mut delayed = push_of(&queue, "delayed", 0);
    delayed.item.eligibility = Eligibility::After(later);
    stores[0].push(vec![delayed]).await.unwrap();
    clock.advance(later / 2);
    push(&stores[0], &queue, 1).await;
    clock.advance(later);
    let places = |of: &[Delivery]| -> Vec<(ItemId, Timestamp)> {
        of.iter().map(|delivery| (delivery.item.id, delivery.previous_eligible_time)).collect()
    };
    let abandoned = abandon(&stores[0], &queue, 2).await;
    assert_eq!(payloads(&abandoned), ["0", "delayed"]);
    let again = take(&stores[0], &queue, 2).await;
    assert_eq!(places(&again), places(&abandoned));
    assert_untouched(&again);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_of_part_of_a_segment_is_undone_when_its_answer_is_lost() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let store = server.open_with(&clock, "a", SIZE).await;
    let queue = make(&store, queue_named("q")).await;
    push(&store, &queue, 30).await;
    // Applied each time, and repeated each time.
    server.fail("update", "alwaysOn", unsure()).await;
    for _ in 0..2 {
        let refused = store.reserve(&queue, &[want(15, LEASE)]).await;
        assert!(matches!(refused, Err(crate::store::StoreError::Unavailable { .. })));
    }
    server.heal().await;
    let taken = take_all(&store, &queue, 30).await;
    assert_untouched(&taken);
    assert_eq!(payloads(&taken), numbers(0..30), "in order");
    assert_eq!(commit(&store, &queue, &taken).await, [Outcome::Ok; 30]);
}

/// Each write of each transition, refused once, applied and answered as not sure, or cut off.
#[tokio::test(flavor = "multi_thread")]
async fn writes_that_fail_lose_and_double_nothing() {
    let (server, clock) = (Server::start().await, Arc::new(Clock::system()));
    let store = server.open_with(&clock, "a", SIZE).await;
    let queue = make(&store, queue_named("q")).await;
    let to = make(&store, queue_named("to")).await;
    let faults = [
        ("update", doc! { "errorCode": 91 }),
        ("update", unsure()),
        ("update", doc! { "closeConnection": true }),
        ("delete", doc! { "errorCode": 91 }),
        ("delete", unsure()),
        ("delete", doc! { "closeConnection": true }),
        ("insert", doc! { "errorCode": 91 }),
        ("insert", doc! { "closeConnection": true }),
        ("find", doc! { "closeConnection": true }),
        (
            "commitTransaction",
            doc! { "errorCode": 91, "errorLabels": ["UnknownTransactionCommitResult"] },
        ),
        ("commitTransaction", doc! { "closeConnection": true }),
    ];
    for (command, data) in faults {
        let fail = || server.fail(command, times(1), data.clone());
        push(&store, &queue, 10).await;
        // The claim itself.
        fail().await;
        let claimed = store.reserve(&queue, &[want(7, LEASE)]).await;
        server.heal().await;
        let claimed = claimed.map(|reserved| reserved.deliveries).unwrap_or_default();
        let mut taken: Vec<Delivery> = claimed.into_iter().map(|(_, delivery)| delivery).collect();
        taken.extend(all_of(&store, &queue, 10 - taken.len()).await);
        assert_eq!(payloads(&taken), numbers(0..10), "{command} {data}");
        // Committing some: by bits, and with the rest by deleting the document.
        for part in [&taken[..2], &taken[2..4]] {
            fail().await;
            let outcomes = store.commit(part.iter().map(|d| held(&queue, d)).collect()).await;
            server.heal().await;
            if outcomes.is_err() {
                for outcome in commit(&store, &queue, part).await {
                    assert!(matches!(outcome, Outcome::Ok | Outcome::Gone), "{command} {data}");
                }
            }
        }
        // Detaching, for what has a fate of its own.
        fail().await;
        let rollbacks = vec![back(&queue, &taken[4]), back(&queue, &taken[5])];
        let _ = store.rollback(rollbacks).await;
        server.heal().await;
        fail().await;
        let moved = store.move_items(vec![move_of(&queue, &to, &taken[6])]).await;
        server.heal().await;
        if moved.is_err() {
            let _ = store.move_items(vec![move_of(&queue, &to, &taken[6])]).await.unwrap();
        }
        fail().await;
        let until = store.now() + LEASE;
        let _ = store.extend(vec![extension(held(&queue, &taken[7]), until)]).await;
        server.heal().await;
        let ends = commit(&store, &queue, &taken[7..]).await;
        assert_eq!(ends, [Outcome::Ok; 3], "{command} {data}");
        // A rollback that was refused: the lease ends.
        clock.advance(LEASE + Duration::from_secs(1));
        let again = all_of(&store, &queue, 2).await;
        assert_eq!(payloads(&again), ["4", "5"], "{command} {data}");
        assert_eq!(commit(&store, &queue, &again).await, [Outcome::Ok; 2]);
        let moved = all_of(&store, &to, 1).await;
        assert_eq!(payloads(&moved), ["6"], "{command} {data}");
        assert_eq!(commit(&store, &to, &moved).await, [Outcome::Ok]);
        for queue in [&queue, &to] {
            assert_eq!(store.depth(queue).await.unwrap().unsettled(), 0, "{command} {data}");
        }
    }
}

/// Takes all items, of which there are so many and no more; those of a claim that was not answered come back when it is undone.
async fn all_of(store: &Broker<MongoStore>, queue: &Arc<Queue>, count: usize) -> Vec<Delivery> {
    let mut taken = take_all(store, queue, count).await;
    assert!(take(store, queue, 10).await.is_empty());
    taken.sort_by_key(|delivery| delivery.item.id);
    taken
}
