//! ConsumeStream: deliveries, settles and flow on one stream.

use std::{collections::VecDeque, time::Duration};

use sluicegate_proto::v1::{
    CommitRequest, CommitUpTo, CommitUpToResponse, ConsumeRequest, ConsumeStreamRequest,
    ConsumeStreamResponse, Delivery, ExtendRequest, Flow, ItemState, Outcome, RollbackItem,
    RollbackRequest, consume_stream_request::Action, consume_stream_response::Event,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use crate::harness::{
    Api, Backend, MongoServer, TestStore, at, bad_fields, duration, on_both_backends, outcomes,
    payloads, text, until, within,
};

on_both_backends!(
    one_stream_carries_all_deliveries_and_answers,
    a_flow_of_zero_halts_and_a_greater_one_resumes,
    requests_of_one_receipt_take_effect_in_the_order_sent,
    one_request_commits_all_items_up_to_one,
    with_commits_up_to_one_each_item_is_delivered_once,
    a_half_closed_stream_answers_all_and_ends,
    the_items_of_a_broken_stream_are_rolled_back,
    a_refused_request_is_answered_and_the_stream_continues,
    only_a_misplaced_open_ends_a_stream,
);

const LONG: Duration = Duration::from_mins(10);

/// An open ConsumeStream.
struct Session {
    requests: mpsc::Sender<ConsumeStreamRequest>,
    events: Streaming<ConsumeStreamResponse>,
    /// Deliveries that arrived while the test waited for another event.
    deliveries: VecDeque<Delivery>,
}

impl Session {
    async fn open(api: &Api, request: ConsumeRequest) -> Self {
        api.ensure(&request.queue).await;
        let (requests, outgoing) = mpsc::channel(100);
        let open = ConsumeStreamRequest { action: Some(Action::Open(request)) };
        requests.send(open).await.expect("room in the channel");
        let events = api.queue.clone().consume_stream(ReceiverStream::new(outgoing)).await;
        let events = events.expect("a stream").into_inner();
        Self { requests, events, deliveries: VecDeque::new() }
    }

    /// Opens a consumer of `work` and waits for the answer.
    async fn of_work(api: &Api, max_in_flight: i32) -> Self {
        let request = ConsumeRequest {
            queue: "work".to_owned(),
            max_in_flight,
            lease: duration(LONG),
            ..ConsumeRequest::default()
        };
        let mut session = Self::open(api, request).await;
        match session.event().await.expect("an event") {
            Some(Event::Opened(opened)) => {
                assert_eq!((opened.max_in_flight, opened.lease), (max_in_flight, duration(LONG)));
            }
            other => panic!("the first event must be opened, not {other:?}"),
        }
        session
    }

    async fn send(&self, action: Action) {
        let request = ConsumeStreamRequest { action: Some(action) };
        self.requests.send(request).await.expect("a stream that takes requests");
    }

    /// Returns the next event; `None` at the end.
    async fn event(&mut self) -> Result<Option<Event>, Status> {
        let message = within("an event", self.events.message()).await?;
        Ok(message.map(|message| message.event.expect("an event in the message")))
    }

    /// Returns the next event that is not a delivery.
    async fn answer(&mut self) -> Event {
        loop {
            match self.event().await.expect("an open stream").expect("an event") {
                Event::Deliveries(message) => self.deliveries.extend(message.deliveries),
                answer => return answer,
            }
        }
    }

    async fn next(&mut self) -> Delivery {
        loop {
            if let Some(delivery) = self.deliveries.pop_front() {
                return delivery;
            }
            match self.event().await.expect("an open stream").expect("an event") {
                Event::Deliveries(message) => self.deliveries.extend(message.deliveries),
                other => panic!("the next event must be a delivery, not {other:?}"),
            }
        }
    }

    async fn take(&mut self, count: usize) -> Vec<Delivery> {
        let mut taken = Vec::new();
        while taken.len() < count {
            taken.push(self.next().await);
        }
        taken
    }

    async fn commit(&mut self, deliveries: &[Delivery]) -> Vec<Outcome> {
        self.send(commit(deliveries)).await;
        match self.answer().await {
            Event::Settled(settled) => outcomes(&settled.results),
            other => panic!("not {other:?}"),
        }
    }

    /// Commits all items up to the one with this tag. Returns how many were committed.
    async fn commit_up_to(&mut self, delivery_tag: i64) -> i32 {
        self.send(Action::CommitUpTo(CommitUpTo { delivery_tag })).await;
        match self.answer().await {
            Event::CommittedUpTo(CommitUpToResponse {
                committed, not_committed_size: 0, ..
            }) => committed,
            other => panic!("not {other:?}"),
        }
    }

    /// Sets the flow and waits until it is in force.
    async fn flow(&mut self, max_in_flight: i32) {
        self.send(Action::Flow(Flow { max_in_flight })).await;
        match self.answer().await {
            Event::Flow(flow) => assert_eq!(flow.max_in_flight, max_in_flight),
            other => panic!("not {other:?}"),
        }
    }
}

fn commit(deliveries: &[Delivery]) -> Action {
    let receipts = deliveries.iter().map(|delivery| delivery.receipt.clone()).collect();
    Action::Commit(CommitRequest { receipts })
}

fn extend(delivery: &Delivery, lease: Duration) -> Action {
    let receipts = vec![delivery.receipt.clone()];
    Action::Extend(ExtendRequest { receipts, lease: duration(lease) })
}

fn rollback(delivery: &Delivery, reason: &str) -> Action {
    let item = RollbackItem {
        receipt: delivery.receipt.clone(),
        delay: duration(Duration::ZERO),
        reason: reason.to_owned(),
        ..RollbackItem::default()
    };
    Action::Rollback(RollbackRequest { items: vec![item] })
}

async fn one_stream_carries_all_deliveries_and_answers(backend: Backend) {
    let store = backend.store();
    let broker = store.launch().without_poll().start().await;
    let api = broker.api().await;
    api.push("work", &["a", "b", "c"]).await;
    let mut session = Session::of_work(&api, 3).await;
    let taken = session.take(3).await;
    assert_eq!(payloads(&taken), ["a", "b", "c"]);

    // Two requests sent together are answered in order.
    session.send(commit(&taken[..1])).await;
    session.send(rollback(&taken[1], "on the stream")).await;
    for delivery in [&taken[0], &taken[1]] {
        match session.answer().await {
            Event::Settled(settled) => {
                assert_eq!(settled.results[0].receipt, delivery.receipt);
                assert_eq!(outcomes(&settled.results), [Outcome::Ok]);
            }
            other => panic!("not {other:?}"),
        }
    }
    let receipts = vec![taken[2].receipt.clone(), taken[0].receipt.clone()];
    session.send(Action::Extend(ExtendRequest { receipts, lease: duration(LONG * 2) })).await;
    match session.answer().await {
        Event::Extended(extended) => {
            let results = &extended.results;
            assert_eq!((results[0].outcome(), results[1].outcome()), (Outcome::Ok, Outcome::Gone));
            let before = at(taken[2].lease_expire_time.as_ref());
            assert!(at(results[0].lease_expire_time.as_ref()) > before + LONG / 2);
            assert!(results[1].lease_expire_time.is_none());
        }
        other => panic!("not {other:?}"),
    }
    let again = session.next().await;
    let item = again.item.as_ref().expect("an item");
    assert_eq!((&item.payload[..], item.attempt, item.deliveries), (&b"b"[..], 2, 2));
    assert_eq!(item.last_reason, "on the stream");
    // A settle by a call of its own frees the place too. A stale receipt is reported as such.
    assert_eq!(api.commit(&[&taken[2].receipt]).await, [Outcome::Ok]);
    let stale = [taken[1].clone(), again, taken[2].clone()];
    let wanted = [Outcome::LeaseLost, Outcome::Ok, Outcome::Gone];
    assert_eq!(session.commit(&stale).await, wanted);
    api.push("work", &["d", "e", "f", "g"]).await;
    assert_eq!(payloads(&session.take(3).await), ["d", "e", "f"]);
}

async fn a_flow_of_zero_halts_and_a_greater_one_resumes(backend: Backend) {
    let store = backend.store();
    let broker = store.launch().without_poll().start().await;
    let api = broker.api().await;
    api.push("work", &["a", "b", "c", "d", "e", "f"]).await;
    let mut session = Session::of_work(&api, 2).await;
    let held = session.take(2).await;
    session.flow(0).await;
    // The items that were handed out stay, and their places are not filled again.
    assert_eq!(session.commit(&held[..1]).await, [Outcome::Ok]);
    // A complete round over the same connection. Any further item would have arrived by then.
    let mut other = api.consume("round", 1).await;
    for _ in 0..20 {
        api.push("round", &["x"]).await;
        let delivery = other.next().await;
        api.commit(&[&delivery.receipt]).await;
    }
    // The answer to a second flow comes after everything that was handed out before it.
    session.flow(0).await;
    assert!(session.deliveries.is_empty(), "delivered while halted: {:?}", session.deliveries);
    assert_eq!(api.list("work", ItemState::Ready).await.len(), 4);

    session.flow(3).await;
    let more = session.take(2).await;
    assert_eq!(payloads(&more), ["c", "d"], "two, because one is still held");
    session.flow(1).await;
    assert_eq!(session.commit(&more).await, [Outcome::Ok, Outcome::Ok]);
    session.flow(1).await;
    assert!(session.deliveries.is_empty(), "one item is held, which is the limit");
    assert_eq!(session.commit(&held[1..]).await, [Outcome::Ok]);
    assert_eq!(text(&session.next().await), "e");
    assert_eq!(api.list("work", ItemState::Ready).await.len(), 1);
}

async fn requests_of_one_receipt_take_effect_in_the_order_sent(backend: Backend) {
    const ITEMS: usize = 150;
    let store = backend.store();
    let broker = store.launch().without_poll().start().await;
    let api = broker.api().await;
    api.push("work", &["x"; ITEMS]).await;
    let mut session = Session::of_work(&api, i32::try_from(ITEMS).expect("few")).await;
    let taken = session.take(ITEMS).await;
    session.flow(0).await;
    // The requests are sent without waiting for answers.
    let requests = session.requests.clone();
    let sent = taken.clone();
    tokio::spawn(async move {
        for (number, delivery) in sent.iter().enumerate() {
            let (mut first, mut second) =
                (commit(std::slice::from_ref(delivery)), rollback(delivery, "again"));
            if number % 2 == 1 {
                std::mem::swap(&mut first, &mut second);
            }
            for action in [extend(delivery, LONG), first, extend(delivery, LONG), second] {
                let request = ConsumeStreamRequest { action: Some(action) };
                requests.send(request).await.expect("a stream that takes requests");
            }
        }
    });
    for number in 0..ITEMS {
        let mut seen = Vec::new();
        for _ in 0..4 {
            seen.push(match session.answer().await {
                Event::Settled(settled) => settled.results[0].outcome(),
                Event::Extended(extended) => extended.results[0].outcome(),
                other => panic!("not {other:?}"),
            });
        }
        let after = if number % 2 == 0 { Outcome::Gone } else { Outcome::LeaseLost };
        assert_eq!(seen, [Outcome::Ok, Outcome::Ok, after, after], "item {number}");
    }
}

async fn one_request_commits_all_items_up_to_one(backend: Backend) {
    let store = backend.store();
    let broker = store.launch().without_poll().start().await;
    let api = broker.api().await;
    api.push("work", &["a", "b", "c", "d", "e"]).await;
    let mut session = Session::of_work(&api, 5).await;
    let taken = session.take(5).await;
    let tags = |taken: &[Delivery]| taken.iter().map(|one| one.delivery_tag).collect::<Vec<_>>();
    assert_eq!(tags(&taken), [1, 2, 3, 4, 5]);
    // What the consumer settles by its receipt is left out, though both are sent at once.
    session.send(rollback(&taken[1], "not yet")).await;
    session.send(Action::CommitUpTo(CommitUpTo { delivery_tag: 4 })).await;
    session.send(extend(&taken[3], LONG)).await;
    let answers = [session.answer().await, session.answer().await, session.answer().await];
    let [Event::Settled(settled), Event::CommittedUpTo(up_to), Event::Extended(extended)] = answers
    else {
        panic!("not {answers:?}");
    };
    assert_eq!(outcomes(&settled.results), [Outcome::Ok]);
    assert_eq!(up_to, CommitUpToResponse { committed: 3, ..Default::default() });
    assert_eq!(extended.results[0].outcome(), Outcome::Gone, "it is committed before");
    let again = session.take(1).await;
    assert_eq!((payloads(&again), tags(&again)), (vec!["b".to_owned()], vec![6]));
    assert_eq!(session.commit_up_to(4).await, 0, "nothing is left up to there");
    for delivery_tag in [0, -1, 7, i64::MAX] {
        session.send(Action::CommitUpTo(CommitUpTo { delivery_tag })).await;
        match session.answer().await {
            Event::Error(error) => {
                assert_eq!(Code::from_i32(error.code), Code::InvalidArgument, "{error:?}");
                assert!(error.message.contains("1 to 6"), "{error:?}");
            }
            other => panic!("not {other:?}"),
        }
    }
    assert_eq!(session.commit_up_to(6).await, 2);
    api.until_stats("work", |stats| (stats.ready, stats.reserved) == (0, 0)).await;
    // A rollback that is refused does not become a commit.
    api.push("work", &["f"]).await;
    let last = session.next().await;
    let never = RollbackItem {
        receipt: last.receipt.clone(),
        delay: duration(Duration::from_secs(1)),
        dead_letter: true,
        ..RollbackItem::default()
    };
    session.send(Action::Rollback(RollbackRequest { items: vec![never] })).await;
    session.send(Action::CommitUpTo(CommitUpTo { delivery_tag: last.delivery_tag })).await;
    assert!(matches!(session.answer().await, Event::Error(_)));
    assert_eq!(session.answer().await, Event::CommittedUpTo(CommitUpToResponse::default()));
    drop(session);
    // Calls give no tags, nor do streams that commit by themselves.
    let again = api.reserve_one("work", Duration::from_secs(100)).await;
    assert_eq!((tags(std::slice::from_ref(&again)), text(&again)), (vec![0], "f".to_owned()));
    api.push("work", &["g"]).await;
    let auto_commit =
        ConsumeRequest { queue: "work".to_owned(), auto_commit: true, ..Default::default() };
    let mut session = Session::open(&api, auto_commit).await;
    assert!(matches!(session.answer().await, Event::Opened(_)));
    assert_eq!(tags(&[session.next().await]), [0]);
    session.send(Action::CommitUpTo(CommitUpTo { delivery_tag: 1 })).await;
    assert!(matches!(session.answer().await, Event::Error(_)));
}

async fn with_commits_up_to_one_each_item_is_delivered_once(backend: Backend) {
    const ITEMS: usize = 5_000;
    let store = backend.store();
    let broker = store.launch().without_poll().start().await;
    let api = broker.api().await;
    let names: Vec<String> = (0..ITEMS).map(|item| format!("{item:04}")).collect();
    for batch in names.chunks(500) {
        api.push("work", &batch.iter().map(String::as_str).collect::<Vec<_>>()).await;
    }
    let mut session = Session::of_work(&api, 700).await;
    let (mut received, mut committed, mut asked) = (Vec::new(), 0, 0);
    while committed < ITEMS {
        match session.event().await.expect("an open stream").expect("an event") {
            Event::Deliveries(message) => {
                received.extend(payloads(&message.deliveries));
                let delivery_tag = message.deliveries.last().expect("a delivery").delivery_tag;
                assert_eq!(delivery_tag, i64::try_from(received.len()).expect("few"));
                // Requests do not wait for the answers to those before.
                session.send(Action::CommitUpTo(CommitUpTo { delivery_tag })).await;
                asked += 1;
            }
            Event::CommittedUpTo(answer) => {
                assert_eq!(answer.not_committed_size, 0);
                committed += usize::try_from(answer.committed).expect("a count");
                asked -= 1;
            }
            other => panic!("not {other:?}"),
        }
    }
    assert_eq!((asked, committed), (0, ITEMS));
    assert_eq!(received, names, "each once, in the order of the pushes");
    api.until_stats("work", |stats| (stats.ready, stats.reserved) == (0, 0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_settle_delays_only_requests_for_its_own_receipt() {
    let server = MongoServer::start().await;
    let store = TestStore::mongo(&server.uri());
    let broker = store.launch().signals("local:").without_poll().start().await;
    let api = broker.api().await;
    // In calls of their own, so that each has a document of its own.
    for item in ["a", "b", "c"] {
        api.push("work", &[item]).await;
    }
    let mut session = Session::of_work(&api, 2).await;
    let held = session.take(2).await;
    // A commit is a delete.
    server.hold("delete", Duration::from_secs(5)).await;
    session.send(commit(&held[..1])).await;
    session.send(extend(&held[0], LONG)).await;
    session.send(extend(&held[1], LONG * 2)).await;
    session.send(Action::Flow(Flow { max_in_flight: 3 })).await;
    // The flow is in force and the other receipt's lease is extended, while the first answer is
    // still pending.
    match session.event().await.expect("an open stream") {
        Some(Event::Deliveries(message)) => assert_eq!(payloads(&message.deliveries), ["c"]),
        other => panic!("the greater flow is not in force: {other:?}"),
    }
    let item = held[1].item.as_ref().expect("an item");
    let before = at(held[1].lease_expire_time.as_ref());
    until("the lease is extended", || async {
        let now = api.item("work", &item.id).await.expect("the item");
        (at(now.eligible_time.as_ref()) > before + LONG / 2).then_some(())
    })
    .await;
    assert_eq!(api.list("work", ItemState::Reserved).await.len(), 3, "the commit is delayed");
    // In the order of the requests.
    let answers = [session.answer().await, session.answer().await, session.answer().await];
    let [Event::Settled(settled), Event::Extended(own), Event::Extended(other)] = answers else {
        panic!("not {answers:?}");
    };
    assert_eq!(outcomes(&settled.results), [Outcome::Ok]);
    assert_eq!(own.results[0].outcome(), Outcome::Gone, "it ran after the commit");
    assert_eq!(other.results[0].outcome(), Outcome::Ok);
    assert_eq!(session.answer().await, Event::Flow(Flow { max_in_flight: 3 }));
}

async fn a_half_closed_stream_answers_all_and_ends(backend: Backend) {
    let store = backend.store();
    let broker = store.launch().without_poll().start().await;
    let api = broker.api().await;
    let lines: Vec<String> = (0..40).map(|line| line.to_string()).collect();
    api.push("work", &lines.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let mut session = Session::of_work(&api, 40).await;
    let taken = session.take(40).await;
    // After many requests the client closes its side. All are answered before the end.
    for delivery in &taken[..30] {
        session.send(commit(std::slice::from_ref(delivery))).await;
    }
    let Session { requests, mut events, .. } = session;
    drop(requests);
    let mut answers = Vec::new();
    while let Some(message) = within("an answer", events.message()).await.expect("a clean end") {
        match message.event.expect("an event") {
            Event::Settled(settled) => answers.extend(settled.results),
            other => panic!("not {other:?}"),
        }
    }
    let receipts: Vec<&str> = answers.iter().map(|answer| answer.receipt.as_str()).collect();
    let wanted: Vec<&str> = taken[..30].iter().map(|taken| taken.receipt.as_str()).collect();
    assert_eq!(receipts, wanted);
    assert!(answers.iter().all(|answer| answer.outcome() == Outcome::Ok));
    // The other items are ready again immediately, as with any stream that ends.
    api.until_stats("work", |stats| (stats.ready, stats.reserved) == (10, 0)).await;
    let mut rest = payloads(&api.reserve_now("work", 100).await);
    rest.sort();
    assert_eq!(rest, lines[30..]);
}

async fn the_items_of_a_broken_stream_are_rolled_back(backend: Backend) {
    let store = backend.store();
    let broker = store.launch().without_poll().start().await;
    let api = broker.api().await;
    api.push("work", &["a", "b", "c"]).await;
    let mut session = Session::of_work(&api, 10).await;
    let taken = session.take(3).await;
    assert_eq!(session.commit(&taken[..1]).await, [Outcome::Ok]);
    drop(session);
    let mut again = Vec::new();
    for _ in 0..2 {
        let delivery = api.reserve_one("work", LONG).await;
        assert_eq!(delivery.item.as_ref().expect("an item").attempt, 1);
        again.push(text(&delivery));
    }
    again.sort();
    assert_eq!(again, ["b", "c"]);
}

/// A request that is refused has no other effect: the stream keeps the items it holds.
async fn a_refused_request_is_answered_and_the_stream_continues(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    api.push("work", &["a", "b"]).await;
    let mut session = Session::of_work(&api, 2).await;
    let held = session.take(2).await;
    let bad = || "not a receipt".to_owned();
    let bad_commit = CommitRequest { receipts: vec![held[0].receipt.clone(), bad()] };
    let bad_item = RollbackItem { receipt: bad(), ..RollbackItem::default() };
    let bad_extend = ExtendRequest { receipts: vec![bad()], lease: None };
    for bad in [
        Action::Commit(bad_commit),
        Action::Rollback(RollbackRequest { items: vec![bad_item] }),
        Action::Extend(bad_extend),
        Action::Flow(Flow { max_in_flight: -1 }),
    ] {
        session.send(bad).await;
        match session.answer().await {
            Event::Error(error) => {
                assert_eq!(Code::from_i32(error.code), Code::InvalidArgument, "{error:?}");
                assert!(!error.message.is_empty() && !error.details.is_empty(), "{error:?}");
            }
            other => panic!("not {other:?}"),
        }
    }
    assert_eq!(
        session.commit(&held).await,
        [Outcome::Ok, Outcome::Ok],
        "no item was settled before"
    );
    api.push("work", &["c"]).await;
    assert_eq!(text(&session.next().await), "c");
}

async fn only_a_misplaced_open_ends_a_stream(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    // The first message must be `open`.
    let (requests, outgoing) = mpsc::channel(1);
    let flow = Action::Flow(Flow { max_in_flight: 1 });
    requests.send(ConsumeStreamRequest { action: Some(flow) }).await.expect("room");
    let refused = match api.queue.clone().consume_stream(ReceiverStream::new(outgoing)).await {
        Err(refused) => refused,
        Ok(stream) => stream.into_inner().message().await.expect_err("no open"),
    };
    assert_eq!(
        (refused.code(), bad_fields(&refused)),
        (Code::InvalidArgument, vec!["open".into()])
    );
    // No other message may be `open`.
    let open = Action::Open(ConsumeRequest { queue: "work".to_owned(), ..Default::default() });
    let mut session = Session::of_work(&api, 1).await;
    session.send(open).await;
    let ended = session.event().await.expect_err("the end of the stream");
    assert_eq!((ended.code(), bad_fields(&ended)), (Code::InvalidArgument, vec!["open".into()]));
}
