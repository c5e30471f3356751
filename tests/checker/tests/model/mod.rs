//! Histories that a small, correct model of the semantics makes are never refused: with many calls at a
//! time, with answers that are lost, and with effects that come after the call was given up.

mod world;

use proptest::prelude::*;
use sluicegate_checker::{
    Options, Report, check,
    history::{
        Answer, CallId, Consume, NewItem, PushEntry, Request, Response, RollbackItem, Settings,
        What,
    },
};

use crate::story::{MS, Story, consume};
use world::World;

/// Decisions, one after the other; none when all are taken.
struct Choices<'a>(std::slice::Iter<'a, u16>);

impl Choices<'_> {
    fn below(&mut self, limit: usize) -> usize {
        self.0.next().map_or(0, |choice| usize::from(*choice) % limit.max(1))
    }

    fn percent(&mut self, chance: usize) -> bool {
        self.below(100) < chance
    }
}

/// A call under way, or given up and still able to take effect.
struct Pending {
    call: CallId,
    request: Request,
    /// The answer, once the call has taken effect.
    response: Option<Answer>,
    given_up: bool,
}

struct Run<'a> {
    choices: Choices<'a>,
    story: Story,
    world: World,
    pending: Vec<Pending>,
    /// Streams that the client knows as open.
    streams: Vec<CallId>,
    /// Receipts that were received, the last ones last.
    receipts: Vec<String>,
    /// Ids and queues of items that were seen.
    seen: Vec<(String, String)>,
    /// Items with deduplication ids whose push was not answered.
    unanswered: Vec<NewItem>,
    names: usize,
}

const QUEUES: [&str; 3] = ["work", "next", "work.dead"];

