//! Each call of the API, by tokens that may and tokens that may not.

pub(super) mod calls;
mod creation;
mod hidden;

use pb::{
    consume_stream_request::Action, operation_service_client::OperationServiceClient,
    template_service_client::TemplateServiceClient,
};
use tonic::Request;

use super::*;
use crate::{
    access::{
        rules::{Needs, RULES},
        tokens::Tokens,
    },
    domain::Action as Permitted,
};

fn tokens(allow: &[(&str, &[&str])]) -> Tokens {
    let entry = |(name, allow): &(&str, &[&str])| {
        format!(
            "[[token]]\nname = '{name}'\ntoken = '{name}-0123456789abcdef'\nallow = {allow:?}\n"
        )
    };
    Tokens::parse(&allow.iter().map(entry).collect::<String>()).unwrap()
}

async fn broker_of(allow: &[(&str, &[&str])]) -> Broker {
    let metrics = Arc::new(Metrics::new());
    let access = Access::new(Some(Arc::new(tokens(allow))), 0, metrics);
    broker_with(Options { access, ..super::open() }).await
}

fn by<T>(token: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    let token = format!("Bearer {token}-0123456789abcdef");
    request.metadata_mut().insert("authorization", token.parse().unwrap());
    request
}

/// The calls that name no queue: what may not be seen is left out of their answers.
const LISTS: [&str; 3] = [
    "/sluicegate.v1.AdminService/ListQueues",
    "/sluicegate.v1.ScheduleService/ListSchedules",
    "/sluicegate.v1.TemplateService/ListTemplates",
];

/// The calls that name no queue but something of it: for those who may not see it, it is not there.
const HIDDEN: [&str; 8] = [
    "GetSchedule",
    "UpdateSchedule",
    "TriggerSchedule",
    "DeleteSchedule",
    "PauseSchedule",
    "ResumeSchedule",
    "GetOperation",
    "CancelOperation",
];

/// A token with all that a call needs may make it. Without one of these permissions, or with the permission on another
/// queue, it is refused.
#[tokio::test]
async fn each_call_needs_each_of_its_permissions_on_each_queue_it_names() {
    const MINE: [&str; 6] =
        ["produce@mine*", "consume@mine*", "view@mine*", "manage@mine*", "create@mine*", "view@x"];
    const ELSEWHERE: [&str; 6] =
        ["produce@else*", "consume@else*", "view@else*", "manage@else*", "create@else*", "view@x"];
    let without = |action: Permitted| -> Vec<&'static str> {
        MINE.into_iter().filter(|text| !text.starts_with(action.name())).collect()
    };
    let lacking = Permitted::ALL.map(|action| (action, format!("no-{action}"), without(action)));
    let mut allow: Vec<(&str, &[&str])> = vec![
        ("admin", &["admin@*"]),
        ("viewer", &["view@*"]),
        ("mine", &MINE),
        ("elsewhere", &ELSEWHERE),
    ];
    allow.extend(lacking.iter().map(|(_, name, allow)| (name.as_str(), &allow[..])));
    let broker = broker_of(&allow).await;
    for (number, rule) in RULES.iter().enumerate() {
        let Needs::Permissions(needs) = rule.needs else { continue };
        if !rule.call.contains('.') {
            continue; // HTTP
        }
        let path = rule.call;
        let (mine, other) = (format!("mine{number}"), format!("mine{number}.other"));
        broker.receipt(&other).await;
        let call = async |token: &str, queue: &str, other: &str| {
            let message = broker.request(path, queue, other).await;
            broker.call(token, path, message).await
        };
        if path.ends_with("/ListBrokers") {
            // It needs the permission on all queues, whatever the name.
            let refused = call("mine", &mine, &other).await.expect_err(path);
            assert_eq!(refused.code(), Code::PermissionDenied, "{path}");
            assert!(call("viewer", &mine, &other).await.is_ok(), "{path}");
            continue;
        }
        let is_hidden = HIDDEN.contains(&path.rsplit('/').next().unwrap());
        if LISTS.contains(&path) {
            assert!(call("elsewhere", &mine, &other).await.is_ok(), "{path}");
        } else if is_hidden {
            let refused = call("elsewhere", &mine, &other).await.expect_err(path);
            assert_eq!(refused.code(), Code::NotFound, "{path}");
        } else {
            let refused = call("elsewhere", &mine, &other).await.expect_err(path);
            let reason = (refused.code(), super::reason(&refused));
            assert_eq!(reason, (Code::PermissionDenied, "PERMISSION_MISSING".into()), "{path}");
        }
        for (action, token, _) in &lacking {
            // A missing `create` matters for queues that do not exist, and payloads are left out: tests of their own.
            let optional = (*action == Permitted::Create && !path.ends_with("CreateQueue"))
                || matches!(
                    path.rsplit('/').next(),
                    Some("ListItems" | "GetItem" | "GetOperation" | "ListOperations")
                ) && *action != Permitted::View
                || path.ends_with("CancelOperation") && *action == Permitted::View;
            let needed = needs.iter().any(|need| need.action == *action) && !optional;
            let answer = call(token, &mine, &other).await;
            let denied = answer.as_ref().is_err_and(|status| {
                status.code() == Code::PermissionDenied
                    || is_hidden && status.code() == Code::NotFound
            });
            assert_eq!(denied, needed, "{path} by {token}: {answer:?}");
        }
        let answer = call("mine", &mine, &other).await;
        let denied = answer.as_ref().is_err_and(|status| {
            matches!(status.code(), Code::PermissionDenied | Code::Unauthenticated)
                || is_hidden && status.code() == Code::NotFound
        });
        assert!(!denied, "{path}: {answer:?}");
        assert!(
            call("nobody", &mine, &other).await.is_err_and(|s| s.code() == Code::Unauthenticated)
        );
    }
}

