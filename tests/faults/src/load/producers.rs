//! Producers: single items and batches of every kind, and what is repeated after a lost answer.

use std::sync::Arc;

use sluicegate_checker::history::{Answer, NewItem};

use super::Load;

/// Pushes until the end.
pub(super) async fn produce(load: Arc<Load>, number: u64) {
    let name = format!("producer {number}");
    while load.pause(0, 40).await {
        if load.dice.chance(0.05) {
            load.push_on_stream(&name, &load.way()).await;
            continue;
        }
        let queue = load.queue();
        let count = if load.dice.chance(0.2) { load.dice.number(2, 20) } else { 1 };
        let mut items: Vec<NewItem> = (0..count).map(|_| load.new_item()).collect();
        if load.dice.chance(0.3) {
            for item in &mut items {
                (item.dedup_id, item.ttl) = (item.name.clone(), None);
            }
            load.produce(&name, &load.any_way(), &queue, &items).await;
            continue;
        }
        let answer = load.push(&name, &load.way(), &queue, &items).await;
        let repeats = items.iter().all(|item| !item.dedup_id.is_empty());
        if repeats && matches!(answer, Err(Answer::Unknown(_))) {
            // Through another broker.
            let _ = load.push(&name, &load.way(), &queue, &items).await;
        }
    }
}
