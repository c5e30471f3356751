//! The console of a running broker: who sees what, who may do what, and that it lets the broker stop.

use sluicegate_proto::v1::{
    ItemState, ListOperationsRequest, Outcome, RollbackItem, RollbackRequest,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::access::TokensFile;
use crate::harness::{Api, Backend, Broker, on_both_backends, outcomes, until, within};

/// A browser with its session.
pub(super) struct Browser<'a> {
    broker: &'a Broker,
    cookie: String,
}

pub(super) struct Page {
    pub(super) status: u16,
    pub(super) head: String,
    pub(super) body: String,
}

impl<'a> Browser<'a> {
    pub(super) fn new(broker: &'a Broker) -> Self {
        Self { broker, cookie: String::new() }
    }

    /// Returns a browser that is signed in.
    async fn signed_in(broker: &'a Broker, token: &str) -> Self {
        let page = Self::new(broker).post("/sign-in", &format!("token={token}")).await;
        assert_eq!(page.status, 303, "{}", page.body);
        let cookie = page.head.split("set-cookie: ").nth(1).expect("a cookie");
        let cookie = cookie.split(';').next().expect("a cookie").to_owned();
        Self { broker, cookie }
    }

    pub(super) async fn get(&self, path: &str) -> Page {
        self.ask("GET", path, "").await
    }

    pub(super) async fn post(&self, path: &str, form: &str) -> Page {
        self.ask("POST", path, form).await
    }

    async fn ask(&self, method: &str, path: &str, form: &str) -> Page {
        let mut connection = self.send(method, path, form).await;
        let mut answer = String::new();
        within(path, connection.read_to_string(&mut answer)).await.expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        Page { status: status.expect("a status"), head: head.to_owned(), body: body.to_owned() }
    }

    async fn send(&self, method: &str, path: &str, form: &str) -> TcpStream {
        let address = self.broker.http_address.trim_start_matches("http://");
        let mut connection = TcpStream::connect(address).await.expect("a connection");
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: {address}\r\nOrigin: http://{address}\r\nAccept: text/html\r\n\
             Cookie: {cookie}\r\nContent-Type: application/x-www-form-urlencoded\r\n\
             Content-Length: {length}\r\nConnection: close\r\n\r\n{form}",
            cookie = self.cookie,
            length = form.len()
        );
        connection.write_all(request.as_bytes()).await.expect("a request");
        connection
    }
}

on_both_backends!(
    items_are_seen_pushed_and_purged,
    what_came_since_is_not_deleted_with_an_empty_queue,
    a_group_of_dead_letters_is_redriven_to_its_last_item,
    charts_survive_the_broker
);

async fn items_are_seen_pushed_and_purged(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let browser = Browser::new(&broker);
    assert_eq!(browser.get("/").await.status, 307);
    let pushed = api.push("work", &["<script>first</script>"]).await;
    let page = browser.get("/queues/work").await;
    assert_eq!(page.status, 200, "{}", page.body);
    assert!(page.body.contains(&pushed[0].id) && page.body.contains("&lt;script&gt;first"));
    let answer = browser.post("/queues/work/push", "payload=second&delay=1h").await;
    assert_eq!(answer.status, 303, "{}", answer.body);
    let delayed = api.list("work", ItemState::Delayed).await;
    assert_eq!((delayed.len(), &delayed[0].payload[..]), (1, &b"second"[..]));
    let page = browser.get("/queues/work/purge").await;
    assert!(page.body.contains("Delete 2 items"), "{}", page.body);
    let answer = browser.post("/queues/work/purge", "").await;
    assert!(answer.head.contains("notice=purged.2"), "{}", answer.head);
    assert!(api.list("work", ItemState::Unspecified).await.is_empty());
    until("the queue is on the board", || async {
        browser.get("/queues").await.body.contains("queue-work").then_some(())
    })
    .await;
}