/// The second queue of calls that name two is checked as well.
#[tokio::test]
async fn nothing_is_put_into_a_queue_of_others() {
    let mine = ["produce@mine*", "consume@mine*", "view@mine*", "manage@mine*", "create@mine*"];
    let broker = broker_of(&[("admin", &["admin@*"]), ("mine", &mine)]).await;
    broker.push_as_admin("theirs").await;
    for method in ["Move", "CommitAndPush"] {
        let path = format!("/sluicegate.v1.QueueService/{method}").leak();
        let message = broker.request(path, "mine", "theirs").await;
        let refused = broker.call("mine", path, message).await.expect_err(method);
        assert_eq!(refused.code(), Code::PermissionDenied, "{method}");
    }
    for method in ["CreateQueue", "UpdateQueue", "RedriveItems"] {
        let path = format!("/sluicegate.v1.AdminService/{method}").leak();
        let message = broker.request(path, "mine", "theirs").await;
        let refused = broker.call("mine", path, message).await.expect_err(method);
        assert_eq!(refused.code(), Code::PermissionDenied, "{method}");
    }
    for path in [
        "/sluicegate.v1.ScheduleService/UpdateSchedule",
        "/sluicegate.v1.OperationService/StartOperation",
        "/sluicegate.v1.TemplateService/CreateTemplate",
        "/sluicegate.v1.TemplateService/UpdateTemplate",
    ] {
        let message = broker.request(path, "mine", "theirs").await;
        let refused = broker.call("mine", path, message).await.expect_err(path);
        assert_eq!(refused.code(), Code::PermissionDenied, "{path}");
    }
    let request = pb::GetQueueStatsRequest { queue: "theirs".into() };
    let stats = broker.admin().get_queue_stats(by("admin", request)).await.unwrap().into_inner();
    assert_eq!(stats.stats.unwrap().pushed, 1, "nothing but the admin's item");
}

