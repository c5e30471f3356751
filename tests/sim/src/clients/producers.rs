//! Producers: items of every kind, and what is repeated after a lost answer.

use std::{sync::Arc, time::Duration};

use sluicegate_checker::{
    history::{Answer, NewItem},
    messages::micros,
};

use super::{Clients, push_streams};
use crate::cluster::Failed;

/// Pushes until the end.
pub(super) async fn produce(clients: Arc<Clients>, number: u64) {
    let name = format!("producer {number}");
    while clients.pause(0, clients.plan.push_pause).await {
        if clients.plan.has_bursts() || clients.dice.chance(0.05) {
            let Some(node) = clients.cluster.any() else { continue };
            push_streams::push(&clients, &name, &node).await;
            continue;
        }
        let queue = clients.queue();
        let count = if clients.dice.chance(0.3) { clients.dice.number(2, 8) } else { 1 };
        let items: Vec<NewItem> = (0..count).map(|_| clients.new_item()).collect();
        let repeats = items.iter().all(|item| !item.dedup_id.is_empty());
        let Some(node) = clients.cluster.any() else { continue };
        let mut answer = clients.push(&name, &node, &queue, items.clone()).await;
        // What has a deduplication id may be repeated at once, through any broker.
        for _ in 0..3 {
            if !repeats || !matches!(answer, Err(Failed(Answer::Unknown(_)))) {
                break;
            }
            let Some(node) = clients.cluster.any() else { break };
            answer = clients.push(&name, &node, &queue, items.clone()).await;
        }
    }
}

impl Clients {
    /// Returns a new item of any kind.
    pub(super) fn new_item(&self) -> NewItem {
        let dice = &self.dice;
        let name = self.item_name();
        let key =
            if dice.chance(0.3) { format!("key {}", dice.number(1, 3)) } else { String::new() };
        let dedup_id = if dice.chance(0.3) { name.clone() } else { String::new() };
        let delay = if dice.chance(0.15) { dice.millis(1, 5_000) } else { Duration::ZERO };
        let ttl = dice.chance(0.05).then(|| micros(dice.millis(500, 20_000)));
        let priority = if dice.chance(0.1) { dice.number(1, 9) as u8 } else { 0 };
        let bytes = *dice.one_of(self.plan.payloads).unwrap_or(&0);
        NewItem { name, bytes, ordering_key: key, dedup_id, priority, delay: micros(delay), ttl }
    }
}
