//! What is known about all queues that the bearer of a token may view. One stream of the broker keeps a board up to date,
//! however many browsers show it. A board ends when nobody has looked at it for a long time.

mod history;
mod keeper;
mod selection;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use sluicegate_proto::v1::{Queue, QueueStats, WatchQueuesRequest};
use tokio::{sync::watch, time::MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use crate::api::Api;

pub use self::{
    history::PastFigures,
    keeper::{HistoryKeeper, TakeFigures},
};

pub(crate) use self::{
    history::Histories,
    selection::{Query, Selection, Show, Sort},
};

/// A board ends when nobody has looked at it for this time. Until then the history goes on.
const LINGER: Duration = Duration::from_hours(12);
/// The most boards. One more ends the one that was not looked at for the longest time.
const MAX_BOARDS: usize = 32;
/// How often settings are read again. The stream tells figures only.
const SETTINGS_AGE: Duration = Duration::from_secs(10);
/// The pause after the stream has failed.
const PAUSE: Duration = Duration::from_secs(1);
/// How long a page waits for the first figures.
const FIRST_FIGURES: Duration = Duration::from_secs(3);
/// A queue with items that have been ready for this time, and from which nobody takes any, is stuck.
const STUCK_AFTER: Duration = Duration::from_mins(1);

/// The boards of all tokens, and the history that they share.
pub(crate) struct Boards {
    by_token: Mutex<HashMap<Option<String>, Arc<Board>>>,
    pub(crate) histories: Arc<Histories>,
    /// Where the history is kept; `None` once someone has looked, or if it is kept nowhere.
    keeper: Mutex<Option<Arc<dyn HistoryKeeper>>>,
    shutdown: CancellationToken,
}

impl Boards {
    pub(crate) fn new(keeper: Option<Arc<dyn HistoryKeeper>>, shutdown: CancellationToken) -> Self {
        let (by_token, histories) = (Mutex::default(), Arc::default());
        Self { by_token, histories, keeper: Mutex::new(keeper), shutdown }
    }

    /// Returns the board of a token; `api` makes the clients for its stream if there is none yet.
    pub(crate) fn of(&self, token: Option<&str>, api: impl FnOnce() -> Api) -> Arc<Board> {
        let mut boards = self.by_token.lock();
        let key = token.map(str::to_owned);
        if let Some(board) = boards.get(&key).filter(|board| !board.stop.is_cancelled()) {
            board.state.lock().looked_at = Instant::now();
            return Arc::clone(board);
        }
        boards.retain(|_, board| !board.stop.is_cancelled());
        if boards.len() >= MAX_BOARDS {
            let oldest = boards.iter().min_by_key(|(_, board)| board.state.lock().looked_at);
            let oldest = oldest.map(|(key, _)| key.clone());
            if let Some(board) = oldest.and_then(|key| boards.remove(&key)) {
                board.stop.cancel();
            }
        }
        let board = Arc::new(Board::new(self.shutdown.child_token()));
        tokio::spawn(Arc::clone(&board).run(api(), Arc::clone(&self.histories)));
        if let Some(keeper) = self.keeper.lock().take() {
            let stop = self.shutdown.child_token();
            tokio::spawn(keeper::run(Arc::clone(&self.histories), keeper, stop));
        }
        boards.insert(key, Arc::clone(&board));
        board
    }
}

/// What is known about the queues of one token.
pub(crate) struct Board {
    state: Mutex<State>,
    /// Incremented when something has changed.
    version: watch::Sender<u64>,
    /// Cancelled when the board has ended.
    stop: CancellationToken,
}

struct State {
    rows: BTreeMap<String, Row>,
    /// The queues that other queues name for their dead letters.
    dead_letter_queues: BTreeSet<String>,
    /// False until the first figures have come.
    is_loaded: bool,
    /// Why the figures are not up to date.
    problem: Option<Status>,
    looked_at: Instant,
}

/// What is known about one queue.
#[derive(Clone)]
pub(crate) struct Row {
    /// Empty until the settings are read.
    pub(crate) settings: Arc<Queue>,
    pub(crate) stats: QueueStats,
    /// When the figures came.
    at: Instant,
    /// What had been pushed and what had left at the last sample, and when that was.
    sample: Option<(Instant, i64, i64)>,
    /// Items per second that came and that left, lately.
    pub(crate) rates: (f64, f64),
    /// When an item was last seen to be handed out.
    delivered_at: Instant,
    has_changed: bool,
    /// True if this is where dead letters go.
    pub(crate) is_dead_letter_queue: bool,
}

impl Row {
    fn new(name: &str) -> Self {
        let now = Instant::now();
        Self {
            settings: Arc::default(),
            stats: QueueStats { queue: name.to_owned(), ..QueueStats::default() },
            at: now,
            sample: None,
            rates: (0.0, 0.0),
            delivered_at: now,
            has_changed: false,
            is_dead_letter_queue: is_called_dead(name),
        }
    }

    /// Returns the row of a queue of which nothing but the settings is known.
    pub(crate) fn of(settings: &Queue) -> Self {
        Self { settings: Arc::new(settings.clone()), ..Self::new(&settings.name) }
    }

    /// Returns the row with settings and figures that have just come.
    pub(crate) fn with(self, settings: &Queue, stats: QueueStats) -> Self {
        Self { settings: Arc::new(settings.clone()), stats, at: Instant::now(), ..self }
    }

    /// Returns how long the oldest ready item has been ready, as of now.
    pub(crate) fn oldest(&self) -> Option<Duration> {
        let age = self.stats.oldest_ready_age.map(crate::text::duration)?;
        Some(age + self.at.elapsed())
    }

    /// Returns true if items have been ready for long and nobody takes them.
    pub(crate) fn is_stuck(&self) -> bool {
        let waits = self.oldest().is_some_and(|age| age >= STUCK_AFTER);
        let is_taken = self.stats.consumers_of_all_brokers > 0
            || self.delivered_at.elapsed() < STUCK_AFTER && self.rates.1 > 0.0;
        waits && !is_taken && !self.settings.paused && !self.is_dead_letter_queue
    }

    /// Returns true if it holds dead letters.
    pub(crate) fn has_dead_letters(&self) -> bool {
        self.is_dead_letter_queue && self.held() > 0
    }

    /// Returns how many unsettled items it holds.
    pub(crate) fn held(&self) -> i64 {
        held(&self.stats)
    }

    fn take_sample(&mut self, now: Instant) -> bool {
        let (pushed, left) = (self.stats.pushed, history::left(&self.stats));
        if let Some((at, pushed_before, left_before)) = self.sample {
            let seconds = (now - at).as_secs_f64().max(0.001);
            let rate = |before: i64, now: i64| (now - before).max(0) as f64 / seconds;
            self.rates = (rate(pushed_before, pushed), rate(left_before, left));
        }
        self.sample = Some((now, pushed, left));
        std::mem::take(&mut self.has_changed)
    }
}

/// Returns how many unsettled items a queue holds.
pub(crate) fn held(stats: &QueueStats) -> i64 {
    stats.ready + stats.delayed + stats.reserved + stats.blocked
}

/// Returns true for the name that dead-letter queues have unless their sources name another one.
fn is_called_dead(name: &str) -> bool {
    name.strip_suffix(".dead").is_some()
}

/// Returns the name of the queue that receives a queue's dead letters, if it has one.
pub(crate) fn dead_letter_queue(queue: &Queue) -> Option<String> {
    if !queue.dead_letter_queue.is_empty() {
        return Some(queue.dead_letter_queue.clone());
    }
    let has_none = queue.discard_failed || is_called_dead(&queue.name) || queue.name.len() > 123;
    (!has_none).then(|| format!("{}.dead", queue.name))
}

impl Board {
    fn new(stop: CancellationToken) -> Self {
        let state = State {
            rows: BTreeMap::new(),
            dead_letter_queues: BTreeSet::new(),
            is_loaded: false,
            problem: None,
            looked_at: Instant::now(),
        };
        Self { state: Mutex::new(state), version: watch::Sender::new(0), stop }
    }

    /// Returns true when nobody keeps the board up to date any more, because the token is not known any more for example.
    pub(crate) fn has_ended(&self) -> bool {
        self.stop.is_cancelled()
    }

    /// Waits for the first figures for a moment. Returns why there are none.
    pub(crate) async fn loaded(&self) -> Result<(), Status> {
        let mut changes = self.version.subscribe();
        let loaded = changes.wait_for(|_| {
            let state = self.state.lock();
            state.is_loaded || state.problem.is_some()
        });
        let in_time = tokio::time::timeout(FIRST_FIGURES, loaded).await.is_ok();
        let state = self.state.lock();
        match &state.problem {
            _ if state.is_loaded => Ok(()),
            Some(problem) => Err(problem.clone()),
            None if in_time => Ok(()),
            None => Err(Status::unavailable("the broker is still counting its queues")),
        }
    }

    /// Returns one queue.
    pub(crate) fn row(&self, queue: &str) -> Option<Row> {
        let mut state = self.state.lock();
        state.looked_at = Instant::now();
        state.rows.get(queue).cloned()
    }

    /// Returns the queues that other queues name for their dead letters, and those that are called so, if they are there.
    pub(crate) fn dead_letter_queues(&self) -> Vec<Row> {
        let state = self.state.lock();
        state.rows.values().filter(|row| row.is_dead_letter_queue).cloned().collect()
    }

    /// Records the settings that a call has answered, so that the next page shows them.
    pub(crate) fn put(&self, queue: Queue) {
        let mut state = self.state.lock();
        let name = queue.name.clone();
        state.rows.entry(name.clone()).or_insert_with(|| Row::new(&name)).settings =
            Arc::new(queue);
        drop(state);
        self.changed();
    }

    /// Removes a queue that was deleted.
    pub(crate) fn forget(&self, queue: &str) {
        self.state.lock().rows.remove(queue);
        self.changed();
    }

    fn changed(&self) {
        self.version.send_modify(|version| *version += 1);
    }

    async fn run(self: Arc<Self>, api: Api, histories: Arc<Histories>) {
        loop {
            let failed = tokio::select! {
                failed = self.follow(&api, &histories) => failed,
                () = self.stop.cancelled() => return,
            };
            let is_over = failed.as_ref().is_none_or(|status| {
                matches!(status.code(), Code::Unauthenticated | Code::PermissionDenied)
            });
            self.state.lock().problem = failed;
            if is_over {
                self.stop.cancel(); // the next visitor begins another board
            }
            self.changed();
            tokio::select! {
                () = tokio::time::sleep(PAUSE) => {}
                () = self.stop.cancelled() => return,
            }
        }
    }

    /// Follows the broker's stream until it fails, which it returns, or until nobody looks any more.
    async fn follow(&self, api: &Api, histories: &Histories) -> Option<Status> {
        let queues = match api.all_queues().await {
            Ok(queues) => queues,
            Err(status) => return Some(status),
        };
        self.settings_read(queues);
        let watched = api.admin.clone().watch_queues(WatchQueuesRequest::default()).await;
        let mut stream = match watched {
            Ok(stream) => stream.into_inner(),
            Err(status) => return Some(status),
        };
        let mut samples = tokio::time::interval(history::STEP);
        samples.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut settings = tokio::time::interval(SETTINGS_AGE);
        settings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        settings.tick().await; // at once
        loop {
            tokio::select! {
                message = stream.message() => match message {
                    Ok(Some(message)) => self.counted(message.stats),
                    Ok(None) => return Some(Status::unavailable("the stream of figures has ended")),
                    Err(status) => return Some(status),
                },
                _ = samples.tick() => {
                    if self.state.lock().looked_at.elapsed() > LINGER {
                        return None;
                    }
                    self.sample(histories);
                }
                _ = settings.tick() => match api.all_queues().await {
                    Ok(queues) => self.settings_read(queues),
                    Err(status) => return Some(status),
                },
            }
        }
    }

    fn settings_read(&self, queues: Vec<Queue>) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        // Of a broker without queues the stream tells nothing.
        state.is_loaded |= queues.is_empty();
        state.dead_letter_queues = queues.iter().filter_map(dead_letter_queue).collect();
        let names: BTreeSet<&str> = queues.iter().map(|queue| queue.name.as_str()).collect();
        state.rows.retain(|name, _| names.contains(name.as_str()));
        for queue in queues {
            let name = queue.name.clone();
            let is_named = state.dead_letter_queues.contains(&name);
            let row = state.rows.entry(name).or_insert_with_key(|name| Row::new(name));
            row.is_dead_letter_queue = is_named || is_called_dead(&queue.name);
            row.settings = Arc::new(queue);
        }
        drop(guard);
        self.changed();
    }

    fn counted(&self, stats: Vec<QueueStats>) {
        let now = Instant::now();
        let mut guard = self.state.lock();
        let state = &mut *guard;
        (state.is_loaded, state.problem) = (true, None);
        for stats in stats {
            let is_named = state.dead_letter_queues.contains(&stats.queue);
            let row = state.rows.entry(stats.queue.clone()).or_insert_with_key(|name| {
                let row = Row::new(name);
                Row { is_dead_letter_queue: is_named || row.is_dead_letter_queue, ..row }
            });
            if stats.delivered != row.stats.delivered {
                row.delivered_at = now;
            }
            (row.stats, row.at, row.has_changed) = (stats, now, true);
        }
        drop(guard);
        self.changed();
    }

    fn sample(&self, histories: &Histories) {
        let now = Instant::now();
        let mut state = self.state.lock();
        if !state.is_loaded {
            return;
        }
        histories.record(state.rows.values_mut().map(|row| {
            let has_changed = row.take_sample(now);
            (&row.stats, has_changed)
        }));
        drop(state);
        self.changed();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(name: &str) -> Queue {
        Queue { name: name.to_owned(), ..Queue::default() }
    }

    fn seconds(seconds: i64) -> prost_types::Duration {
        prost_types::Duration { seconds, nanos: 0 }
    }

    #[test]
    fn dead_letter_queues_are_those_that_settings_lead_to() {
        assert_eq!(dead_letter_queue(&queue("a")).as_deref(), Some("a.dead"));
        assert_eq!(dead_letter_queue(&queue("a.dead")), None);
        assert_eq!(dead_letter_queue(&Queue { discard_failed: true, ..queue("a") }), None);
        let board = Board::new(CancellationToken::new());
        let named = Queue { dead_letter_queue: "graves".to_owned(), ..queue("a") };
        board.settings_read(vec![named, queue("b"), queue("graves"), queue("x.dead")]);
        let names: Vec<_> =
            board.dead_letter_queues().iter().map(|row| row.settings.name.clone()).collect();
        assert_eq!(names, ["graves", "x.dead"]);
    }

    #[test]
    fn queues_that_are_gone_leave_the_board() {
        let board = Board::new(CancellationToken::new());
        board.settings_read(vec![queue("a"), queue("b")]);
        board.counted(vec![QueueStats { queue: "b".to_owned(), ready: 3, ..Default::default() }]);
        board.settings_read(vec![queue("b")]);
        assert!(board.row("a").is_none());
        assert_eq!(board.row("b").unwrap().held(), 3, "figures stay");
    }

    #[test]
    fn stuck_is_what_waits_while_nobody_takes_it() {
        let mut row = Row::new("a");
        assert!(!row.is_stuck(), "empty");
        row.stats.oldest_ready_age = Some(seconds(90));
        assert!(row.is_stuck());
        row.settings = Arc::new(Queue { paused: true, ..queue("a") });
        assert!(!row.is_stuck(), "paused on purpose");
        row.settings = Arc::default();
        row.stats.consumers_of_all_brokers = 1;
        assert!(!row.is_stuck(), "somebody is at work");
    }

    #[test]
    fn rates_come_from_two_samples() {
        let mut row = Row::new("a");
        let now = Instant::now();
        row.take_sample(now);
        (row.stats.pushed, row.stats.committed) = (50, 20);
        row.take_sample(now + Duration::from_secs(10));
        assert_eq!(row.rates, (5.0, 2.0));
    }
}
