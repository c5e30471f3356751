//! Reported figures, over a real store.

use std::sync::atomic::{AtomicBool, Ordering};

use std::time::Duration;

use crate::{
    domain::{Clock, Eligibility, NewItem},
    engine::{EngineError, Gauges, Limits, stats::*, watch::Watch},
    signals::LocalSignals,
    store::sqlite::SqliteStore,
};

fn engine() -> (Arc<Engine>, Arc<Metrics>) {
    let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
    let metrics = Arc::new(Metrics::new());
    let signals = Arc::new(LocalSignals::new());
    (Engine::new(Arc::new(store), signals, Arc::clone(&metrics), Limits::default()), metrics)
}

fn name(name: &str) -> QueueName {
    QueueName::parse("queue", name).unwrap()
}

/// Totals neither decrease nor run ahead, however often they are flushed meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn totals_never_decrease_while_they_are_flushed() {
    let (engine, _) = engine();
    let (queue, pushes) = (name("q"), 300);
    let done = Arc::new(AtomicBool::new(false));
    engine.push(&queue, vec![NewItem::default()], None).await.unwrap();
    let flushing = tokio::spawn({
        let (engine, done) = (Arc::clone(&engine), Arc::clone(&done));
        async move {
            while !done.load(Ordering::Relaxed) {
                engine.flush_totals().await.unwrap();
                tokio::task::yield_now().await;
            }
        }
    });
    let reading = tokio::spawn({
        let (engine, done, queue) = (Arc::clone(&engine), Arc::clone(&done), queue.clone());
        async move {
            let mut last = 0;
            while !done.load(Ordering::Relaxed) {
                let pushed = engine.queue_stats(&queue).await.unwrap().totals.pushed;
                assert!(pushed >= last && pushed <= pushes + 1, "{pushed} after {last}");
                last = pushed;
            }
        }
    });
    for _ in 0..pushes {
        engine.push(&queue, vec![NewItem::default()], None).await.unwrap();
    }
    done.store(true, Ordering::Relaxed);
    flushing.await.unwrap();
    reading.await.unwrap();
    assert_eq!(engine.queue_stats(&queue).await.unwrap().totals.pushed, pushes + 1);
}

/// Returns the value of a metric.
fn value(metrics: &Metrics, line: &str) -> Option<f64> {
    let page = metrics.encode().unwrap();
    let found = page.lines().find_map(|l| l.strip_prefix(line)?.strip_prefix(' '));
    found.map(|value| value.parse().unwrap())
}

fn calls(metrics: &Metrics, call: &str) -> f64 {
    let line = format!("sluicegate_store_call_duration_seconds_count{{call=\"{call}\"}}");
    value(metrics, &line).unwrap_or_default()
}

/// Depth gauges appear without a request, follow the queue, and disappear with it.
#[tokio::test(start_paused = true)]
async fn depth_gauges_follow_the_queues() {
    let (engine, metrics) = engine();
    let (work, mut gauges) = (name("work"), Gauges::default());
    let later =
        NewItem { eligibility: Eligibility::After(Duration::from_hours(1)), ..NewItem::default() };
    engine.push(&work, vec![NewItem::default(), NewItem::default(), later], None).await.unwrap();
    let shown = |state: &str| {
        value(&metrics, &format!("sluicegate_queue_items{{queue=\"work\",state=\"{state}\"}}"))
    };
    gauges.keep(&engine).await.unwrap();
    assert_eq!((shown("ready"), shown("delayed")), (Some(2.0), Some(1.0)));
    assert_eq!(value(&metrics, "sluicegate_counts_queues"), Some(1.0));
    let oldest = "sluicegate_queue_oldest_ready_timestamp_seconds{queue=\"work\"}";
    assert!(value(&metrics, oldest).unwrap() > 1e9);

    engine.push(&work, vec![NewItem::default()], None).await.unwrap();
    engine.flush_totals().await.unwrap();
    gauges.keep(&engine).await.unwrap();
    assert_eq!(shown("ready"), Some(3.0));

    // Changes by other brokers are noticed by the totals.
    let other = Totals { pushed: 1, ..Totals::default() };
    engine.store.add_totals(vec![(work.clone(), other)]).await.unwrap();
    let counted = calls(&metrics, "depth");
    for _ in 0..3 {
        gauges.keep(&engine).await.unwrap();
    }
    assert!(calls(&metrics, "depth") > counted);

    engine.delete_queue(&work, true).await.unwrap();
    gauges.keep(&engine).await.unwrap();
    assert!(!metrics.encode().unwrap().contains("work"), "{}", metrics.encode().unwrap());
}

/// When another broker deletes a queue, its labels and its remembered state are dropped here too.
#[tokio::test(start_paused = true)]
async fn a_queue_deleted_on_another_broker_leaves_no_figures() {
    let (engine, metrics) = engine();
    let (work, other, mut gauges) = (name("work"), name("other"), Gauges::default());
    for queue in [&work, &other] {
        engine.push(queue, vec![NewItem::default()], None).await.unwrap();
        engine.queue_stats(queue).await.unwrap();
    }
    gauges.keep(&engine).await.unwrap();
    let queue = engine.get_queue(&work).await.unwrap();
    let links = engine.store.links().await.unwrap();
    engine.store.delete_queue(&queue, true, links).await.unwrap(); // not through the engine
    while metrics.encode().unwrap().contains("work") {
        gauges.keep(&engine).await.unwrap();
    }
    assert!(metrics.encode().unwrap().contains("other"));
    assert_eq!(engine.stats.depths.queues(), [other]);
}

