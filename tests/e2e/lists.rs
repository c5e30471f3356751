//! What operators find: queues by name and label, items by what is in them, the stats of many queues.

use std::{collections::HashMap, time::Duration};

use sluicegate_proto::v1::{
    BatchGetQueueStatsRequest, BatchGetQueueStatsResponse, ItemFilter, ListItemsRequest,
    ListQueuesRequest, NewItem, Queue, RollbackItem, TimeRange,
};
use tonic::Code;

use crate::harness::{
    Api, Backend, Brokers, bad_fields, duration, new_item, on_both_backends, until,
};

on_both_backends!(
    queues_are_found_by_prefix_and_labels,
    items_are_found_by_what_is_in_them,
    items_that_share_a_document_are_found,
    a_search_ends_its_page_after_a_bound_and_goes_on,
    stats_of_many_queues_come_in_one_answer,
);

fn labels(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

async fn queues(api: &Api, prefix: &str, by: &[(&str, &str)], page_size: i32) -> Vec<String> {
    let (mut names, mut page_token) = (Vec::new(), String::new());
    loop {
        let (prefix, labels) = (prefix.to_owned(), labels(by));
        let request = ListQueuesRequest { page_size, page_token, prefix, labels };
        let page = api.admin.clone().list_queues(request).await.expect("a page").into_inner();
        names.extend(page.queues.into_iter().map(|queue| queue.name));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return names;
        }
    }
}

async fn queues_are_found_by_prefix_and_labels(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    for (name, of) in [
        ("shop", &[][..]),
        ("shop.orders", &[("team", "a"), ("tier", "1")]),
        ("shop.orders.dead", &[("team", "a")]),
        ("shop.refunds", &[("team", "b")]),
        ("shopping", &[("team", "a"), ("tier", "1")]),
    ] {
        let queue = Queue { name: name.to_owned(), labels: labels(of), ..Queue::default() };
        api.create(queue).await;
    }
    for size in [1, 2, 100] {
        assert_eq!(
            queues(&api, "shop.", &[], size).await,
            ["shop.orders", "shop.orders.dead", "shop.refunds"]
        );
        assert_eq!(
            queues(&api, "", &[("team", "a")], size).await,
            ["shop.orders", "shop.orders.dead", "shopping"]
        );
        let both = [("team", "a"), ("tier", "1")];
        assert_eq!(queues(&api, "shop.", &both, size).await, ["shop.orders"]);
        assert_eq!(queues(&api, "shop", &[("team", "c")], size).await, [""; 0]);
        assert_eq!(queues(&api, "shop.refunds", &[], size).await, ["shop.refunds"]);
    }
    let request = ListQueuesRequest { prefix: "x".repeat(129), ..ListQueuesRequest::default() };
    let refused = api.admin.clone().list_queues(request).await.expect_err("too long");
    assert_eq!(bad_fields(&refused), ["prefix"]);
}

/// Returns the payloads of the items that match, and the number of pages.
async fn find(api: &Api, queue: &str, filter: ItemFilter, page_size: i32) -> (Vec<String>, usize) {
    let (mut found, mut pages, mut page_token) = (Vec::new(), 0, String::new());
    loop {
        let request = ListItemsRequest {
            queue: queue.to_owned(),
            page_size,
            page_token,
            filter: Some(filter.clone()),
            ..ListItemsRequest::default()
        };
        let page = api.admin.clone().list_items(request).await.expect("a page").into_inner();
        assert!(page.items.len() <= page_size as usize);
        found.extend(page.items.iter().map(|item| String::from_utf8_lossy(&item.payload).into()));
        pages += 1;
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return (found, pages);
        }
    }
}

async fn items_are_found_by_what_is_in_them(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let with = |payload: &str, set: &dyn Fn(&mut NewItem)| {
        let mut item = new_item(payload);
        set(&mut item);
        item
    };
    let items = vec![
        with("keyed", &|item| item.ordering_key = "k".into()),
        with("blocked", &|item| item.ordering_key = "k".into()),
        with("deduplicated", &|item| item.dedup_id = "once".into()),
        with("eu", &|item| item.headers = labels(&[("region", "eu"), ("tier", "1")])),
        with("us", &|item| item.headers = labels(&[("region", "us"), ("tier", "1")])),
        with("later", &|item| {
            item.eligibility = Some(sluicegate_proto::v1::new_item::Eligibility::Delay(
                duration(Duration::from_mins(9)).expect("a delay"),
            ));
        }),
    ];
    let pushed = api.push_items("q", items).await;
    let any = ItemFilter::default;
    let tier = labels(&[("tier", "1")]);
    let cases: Vec<(ItemFilter, &[&str])> = vec![
        (ItemFilter { ordering_key: "k".to_owned(), ..any() }, &["keyed", "blocked"]),
        (ItemFilter { dedup_id: "once".to_owned(), ..any() }, &["deduplicated"]),
        (ItemFilter { dedup_id: "onc".to_owned(), ..any() }, &[]),
        (ItemFilter { headers: tier.clone(), ..any() }, &["eu", "us"]),
        (ItemFilter { headers: tier, payload_contains: "u".into(), ..any() }, &["eu", "us"]),
        (ItemFilter { headers: labels(&[("region", "")]), ..any() }, &[]),
        (
            ItemFilter { payload_contains: "ed".into(), ..any() },
            &["keyed", "deduplicated", "blocked"],
        ),
        (ItemFilter { payload_contains: "late".into(), ..any() }, &["later"]),
        (ItemFilter { min_attempts: 2, ..any() }, &[]),
        (any(), &["keyed", "deduplicated", "eu", "us", "later", "blocked"]),
    ];
    for size in [1, 2, 50] {
        for (filter, expected) in &cases {
            let (mut found, _) = find(&api, "q", filter.clone(), size).await;
            let mut expected = expected.to_vec();
            found.sort();
            expected.sort_unstable();
            assert_eq!(found, expected, "{filter:?} in pages of {size}");
        }
    }
    // By time: what was pushed before the first item, and from then on.
    let first = api.item("q", &pushed[0].id).await.expect("the item").create_time;
    let before = TimeRange { start_time: None, end_time: first };
    let from = TimeRange { start_time: first, end_time: None };
    assert!(
        find(&api, "q", ItemFilter { create_time: Some(before), ..any() }, 50).await.0.is_empty()
    );
    assert_eq!(
        find(&api, "q", ItemFilter { create_time: Some(from), ..any() }, 50).await.0.len(),
        6
    );
    // Dead letters, by reason, origin and attempts.
    api.push("other", &["bad"]).await;
    let delivery = api.reserve_one("other", Duration::from_mins(1)).await;
    let (receipt, reason) = (delivery.receipt.clone(), "card declined: 51".to_owned());
    api.rollback_item(RollbackItem {
        receipt,
        reason,
        dead_letter: true,
        ..RollbackItem::default()
    })
    .await;
    for (filter, count) in [
        (ItemFilter { reason_contains: "declined".to_owned(), ..any() }, 1),
        (ItemFilter { reason_contains: "Declined".to_owned(), ..any() }, 0),
        (ItemFilter { origin_queue: "other".to_owned(), ..any() }, 1),
        (ItemFilter { origin_queue: "q".to_owned(), ..any() }, 0),
        (ItemFilter { min_attempts: 1, ..any() }, 1),
        (ItemFilter { min_attempts: 2, ..any() }, 0),
    ] {
        assert_eq!(find(&api, "other.dead", filter.clone(), 5).await.0.len(), count, "{filter:?}");
    }
}

