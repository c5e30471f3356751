//! Histories told call by call. Times are in milliseconds.

use sluicegate_checker::{
    Options, Report, Rule, check,
    history::{
        Answer, CallId, Consume, Delivery, Event, NewItem, Outcome, Pushed, Request, Response,
        RollbackItem, Settings, What,
    },
};

pub(crate) const MS: u64 = 1_000;
/// The lease of deliveries, in milliseconds.
pub(crate) const LEASE: u64 = 10_000;

/// A history in the making.
#[derive(Default)]
pub(crate) struct Story {
    pub(crate) events: Vec<Event>,
    calls: CallId,
    now: u64,
}

impl Story {
    /// Goes on to a point of time.
    pub(crate) fn at(&mut self, ms: u64) -> &mut Self {
        self.now = self.now.max(ms * MS);
        self
    }

    pub(crate) fn tell(&mut self, what: What) -> &mut Self {
        self.events.push(Event { at: self.now, what });
        self
    }

    /// Starts a call and returns its number.
    pub(crate) fn start(&mut self, request: Request) -> CallId {
        self.calls += 1;
        let (client, broker) = ("client".to_owned(), "broker".to_owned());
        self.tell(What::Start { call: self.calls, client, broker, request });
        self.calls
    }

    pub(crate) fn end(&mut self, call: CallId, answer: Answer) -> &mut Self {
        self.tell(What::End { call, answer })
    }

    pub(crate) fn ok(&mut self, call: CallId, response: Response) -> &mut Self {
        self.end(call, Answer::Ok(response))
    }

    pub(crate) fn unknown(&mut self, call: CallId) -> &mut Self {
        self.end(call, Answer::Unknown("UNAVAILABLE".to_owned()))
    }

    pub(crate) fn refused(&mut self, call: CallId) -> &mut Self {
        self.end(call, Answer::Refused("RESOURCE_EXHAUSTED".to_owned()))
    }

    /// Tells of a call that lasts a millisecond.
    pub(crate) fn call(&mut self, request: Request, response: Response) -> &mut Self {
        let call = self.start(request);
        self.now += MS;
        self.ok(call, response)
    }

    pub(crate) fn set(&mut self, queue: &str, settings: Settings) -> &mut Self {
        self.call(Request::SetQueue { queue: queue.to_owned(), settings }, Response::Done)
    }

    /// Pushes one item, which has its name as id.
    pub(crate) fn push(&mut self, item: NewItem) -> &mut Self {
        let result = pushed(&item.name);
        self.call(push(vec![item]), Response::Pushed(vec![result]))
    }

    /// Reserves, and receives this.
    pub(crate) fn reserve(&mut self, delivery: Delivery) -> &mut Self {
        let call = self.start(reserve(1, 0));
        self.now += MS;
        let delivery = self.leased(delivery);
        self.ok(call, Response::Deliveries(vec![delivery]))
    }

    /// Returns a delivery with the lease that begins now, unless it has another one.
    pub(crate) fn leased(&self, delivery: Delivery) -> Delivery {
        let fresh = self.now + LEASE * MS;
        let lease_end = if delivery.lease_end == 0 { fresh } else { delivery.lease_end };
        Delivery { lease_end, ..delivery }
    }

    pub(crate) fn deliver(&mut self, stream: CallId, delivery: Delivery) -> &mut Self {
        let deliveries = vec![self.leased(delivery)];
        self.tell(What::Delivered { call: stream, deliveries })
    }

    pub(crate) fn commit(&mut self, receipt: &str, outcome: Outcome) -> &mut Self {
        self.call(commit(receipt), Response::Settled(vec![outcome]))
    }

    pub(crate) fn rollback(&mut self, item: RollbackItem, outcome: Outcome) -> &mut Self {
        self.call(Request::Rollback { items: vec![item] }, Response::Settled(vec![outcome]))
    }

    pub(crate) fn rest(&mut self) -> &mut Self {
        self.tell(What::Rest { queues: Vec::new() })
    }

    pub(crate) fn report(&self) -> Report {
        check(&self.events, &Options::default())
    }

    /// The history breaks no promise.
    pub(crate) fn is_clean(&self) {
        let report = self.report();
        assert!(report.is_clean(), "{report}");
    }

    /// The history breaks this promise alone, with this item or queue, and that many events prove it.
    pub(crate) fn breaks(&self, rule: Rule, name: &str, events: usize) -> Report {
        let report = self.report();
        assert_eq!(report.rules(), [rule], "{report}");
        let violation = &report.violations[0];
        assert_eq!(violation.name, name, "{report}");
        assert_eq!(violation.evidence.len(), events, "{report}");
        report
    }
}

pub(crate) fn item(name: &str) -> NewItem {
    NewItem { name: name.to_owned(), ..NewItem::default() }
}

pub(crate) fn keyed(name: &str) -> NewItem {
    NewItem { ordering_key: "key".to_owned(), ..item(name) }
}

pub(crate) fn dedup(name: &str) -> NewItem {
    NewItem { dedup_id: format!("id of {name}"), ..item(name) }
}

pub(crate) fn push(items: Vec<NewItem>) -> Request {
    Request::Push { queue: "work".to_owned(), items, stream: None }
}

pub(crate) fn pushed(id: &str) -> Pushed {
    Pushed { id: id.to_owned(), ..Pushed::default() }
}

pub(crate) fn reserve(max_items: u32, wait_ms: u64) -> Request {
    let queue = "work".to_owned();
    Request::Reserve { queue, max_items, wait: wait_ms * MS, lease: LEASE * MS }
}

pub(crate) fn consume(max_in_flight: u32) -> Consume {
    let lease = LEASE * MS;
    Consume { queue: "work".to_owned(), max_in_flight, lease, ..Consume::default() }
}

/// Returns how a stream consumes that may hold 100 bytes.
pub(crate) fn consume_100_bytes() -> Consume {
    Consume { max_in_flight_bytes: 100, ..consume(10) }
}

/// Returns the first delivery of an item with so many bytes.
pub(crate) fn large(name: &str, bytes: usize) -> Delivery {
    Delivery { bytes, ..delivery(name, 1) }
}

/// Changes the flow of a stream.
pub(crate) fn flow(stream: CallId, max_in_flight: u32) -> Request {
    Request::Flow { stream, max_in_flight }
}

pub(crate) fn commit(receipt: &str) -> Request {
    Request::Commit { receipts: vec![receipt.to_owned()] }
}

pub(crate) fn extend(receipt: &str) -> Request {
    Request::Extend { receipts: vec![receipt.to_owned()], lease: LEASE * MS }
}

/// Returns delivery `number` of an item, by the receipt `<name>/<number>`.
pub(crate) fn delivery(name: &str, number: u32) -> Delivery {
    Delivery {
        receipt: format!("{name}/{number}"),
        id: name.to_owned(),
        name: name.to_owned(),
        queue: "work".to_owned(),
        attempt: number,
        deliveries: number,
        ..Delivery::default()
    }
}

/// Returns delivery `number` of an item, which is the first since it became a dead letter of this queue after so many failed
/// attempts.
pub(crate) fn dead_letter(name: &str, number: u32, of: &str, failed: u32) -> Delivery {
    Delivery {
        queue: format!("{of}.dead"),
        attempt: 1,
        origin_queue: of.to_owned(),
        dead_letter_attempts: failed,
        ..delivery(name, number)
    }
}

pub(crate) fn back(receipt: &str) -> RollbackItem {
    RollbackItem { receipt: receipt.to_owned(), delay: Some(0), ..RollbackItem::default() }
}
