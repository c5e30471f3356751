//! The loop of a dispatcher: collect demands, reserve, hand out, wait.

use std::{sync::Arc, time::Duration};

use sluicegate_proto::backoff::Backoff;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::{
    Dispatcher,
    direct::UnderWay,
    hand_out::hand_out,
    polls::Polls,
    reconcile::{confirm_lapses, reconcile_if_due},
    returning::return_first,
};
use crate::{
    domain::{Queue, Timestamp},
    engine::{Engine, EngineError, Result},
    metrics::Wake,
    store::{Appeared, Reserver},
};

/// A dispatcher without consumers ends after this time.
const IDLE: Duration = Duration::from_secs(10);
/// How long consumers that have work wait for more, so that many small refills become one.
pub(super) const GATHER: Duration = Duration::from_millis(1);
/// Shortest wait for a timer.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);
/// Reserves in a row that assigned nothing before the dispatcher waits.
const MAX_STUCK: u32 = 3;
/// Longest waits after that: if other brokers were faster, there may be many items left.
const STUCK: Backoff = Backoff::new(Duration::from_millis(5), Duration::from_secs(1));
/// Pauses after failed reserves.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));
/// Runs the dispatcher's loop. The loop ends at shutdown, or when the queue has had no consumers
/// for [`IDLE`].
pub(crate) async fn run(engine: Arc<Engine>, dispatcher: Arc<Dispatcher>) {
    engine.note_consumer(&dispatcher.queue).await;
    let mut polls = Polls::new(&engine);
    let mut reserver = engine.store.reserver(&dispatcher.queue);
    let (mut failures, mut stuck) = (0, 0_u32);
    let mut ends_at = None;
    loop {
        if engine.draining.is_cancelled() {
            if let Some((queue, unsent)) = dispatcher.take_stock() {
                engine.release_unsent(&queue, unsent);
            }
            dispatcher.state.lock().consumers.fail_calls(&EngineError::ShuttingDown);
            if engine.stopping.is_cancelled() {
                return;
            }
            tokio::select! {
                biased;
                () = engine.stopping.cancelled() => return,
                () = dispatcher.wake.notified() => continue,
            }
        }
        #[cfg(test)]
        dispatcher.steps.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        if !dispatcher.is_used() {
            // Other events wake the loop too, but only a new consumer stops the countdown.
            let ends_at = *ends_at.get_or_insert_with(|| Instant::now() + IDLE);
            tokio::select! {
                biased;
                () = sleep_until(ends_at) => {
                    if engine.retire(&dispatcher) {
                        return;
                    }
                }
                () = dispatcher.wake.notified() => {}
                () = engine.draining.cancelled() => {}
            }
            continue;
        }
        ends_at = None;
        match step(&engine, &dispatcher, &mut *reserver, &mut polls).await {
            Ok(Step::Again) => {
                polls.found();
                (failures, stuck) = (0, 0);
            }
            Ok(Step::Stuck) => {
                failures = 0;
                if let Some(pauses) = stuck.checked_sub(MAX_STUCK) {
                    let _ =
                        timeout(STUCK.delay(pauses), wait(&engine, &dispatcher, &mut polls)).await;
                }
                stuck += 1;
            }
            Ok(Step::Wait) => {
                (failures, stuck) = (0, 0);
                wait(&engine, &dispatcher, &mut polls).await;
            }
            Err(EngineError::QueueNotFound(queue)) => {
                // The items that the streams held were deleted with the queue. Streams that are not
                // polled do not notice their end, but no longer count as consumers.
                dispatcher.end_all(&EngineError::QueueDeleted(queue));
            }
            Err(error) => {
                tracing::warn!(queue = %dispatcher.queue, %error, "could not reserve; trying again");
                dispatcher.look_failed(&error);
                tokio::select! {
                    biased;
                    () = tokio::time::sleep(BACKOFF.delay(failures)) => {}
                    () = engine.draining.cancelled() => {}
                }
                failures += 1;
            }
        }
    }
}

enum Step {
    /// Items were handed out or removed, or there is more to reserve.
    Again,
    /// There are more items, but none could be assigned: other brokers were faster, or the items
    /// are too large for the room there is.
    Stuck,
    /// There is nothing to do until the next event.
    Wait,
}