/// Items that were pushed together may share a document: some are reserved, some ready.
async fn items_that_share_a_document_are_found(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let items = (0..600).map(|n| {
        let headers = labels(&[("tenth", &(n % 10).to_string())]);
        NewItem { headers, ..new_item(&format!("<{n}>")) }
    });
    api.push_items("many", items.collect()).await;
    assert_eq!(api.reserve_now("many", 250).await.len(), 250);
    let seventh = ItemFilter { headers: labels(&[("tenth", "7")]), ..ItemFilter::default() };
    let mut expected: Vec<String> = (0..60).map(|n| format!("<{}>", n * 10 + 7)).collect();
    expected.sort();
    for size in [7, 60, 1_000] {
        let (mut found, _) = find(&api, "many", seventh.clone(), size).await;
        found.sort();
        assert_eq!(found, expected, "in pages of {size}");
    }
    let one = ItemFilter { payload_contains: "<599>".into(), ..ItemFilter::default() };
    assert_eq!(find(&api, "many", one, 10).await.0, ["<599>"]);
}

async fn a_search_ends_its_page_after_a_bound_and_goes_on(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    for batch in 0..21 {
        let items = (0..1_000).map(|n| new_item(&format!("<{}>", batch * 1_000 + n))).collect();
        api.push_items("long", items).await;
    }
    let last = ItemFilter { payload_contains: "<20999>".into(), ..ItemFilter::default() };
    let (found, pages) = find(&api, "long", last, 10).await;
    assert_eq!(
        (found, pages),
        (vec!["<20999>".to_owned()], 3),
        "10,000 items are looked at by a call"
    );
}

async fn stats_of_many_queues_come_in_one_answer(backend: Backend) {
    let brokers = Brokers::start(backend).await;
    let api = brokers.api(0);
    for queue in ["a", "b", "empty"] {
        api.ensure(queue).await;
    }
    api.push("a", &["1", "2", "3"]).await;
    brokers.api(1).push("b", &["1"]).await;
    let ask = async |queues: &[&str]| -> BatchGetQueueStatsResponse {
        let queues = queues.iter().map(|&queue| queue.to_owned()).collect();
        let request = BatchGetQueueStatsRequest { queues };
        api.admin.clone().batch_get_queue_stats(request).await.expect("stats").into_inner()
    };
    let shown = |answer: &BatchGetQueueStatsResponse| -> Vec<(String, i64, i64)> {
        answer.stats.iter().map(|of| (of.queue.clone(), of.ready, of.pushed)).collect()
    };
    let expected = [("b", 1, 1), ("empty", 0, 0), ("a", 3, 3)];
    let expected = expected.map(|(queue, ready, pushed)| (queue.to_owned(), ready, pushed));
    until("all stats", || async {
        let answer = ask(&["b", "none", "empty", "a"]).await;
        assert_eq!(answer.missing, ["none"]);
        (shown(&answer) == expected).then_some(())
    })
    .await;
    // What changes, here or on another broker, is seen.
    let taken = brokers.api(1).reserve_now("a", 2).await;
    brokers.api(1).commit(&[&taken[0].receipt]).await;
    until("the change", || async {
        let answer = ask(&["a"]).await;
        let of = &answer.stats[0];
        ((of.ready, of.reserved, of.committed) == (1, 1, 1)).then_some(())
    })
    .await;
    let request = BatchGetQueueStatsRequest { queues: Vec::new() };
    let refused = api.admin.clone().batch_get_queue_stats(request).await.expect_err("no queue");
    assert_eq!(
        (refused.code(), bad_fields(&refused)),
        (Code::InvalidArgument, vec!["queues".to_owned()])
    );
}
