//! Figures that go back or do not add up.

use sluicegate_checker::{
    Rule,
    history::{Figures, NewItem, QueueAtRest, Request, Response, What},
};

use crate::story::{MS, Story, delivery, item};

#[test]
fn totals_go_back() {
    let mut story = Story::default();
    let stats = || Request::GetQueueStats { queue: "work".to_owned() };
    let figures = |pushed| Response::Stats(Figures { pushed, ..Figures::default() });
    story.call(stats(), figures(2)).call(stats(), figures(1)).breaks(Rule::Figures, "work", 3);
}

#[test]
fn figures_do_not_add_up() {
    for figures in [
        Figures { ready: 1, pushed: 1, ..Figures::default() },
        Figures { pushed: 2, ..Figures::default() },
        Figures { pushed: 1, committed: 1, ..Figures::default() },
    ] {
        let mut story = Story::default();
        story.push(NewItem { ttl: Some(MS), ..item("a") }).at(500);
        let queue = "work".to_owned();
        let queue = QueueAtRest { queue, items: Vec::new(), figures: Some(figures) };
        story.tell(What::Rest { queues: vec![queue] }).breaks(Rule::Figures, "work", 1);
    }
}

/// What expired before its `Pop` was answered counts as expired. Counted as popped, it is one more than anybody got.
#[test]
fn more_is_popped_than_was_answered() {
    let counted = |popped, expired| {
        let mut story = Story::default();
        story.push(item("a")).push(NewItem { ttl: Some(100 * MS), ..item("b") });
        let pop = story.start(Request::Pop { queue: "work".to_owned(), max_items: 2, wait: 0 });
        story.at(500).ok(pop, Response::Deliveries(vec![delivery("a", 1)]));
        let (queue, pushed, delivered) = ("work".to_owned(), 2, popped);
        let committed = popped;
        let figures =
            Figures { pushed, delivered, committed, popped, expired, ..Figures::default() };
        let queue = QueueAtRest { queue, items: Vec::new(), figures: Some(figures) };
        story.tell(What::Rest { queues: vec![queue] });
        story
    };
    counted(1, 1).is_clean();
    counted(2, 0).breaks(Rule::Figures, "work", 1);
}