async fn step(
    engine: &Arc<Engine>,
    dispatcher: &Arc<Dispatcher>,
    reserver: &mut dyn Reserver,
    polls: &mut Polls,
) -> Result<Step> {
    gather_room(dispatcher, &engine.draining).await;
    dispatcher.state.lock().consumers.stock.open();
    let mut queue = engine.queues.get(&dispatcher.queue).await?;
    let now = engine.now();
    confirm_lapses(engine, dispatcher, &queue, now).await?;
    let lapsed = dispatcher.begin_step(&queue, now);
    engine.release_unsent(&queue, lapsed);
    dispatcher.return_soon(engine);
    reconcile_if_due(engine, dispatcher, &queue, polls).await?;
    if queue.paused {
        engine.release_unsent(&queue, dispatcher.pause());
        return Ok(Step::Wait);
    }
    let returning = dispatcher.returning.lock().await;
    return_first(engine, dispatcher, &queue, now).await?;
    let next = dispatcher.next_round(&queue, engine.now());
    drop(returning);
    let Some((round, appeared)) = next else { return Ok(Step::Wait) };
    let under_way = UnderWay::new(engine, dispatcher);
    let wanted: usize = round.demands.iter().map(|demand| demand.max_items).sum();
    let woken_by = std::mem::replace(&mut dispatcher.state.lock().woken_by, Wake::Local);
    let looked = engine.now();
    let reserve = reserver.reserve(&queue, &round.demands, appeared);
    let reserved = under_way.watch(reserve).await;
    let is_named = reserved.as_ref().is_ok_and(|reserved| reserved.is_named);
    engine.metrics.woken(if is_named { Wake::Announcement } else { woken_by });
    let mut reserved = reserved.inspect_err(|_| {
        dispatcher.state.lock().appeared.add(appeared); // the store may not have received it
    })?;
    if reserved.limit_unknown {
        // Within the same round: a call that does not wait may take part in no other, and it is the only consumer.
        queue = under_way.watch(engine.with_known_limit(&queue)).await?;
        let reserve = reserver.reserve(&queue, &round.demands, Appeared::Nothing);
        reserved = under_way.watch(reserve).await?;
    }
    // Behind an item that was named, the queue is as empty as before, as far as this broker knows.
    if !is_named {
        polls.looked();
    }
    let assigned = reserved.deliveries.len();
    let cleared = reserved.at_limit.total() + reserved.expired;
    let more = !is_named && (reserved.more || assigned >= wanted);
    let lease_ends = reserved.deliveries.iter().map(|(_, found)| found.lease_expire_time);
    let unseen_end = lease_ends.min().filter(|_| is_named); // the store is not asked when it is
    dispatcher.state.lock().found(&reserved.deliveries);
    let hand_out = hand_out(engine, dispatcher, &queue, &round, reserved);
    let some_return = under_way.watch(hand_out).await?;
    {
        let mut state = dispatcher.state.lock();
        state.dirty |= more;
        state.seen_empty = !more && !some_return;
        if let Some(end) = unseen_end {
            state.next_due.add(end);
        }
        state.consumers.end_round(&round, !more, engine.now());
    }
    under_way.end(more || some_return);
    dispatcher.return_soon(engine);
    if is_named {
        return Ok(Step::Again);
    }
    if more {
        return Ok(if assigned > 0 || cleared > 0 { Step::Again } else { Step::Stuck });
    }
    // The reserve saw the end of the queue.
    let is_behind = ask_when_due(engine, dispatcher, reserver, &queue, looked).await?;
    // What direct pushes have brought may have to be returned.
    let has_news = dispatcher.state.lock().has_news();
    Ok(if assigned > 0 || is_behind || has_news { Step::Again } else { Step::Wait })
}

/// Waits until there is room worth a reserve, a consumer is idle, or [`GATHER`] has passed. The
/// following step handles the events that end the wait.
pub(super) async fn gather_room(dispatcher: &Dispatcher, draining: &CancellationToken) {
    let until = Instant::now() + GATHER;
    while dispatcher.can_wait() {
        tokio::select! {
            biased;
            () = sleep_until(until) => return,
            () = draining.cancelled() => return,
            () = dispatcher.wake.notified() => {}
        }
    }
}

/// Sets a timer for the time at which the next item becomes eligible. A queue that runs empty
/// repeatedly does not ask the store each time, but is reserved from again a little later. `looked`
/// is when the reserve began that saw the end of the queue. Returns true if an item is eligible already.
async fn ask_when_due(
    engine: &Engine,
    dispatcher: &Dispatcher,
    reserver: &mut dyn Reserver,
    queue: &Queue,
    looked: Timestamp,
) -> Result<bool> {
    let asked = engine.now();
    if !dispatcher.state.lock().next_due.may_ask(asked) {
        return Ok(false);
    }
    let mut next = reserver.next_eligible(queue, looked).await?;
    let now = engine.now();
    let is_behind = next.is_some_and(|at| at <= now);
    if is_behind {
        // It was stored behind the reserve, and hides what becomes eligible after it.
        next = reserver.next_eligible(queue, now).await?;
    }
    let mut state = dispatcher.state.lock();
    state.next_due.told(next, asked, engine.now());
    if is_behind {
        (state.dirty, state.woken_by) = (true, Wake::Timer);
    }
    Ok(is_behind)
}

async fn wait(engine: &Engine, dispatcher: &Dispatcher, polls: &mut Polls) {
    let healthy = engine.signals.healthy();
    let now = engine.now();
    if let Some(wanted) = dispatcher.wanted(now) {
        engine.signals.publish(wanted);
    }
    let timer =
        dispatcher.next_timer().map(|timer| Instant::now() + now.until(timer).max(SHORTEST_WAIT));
    let reconcile = dispatcher.holds_any().then(|| dispatcher.next_reconcile(polls, healthy));
    let poll = polls.next_poll(healthy);
    let until = [Some(poll), reconcile, timer].into_iter().flatten().min().unwrap_or(poll);
    tokio::select! {
        biased; // a queue that wakes without end is polled too
        () = sleep_until(until) => {}
        () = dispatcher.wake.notified() => return,
        () = engine.draining.cancelled() => return,
    }
    // The following step handles timers and lapsed leases that are due, and reconciles if that is
    // due.
    let is_polled = poll <= Instant::now();
    if is_polled {
        polls.missed();
        let mut state = dispatcher.state.lock();
        state.dirty = true;
        state.woken_by = Wake::Poll;
    }
}