/// Requests on a stream are checked like calls.
#[tokio::test]
async fn a_stream_settles_nothing_of_other_queues() {
    let broker = broker_of(&[("admin", &["admin@*"]), ("worker", &["consume@mine"])]).await;
    let (mine, theirs) = (broker.receipt("mine").await, broker.receipt("theirs").await);
    let (requests, receiver) = mpsc::channel(9);
    let open = pb::ConsumeRequest { queue: "mine".into(), ..Default::default() };
    let rollback =
        |receipt: &str| pb::RollbackItem { receipt: receipt.into(), ..Default::default() };
    for action in [
        Action::Open(open),
        Action::Commit(pb::CommitRequest { receipts: vec![mine.clone(), theirs.clone()] }),
        Action::Rollback(pb::RollbackRequest { items: vec![rollback(&theirs)] }),
        Action::Extend(pb::ExtendRequest { receipts: vec![theirs], lease: None }),
        Action::Commit(pb::CommitRequest { receipts: vec![mine] }),
    ] {
        requests.send(act(action)).await.unwrap();
    }
    let requests_of_worker = by("worker", ReceiverStream::new(receiver));
    let stream = broker.queues().consume_stream(requests_of_worker).await;
    let mut events = stream.unwrap().into_inner();
    assert!(matches!(next(&mut events).await, Some(Event::Opened(_))));
    for _ in 0..3 {
        let Some(Event::Error(error)) = next(&mut events).await else { panic!("no refusal") };
        assert_eq!(error.code, Code::PermissionDenied as i32);
    }
    let Some(Event::Settled(settled)) = next(&mut events).await else { panic!("no answer") };
    assert_eq!(settled.results[0].outcome(), pb::Outcome::Ok);
    drop(requests);
}

/// Whether or not a consumer may create queues: consuming creates none, and begins when the queue is there.
#[tokio::test]
async fn consumers_of_every_kind_wait_for_their_queue_and_create_nothing() {
    let broker =
        broker_of(&[("admin", &["admin@*"]), ("worker", &["consume@*"]), ("shop", &["produce@*"])])
            .await;
    let minute = |seconds| Some(prost_types::Duration { seconds, nanos: 0 });
    let (queue, wait) = (String::from("reserve"), minute(0));
    let reserve = pb::ReserveRequest { queue, wait, ..Default::default() };
    let answer = broker.queues().reserve(by("worker", reserve.clone())).await.unwrap();
    assert!(answer.into_inner().deliveries.is_empty());
    let push = pb::PushRequest {
        queue: "reserve".into(),
        items: vec![pb::NewItem::default()],
        ..Default::default()
    };
    let refused = broker.queues().push(by("shop", push)).await.unwrap_err();
    assert_eq!(
        (refused.code(), reason(&refused)),
        (Code::PermissionDenied, "PERMISSION_MISSING".into())
    );

    let open = |queue: &str| pb::ConsumeRequest { queue: queue.into(), ..Default::default() };
    let consume = broker.queues().consume(by("admin", open("consume"))).await;
    let mut consume = consume.unwrap().into_inner();
    let (requests, receiver) = mpsc::channel(9);
    requests.send(act(Action::Open(open("stream")))).await.unwrap();
    let stream = by("worker", ReceiverStream::new(receiver));
    let mut stream = broker.queues().consume_stream(stream).await.unwrap().into_inner();
    let (mut first, mut second) = (broker.queues(), broker.queues());
    let reserve = pb::ReserveRequest { wait: minute(60), ..reserve };
    let reserving = tokio::spawn(async move { first.reserve(by("admin", reserve)).await.unwrap() });
    let pop = pb::PopRequest { queue: "pop".into(), wait: minute(60), ..Default::default() };
    let popping = tokio::spawn(async move { second.pop(by("worker", pop)).await.unwrap() });
    let mut waiting = broker.queues();
    let missing = pb::ReserveRequest {
        queue: "never".into(),
        wait: Some(prost_types::Duration { seconds: 0, nanos: 300_000_000 }),
        ..Default::default()
    };
    let nothing = waiting.reserve(by("admin", missing)).await.unwrap().into_inner();
    assert!(nothing.deliveries.is_empty());
    let listed = broker.admin().list_queues(by("admin", pb::ListQueuesRequest::default())).await;
    assert!(listed.unwrap().into_inner().queues.is_empty(), "nothing was created");

    for queue in ["reserve", "pop", "consume", "stream"] {
        broker.push_as_admin(queue).await;
    }
    assert_eq!(reserving.await.unwrap().into_inner().deliveries.len(), 1);
    assert_eq!(popping.await.unwrap().into_inner().items.len(), 1);
    assert_eq!(consume.message().await.unwrap().unwrap().deliveries.len(), 1);
    assert!(matches!(next(&mut stream).await, Some(Event::Opened(_))));
    assert_eq!(deliveries(&mut stream, 1).await.len(), 1);
}

