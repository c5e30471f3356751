//! Figures that go back or do not add up.

use sluicegate_checker::{
    Rule,
    history::{Figures, NewItem, QueueAtRest, Request, Response, What},
};

use crate::story::{MS, Story, item};

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
