//! Tests of what changes of the machine's clock must not do to items.

use super::*;
use crate::domain::Eligibility;

const MINUTE: Duration = Duration::from_mins(1);

fn want(lease: Duration) -> Demand {
    Demand {
        max_items: 10,
        max_bytes: 1 << 20,
        may_exceed: true,
        lease,
        consumer: None,
        spare: false,
    }
}

/// Returns a clock whose machine was set forward or back.
fn stepped(millis: i64) -> Arc<Clock> {
    let clock = Arc::new(Clock::system());
    clock.step_machine(millis);
    if millis < 0 {
        clock.set(Timestamp(clock.now().0 + millis));
    }
    clock
}

fn open_at(path: &Path, clock: &Arc<Clock>) -> SqliteStore {
    let uri = format!("sqlite:{}", path.display());
    SqliteStore::open_with(&uri, clock.clone(), NO_SWEEP).unwrap()
}

/// An item that was pushed as ready is ready after a restart, though the clock was set back meanwhile. A delayed item
/// is not.
#[tokio::test]
async fn a_restart_with_the_clock_back_by_minutes_hides_nothing() {
    let (_folder, path) = file();
    let store = open_at(&path, &stepped(0));
    let queue = queue(&store);
    let mut later = push_of(&queue, "later");
    later.item.eligibility = Eligibility::After(MINUTE);
    store.push(vec![push_of(&queue, "now"), later]).await.unwrap();
    drop(store);

    let store = open_at(&path, &stepped(-10 * 60_000));
    let reserved = store
        .reserver(&queue.name)
        .reserve(&queue, &[want(MINUTE)], Appeared::Nothing)
        .await
        .unwrap();
    assert_eq!(reserved.deliveries.len(), 1);
    assert_eq!(reserved.deliveries[0].1.item.payload, "now");
    assert_eq!(store.depth(&queue).await.unwrap().delayed, 1);
}

/// A machine whose clock was wrong by years leaves times in the file that no clock catches up with.
#[tokio::test]
async fn a_restart_with_the_clock_back_by_years_sets_all_times_back() {
    let (_folder, path) = file();
    let year = Duration::from_hours(24 * 365);
    let ahead = stepped(year.as_millis() as i64);
    let store = open_at(&path, &ahead);
    let queue = queue(&store);
    let mut later = push_of(&queue, "later");
    later.item.eligibility = Eligibility::After(10 * MINUTE);
    let mut short = push_of(&queue, "short");
    short.item.eligibility = Eligibility::After(10 * MINUTE);
    short.item.ttl = Some(20 * MINUTE);
    store.push(vec![push_of(&queue, "now"), later, short]).await.unwrap();
    drop(store);

    let clock = stepped(0);
    let store = open_at(&path, &clock);
    assert!(store.now().until(clock.now()) < MINUTE && clock.now().until(store.now()) < MINUTE);
    let reserved = store
        .reserver(&queue.name)
        .reserve(&queue, &[want(MINUTE)], Appeared::Nothing)
        .await
        .unwrap();
    assert_eq!(reserved.deliveries.len(), 1);
    let depth = store.depth(&queue).await.unwrap();
    assert_eq!((depth.reserved, depth.delayed), (1, 2));
    clock.advance(11 * MINUTE);
    assert_eq!(store.depth(&queue).await.unwrap().ready, 3);
    clock.advance(10 * MINUTE);
    assert_eq!(store.depth(&queue).await.unwrap().ready, 2, "one item has expired");
}

/// While the broker runs, ready items stay ready, and a lease ends neither early nor much later.
#[tokio::test]
async fn a_clock_set_back_hides_no_ready_item_and_shortens_no_lease() {
    let (_folder, path) = file();
    let clock = stepped(0);
    let store = open_at(&path, &clock);
    let queue = queue(&store);
    store.push(vec![push_of(&queue, "first"), push_of(&queue, "second")]).await.unwrap();
    let one = Demand { max_items: 1, ..want(MINUTE) };
    assert_eq!(
        store
            .reserver(&queue.name)
            .reserve(&queue, std::slice::from_ref(&one), Appeared::Nothing)
            .await
            .unwrap()
            .deliveries
            .len(),
        1
    );

    clock.step_machine(-10 * 60_000);
    let before = store.now();
    assert_eq!(
        store
            .reserver(&queue.name)
            .reserve(&queue, std::slice::from_ref(&one), Appeared::Nothing)
            .await
            .unwrap()
            .deliveries
            .len(),
        1
    );
    assert_eq!(store.depth(&queue).await.unwrap().reserved, 2);
    assert!(store.now() >= before);

    // The time of both leases passes for everyone.
    clock.advance(MINUTE + MINUTE / 6);
    assert_eq!(store.depth(&queue).await.unwrap().ready, 2);
}

/// On a machine that was suspended, time has passed for everyone else.
#[tokio::test]
async fn a_clock_set_forward_is_followed_without_a_restart() {
    let (_folder, path) = file();
    let clock = stepped(0);
    let store = open_at(&path, &clock);
    let queue = queue(&store);
    let mut later = push_of(&queue, "later");
    later.item.eligibility = Eligibility::After(10 * MINUTE);
    store.push(vec![later]).await.unwrap();
    assert_eq!(store.depth(&queue).await.unwrap().delayed, 1);
    clock.step_machine(11 * 60_000);
    assert_eq!(
        store
            .reserver(&queue.name)
            .reserve(&queue, &[want(MINUTE)], Appeared::Nothing)
            .await
            .unwrap()
            .deliveries
            .len(),
        1
    );
}