/// A token that has created as many queues as it may does not keep others from creating theirs.
#[tokio::test]
async fn a_token_creates_only_so_many_queues_and_others_go_on() {
    let few = "[[token]]\nname = 'few'\ntoken = 'few-0123456789abcdef'\nmax_queues = 3\n\
               allow = ['produce@*', 'create@few.*', 'manage@few.*']\n";
    let others = "[[token]]\nname = 'other'\ntoken = 'other-0123456789abcdef'\nallow = ['produce@*', 'create@*']\n\
                  [[token]]\nname = 'admin'\ntoken = 'admin-0123456789abcdef'\nallow = ['admin@*']\nmax_queues = 1\n";
    let tokens = Tokens::parse(&format!("{few}{others}")).unwrap();
    let access = Access::new(Some(Arc::new(tokens)), 0, Arc::new(Metrics::new()));
    let broker = broker_with(Options { access, ..super::open() }).await;
    let push = async |token: &str, queue: &str| {
        let items = vec![pb::NewItem::default()];
        let request = pb::PushRequest { queue: queue.into(), items, ..Default::default() };
        broker.queues().push(by(token, request)).await.map_err(|status| {
            assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
            reason(&status)
        })
    };
    push("other", "elsewhere").await.unwrap();
    for queue in ["few.a", "few.b", "few.c", "few.a"] {
        push("few", queue).await.unwrap();
    }
    assert_eq!(push("few", "few.d").await.unwrap_err(), "TOO_MANY_QUEUES");
    let queue = Some(pb::Queue { name: "few.d".into(), ..Default::default() });
    let create = pb::CreateQueueRequest { queue };
    let refused = broker.admin().create_queue(by("few", create)).await.unwrap_err();
    assert_eq!(reason(&refused), "TOO_MANY_QUEUES");
    push("few", "few.c").await.expect("a queue that is there");
    push("other", "another").await.unwrap();
    push("admin", "few.by-admin").await.expect("administrators have no limit");
    assert_eq!(push("few", "few.d").await.unwrap_err(), "TOO_MANY_QUEUES");
    for name in ["few.a", "few.by-admin"] {
        let delete = pb::DeleteQueueRequest { name: name.into(), force: true };
        broker.admin().delete_queue(by("admin", delete)).await.unwrap();
    }
    push("few", "few.d").await.expect("there is room again");
}

/// A move that leaves the item as it is needs no right to produce where the token may consume.
#[tokio::test]
async fn an_unchanged_item_may_be_moved_between_queues_one_may_consume() {
    let broker = broker_of(&[("admin", &["admin@*"]), ("worker", &["consume@work.*"])]).await;
    broker.push_as_admin("work.b").await;
    broker.push_as_admin("other").await;
    let moved = async |change: fn(&mut pb::MoveRequest)| {
        let receipt = broker.receipt("work.a").await;
        let mut request =
            pb::MoveRequest { receipt, to_queue: "work.b".into(), ..Default::default() };
        change(&mut request);
        broker.queues().r#move(by("worker", request)).await.map_err(|status| status.code())
    };
    assert!(moved(|_| ()).await.is_ok());
    for change in [
        (|request| request.payload = Some("x".into())) as fn(&mut pb::MoveRequest),
        |request| request.priority = Some(9),
        |request| request.content_type = Some("x".into()),
        |request| drop(request.headers.insert("a".into(), "b".into())),
        |request| request.to_queue = "other".into(),
    ] {
        assert_eq!(moved(change).await.unwrap_err(), Code::PermissionDenied);
    }
}

