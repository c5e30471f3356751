//! For each rule the shortest histories that break it.

mod atomic;
mod figures;
mod items;
mod leases;
mod limits;
mod order;
mod wakes;

use std::collections::HashSet;

use sluicegate_checker::{Rule, history::Response};

use crate::story::Story;

#[test]
fn a_history_contradicts_itself() {
    let mut story = Story::default();
    story.rest().ok(7, Response::Done).breaks(Rule::Recording, "history", 1);
}

/// The faults of this folder and of schedules.rs break every rule there is.
#[test]
fn every_rule_has_a_fault() {
    let source = [
        include_str!("atomic.rs"),
        include_str!("figures.rs"),
        include_str!("items.rs"),
        include_str!("leases.rs"),
        include_str!("limits.rs"),
        include_str!("order.rs"),
        include_str!("wakes.rs"),
        include_str!("mod.rs"),
        include_str!("../schedules.rs"),
    ]
    .concat();
    let named: HashSet<&Rule> =
        Rule::ALL.iter().filter(|rule| source.contains(&format!("Rule::{rule}"))).collect();
    let missing: Vec<&Rule> = Rule::ALL.iter().filter(|rule| !named.contains(rule)).collect();
    assert!(missing.is_empty(), "no history breaks {missing:?}");
}