async fn what_came_since_is_not_deleted_with_an_empty_queue(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let browser = Browser::new(&broker);
    assert_eq!(browser.post("/queues", "name=work").await.status, 303);
    let form = browser.get("/queues/work/delete").await.body;
    assert!(form.contains(r#"name="unsettled" value="0""#), "{form}");
    api.push("work", &["late"]).await;
    let refused = browser.post("/queues/work/delete", "confirm=work&unsettled=0").await;
    assert_eq!(refused.status, 409, "{}", refused.body);
    assert_eq!(api.list("work", ItemState::Ready).await.len(), 1);
    let deleted = browser.post("/queues/work/delete", "confirm=work&unsettled=1").await;
    assert!(deleted.head.contains("notice=deleted.1"), "{}", deleted.head);
}

/// Returns the numbers of ready items in the chart of the last hour.
async fn ready_in_the_chart(browser: &Browser<'_>) -> Vec<i64> {
    let chart = browser.get("/queues/work/series?seconds=3600").await.body;
    let ready = chart.split("\"ready\":[").nth(1).and_then(|rest| rest.split(']').next());
    ready.expect(&chart).split(',').filter_map(|number| number.parse().ok()).collect()
}

async fn charts_survive_the_broker(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    api.push("work", &["first", "second"]).await;
    let browser = Browser::new(&broker);
    assert_eq!(browser.get("/queues").await.status, 200);
    until("figures in the store", || async {
        let metrics = browser.get("/metrics").await.body;
        let line = "sluicegate_store_call_duration_seconds_count{call=\"keep_figures\"} ";
        let count = metrics.lines().find_map(|metric| metric.strip_prefix(line))?;
        (count != "0").then_some(())
    })
    .await;
    broker.kill();
    let broker = store.broker().await;
    let browser = Browser::new(&broker);
    assert_eq!(browser.post("/queues/work/purge", "").await.status, 303);
    assert_eq!(browser.get("/queues").await.status, 200);
    until("what was before and what is now", || async {
        let ready = ready_in_the_chart(&browser).await;
        (ready.first() == Some(&2) && ready.last() == Some(&0)).then_some(())
    })
    .await;
}

/// Dead-letters new items of the queue `work`.
async fn bury(api: &Api, count: usize, reason: &str) {
    api.push("work", &vec!["x"; count]).await;
    let items = api.reserve_now("work", count as i32).await.into_iter().map(|delivery| {
        let (receipt, reason) = (delivery.receipt, reason.to_owned());
        RollbackItem { receipt, reason, dead_letter: true, ..RollbackItem::default() }
    });
    let request = RollbackRequest { items: items.collect() };
    let answer = api.queue.clone().rollback(request).await.expect("an answer").into_inner();
    assert_eq!(outcomes(&answer.results), vec![Outcome::DeadLettered; count]);
}

/// Returns what the form of a page sends.
fn form_of(page: &str) -> String {
    let fields = page.split("<input type=\"hidden\" name=\"").skip(1).map(|field| {
        let (name, rest) = field.split_once("\" value=\"").expect(page);
        let value = rest.split('"').next().expect(page);
        format!("{name}={}", value.replace('%', "%25"))
    });
    fields.collect::<Vec<_>>().join("&")
}

/// The page reads the first 2,000 items of a queue.
async fn a_group_of_dead_letters_is_redriven_to_its_last_item(backend: Backend) {
    let store = backend.store();
    let broker = store.broker().await;
    let api = broker.api().await;
    let (reason, others) = ("refused: 100 % & more\n  at line 7", "refused: 100 % & more");
    bury(&api, 3, others).await;
    for count in [1_000, 1_000, 100] {
        bury(&api, count, reason).await;
    }
    let browser = Browser::new(&broker);
    let page = until("the dead letters", || async {
        let page = browser.get("/dead-letters").await.body;
        page.contains("/dead-letters/redrive").then_some(page)
    })
    .await;
    // The largest group comes first.
    let link = page.split("href=\"/dead-letters/redrive").nth(1).expect(&page);
    let link = link.split('"').next().expect(&page).replace("&amp;", "&");
    let page = browser.get(&format!("/dead-letters/redrive{link}")).await.body;
    assert!(page.contains("Redrive 2,100 items"), "{page}");
    let form = form_of(&page);
    for _ in 0..2 {
        let answer = browser.post("/dead-letters/redrive", &form).await;
        assert_eq!(answer.status, 303, "{}", answer.body);
        let place = answer.head.split("location: ").nth(1).expect(&answer.head);
        let is_known = place.starts_with("/dead-letters?notice=redriven.2100")
            || place.starts_with("/operations/");
        assert!(is_known, "{place}");
    }
    api.until_stats("work", |stats| stats.ready == 2_100).await;
    let left = api.list("work.dead", ItemState::Ready).await;
    assert_eq!(left.iter().map(|item| item.last_reason.as_str()).collect::<Vec<_>>(), [others; 3]);
    let operations = api.operation.clone().list_operations(ListOperationsRequest::default()).await;
    assert_eq!(operations.expect("operations").into_inner().operations.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rights_are_those_of_the_token() {
    let tokens = TokensFile::new();
    let all = tokens.add("all", &["admin@*"]).await;
    let view = tokens.add("view", &["view@shop.*"]).await;
    let push = tokens.add("push", &["produce@*"]).await;
    let broker = tokens.launch().start().await;
    let nobody = Browser::new(&broker);
    assert_eq!(nobody.get("/queues/shop.orders").await.status, 303, "to the page for signing in");
    for token in ["wrong", &push] {
        assert_eq!(nobody.post("/sign-in", &format!("token={token}")).await.status, 403);
    }

    let admin = Browser::signed_in(&broker, &all).await;
    for queue in ["shop.orders", "secret"] {
        let created = admin.post(&format!("/queues/{queue}/push"), "payload=hidden-text").await;
        assert_eq!(created.status, 303, "{}", created.body);
    }
    assert!(admin.get("/queues/shop.orders").await.body.contains("hidden-text"));

    let viewer = Browser::signed_in(&broker, &view).await;
    let page = until("the queue is on the board", || async {
        let page = viewer.get("/queues").await.body;
        page.contains("shop.orders").then_some(page)
    })
    .await;
    assert!(!page.contains("secret") && !page.contains("New queue"), "{page}");
    let page = viewer.get("/queues/shop.orders").await.body;
    for action in ["/push", "/purge", "/delete", "/pause", "hidden-text"] {
        assert!(!page.contains(action), "{action} in {page}");
    }
    assert_eq!(viewer.get("/queues/secret").await.status, 403);
    assert_eq!(viewer.get("/queues/secret/series?seconds=300").await.status, 403);
    for action in ["purge", "pause", "push"] {
        let path = format!("/queues/shop.orders/{action}");
        assert_eq!(viewer.post(&path, "payload=x").await.status, 403, "{action}");
    }
    assert!(broker.log().contains("audit"), "refusals and actions are audited: {}", broker.log());

    // A token that is withdrawn ends its sessions.
    tokens.replace(
        "[[token]]\nname = \"other\"\ntoken = \"0123456789abcdef0123456789abcdef\"\nallow = [\"view@*\"]\n",
    );
    until("the session has ended", || async {
        (viewer.get("/queues/shop.orders").await.status == 303).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_that_follows_the_figures_lets_the_broker_stop() {
    let broker = Backend::Sqlite.store().broker().await;
    broker.api().await.push("work", &["x"]).await;
    let browser = Browser::new(&broker);
    let mut events = browser.send("GET", "/queue-events", "").await;
    let mut received = String::new();
    let mut part = [0; 4_096];
    while !received.contains("queue-work") {
        let length = within("an event", events.read(&mut part)).await.expect("a part");
        assert!(length > 0, "{received}");
        received.push_str(&String::from_utf8_lossy(&part[..length]));
    }
    broker.stop().await;
    let mut rest = Vec::new();
    within("the end of the stream", events.read_to_end(&mut rest)).await.ok();
}
