//! Queues that come into being by other calls than a push.

use pb::operation_work::Kind;

use super::{hidden::MINE, *};

fn linking(queue: &str, dead_letter_queue: &str) -> pb::Queue {
    let (name, dead_letter_queue) = (queue.to_owned(), dead_letter_queue.to_owned());
    pb::Queue { name, dead_letter_queue, ..Default::default() }
}

fn update(queue: pb::Queue) -> pb::UpdateQueueRequest {
    let update_mask = Some(prost_types::FieldMask { paths: vec!["dead_letter_queue".into()] });
    pb::UpdateQueueRequest { queue: Some(queue), update_mask }
}

impl Broker {
    /// Tries all calls, besides pushes and moves, that create the queue `new` or will do so, and returns their outcomes.
    async fn creations(&self, token: &str, new: &str) -> Vec<(&'static str, Result<(), Status>)> {
        let mut outcomes = Vec::new();
        let name = || new.to_owned();
        let link = linking("mine", new);
        let answer = self.admin().update_queue(by(token, update(link))).await;
        outcomes.push(("UpdateQueue", answer.map(drop)));
        let queue = Some(linking("mine.made", new));
        let answer = self.admin().create_queue(by(token, pb::CreateQueueRequest { queue })).await;
        outcomes.push(("CreateQueue", answer.map(drop)));
        let redrive = pb::RedriveItemsRequest {
            queue: "mine.dead".into(),
            to_queue: name(),
            ..Default::default()
        };
        let answer = self.admin().redrive_items(by(token, redrive.clone())).await;
        outcomes.push(("RedriveItems", answer.map(drop)));
        let work = Some(pb::OperationWork { kind: Some(Kind::Redrive(redrive)) });
        let request = pb::StartOperationRequest { work, ..Default::default() };
        let mut operations = OperationServiceClient::new(self.channel.clone());
        let answer = operations.start_operation(by(token, request)).await;
        outcomes.push(("StartOperation", answer.map(drop)));
        let schedule = |queue: &str| calls::a_schedule(&format!("for-{token}"), queue);
        let mut schedules = ScheduleServiceClient::new(self.channel.clone());
        let there = pb::CreateScheduleRequest { schedule: Some(schedule("mine")) };
        schedules.create_schedule(by("admin", there)).await.unwrap();
        let update_mask = Some(prost_types::FieldMask { paths: vec!["queue".into()] });
        let request = pb::UpdateScheduleRequest { schedule: Some(schedule(new)), update_mask };
        let answer = schedules.update_schedule(by(token, request)).await;
        outcomes.push(("UpdateSchedule", answer.map(drop)));
        let schedule = calls::a_schedule(&format!("new-of-{token}"), new);
        let request = pb::CreateScheduleRequest { schedule: Some(schedule) };
        let answer = schedules.create_schedule(by(token, request)).await;
        outcomes.push(("CreateSchedule", answer.map(drop)));
        let template = |of: String, to: &str| {
            let settings = Some(linking("", to));
            Some(pb::QueueTemplate { pattern: of, settings, ..Default::default() })
        };
        let mut templates = TemplateServiceClient::new(self.channel.clone());
        let of = format!("mine.of-{token}.*");
        let there = pb::CreateTemplateRequest { template: template(of.clone(), "") };
        templates.create_template(by("admin", there)).await.unwrap();
        let update_mask =
            Some(prost_types::FieldMask { paths: vec!["settings.dead_letter_queue".into()] });
        let request = pb::UpdateTemplateRequest { template: template(of, new), update_mask };
        let answer = templates.update_template(by(token, request)).await;
        outcomes.push(("UpdateTemplate", answer.map(drop)));
        let of = format!("mine.new-of-{token}.*");
        let request = pb::CreateTemplateRequest { template: template(of, new) };
        let answer = templates.create_template(by(token, request)).await;
        outcomes.push(("CreateTemplate", answer.map(drop)));
        outcomes
    }

    async fn names(&self) -> Vec<String> {
        let request = pb::ListQueuesRequest::default();
        let listed = self.admin().list_queues(by("admin", request)).await.unwrap();
        listed.into_inner().queues.into_iter().map(|queue| queue.name).collect()
    }
}

/// `create` is a right of its own, whichever call it is that needs the queue.
#[tokio::test]
async fn no_call_creates_a_queue_without_the_right_to() {
    let may: Vec<&str> = [&MINE[..], &["create@mine.made"]].concat();
    let broker = broker_of(&[("admin", &["admin@*"]), ("mine", &may)]).await;
    for queue in ["mine", "mine.dead"] {
        broker.push_as_admin(queue).await;
    }
    let before = broker.names().await;
    for (call, outcome) in broker.creations("mine", "mine.new").await {
        let refused = outcome.expect_err(call);
        let told =
            (refused.code(), reason(&refused), refused.message().contains("create@mine.new"));
        assert_eq!(told, (Code::PermissionDenied, "PERMISSION_MISSING".into(), true), "{call}");
    }
    assert_eq!(broker.names().await, before);
    // Each queue may have its own dead-letter queue, and every call may name a queue that is there.
    let own = update(linking("mine", "mine.dead"));
    broker.admin().update_queue(by("mine", own)).await.unwrap();
    broker.push_as_admin("mine.there").await;
    for (call, outcome) in broker.creations("mine", "mine.there").await {
        assert!(outcome.is_ok(), "{call}: {outcome:?}");
    }
}

/// No call passes `max_queues` of a token, or of the broker.
#[tokio::test]
async fn no_call_creates_more_queues_than_there_may_be() {
    let few = "[[token]]\nname = 'few'\ntoken = 'few-0123456789abcdef'\nmax_queues = 3\n\
               allow = ['produce@mine*', 'manage@mine*', 'create@mine*']\n\
               [[token]]\nname = 'admin'\ntoken = 'admin-0123456789abcdef'\nallow = ['admin@*']\n";
    let access =
        Access::new(Some(Arc::new(Tokens::parse(few).unwrap())), 0, Arc::new(Metrics::new()));
    let options = Options { access, ..open() };
    let limits = Limits { max_queues: 4, ..Limits::default() };
    let broker = broker_within(options, limits).await;
    for queue in ["mine", "mine.dead", "mine.other"] {
        broker.push_as_admin(queue).await;
    }
    let too_many = async |token: &str, setting: &str| {
        let before = broker.names().await;
        for (call, outcome) in broker.creations(token, "mine.new").await {
            let refused = outcome.expect_err(call);
            assert_eq!(reason(&refused), "TOO_MANY_QUEUES", "{call}");
            assert!(refused.message().starts_with(setting), "{call}: {}", refused.message());
        }
        assert_eq!(broker.names().await, before);
    };
    too_many("few", "max_queues of the token").await;
    broker.push_as_admin("another").await;
    too_many("admin", "max_queues is").await;
}

/// Settings that name one dead-letter queue after another leave as many queues as there may be.
#[tokio::test]
async fn dead_letter_queues_that_settings_name_are_bounded() {
    let limits = Limits { max_queues: 5, ..Limits::default() };
    let broker = broker_within(open(), limits).await;
    broker.push("mine", small(1)).await;
    let name_one = async |number: usize| {
        let link = linking("mine", &format!("dead-{number}"));
        broker.admin().update_queue(update(link)).await.is_ok()
    };
    let named = futures_util::future::join_all((0..20).map(name_one)).await;
    assert!(named.iter().any(|named| *named));
    assert_eq!(broker.names().await.len(), 5);
}
