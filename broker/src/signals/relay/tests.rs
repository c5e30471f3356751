//! The relay over a transport that records its messages, on a clock that the tests advance.

use std::sync::atomic::AtomicUsize;

use parking_lot::Mutex;

use super::*;

/// What was sent, and when, from the start of the test.
type Sent = Arc<Mutex<Vec<(u64, Message)>>>;

struct Noted {
    start: Instant,
    sent: Sent,
    /// Sends that fail before one succeeds.
    failures: AtomicUsize,
    /// How long each send takes.
    latency: Duration,
}

#[async_trait]
impl Transport for Noted {
    type Outlet = ();

    fn describe(&self) -> String {
        "noted".to_owned()
    }

    async fn connect(&self) -> Result<(), Lost> {
        Ok(())
    }

    async fn send(&self, (): &mut (), messages: &[Message]) -> Result<(), Lost> {
        let less = |n: usize| n.checked_sub(1);
        if self.failures.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).is_ok() {
            return Err(Lost("failed on purpose".to_owned()));
        }
        let at = self.start.elapsed().as_millis() as u64;
        self.sent.lock().extend(messages.iter().map(|message| (at, message.clone())));
        sleep(self.latency).await;
        Ok(())
    }

    async fn receive(&self, receiving: &Receiving) -> Lost {
        receiving.listening();
        std::future::pending().await
    }
}

async fn relay(failures: usize, latency: Duration) -> (Relay<Noted>, Sent) {
    let sent = Sent::default();
    let start = Instant::now();
    let failures = AtomicUsize::new(failures);
    let noted = Noted { start, sent: Arc::clone(&sent), failures, latency };
    (Relay::start(noted, [1; 4], Arc::new(Metrics::new())).await, sent)
}

fn insert(since: i64) -> Signal {
    let queue = QueueName::parse("queue", "orders").unwrap();
    Signal::new(queue, Topic::Insert, Some(Timestamp(since)))
}

fn signals(sent: &Sent) -> Vec<(u64, i64)> {
    let since = |message: &Message| match message {
        Message::Signal(signal) => signal.since.unwrap().millis(),
        Message::Missed => -1,
    };
    sent.lock().iter().map(|(at, message)| (*at, since(message))).collect()
}

#[tokio::test(start_paused = true)]
async fn a_burst_is_sent_once_per_window_and_its_last_signal_is_not_lost() {
    let (relay, sent) = relay(0, Duration::ZERO).await;
    for n in 0..120 {
        relay.publish(insert(1_000 - n));
        sleep(Duration::from_millis(1)).await;
    }
    sleep(Duration::from_millis(200)).await;
    let sent = signals(&sent);
    assert_eq!(sent.len(), 4, "{sent:?}");
    assert!(sent.windows(2).all(|pair| pair[1].0 - pair[0].0 >= 50), "{sent:?}");
    assert_eq!((sent[0].1, sent[3].1), (1_000, 881), "the first and the least of the last");
}

/// Other brokers' consumers that wait for it are told of each insert at once.
#[tokio::test(start_paused = true)]
async fn a_window_ends_when_another_broker_waits_for_the_next_signal() {
    let (relay, sent) = relay(0, Duration::ZERO).await;
    let wanted = Signal { topic: Topic::Wanted, since: None, ..insert(0) };
    let receive = |from| {
        relay.shared.receiving.received([from; 4], Message::Signal(wanted.clone()));
    };
    let begun = Instant::now();
    relay.publish(insert(1));
    relay.publish(insert(2));
    receive(1);
    sleep(Duration::from_millis(1)).await;
    assert_eq!(signals(&sent), [(0, 1)], "its own question says nothing of others");
    receive(2);
    sleep(Duration::from_millis(1)).await;
    assert_eq!(signals(&sent), [(0, 1), (1, 2)], "what was merged");
    receive(2);
    sleep(Duration::from_millis(1)).await;
    relay.publish(insert(3));
    sleep(Duration::from_millis(1)).await;
    assert_eq!(signals(&sent)[2..], [(3, 3)], "the next one");
    relay.publish(insert(4));
    sleep(Duration::from_millis(60)).await;
    assert_eq!(signals(&sent)[3..], [(53, 4)], "of the window that this one opened");
    assert!(begun.elapsed() < Duration::from_millis(70));
}

