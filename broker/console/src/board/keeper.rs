//! The history where it survives the broker: read when someone looks at last, and written every minute.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;

use super::history::{Histories, POINTS, PastFigures, STEP, STEPS};

/// Takes figures that were kept: how old they are, how many seconds there are between them and the next ones, and the
/// figures.
pub type TakeFigures<'a> = dyn FnMut(Duration, u32, Vec<PastFigures>) + Send + 'a;

/// Keeps figures of queues where they survive the broker. Figures of several brokers stand side by side.
pub trait HistoryKeeper: Send + Sync + 'static {
    /// Keeps figures as of now for `lasting`. Those that cannot be kept leave a gap.
    fn keep(&self, step: u32, lasting: Duration, queues: Vec<PastFigures>) -> BoxFuture<'_, ()>;

    /// Passes on all figures that last, the oldest first. Returns false if not all could be read.
    fn read<'a>(&'a self, take: &'a mut TakeFigures<'a>) -> BoxFuture<'a, bool>;
}

/// Restores the history, and keeps it for as long as figures come. Of the finest level nothing is kept: it covers a
/// quarter of an hour.
pub(super) async fn run(
    histories: Arc<Histories>,
    keeper: Arc<dyn HistoryKeeper>,
    stop: CancellationToken,
) {
    let mut is_restored = restore(&histories, &*keeper).await;
    let mut was_looked_at = false;
    let mut due = [Instant::now(); STEPS.len()];
    while stop.run_until_cancelled(tokio::time::sleep(STEP)).await.is_some() {
        let figures = histories.latest();
        if figures.is_empty() {
            // While nobody looks any more, other brokers may keep figures.
            is_restored &= !was_looked_at;
            continue;
        }
        was_looked_at = true;
        if !is_restored {
            is_restored = restore(&histories, &*keeper).await;
        }
        for (step, due) in STEPS.into_iter().zip(&mut due).skip(1) {
            if Instant::now() >= *due {
                let step_time = Duration::from_secs(u64::from(step));
                *due = Instant::now() + step_time;
                keeper.keep(step, step_time * POINTS as u32, figures.clone()).await;
            }
        }
    }
}

async fn restore(histories: &Histories, keeper: &dyn HistoryKeeper) -> bool {
    let mut take = |age, step, figures| histories.restore(age, step, figures);
    keeper.read(&mut take).await
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use parking_lot::Mutex;
    use sluicegate_proto::v1::QueueStats;

    use super::*;

    /// Keeps figures in memory, as a store would.
    #[derive(Default)]
    struct Memory(Mutex<Vec<(u32, Duration, Vec<PastFigures>)>>);

    impl HistoryKeeper for Memory {
        fn keep(
            &self,
            step: u32,
            lasting: Duration,
            queues: Vec<PastFigures>,
        ) -> BoxFuture<'_, ()> {
            self.0.lock().push((step, lasting, queues));
            async {}.boxed()
        }

        fn read<'a>(&'a self, take: &'a mut TakeFigures<'a>) -> BoxFuture<'a, bool> {
            for (step, _, queues) in self.0.lock().iter() {
                take(Duration::from_mins(5), *step, queues.clone());
            }
            async { true }.boxed()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_one_broker_keeps_another_restores() {
        let memory = Arc::new(Memory::default());
        let stop = CancellationToken::new();
        let histories = Arc::new(Histories::default());
        let keeping = run(Arc::clone(&histories), Arc::clone(&memory) as _, stop.clone());
        let keeping = tokio::spawn(keeping);
        tokio::time::sleep(STEP * 2).await;
        assert!(memory.0.lock().is_empty(), "nobody looks");
        let stats =
            QueueStats { queue: "a".to_owned(), ready: 7, pushed: 9, ..QueueStats::default() };
        histories.record([(&stats, true)].into_iter());
        tokio::time::sleep(STEP * 3).await;
        stop.cancel();
        keeping.await.unwrap();
        let kept = memory.0.lock().clone();
        let spans: Vec<_> = kept.iter().map(|(step, lasting, _)| (*step, *lasting)).collect();
        let hours = Duration::from_hours;
        assert_eq!(spans, [(60, hours(3)), (480, hours(24))], "once in each step");
        assert_eq!((kept[0].2[0].ready, kept[0].2[0].pushed), (7, 9));

        let restored = Histories::default();
        assert!(restore(&restored, &*memory).await);
        let points = |histories: &Histories| histories.points_of("a");
        assert_eq!(points(&restored).len(), 1, "both levels tell of the same time");
        assert!(restore(&restored, &*memory).await);
        assert_eq!(points(&restored).len(), 1, "nothing is added twice");
    }
}