#[tokio::test]
async fn lists_leave_out_what_may_not_be_seen() {
    let broker = broker_of(&[
        ("admin", &["admin@*"]),
        ("viewer", &["view@a*", "view@c"]),
        ("reader", &["view@a", "consume@a"]),
        ("keeper", &["view@a", "manage@a"]),
    ])
    .await;
    for queue in ["a", "b", "c", "d", "e"] {
        broker.push_as_admin(queue).await;
        broker.request("/CreateSchedule", queue, "").await;
        broker.request("/GetSchedule", queue, "").await;
    }
    let mut admin = broker.admin();
    let mut page_token = String::new();
    let mut names = Vec::new();
    loop {
        let request = pb::ListQueuesRequest { page_size: 1, page_token, ..Default::default() };
        let page = admin.list_queues(by("viewer", request)).await.unwrap().into_inner();
        names.extend(page.queues.into_iter().map(|queue| queue.name));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(names, ["a", "c"]);
    let request = pb::WatchQueuesRequest { queues: Vec::new() };
    let mut watched = admin.watch_queues(by("viewer", request)).await.unwrap().into_inner();
    let first = watched.message().await.unwrap().unwrap();
    let mut names: Vec<_> = first.stats.into_iter().map(|stats| stats.queue).collect();
    names.sort();
    assert_eq!(names, ["a", "c"]);
    let mut schedules = ScheduleServiceClient::new(broker.channel.clone());
    let request = pb::ListSchedulesRequest::default();
    let listed = schedules.list_schedules(by("keeper", request)).await.unwrap().into_inner();
    let names: Vec<_> = listed.schedules.into_iter().map(|schedule| schedule.name).collect();
    assert_eq!(names, ["schedule-of-a"]);
    hidden::operations_of_others_are_left_out(&broker).await;
    for (token, payload) in [("viewer", ""), ("reader", "x"), ("keeper", "x")] {
        let request = pb::ListItemsRequest { queue: "a".into(), ..Default::default() };
        let listed = admin.list_items(by(token, request)).await.unwrap().into_inner().items;
        let id = listed[0].id.clone();
        let request = pb::GetItemRequest { queue: "a".into(), id };
        let item = admin.get_item(by(token, request)).await.unwrap().into_inner().item.unwrap();
        assert_eq!(
            (&listed[0].payload[..], &item.payload[..]),
            (payload.as_bytes(), payload.as_bytes())
        );
        // What may not be read is not searched either.
        let filter = pb::ItemFilter { payload_contains: "x".into(), ..Default::default() };
        let request =
            pb::ListItemsRequest { filter: Some(filter), queue: "a".into(), ..Default::default() };
        let found = admin.list_items(by(token, request)).await.map_err(|status| status.code());
        if payload.is_empty() {
            assert_eq!(found.unwrap_err(), Code::PermissionDenied);
        } else {
            assert!(!found.unwrap().into_inner().items.is_empty());
        }
    }
}

/// A template decides about every queue of its pattern, so that a permission on a part of them is not enough.
#[tokio::test]
async fn a_template_needs_a_permission_on_all_queues_it_stands_for() {
    let some: [&str; 5] = ["manage@a*", "view@a*", "manage@b.1", "view@b.*", "produce@*"];
    let broker = broker_of(&[("admin", &["admin@*"]), ("some", &some)]).await;
    let mut client = TemplateServiceClient::new(broker.channel.clone());
    let request = |pattern: &str| {
        let settings = Some(pb::Queue::default());
        let template =
            pb::QueueTemplate { pattern: pattern.into(), settings, ..Default::default() };
        pb::CreateTemplateRequest { template: Some(template) }
    };
    for pattern in ["a*", "a", "a.*.x", "b.1"] {
        client.create_template(by("some", request(pattern))).await.unwrap();
    }
    for pattern in ["*", "*a", "b.*", "b.1*", ""] {
        let refused = client.create_template(by("some", request(pattern))).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied, "{pattern}");
        assert!(refused.message().contains(&format!("manage@{pattern}")), "{refused:?}");
    }
    for pattern in ["*", "b.*", "c"] {
        client.create_template(by("admin", request(pattern))).await.unwrap();
    }
    let listed = client.list_templates(by("some", pb::ListTemplatesRequest::default())).await;
    let seen: Vec<_> =
        listed.unwrap().into_inner().templates.into_iter().map(|one| one.pattern).collect();
    assert_eq!(seen, ["a", "a*", "a.*.x", "b.*", "b.1"]);
    let get = |pattern: &str| by("some", pb::GetTemplateRequest { pattern: pattern.into() });
    assert!(client.get_template(get("b.*")).await.is_ok());
    assert_eq!(client.get_template(get("*")).await.unwrap_err().code(), Code::PermissionDenied);
    let delete = pb::DeleteTemplateRequest { pattern: "b.*".into() };
    let refused = client.delete_template(by("some", delete)).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied, "viewing is not managing");
}

