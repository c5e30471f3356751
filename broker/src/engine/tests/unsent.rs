//! Streams whose clients read nothing.

use super::{
    super::EngineError,
    streams::{ask, until_assigned},
    *,
};

const KIB: usize = 1 << 10;

/// Returns a bench whose streams may leave as many bytes, with bounds kept in the background.
async fn bench_that_keeps(max_unsent_bytes: usize) -> Bench {
    let bench = bench_with(Limits { max_unsent_bytes, ..rare_polls() }).await;
    tokio::spawn(Arc::clone(&bench.engine).bound_unsent());
    bench
}

impl Bench {
    async fn push_large(&self, count: usize) {
        let large = || NewItem { payload: vec![0; 100 * KIB].into(), ..NewItem::default() };
        let items = (0..count).map(|_| large()).collect();
        self.engine.push(&name("q"), items, None).await.unwrap();
    }

    async fn reserved(&self) -> u64 {
        let queue = self.queue().await;
        self.store.depth(&queue).await.unwrap().reserved
    }
}

/// What nobody reads returns, unharmed, and goes to those who read.
#[tokio::test]
async fn streams_that_are_not_read_keep_no_more_than_they_may() {
    let bench = bench_that_keeps(2_500 * KIB).await; // what two streams may hold
    let mut unread = Vec::new();
    for _ in 0..8 {
        let mut stream = bench.stream().await;
        ask(&mut stream).await;
        unread.push(stream);
    }
    bench.push_large(80).await;
    until("no more is kept", async || {
        let kept = bench.reserved().await;
        0 < kept && kept <= 20
    })
    .await;
    let mut reader = bench.stream().await;
    let mut taken = Vec::new();
    while taken.len() < 60 {
        let next = deliveries(&mut reader).await;
        bench.engine.commit(&receipts(&next)).await.unwrap();
        taken.extend(next);
    }
    assert!(taken.iter().all(|delivery| delivery.item.attempt == 1));
    // Whoever reads again receives what it was left, or what was taken from it.
    drop(reader);
    let mut rest = 80 - taken.len();
    while rest > 0 {
        for stream in &mut unread {
            let next = tokio::time::timeout(Duration::from_millis(20), stream.next()).await;
            if let Ok(Ok(Received::Deliveries(next))) = next {
                rest -= next.len();
                bench.engine.commit(&receipts(&next)).await.unwrap();
            }
        }
    }
    assert!(bench.items().await.is_empty());
}

/// Items that are committed before they are sent are lost with their stream, as if its client had left.
#[tokio::test]
async fn a_stream_whose_items_cannot_be_taken_back_ends() {
    let bench = bench_that_keeps(100 * KIB).await;
    let options = ConsumeOptions { auto_commit: true, ..Bench::options() };
    let mut stream = bench.engine.consume(options).await.unwrap();
    ask(&mut stream).await;
    bench.push_large(3).await;
    bench.until_waiting(0).await;
    assert!(!bench.engine.unsent.is_over());
    assert!(matches!(stream.next().await, Err(EngineError::NotRead)));
}

/// As long as there is room, a stream that is busy is assigned its next items.
#[tokio::test]
async fn what_a_stream_leaves_for_a_moment_stays() {
    let bench = bench_that_keeps(1_000 * KIB).await;
    let mut stream = bench.stream().await;
    ask(&mut stream).await;
    bench.push_large(5).await;
    until_assigned(&bench, 5).await;
    assert_eq!(deliveries(&mut stream).await.len(), 5);
}