/// Queues without activity are not counted, whatever the number of watchers. A changing queue is
/// counted once a second.
#[tokio::test(start_paused = true)]
async fn a_watch_of_idle_queues_costs_nothing() {
    let (engine, metrics) = engine();
    let names: Vec<_> = (0..200).map(|n| name(&format!("q{n}"))).collect();
    for queue in &names {
        engine.push(queue, vec![NewItem::default()], None).await.unwrap();
    }
    engine.flush_totals().await.unwrap();
    let mut watches = Vec::new();
    for _ in 0..3 {
        let mut watch = engine.watch_queues(Vec::new()).await.unwrap();
        assert_eq!(watch.next(1_000, |_| true).await.unwrap().len(), 200);
        watches.push(watch);
    }
    // During this many polls of the watchers, with nothing to report,
    let looks = async |looks: f64| {
        let until = calls(&metrics, "all_totals") + looks;
        while calls(&metrics, "all_totals") < until {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    looks(2.0).await;
    let all = || {
        let page = metrics.encode().unwrap();
        let counts = page.lines().filter(|l| l.contains("store_call_duration_seconds_count{"));
        counts.map(|l| l.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum::<f64>()
    };
    let (counted, asked) = (calls(&metrics, "depth"), all());
    looks(10.0).await;
    assert!(calls(&metrics, "depth") <= counted, "an unchanged queue was counted");
    // only the totals are read, and occasionally the names.
    assert!(all() - asked <= 20.0, "{} calls", all() - asked);

    // When one queue changes, all watchers are notified after one or two counts.
    engine.push(&names[7], vec![NewItem::default()], None).await.unwrap();
    for watch in &mut watches {
        let told = watch.next(1_000, |_| true).await.unwrap();
        assert_eq!(told.iter().map(|stats| &stats.queue).collect::<Vec<_>>(), [&names[7]]);
        assert_eq!((told[0].depth.ready, told[0].totals.pushed), (2, 2));
    }
    looks(10.0).await;
    assert!(calls(&metrics, "depth") - counted <= 4.0);

    // Changes by another broker are known only by the totals.
    let other = Totals { pushed: 3, ..Totals::default() };
    engine.store.add_totals(vec![(names[9].clone(), other)]).await.unwrap();
    let told = watches[0].next(1_000, |_| true).await.unwrap();
    assert_eq!((&told[0].queue, told[0].totals.pushed), (&names[9], 4));
}

/// Returns how many items of this queue are told to be ready next, other than so many, and that of no other queue. The same number is told once more if an item was
/// counted in the store before it was counted among those that were pushed.
async fn next_ready(watch: &mut Watch, queue: &QueueName, before: u64) -> Result<u64> {
    loop {
        let told = watch.next(9, |_| true).await?;
        assert_eq!((told.len(), &told[0].queue), (1, queue));
        if told[0].depth.ready != before {
            return Ok(told[0].depth.ready);
        }
    }
}

/// Who reads late is told the latest of each queue once, in parts of the size that it takes. So nothing is kept for who reads
/// nothing.
#[tokio::test(start_paused = true)]
async fn who_watches_and_reads_late_is_told_the_latest() {
    let (engine, _) = engine();
    let names: Vec<_> = (0..5).map(|n| name(&format!("q{n}"))).collect();
    for queue in &names {
        engine.push(queue, vec![NewItem::default()], None).await.unwrap();
    }
    let mut late = engine.watch_queues(Vec::new()).await.unwrap();
    let mut prompt = engine.watch_queues(names.clone()).await.unwrap();
    assert_eq!(prompt.next(9, |_| true).await.unwrap().len(), 5);
    let first = late.next(2, |_| true).await.unwrap();
    assert_eq!(first.iter().map(|stats| &stats.queue).collect::<Vec<_>>(), [&names[0], &names[1]]);
    for pushed in 2..=4 {
        engine.push(&names[1], vec![NewItem::default()], None).await.unwrap();
        assert_eq!(next_ready(&mut prompt, &names[1], pushed - 1).await.unwrap(), pushed);
    }
    let rest = late.next(9, |queue| *queue != names[3]).await.unwrap();
    let rest: Vec<_> = rest.iter().map(|stats| (&stats.queue, stats.depth.ready)).collect();
    assert_eq!(rest, [(&names[2], 1), (&names[4], 1), (&names[1], 4)]);
    // A queue that is gone ends the watch that names it, and no other.
    engine.delete_queue(&names[4], true).await.unwrap();
    let ended = next_ready(&mut prompt, &names[1], 4).await.unwrap_err();
    assert!(matches!(&ended, EngineError::QueueNotFound(gone) if *gone == names[4]), "{ended}");
    engine.push(&names[0], vec![NewItem::default()], None).await.unwrap();
    assert_eq!(late.next(9, |queue| *queue != names[1]).await.unwrap()[0].queue, names[0]);
    // Nobody watches: nobody looks, and nothing is kept.
    drop((late, prompt));
    while engine.watched.is_in_use() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let mut anew = engine.watch_queues(Vec::new()).await.unwrap();
    assert_eq!(anew.next(9, |_| true).await.unwrap().len(), 4);
}