/// A token that is withdrawn, or exchanged for one that allows less, ends what was begun with it.
#[tokio::test]
async fn a_stream_ends_when_its_token_is_withdrawn() {
    let both: [(&str, &[&str]); 2] = [("admin", &["admin@*"]), ("worker", &["consume@q"])];
    let access = Access::new(Some(Arc::new(tokens(&both))), 0, Arc::new(Metrics::new()));
    let broker = broker_with(Options { access: Arc::clone(&access), ..super::open() }).await;
    broker.push_as_admin("q").await;
    let open = pb::ConsumeRequest { queue: "q".into(), ..Default::default() };
    let consumed = broker.queues().consume(by("worker", open.clone())).await.unwrap();
    let mut deliveries = consumed.into_inner();
    assert_eq!(deliveries.message().await.unwrap().unwrap().deliveries.len(), 1);
    let (requests, receiver) = mpsc::channel(9);
    requests.send(act(Action::Open(open))).await.unwrap();
    let requests_of_worker = by("worker", ReceiverStream::new(receiver));
    let stream = broker.queues().consume_stream(requests_of_worker).await;
    let mut events = stream.unwrap().into_inner();
    assert!(matches!(next(&mut events).await, Some(Event::Opened(_))));
    let request = pb::WatchQueuesRequest { queues: vec!["q".into()] };
    access.replace(tokens(&both[..1]));
    for refused in [deliveries.message().await.unwrap_err(), events.message().await.unwrap_err()] {
        assert_eq!(
            (refused.code(), reason(&refused)),
            (Code::Unauthenticated, "TOKEN_UNKNOWN".into())
        );
    }
    let refused = broker.admin().watch_queues(by("worker", request)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    // What the streams held is ready again, with no failed attempt.
    let reserve = pb::ReserveRequest { queue: "q".into(), ..Default::default() };
    let reserve = pb::ReserveRequest {
        wait: Some(prost_types::Duration { seconds: 60, nanos: 0 }),
        ..reserve
    };
    let reserved = broker.queues().reserve(by("admin", reserve)).await.unwrap().into_inner();
    assert_eq!(reserved.deliveries[0].item.as_ref().unwrap().attempt, 1);
}

#[tokio::test]
async fn health_is_open_reflection_is_not_and_other_paths_are_not_there() {
    let broker = broker_of(&[("shop", &["produce@*"])]).await;
    let health = HealthCheckRequest { service: String::new() };
    let answer =
        HealthClient::new(broker.channel.clone()).check(health).await.unwrap().into_inner();
    assert_eq!(answer.status(), ServingStatus::Serving);
    let reflection = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
    let list = vec![0x3a, 0]; // list_services
    assert!(broker.call("shop", reflection, list.clone()).await.is_ok());
    let refused = broker.call("nobody", reflection, list).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    for path in ["/sluicegate.v1.QueueService/Steal", "/sluicegate.v2.QueueService/Push", "/Push"] {
        let refused = broker.call("shop", path, Vec::new()).await.unwrap_err();
        assert_eq!(
            (refused.code(), reason(&refused)),
            (Code::Unimplemented, "UNIMPLEMENTED".into())
        );
    }
}

/// A stream of figures ends when its token is withdrawn, though nothing changes that it could tell.
#[tokio::test]
async fn who_watches_is_told_at_once_that_the_token_is_withdrawn() {
    let both: [(&str, &[&str]); 2] = [("admin", &["admin@*"]), ("viewer", &["view@q*"])];
    let access = Access::new(Some(Arc::new(tokens(&both))), 0, Arc::new(Metrics::new()));
    let broker = broker_with(Options { access: Arc::clone(&access), ..open() }).await;
    broker.push_as_admin("q").await;
    let mut streams = Vec::new();
    for queues in [Vec::new(), vec!["q".into()]] {
        let request = pb::WatchQueuesRequest { queues };
        let watched = broker.admin().watch_queues(by("viewer", request)).await.unwrap();
        let mut stream = watched.into_inner();
        assert_eq!(stream.message().await.unwrap().unwrap().stats.len(), 1);
        streams.push(stream);
    }
    access.replace(tokens(&both[..1]));
    for mut stream in streams {
        let refused = stream.message().await.unwrap_err();
        assert_eq!(reason(&refused), "TOKEN_UNKNOWN", "{refused}");
    }
}
