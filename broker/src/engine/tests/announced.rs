//! What a broker says to others of pushes before they are stored, and to be told of the next one.

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::broadcast;

use super::*;
use crate::{
    domain::{Eligibility, ItemId, Signal, Timestamp, Topic},
    signals::{Notice, Signals},
};

/// Signals that go nowhere and are written down.
struct Noted {
    published: Mutex<Vec<Signal>>,
    announced: Mutex<Vec<Option<ItemId>>>,
    silence: broadcast::Sender<Notice>,
}

#[async_trait]
impl Signals for Noted {
    fn describe(&self) -> String {
        "noted".to_owned()
    }

    fn publish(&self, signal: Signal) {
        self.published.lock().push(signal);
    }

    fn awaits(&self, _: &QueueName) -> bool {
        true
    }

    fn announce(&self, _: &QueueName, _: Timestamp, item: Option<ItemId>) {
        self.announced.lock().push(item);
    }

    fn subscribe(&self) -> broadcast::Receiver<Notice> {
        self.silence.subscribe()
    }

    fn healthy(&self) -> bool {
        true
    }

    async fn close(&self) {}
}

async fn noted_bench() -> (Bench, Arc<Noted>) {
    let noted = Arc::new(Noted {
        published: Mutex::default(),
        announced: Mutex::default(),
        silence: broadcast::Sender::new(1),
    });
    let bench = bench_over(Arc::clone(&noted) as Arc<dyn Signals>, rare_polls()).await;
    (bench, noted)
}

/// Starts a push of one item in a task of its own.
fn push(bench: &Bench, eligibility: Eligibility) -> tokio::task::JoinHandle<()> {
    let engine = Arc::clone(&bench.engine);
    tokio::spawn(async move {
        let item = NewItem { eligibility, ..NewItem::default() };
        engine.push(&name("q"), vec![item], None).await.unwrap();
    })
}

#[tokio::test]
async fn a_lone_push_is_announced_before_it_is_stored_and_signalled_when_it_is() {
    let (bench, noted) = noted_bench().await;
    bench.faults.set("push", Fault::HeldBefore);
    let first = push(&bench, Eligibility::Immediate);
    let is_announced = async || noted.announced.lock().len() == 1;
    until("it is announced", is_announced).await;
    assert!(noted.published.lock().is_empty(), "it may be looked for too early");
    let second = push(&bench, Eligibility::Immediate);
    bench.faults.until_begun("push", 2).await;
    bench.faults.set("push", Fault::None);
    for push in [first, second] {
        within("a push", push).await.unwrap();
    }
    assert_eq!(noted.announced.lock().len(), 1, "the second may wait for the first");
    assert_eq!(noted.published.lock().len(), 2);
}

#[tokio::test]
async fn what_is_not_ready_when_it_is_stored_is_not_announced() {
    let (bench, noted) = noted_bench().await;
    let later = Eligibility::After(Duration::from_hours(1));
    within("a delayed push", push(&bench, later)).await.unwrap();
    assert_eq!(noted.announced.lock().len(), 0);
    let queue = Queue { paused: true, ..(*bench.queue().await).clone() };
    assert!(bench.store.update_queue(&queue).await.unwrap().is_some());
    bench.engine.rescan_all();
    within("a push to a paused queue", push(&bench, Eligibility::Immediate)).await.unwrap();
    assert_eq!(noted.announced.lock().len(), 0);
}

#[tokio::test]
async fn a_push_that_is_delivered_directly_is_not_announced() {
    let (bench, noted) = noted_bench().await;
    let mut stream = bench.stream().await;
    direct::idle(&bench, &mut stream).await;
    let before = noted.announced.lock().len();
    bench.push(1).await;
    assert_eq!(noted.announced.lock().len(), before);
}

/// Other brokers need not signal again what was found.
#[tokio::test]
async fn whoever_asks_for_the_next_signal_says_what_it_has_found() {
    let (bench, noted) = noted_bench().await;
    let mut stream = bench.stream().await;
    direct::idle(&bench, &mut stream).await;
    let wanted = async || {
        let mut asked = Vec::new();
        until("the next signal is asked for", async || {
            let signals = std::mem::take(&mut *noted.published.lock());
            asked.extend(signals.into_iter().filter(|signal| signal.topic == Topic::Wanted));
            !asked.is_empty()
        })
        .await;
        asked
    };
    let now = bench.engine.now();
    let signal = Signal::new(name("q"), Topic::Insert, Some(now));
    bench.engine.receive(&Notice::Signal(signal.clone()));
    let nothing = Signal::new(name("q"), Topic::Wanted, None);
    assert_eq!(wanted().await, [nothing]);

    let queue = bench.queue().await;
    let stored = bench.store.push(vec![crate::store::Push::new(queue, NewItem::default())]).await;
    let stored = stored.unwrap();
    let found = stored[0].eligible_time;
    bench.engine.receive(&Notice::Signal(signal));
    assert_eq!(deliveries(&mut stream).await.len(), 1);
    assert!(futures_util::poll!(std::pin::pin!(stream.next())).is_pending());
    let item = Some(stored[0].id);
    assert_eq!(wanted().await, [Signal { item, ..Signal::new(name("q"), Topic::Wanted, found) }]);
}
