//! Large pushes that wait until they can go directly.

use futures_util::{
    FutureExt,
    future::{BoxFuture, join, join3},
};

use super::{direct::idle, flow::take, *};
use crate::domain::{ItemState, OrderingKey};

/// As large as a push must be to wait.
const LARGE: usize = 32 << 10;
/// Longer than a test: what waits so long has not come.
const FOREVER: Duration = Duration::from_hours(1);

fn large(payload: char) -> NewItem {
    NewItem { payload: vec![payload as u8; LARGE].into(), ..NewItem::default() }
}

async fn bench_with_waits(max_push_wait: Duration) -> Bench {
    bench_with(Limits { max_push_wait, ..rare_polls() }).await
}

/// A bench with an idle stream, in which pushes are stored and do not end.
async fn bench_that_holds_pushes(max_push_wait: Duration) -> (Bench, Subscription) {
    let bench = bench_with_waits(max_push_wait).await;
    let mut stream = bench.stream().await;
    idle(&bench, &mut stream).await;
    bench.faults.set("push", Fault::HeldAfter);
    (bench, stream)
}

impl Bench {
    fn push_items(&self, items: Vec<NewItem>) -> BoxFuture<'_, ()> {
        let pushing =
            async move { within("a push", self.engine.push(&name("q"), items, None)).await };
        pushing.map(|pushed| assert!(pushed.is_ok(), "{pushed:?}")).boxed()
    }

    /// Makes a reserve necessary, and lets none end.
    async fn hold_reserves(&self) {
        let begun = self.faults.begun("reserve");
        self.faults.set("reserve", Fault::HeldBefore);
        self.engine.rescan_all();
        self.faults.until_begun("reserve", begun + 1).await;
    }

    /// The first letters of the payloads that a stream receives next.
    async fn take_letters(&self, stream: &mut Subscription, count: usize) -> String {
        take(stream, count).await.iter().filter_map(|payload| payload.chars().next()).collect()
    }
}

#[tokio::test]
async fn a_large_push_waits_for_one_that_does_not_go_directly() {
    let (bench, mut stream) = bench_that_holds_pushes(FOREVER).await;
    let (begun, done) = (bench.faults.begun("push"), bench.faults.done("push"));
    let looking = async {
        bench.faults.until_done("push", done + 1).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(bench.faults.begun("push"), begun + 1, "those behind it wait");
        bench.faults.set("push", Fault::HeldBefore);
        // The first one can be found now, and the reserve that takes it clears the way.
        bench.faults.until_begun("push", begun + 3).await;
        bench.faults.set("push", Fault::None);
    };
    let behind =
        join(bench.push_items(vec![large('b'), large('c')]), bench.push_items(vec![large('d')]));
    join3(bench.push_keyed("a"), behind, looking).await;
    let items = bench.items().await;
    let is_reserved = |item: &&Item| item.state == ItemState::Reserved;
    assert_eq!(items.iter().filter(is_reserved).count(), items.len(), "{items:?}");
    assert_eq!(bench.take_letters(&mut stream, 4).await, "abcd");
}

/// What one caller pushes stays in its order.
#[tokio::test]
async fn a_small_push_does_not_overtake_a_large_one_that_waits() {
    let (bench, mut stream) = bench_that_holds_pushes(FOREVER).await;
    let done = bench.faults.done("push");
    let looking = async {
        bench.faults.until_done("push", done + 1).await;
        bench.faults.set("push", Fault::None);
    };
    let behind = join(bench.push_items(vec![large('b')]), bench.push(1));
    join3(bench.push_keyed("a"), behind, looking).await;
    assert_eq!(bench.take_letters(&mut stream, 3).await, "ab0");
}

#[tokio::test]
async fn a_large_push_waits_for_a_limited_time() {
    let (bench, mut stream) = bench_that_holds_pushes(Duration::from_millis(20)).await;
    let done = bench.faults.done("push");
    let looking = async {
        bench.faults.until_done("push", done + 2).await;
        let items = bench.items().await;
        assert!(items.iter().all(|item| item.state == ItemState::Ready), "{items:?}");
        bench.faults.set("push", Fault::None);
    };
    join3(bench.push_keyed("a"), bench.push_items(vec![large('b')]), looking).await;
    assert_eq!(bench.take_letters(&mut stream, 2).await, "ab");
}

#[tokio::test]
async fn a_push_that_nobody_waits_for_any_more_holds_up_no_other() {
    let (bench, mut stream) = bench_that_holds_pushes(FOREVER).await;
    let (begun, done) = (bench.faults.begun("push"), bench.faults.done("push"));
    let given_up = async {
        bench.faults.until_done("push", done + 1).await;
        tokio::select! {
            () = bench.push_items(vec![large('b')]) => panic!("it waits"),
            () = tokio::time::sleep(Duration::from_millis(50)) => {}
        }
        assert_eq!(bench.faults.begun("push"), begun + 1, "it has not begun");
        bench.faults.set("push", Fault::None);
    };
    join3(bench.push_keyed("a"), given_up, bench.push_items(vec![large('c')])).await;
    assert_eq!(bench.take_letters(&mut stream, 2).await, "ac");
}

/// There is nothing to wait for: consumers are slow, or pushes like these never go directly.
#[tokio::test]
async fn a_large_push_does_not_wait_for_what_does_not_come() {
    let keyed = |payload| NewItem { ordering_key: OrderingKey::new("k"), ..large(payload) };
    let options = [
        ("no items so large", ConsumeOptions { max_in_flight_bytes: Some(10), ..Bench::options() }),
        ("not so many", ConsumeOptions { max_in_flight: 1, ..Bench::options() }),
        ("auto_commit", ConsumeOptions { auto_commit: true, ..Bench::options() }),
        ("keyed items", Bench::options()),
        ("paused", Bench::options()),
        ("two streams", Bench::options()),
    ];
    for (case, options) in options {
        println!("{case}");
        let bench = bench_with_waits(FOREVER).await;
        let mut stream = bench.engine.consume(options.clone()).await.unwrap();
        assert!(futures_util::poll!(std::pin::pin!(stream.next())).is_pending());
        bench.hold_reserves().await;
        let second = match case {
            "two streams" => Some(bench.engine.consume(options).await.unwrap()),
            _ => None,
        };
        if case == "paused" {
            bench.engine.pause_queue(&name("q"), true).await.unwrap();
        }
        let items = match case {
            "keyed items" => vec![keyed('a'), keyed('b')],
            _ => vec![large('a'), large('b')],
        };
        bench.push_items(items).await;
        drop(second);
    }
}

/// A stream that holds all it may has no place before its client settles something.
#[tokio::test]
async fn a_large_push_does_not_wait_for_a_stream_that_is_full() {
    let bench = bench_with_waits(FOREVER).await;
    let options = ConsumeOptions { max_in_flight: 1, ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    idle(&bench, &mut stream).await;
    bench.push_items(vec![large('a')]).await;
    assert_eq!(bench.take_letters(&mut stream, 1).await, "a");
    bench.push_items(vec![large('b')]).await;
    assert!(bench.items().await.iter().any(|item| item.state == ItemState::Ready));
}
