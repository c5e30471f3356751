use super::*;

const FILE: &str = r#"
    [[token]]
    name = "shop"
    token = "shop-0123456789abcdef"
    allow = ["produce@orders.*"]

    [[token]]
    name = "old"
    token = "old-0123456789abcdef"
    allow = ["admin@*"]
    expires = 2020-01-01T00:00:00Z

    [[certificate]]
    san = "worker"
    allow = ["consume@orders.*", "view@*"]
"#;

const PUSH: &str = "/sluicegate.v1.QueueService/Push";
const STATS: &str = "/sluicegate.v1.AdminService/GetQueueStats";

fn access(text: &str) -> Arc<Access> {
    Access::new(Some(Arc::new(Tokens::parse(text).unwrap())), 0, Arc::new(Metrics::new()))
}

fn owner(name: &str) -> Peer {
    let peer = Peer::default();
    peer.names.set(vec![name.to_owned()]).unwrap();
    peer
}

/// Returns "ok" or why the action is refused.
fn outcome(
    access: &Arc<Access>,
    call: &str,
    authorization: Option<&str>,
    peer: &Peer,
    (action, queue): (Action, &str),
) -> &'static str {
    let caller = access.admit(call, authorization.map(str::as_bytes), peer);
    match caller.and_then(|caller| caller.may(action, queue)) {
        Ok(()) => "ok",
        Err(refused) => refused.reason(),
    }
}

#[test]
fn a_token_allows_its_actions_on_its_queues_and_nothing_else() {
    let access = access(FILE);
    let push = |authorization, queue| {
        outcome(&access, PUSH, authorization, &Peer::default(), (Action::Produce, queue))
    };
    let shop = Some("Bearer shop-0123456789abcdef");
    assert_eq!(push(shop, "orders.eu"), "ok");
    assert_eq!(push(Some("bearer shop-0123456789abcdef"), "orders.eu"), "ok");
    assert_eq!(push(shop, "mail"), "PERMISSION_MISSING");
    assert_eq!(push(None, "orders.eu"), "TOKEN_MISSING");
    assert_eq!(push(Some("Bearer old-0123456789abcdef"), "orders.eu"), "TOKEN_EXPIRED");
    for wrong in
        ["", "Bearer", "Bearer ", "Bearer shop-0123456789abcdeF", "Basic shop-0123456789abcdef"]
    {
        assert_eq!(push(Some(wrong), "orders.eu"), "TOKEN_UNKNOWN", "{wrong:?}");
    }
    let stats = outcome(&access, STATS, shop, &Peer::default(), (Action::View, "orders.eu"));
    assert_eq!(stats, "PERMISSION_MISSING");
}

/// An error is sent in headers, which have to stay small.
#[test]
fn pages_offer_what_a_token_allows() {
    let access = access(FILE);
    let offered = |token, action, queue| access.allows(Some(token), action, queue);
    let shop = "shop-0123456789abcdef";
    assert!(offered(shop, Action::Produce, Some("orders.eu")));
    assert!(offered(shop, Action::Produce, None), "on some queue");
    assert!(!offered(shop, Action::Produce, Some("mail")));
    assert!(!offered(shop, Action::Manage, None));
    assert!(!offered("old-0123456789abcdef", Action::Produce, None), "expired");
    assert!(!offered("", Action::Produce, None) && !access.allows(None, Action::View, None));
    let open = Access::new(None, 0, Arc::new(Metrics::new()));
    assert!(open.allows(None, Action::Manage, Some("mail")));
}

#[test]
fn a_refusal_does_not_repeat_a_name_of_megabytes() {
    let access = access(FILE);
    let shop = Some(&b"Bearer shop-0123456789abcdef"[..]);
    let caller = access.admit(PUSH, shop, &Peer::default()).unwrap();
    let refused = caller.may(Action::Produce, &"x".repeat(1 << 20)).unwrap_err();
    assert!(refused.to_string().len() < 200, "{}", refused.to_string().len());
}

#[test]
fn a_certificate_stands_for_a_token() {
    let access = access(FILE);
    let stats = |authorization, peer: &Peer| {
        outcome(&access, STATS, authorization, peer, (Action::View, "mail"))
    };
    assert_eq!(stats(None, &owner("worker")), "ok");
    assert_eq!(stats(None, &owner("stranger")), "TOKEN_MISSING");
    let shop = Some("Bearer shop-0123456789abcdef");
    assert_eq!(
        stats(shop, &owner("worker")),
        "PERMISSION_MISSING",
        "a token that is shown decides"
    );
}

#[test]
fn without_tokens_everyone_may_do_everything_but_calls_that_do_not_exist() {
    let access = Access::new(None, 0, Arc::new(Metrics::new()));
    let peer = Peer::default();
    assert_eq!(outcome(&access, PUSH, None, &peer, (Action::Produce, "q")), "ok");
    for call in ["/sluicegate.v1.QueueService/push", "/sluicegate.v1.Other/Push", "/", ""] {
        assert_eq!(access.admit(call, None, &peer).err(), Some(Refused::NoSuchCall), "{call}");
    }
}

#[test]
fn probes_are_open_and_reflection_needs_any_token() {
    let access = access(FILE);
    let admitted = |call: &str, authorization: Option<&str>| {
        access.admit(call, authorization.map(str::as_bytes), &Peer::default()).is_ok()
    };
    for call in
        ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/healthz", "/readyz"]
    {
        assert!(admitted(call, None), "{call}");
    }
    let reflection = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
    assert!(!admitted(reflection, None));
    assert!(admitted(reflection, Some("Bearer shop-0123456789abcdef")));
}

/// A token that is withdrawn ends what its bearer is allowed on streams that are open.
#[tokio::test(start_paused = true)]
async fn what_is_withdrawn_or_expires_is_lost_at_once() {
    let access = access(FILE);
    let caller = access.admit(STATS, None, &owner("worker")).unwrap();
    let lost = tokio::spawn(caller.clone().lost(Action::View, "mail".to_owned()));
    access.replace(Tokens::parse(&FILE.replace("view@*", "view@mail")).unwrap());
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!lost.is_finished(), "it is still allowed");
    access.replace(Tokens::parse(&FILE.replace("view@*", "view@other")).unwrap());
    assert_eq!(lost.await.unwrap().reason(), "PERMISSION_MISSING");
    access.replace(Tokens::parse(&FILE.replace("\"worker\"", "\"nobody\"")).unwrap());
    assert_eq!(caller.may(Action::View, "mail"), Err(Refused::TokenMissing));
}

#[test]
fn refusals_are_counted_by_reason() {
    let metrics = Arc::new(Metrics::new());
    let tokens = Tokens::parse(FILE).unwrap();
    let access = Access::new(Some(Arc::new(tokens)), 0, Arc::clone(&metrics));
    for _ in 0..2 {
        let peer = Peer::default();
        assert_eq!(outcome(&access, PUSH, None, &peer, (Action::Produce, "q")), "TOKEN_MISSING");
    }
    let page = metrics.encode().unwrap();
    assert!(
        page.contains("sluicegate_calls_refused_total{reason=\"TOKEN_MISSING\"} 2\n"),
        "{page}"
    );
}
