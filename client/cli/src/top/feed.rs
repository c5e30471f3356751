//! What comes from the broker: the figures of all queues as they change, and everything about the one that is open.

use std::time::Duration;

use sluicegate_client::{
    Client,
    proto::{
        Consumer, GetQueueRequest, Item, ItemFilter, ListConsumersRequest, ListItemsRequest, Queue,
        QueueStats, WatchQueuesRequest,
    },
    tonic::{Code, Request, Status},
};
use tokio::{
    sync::{mpsc, watch},
    time::{MissedTickBehavior, interval, sleep},
};

use crate::{
    failure::Failure,
    queue::dead_letter_queue,
    stats::{Which, list_queues},
};

/// How often settings are read again. The stream tells figures only.
const SETTINGS_AGE: Duration = Duration::from_secs(10);
/// The pause after the stream has failed.
const PAUSE: Duration = Duration::from_secs(1);
/// How often the queue that is open is read again.
const DETAIL_AGE: Duration = Duration::from_secs(2);
/// The most consumers that are shown.
const CONSUMERS: i32 = 100;
/// The most dead letters that are read, of which the latest are shown.
const DEAD_LETTERS: i32 = 100;

/// What has come.
pub(super) enum News {
    /// Figures of queues that have changed.
    Stats(Vec<QueueStats>),
    /// All queues.
    Queues(Vec<Queue>),
    Detail(Box<Detail>),
    /// Why there is nothing new.
    Problem(String),
}

/// Everything about one queue. What may not be read is an error, which is shown in its place.
#[derive(Debug, Default)]
pub(super) struct Detail {
    pub(super) queue: String,
    pub(super) settings: Option<Result<Queue, String>>,
    pub(super) consumers: Option<Result<Vec<Consumer>, String>>,
    pub(super) dead_letters: Option<Result<DeadLetters, String>>,
}

/// Items that were dead-lettered from a queue, the latest first.
#[derive(Debug, Default)]
pub(super) struct DeadLetters {
    /// Where they are; `None` if the queue has no dead-letter queue.
    pub(super) queue: Option<String>,
    pub(super) items: Vec<Item>,
    /// True if there are more: the broker lists the first to be handed out, which need not be the latest.
    pub(super) has_more: bool,
}

/// Follows the figures. Begins again after a failure; returns one that will not pass.
pub(super) async fn follow(client: &Client, news: &mpsc::Sender<News>) -> Failure {
    loop {
        let failure = match follow_once(client, news).await {
            Ok(()) => Status::unavailable("the broker ended the stream of figures").into(),
            Err(failure) => failure,
        };
        if is_final(&failure) {
            return failure;
        }
        // The receiver lives as long as this future.
        let _ = news.send(News::Problem(failure.with_causes())).await;
        sleep(PAUSE).await;
    }
}

/// Returns true if the same call would fail in the same way.
fn is_final(failure: &Failure) -> bool {
    match failure {
        Failure::Client(error) => matches!(
            error.code(),
            Some(Code::Unauthenticated | Code::PermissionDenied | Code::Unimplemented)
        ),
        _ => true,
    }
}

async fn follow_once(client: &Client, news: &mpsc::Sender<News>) -> Result<(), Failure> {
    let request = Request::new(WatchQueuesRequest::default());
    let mut stream = client.admin_service().watch_queues(request).await?.into_inner();
    let mut settings = interval(SETTINGS_AGE);
    settings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let heard = tokio::select! {
            message = stream.message() => match message? {
                Some(message) => News::Stats(message.stats),
                None => return Ok(()),
            },
            _ = settings.tick() => News::Queues(list_queues(client, &Which::default()).await?),
        };
        let _ = news.send(heard).await;
    }
}

/// Reads the queue that is open, again and again.
pub(super) async fn examine(
    client: &Client,
    mut open: watch::Receiver<Option<String>>,
    news: &mpsc::Sender<News>,
) {
    loop {
        let queue = open.borrow_and_update().clone();
        if let Some(queue) = queue {
            let detail = Box::new(detail(client, queue).await);
            let _ = news.send(News::Detail(detail)).await;
            tokio::select! {
                () = sleep(DETAIL_AGE) => {}
                changed = open.changed() => if changed.is_err() { return },
            }
        } else if open.changed().await.is_err() {
            return;
        }
    }
}

async fn detail(client: &Client, queue: String) -> Detail {
    let settings = settings(client, &queue).await;
    let dead_letters = match &settings {
        Ok(settings) => Some(dead_letters(client, settings).await.map_err(shown)),
        Err(_) => None,
    };
    let consumers = consumers(client, &queue).await;
    Detail {
        queue,
        settings: Some(settings.map_err(shown)),
        consumers: Some(consumers.map_err(shown)),
        dead_letters,
    }
}

fn shown(status: Status) -> String {
    Failure::from(status).with_causes()
}

async fn settings(client: &Client, queue: &str) -> Result<Queue, Status> {
    let request = client.request(GetQueueRequest { name: queue.to_owned() });
    let answer = client.admin_service().get_queue(request).await?.into_inner();
    Ok(answer.queue.unwrap_or_default())
}

async fn consumers(client: &Client, queue: &str) -> Result<Vec<Consumer>, Status> {
    let request = client.request(ListConsumersRequest {
        queue: queue.to_owned(),
        page_size: CONSUMERS,
        ..ListConsumersRequest::default()
    });
    Ok(client.admin_service().list_consumers(request).await?.into_inner().consumers)
}

async fn dead_letters(client: &Client, settings: &Queue) -> Result<DeadLetters, Status> {
    let Some(queue) = dead_letter_queue(settings) else { return Ok(DeadLetters::default()) };
    let filter = ItemFilter { origin_queue: settings.name.clone(), ..ItemFilter::default() };
    let request = client.request(ListItemsRequest {
        queue: queue.clone(),
        page_size: DEAD_LETTERS,
        filter: Some(filter),
        ..ListItemsRequest::default()
    });
    let page = match client.admin_service().list_items(request).await {
        Ok(page) => page.into_inner(),
        // Created by the first dead letter.
        Err(status) if status.code() == Code::NotFound => {
            return Ok(DeadLetters { queue: Some(queue), ..DeadLetters::default() });
        }
        Err(status) => return Err(status),
    };
    let mut items = page.items;
    items.sort_by_key(|item| {
        std::cmp::Reverse(item.dead_letter_time.map(|time| (time.seconds, time.nanos)))
    });
    Ok(DeadLetters { queue: Some(queue), items, has_more: !page.next_page_token.is_empty() })
}
