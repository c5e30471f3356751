//! A rush: many items at once, and workers that take them one at a time, as fast as they can. For such workers a broker reserves
//! items ahead.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use sluicegate_checker::history::NewItem;

use super::{Clients, api::NodeRef};
use crate::plan::SHARED;

/// Items of one push.
const BATCH: u64 = 100;
/// Most items that one worker takes.
const SHARE: usize = 80;
/// How long a worker waits for an item before it ends.
const WAIT: Duration = Duration::from_millis(100);

/// Begins one rush after the other, until the end.
pub(super) async fn rush(clients: Arc<Clients>) {
    while clients.pause(1_000, 20_000).await {
        let Some(node) = clients.cluster.any() else { continue };
        let (queue, dice) = (clients.queue(), &clients.dice);
        for _ in 0..dice.number(1, 4) {
            let item = || NewItem { name: clients.item_name(), ..NewItem::default() };
            let items = (0..BATCH).map(|_| item()).collect();
            let _ = clients.push("rush", &node, &queue, items).await; // what is lost is in the history
        }
        let lease = clients.lease_of(&SHARED);
        let workers = 1..=dice.number(4, 12);
        join_all(workers.map(|number| work(&clients, number, &node, &queue, lease))).await;
    }
}

async fn work(clients: &Clients, number: u64, node: &NodeRef, queue: &str, lease: Duration) {
    let name = format!("worker {number}");
    for _ in 0..SHARE {
        let taken = clients.reserve(&name, node, queue, 1, WAIT, lease).await;
        let receipts: Vec<String> = taken.into_iter().map(|delivery| delivery.receipt).collect();
        if receipts.is_empty() || clients.stop.is_cancelled() {
            return;
        }
        clients.commit(&name, node, receipts).await;
    }
}