/// An announced insert reaches the broker that waits for it once, if it is found at once.
#[tokio::test(start_paused = true)]
async fn an_insert_is_announced_to_a_broker_that_waits_for_it() {
    let (relay, sent) = relay(0, Duration::ZERO).await;
    let orders = insert(0).queue;
    let tick = || sleep(Duration::from_millis(1));
    let asks = |found: Option<i64>| {
        let since = found.map(Timestamp);
        let wanted = Signal { topic: Topic::Wanted, since, ..insert(0) };
        relay.shared.receiving.received([2; 4], Message::Signal(wanted));
    };
    relay.announce(&orders, Timestamp(1), None);
    tick().await;
    assert_eq!(signals(&sent), [], "nobody waits");
    asks(None);
    relay.announce(&orders, Timestamp(2), None);
    relay.announce(&orders, Timestamp(3), None);
    tick().await;
    assert_eq!(signals(&sent), [(1, 2)], "once for each time it was asked for");
    relay.publish(insert(4));
    asks(Some(4));
    tick().await;
    relay.announce(&orders, Timestamp(5), None);
    tick().await;
    assert_eq!(signals(&sent)[1..], [(3, 5)], "what was stored has been found");
    asks(None);
    relay.publish(insert(6));
    tick().await;
    assert_eq!(signals(&sent)[2..], [(4, 4)], "too early: what is merged is signalled");
    sleep(Duration::from_millis(100)).await;
    assert_eq!(signals(&sent)[3..], [(54, 6)]);
}

/// What is merged and may not have been found comes before it.
#[tokio::test(start_paused = true)]
async fn an_announcement_names_its_item_unless_others_are_merged() {
    let (relay, sent) = relay(0, Duration::ZERO).await;
    let (orders, item) = (insert(0).queue, |item: u8| Some(ItemId([item; 12])));
    let asks = |since: i64, item| {
        let wanted = Signal { topic: Topic::Wanted, item, ..insert(since) };
        relay.shared.receiving.received([2; 4], Message::Signal(wanted));
    };
    let announced = async |since: i64, item| {
        relay.announce(&orders, Timestamp(since), item);
        sleep(Duration::from_millis(1)).await;
        match sent.lock().pop() {
            Some((_, Message::Signal(signal))) if signal.since == Some(Timestamp(since)) => {
                signal.item
            }
            other => panic!("{other:?}"),
        }
    };
    assert!(!relay.awaits(&orders));
    asks(0, None);
    assert!(relay.awaits(&orders));
    assert_eq!(announced(1, item(1)).await, item(1));
    assert!(!relay.awaits(&orders), "it was told");
    relay.publish(Signal { item: item(1), ..insert(1) });
    asks(1, item(1));
    assert_eq!(announced(2, item(2)).await, item(2), "the last one was found");
    relay.publish(Signal { item: item(2), ..insert(2) });
    relay.publish(insert(2));
    asks(2, item(2));
    assert_eq!(announced(3, item(3)).await, None, "there is another");
}

/// The question is sent each time, and its loss is no reason to scan everything.
#[tokio::test(start_paused = true)]
async fn what_asks_for_signals_is_not_merged() {
    let (relay, sent) = relay(1, Duration::ZERO).await;
    let wanted = Signal { topic: Topic::Wanted, since: None, ..insert(0) };
    relay.publish(insert(1));
    sleep(Duration::from_millis(1)).await;
    assert!(!relay.healthy(), "sending failed");
    relay.publish(wanted.clone());
    sleep(Duration::from_secs(10)).await;
    assert_eq!(
        sent.lock().iter().map(|(_, message)| message.clone()).collect::<Vec<_>>(),
        [Message::Missed]
    );
    for _ in 0..3 {
        relay.publish(wanted.clone());
        sleep(Duration::from_millis(1)).await;
    }
    let wanted = Message::Signal(wanted);
    assert_eq!(sent.lock().iter().filter(|(_, message)| *message == wanted).count(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_slow_server_delays_but_loses_nothing() {
    let (relay, sent) = relay(0, Duration::from_millis(400)).await;
    for n in 0..300 {
        relay.publish(insert(1_000 - n));
        sleep(Duration::from_millis(1)).await;
    }
    sleep(Duration::from_secs(2)).await;
    assert_eq!(signals(&sent).iter().map(|s| s.1).min(), Some(701));
}

#[tokio::test(start_paused = true)]
async fn after_a_failed_send_the_other_brokers_are_told_to_scan_everything() {
    let (relay, sent) = relay(3, Duration::ZERO).await;
    relay.publish(insert(1));
    sleep(Duration::from_millis(1)).await;
    assert!(!relay.healthy(), "sending failed");
    relay.publish(insert(2));
    sleep(Duration::from_secs(10)).await;
    assert!(relay.healthy(), "it was tried again with nothing new to send");
    assert_eq!(signals(&sent).iter().map(|s| s.1).collect::<Vec<_>>(), [-1]);
    relay.publish(insert(3));
    sleep(Duration::from_millis(100)).await;
    assert_eq!(signals(&sent).len(), 2);
}

#[tokio::test(start_paused = true)]
async fn closing_sends_the_queued_signals() {
    let (relay, sent) = relay(0, Duration::ZERO).await;
    relay.publish(insert(2));
    relay.publish(insert(1));
    relay.close().await;
    assert_eq!(signals(&sent).iter().map(|s| s.1).collect::<Vec<_>>(), [2, 1]);
    assert!(relay.tasks.is_empty());
    relay.publish(insert(0));
    relay.close().await;
}