impl Run<'_> {
    fn queue(&mut self) -> String {
        QUEUES[[0, 0, 0, 0, 1, 2][self.choices.below(6)]].to_owned()
    }

    fn new_item(&mut self) -> NewItem {
        if !self.unanswered.is_empty() && self.choices.percent(50) {
            let index = self.choices.below(self.unanswered.len());
            return self.unanswered[index].clone();
        }
        self.names += 1;
        let name = format!("item {}", self.names);
        let key = self.choices.below(6);
        let dedup_id = if self.choices.percent(40) { format!("id {name}") } else { String::new() };
        let item = NewItem {
            name,
            ordering_key: if key < 2 { format!("key {key}") } else { String::new() },
            dedup_id,
            delay: if self.choices.percent(10) { 1_500 * MS } else { 0 },
            ttl: self.choices.percent(10).then_some(3_000 * MS),
            ..NewItem::default()
        };
        if !item.dedup_id.is_empty() {
            self.unanswered.push(item.clone());
        }
        item
    }

    fn receipt(&mut self) -> Option<String> {
        let back = self.choices.below(self.receipts.len().min(6));
        let index = self.receipts.len().checked_sub(1 + back)?;
        Some(self.receipts[index].clone())
    }

    fn request(&mut self) -> Option<Request> {
        Some(match self.choices.below(16) {
            0..=4 => {
                let count = 1 + self.choices.below(3);
                let items = (0..count).map(|_| self.new_item()).collect::<Vec<_>>();
                // One push has each name once.
                let mut names: Vec<&String> = items.iter().map(|item| &item.name).collect();
                names.sort_unstable();
                names.dedup();
                if names.len() < items.len() {
                    return None;
                }
                Request::Push { queue: "work".to_owned(), items, stream: None }
            }
            5..=7 => {
                let max_items = 1 + self.choices.below(3) as u32;
                let lease = [500, 2_000, 4_000][self.choices.below(3)] * MS;
                Request::Reserve { queue: self.queue(), max_items, wait: 0, lease }
            }
            8 => Request::Pop { queue: self.queue(), max_items: 1, wait: 0 },
            9 | 10 => {
                let mut receipts = vec![self.receipt()?, self.receipt()?];
                receipts.dedup();
                Request::Commit { receipts }
            }
            11 => {
                let receipt = self.receipt()?;
                let dead_letter = self.choices.percent(20);
                let keep_attempt = !dead_letter && self.choices.percent(30);
                let delays = [None, Some(0), Some(0), Some(700 * MS)];
                let delay = delays[self.choices.below(4)].filter(|_| !dead_letter);
                let item = RollbackItem { receipt, delay, keep_attempt, dead_letter };
                Request::Rollback { items: vec![item] }
            }
            12 => {
                let lease = [300, 2_000, 5_000][self.choices.below(3)] * MS;
                Request::Extend { receipts: vec![self.receipt()?], lease }
            }
            13 => {
                let delay = [0, 900 * MS][self.choices.below(2)];
                Request::Move { receipt: self.receipt()?, to_queue: "next".to_owned(), delay }
            }
            14 => {
                let receipt = self.receipt()?;
                let entry = |item| PushEntry { queue: "next".to_owned(), item };
                let mut fresh = || {
                    self.names += 1;
                    NewItem { name: format!("item {}", self.names), ..NewItem::default() }
                };
                let pushes = vec![entry(fresh()), entry(fresh())];
                Request::CommitAndPush { receipt, pushes }
            }
            _ => {
                let index = self.choices.below(self.seen.len());
                let (id, queue) = self.seen.get(index)?.clone();
                Request::DeleteItem { queue, id }
            }
        })
    }

    fn start(&mut self) {
        let Some(request) = self.request() else { return };
        let call = self.story.start(request.clone());
        self.pending.push(Pending { call, request, response: None, given_up: false });
    }

    /// A call takes effect.
    fn take_effect(&mut self) {
        let index = self.choices.below(self.pending.len());
        let refuses = self.choices.percent(5);
        let Some(pending) = self.pending.get_mut(index) else { return };
        if pending.response.is_some() {
            return;
        }
        let refused = Answer::Refused("RESOURCE_EXHAUSTED".to_owned());
        let answer =
            if refuses { refused } else { self.world.perform(pending.call, &pending.request) };
        pending.response = Some(answer);
        if pending.given_up {
            self.pending.swap_remove(index);
        }
    }

    /// A call is answered, or given up.
    fn end(&mut self) {
        let index = self.choices.below(self.pending.len());
        let answered = self.choices.percent(85);
        let Some(pending) = self.pending.get_mut(index).filter(|pending| !pending.given_up) else {
            return;
        };
        let call = pending.call;
        match pending.response.clone() {
            Some(answer) if answered => {
                if let Answer::Ok(response) = &answer {
                    self.see(index, response);
                }
                self.pending.swap_remove(index);
                self.story.end(call, answer);
            }
            Some(_) => {
                self.pending.swap_remove(index);
                self.story.unknown(call);
            }
            None if answered => {}
            None => {
                pending.given_up = true;
                self.story.unknown(call);
            }
        }
    }

    fn see(&mut self, index: usize, response: &Response) {
        if let Request::Push { items, .. } = &self.pending[index].request {
            self.unanswered.retain(|open| items.iter().all(|item| item.name != open.name));
        }
        if let Response::Deliveries(deliveries) = response {
            for delivery in deliveries {
                self.seen.push((delivery.id.clone(), delivery.queue.clone()));
                if delivery.lease_end > 0 {
                    self.receipts.push(delivery.receipt.clone());
                }
            }
        }
    }

    fn streams(&mut self) {
        let action = self.choices.below(4);
        let index = self.choices.below(self.streams.len());
        match action {
            0 | 1 if self.streams.len() < 2 => {
                let lease = [1_000, 3_000][self.choices.below(2)] * MS;
                let auto_commit = self.choices.percent(20);
                let of = Consume { queue: self.queue(), lease, auto_commit, ..consume(2) };
                let call = self.story.start(Request::Consume(of.clone()));
                self.world.open(call, of);
                self.streams.push(call);
            }
            2 if index < self.streams.len() => {
                let call = self.streams.swap_remove(index);
                // What the broker has ended may still look open to the client.
                self.story.ok(call, Response::Done);
                self.world.close(call);
            }
            3 if index < self.streams.len() => {
                let call = self.streams[index];
                if self.world.is_open(call) {
                    self.world.close(call);
                } else {
                    self.streams.swap_remove(index);
                    self.story.unknown(call);
                }
            }
            _ => {}
        }
    }

    /// Time passes, and the streams receive what is there.
    fn pass(&mut self, steps: usize) {
        for _ in 0..steps {
            self.world.now += 100 * MS;
            self.story.at(self.world.now / MS);
            for (call, delivery) in self.world.pump() {
                if !self.streams.contains(&call) {
                    continue;
                }
                self.seen.push((delivery.id.clone(), delivery.queue.clone()));
                if delivery.lease_end > 0 {
                    self.receipts.push(delivery.receipt.clone());
                }
                self.story.tell(What::Delivered { call, deliveries: vec![delivery] });
            }
        }
    }

    fn step(&mut self) {
        match self.choices.below(12) {
            0..=2 => self.start(),
            3..=5 => self.take_effect(),
            6..=8 => self.end(),
            9 => self.streams(),
            10 => self.pass(1),
            _ => {
                let steps = [1, 3, 10, 40][self.choices.below(4)];
                self.pass(steps);
            }
        }
    }

    /// Everything comes to rest.
    fn rest(&mut self) {
        for pending in std::mem::take(&mut self.pending) {
            if !pending.given_up {
                self.story.unknown(pending.call);
            }
        }
        for call in std::mem::take(&mut self.streams) {
            self.story.ok(call, Response::Done);
            self.world.close(call);
        }
        let queues = self.world.at_rest(&QUEUES);
        self.story.tell(What::Rest { queues });
    }
}

fn history(choices: &[u16]) -> (Story, World) {
    let mut run = Run {
        choices: Choices(choices.iter()),
        story: Story::default(),
        world: World::default(),
        pending: Vec::new(),
        streams: Vec::new(),
        receipts: Vec::new(),
        seen: Vec::new(),
        unanswered: Vec::new(),
        names: 0,
    };
    let work = Settings { max_attempts: world::MAX_ATTEMPTS, ..Settings::default() };
    run.story.set("work", work);
    run.world.now = MS;
    while run.choices.0.len() > 0 {
        // Half of the decisions come before the first rest.
        if run.choices.0.len() == choices.len() / 2 {
            run.rest();
        }
        run.step();
    }
    run.rest();
    (run.story, run.world)
}

/// Returns the history as text, for a case that fails.
fn told(story: &Story) -> String {
    story.events.iter().fold(String::new(), |told, event| told + &format!("{event:?}\n"))
}

fn checked(story: &Story) -> Report {
    // The model answers as late as it likes.
    check(&story.events, &Options { transit: 3_600_000 * MS, ..Options::default() })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_a_correct_model_does_is_never_refused(
        choices in proptest::collection::vec(any::<u16>(), 0..1_500)
    ) {
        let (story, _) = history(&choices);
        let report = checked(&story);
        prop_assert!(report.is_clean(), "{}\n{}", report, told(&story));
    }
}
