//! AdminService: queues, their settings and their contents.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream;
use sluicegate_proto::v1::{self as pb, admin_service_server::AdminService};
use tonic::{Request, Response, Status};

use super::{
    Api, brokers, caller, convert, may_create, pages,
    parse::{self, PageRequest, TOKEN_BYTES},
    queue_service::Responses,
    status::ApiError,
};
use crate::{
    access::Caller,
    domain::{
        Action::{Consume, Create, Manage, View},
        Item, ItemFilter, ItemState, Queue, QueueName,
        limits::{MAX_MESSAGE_BYTES, MAX_PAGE},
    },
    engine::{Engine, EngineError},
    store::Page,
};

/// Page size of a list of queues if the caller specifies none.
const QUEUES_PER_PAGE: usize = 100;
/// Number of queues read from the store at a time.
const QUEUES_PER_READ: usize = 250;
/// Page size of a list of items if the caller specifies none.
const ITEMS_PER_PAGE: usize = 50;
/// Number of items read from the store at a time, which bounds the memory for a page of large
/// items.
const ITEMS_PER_READ: usize = 64;
/// Number of items that one call with a filter looks at.
const ITEMS_PER_SCAN: usize = 10_000;
/// About how many bytes of payload it looks at.
const SCAN_BYTES: usize = 64 << 20;
/// A read of fewer bytes is followed by one of twice as many items.
const SMALL_READ_BYTES: usize = 1 << 20;
/// Most entries in one message of WatchQueues.
const STATS_PER_MESSAGE: usize = 1000;

#[tonic::async_trait]
impl AdminService for Api {
    type WatchQueuesStream = Responses<pb::WatchQueuesResponse>;

    async fn create_queue(
        &self,
        request: Request<pb::CreateQueueRequest>,
    ) -> Result<Response<pb::CreateQueueResponse>, Status> {
        let caller = caller(&request)?;
        let queue = request.into_inner().queue;
        if let Some(queue) = &queue {
            caller.may(Create, &queue.name)?;
            may_link(&caller, queue)?;
        }
        let to = queue.as_ref().and_then(linked);
        let queue = parse::new_queue(queue, &self.rules())?;
        let create = |engine: Arc<Engine>| async move {
            let may_create = may_create(&caller);
            let _place = engine.place_for(to.as_ref(), &may_create).await?;
            engine.create_queue(queue, &may_create).await
        };
        let queue = self.run(create).await?;
        Ok(Response::new(pb::CreateQueueResponse { queue: Some(convert::queue(&queue)) }))
    }

    async fn get_queue(
        &self,
        request: Request<pb::GetQueueRequest>,
    ) -> Result<Response<pb::GetQueueResponse>, Status> {
        caller(&request)?.may(View, &request.get_ref().name)?;
        let name = QueueName::parse("name", &request.get_ref().name)?;
        let queue = self.run(|engine| async move { engine.get_queue(&name).await }).await?;
        Ok(Response::new(pb::GetQueueResponse { queue: Some(convert::queue(&queue)) }))
    }

    async fn update_queue(
        &self,
        request: Request<pb::UpdateQueueRequest>,
    ) -> Result<Response<pb::UpdateQueueResponse>, Status> {
        let caller = caller(&request)?;
        let pb::UpdateQueueRequest { queue, update_mask } = request.into_inner();
        let mut to = None;
        if let Some(queue) = &queue {
            caller.may(Manage, &queue.name)?;
            let links = |path: &String| path == "dead_letter_queue" || path == "*";
            if update_mask.as_ref().is_some_and(|mask| mask.paths.iter().any(links)) {
                may_link(&caller, queue)?;
                to = linked(queue);
            }
        }
        let (name, change) = parse::change(queue, update_mask, &self.rules())?;
        let queue = self
            .run(|engine| async move {
                let _place = engine.place_for(to.as_ref(), &may_create(&caller)).await?;
                engine.update_queue(&name, &*change).await
            })
            .await?;
        Ok(Response::new(pb::UpdateQueueResponse { queue: Some(convert::queue(&queue)) }))
    }

    async fn delete_queue(
        &self,
        request: Request<pb::DeleteQueueRequest>,
    ) -> Result<Response<pb::DeleteQueueResponse>, Status> {
        caller(&request)?.may(Manage, &request.get_ref().name)?;
        let pb::DeleteQueueRequest { name, force } = request.into_inner();
        let name = QueueName::parse("name", &name)?;
        let deleted =
            self.run(|engine| async move { engine.delete_queue(&name, force).await }).await?;
        Ok(Response::new(pb::DeleteQueueResponse { deleted_items: convert::figure(deleted) }))
    }

    async fn list_queues(
        &self,
        request: Request<pb::ListQueuesRequest>,
    ) -> Result<Response<pb::ListQueuesResponse>, Status> {
        let caller = caller(&request)?;
        let pb::ListQueuesRequest { page_size, page_token, prefix, labels } = request.into_inner();
        let prefix = parse::prefix("prefix", &prefix)?;
        parse::check_labels(&labels)?;
        let keys = self.engine.receipt_keys();
        let page = pages::request(&keys, page_size, page_token, QUEUES_PER_PAGE)?;
        let after = page.after(QueueName::parse)?;
        let read = |after: Option<QueueName>, step| {
            let prefix = prefix.clone();
            self.run(move |engine| async move {
                engine.list_queues(&prefix, after.as_ref(), step).await
            })
        };
        let shown = |queue: Queue| {
            let has = |(key, value): (&String, &String)| queue.labels.get(key) == Some(value);
            let is_wanted = labels.iter().all(has) && caller.allows(View, queue.name.as_str());
            is_wanted.then(|| convert::queue(&queue))
        };
        let name = |queue: &Queue| queue.name.clone();
        let (queues, next_page_token) =
            pages::list(&keys, &page, after, QUEUES_PER_READ, read, name, shown).await?;
        Ok(Response::new(pb::ListQueuesResponse { queues, next_page_token }))
    }

    async fn pause_queue(
        &self,
        request: Request<pb::PauseQueueRequest>,
    ) -> Result<Response<pb::PauseQueueResponse>, Status> {
        let queue = self.set_paused(&caller(&request)?, &request.get_ref().name, true).await?;
        Ok(Response::new(pb::PauseQueueResponse { queue: Some(queue) }))
    }

    async fn resume_queue(
        &self,
        request: Request<pb::ResumeQueueRequest>,
    ) -> Result<Response<pb::ResumeQueueResponse>, Status> {
        let queue = self.set_paused(&caller(&request)?, &request.get_ref().name, false).await?;
        Ok(Response::new(pb::ResumeQueueResponse { queue: Some(queue) }))
    }

    async fn purge_queue(
        &self,
        request: Request<pb::PurgeQueueRequest>,
    ) -> Result<Response<pb::PurgeQueueResponse>, Status> {
        caller(&request)?.may(Manage, &request.get_ref().name)?;
        let name = QueueName::parse("name", &request.get_ref().name)?;
        let purged = self.run(|engine| async move { engine.purge_queue(&name).await }).await?;
        Ok(Response::new(pb::PurgeQueueResponse { purged_items: convert::figure(purged) }))
    }

    async fn get_queue_stats(
        &self,
        request: Request<pb::GetQueueStatsRequest>,
    ) -> Result<Response<pb::GetQueueStatsResponse>, Status> {
        caller(&request)?.may(View, &request.get_ref().queue)?;
        let name = QueueName::parse("queue", &request.get_ref().queue)?;
        let stats = self.run(|engine| async move { engine.queue_stats(&name).await }).await?;
        let stats = Some(convert::stats(&stats, self.engine.now()));
        Ok(Response::new(pb::GetQueueStatsResponse { stats }))
    }

    async fn batch_get_queue_stats(
        &self,
        request: Request<pb::BatchGetQueueStatsRequest>,
    ) -> Result<Response<pb::BatchGetQueueStatsResponse>, Status> {
        let caller = caller(&request)?;
        let names = parse::queue_batch(&request.get_ref().queues)?;
        for name in &names {
            caller.may(View, name.as_str())?;
        }
        let read = |engine: Arc<Engine>| async move { engine.batch_stats(&names).await };
        let (stats, missing) = self.run(read).await?;
        let now = self.engine.now();
        Ok(Response::new(pb::BatchGetQueueStatsResponse {
            stats: stats.iter().map(|stats| convert::stats(stats, now)).collect(),
            missing: missing.iter().map(ToString::to_string).collect(),
        }))
    }

    async fn watch_queues(
        &self,
        request: Request<pb::WatchQueuesRequest>,
    ) -> Result<Response<Self::WatchQueuesStream>, Status> {
        let caller = caller(&request)?;
        for name in &request.get_ref().queues {
            caller.may(View, name)?;
        }
        let queues = parse::watched(&request.get_ref().queues)?;
        let named = queues.clone();
        let watch = self.run(|engine| async move { engine.watch_queues(queues).await }).await?;
        let (engine, shutdown) = (Arc::clone(&self.engine), self.shutdown.clone());
        let (shown_to, is_of_all) = (caller.clone(), named.is_empty());
        // Permissions may be withdrawn while the stream lives.
        let refused = Box::pin(caller.until_refused(move |caller| {
            caller.is_known()?;
            named.iter().try_for_each(|name| caller.may(View, name.as_str()))
        }));
        let stream = stream::try_unfold((watch, refused), move |(mut watch, mut refused)| {
            let (engine, shutdown, caller) =
                (Arc::clone(&engine), shutdown.clone(), shown_to.clone());
            async move {
                let is_shown = |name: &QueueName| !is_of_all || caller.allows(View, name.as_str());
                let changed = tokio::select! {
                    biased;
                    refused = &mut refused => return Err(refused.into()),
                    () = shutdown.cancelled() => return Err(EngineError::ShuttingDown.into()),
                    changed = watch.next(STATS_PER_MESSAGE, is_shown) => changed?,
                };
                let now = engine.now();
                let stats = changed.iter().map(|stats| convert::stats(stats, now)).collect();
                Ok(Some((pb::WatchQueuesResponse { stats }, (watch, refused))))
            }
        });
        Ok(Response::new(Box::pin(stream)))
    }

    async fn list_items(
        &self,
        request: Request<pb::ListItemsRequest>,
    ) -> Result<Response<pb::ListItemsResponse>, Status> {
        let caller = caller(&request)?;
        let pb::ListItemsRequest { queue, state, page_size, page_token, filter } =
            request.into_inner();
        caller.may(View, &queue)?;
        let payloads = may_read_payloads(&caller, &queue);
        let filter = parse::item_filter(filter)?;
        if !filter.payload_contains.is_empty() && !payloads {
            caller.may(Consume, &queue)?;
        }
        let queue = QueueName::parse("queue", &queue)?;
        let state = parse::item_state("state", state)?;
        let page = PageRequest::parse(page_size, page_token, ITEMS_PER_PAGE)?;
        // The semaphore is never closed.
        let room = Arc::clone(&self.pages).acquire_owned().await;
        let read = |engine: Arc<Engine>| async move {
            let _room = room;
            fill_page(&engine, &queue, state, &filter, page).await
        };
        let page = self.run(read).await?;
        Ok(Response::new(pb::ListItemsResponse {
            items: page.entries.into_iter().map(|item| shown(item, payloads)).collect(),
            next_page_token: page.next.unwrap_or_default(),
        }))
    }

    async fn get_item(
        &self,
        request: Request<pb::GetItemRequest>,
    ) -> Result<Response<pb::GetItemResponse>, Status> {
        let caller = caller(&request)?;
        caller.may(View, &request.get_ref().queue)?;
        let payloads = may_read_payloads(&caller, &request.get_ref().queue);
        let queue = QueueName::parse("queue", &request.get_ref().queue)?;
        let id = parse::item_id("id", &request.get_ref().id)?;
        let item = self.run(|engine| async move { engine.get_item(&queue, id).await }).await?;
        Ok(Response::new(pb::GetItemResponse { item: Some(shown(item, payloads)) }))
    }

    async fn delete_item(
        &self,
        request: Request<pb::DeleteItemRequest>,
    ) -> Result<Response<pb::DeleteItemResponse>, Status> {
        caller(&request)?.may(Manage, &request.get_ref().queue)?;
        let queue = QueueName::parse("queue", &request.get_ref().queue)?;
        let id = parse::item_id("id", &request.get_ref().id)?;
        let only_if = parse::item_state("only_if", request.get_ref().only_if)?;
        self.run(|engine| async move { engine.delete_item(&queue, id, only_if).await }).await?;
        Ok(Response::new(pb::DeleteItemResponse {}))
    }

    async fn replay_items(
        &self,
        request: Request<pb::ReplayItemsRequest>,
    ) -> Result<Response<pb::ReplayItemsResponse>, Status> {
        caller(&request)?.may(Manage, &request.get_ref().queue)?;
        let request = request.into_inner();
        let queue = QueueName::parse("queue", &request.queue)?;
        let selection = parse::replay(request.selection)?;
        let max_items = parse::max_items(request.max_items)?;
        let replayed = self
            .run(|engine| async move { engine.replay_items(&queue, selection, max_items).await })
            .await?;
        Ok(Response::new(pb::ReplayItemsResponse { replayed_items: convert::figure(replayed) }))
    }

    async fn redrive_items(
        &self,
        request: Request<pb::RedriveItemsRequest>,
    ) -> Result<Response<pb::RedriveItemsResponse>, Status> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        caller.may(Manage, &request.queue)?;
        if !request.to_queue.is_empty() {
            caller.may(Manage, &request.to_queue)?;
        }
        let queue = QueueName::parse("queue", &request.queue)?;
        let to = QueueName::parse_optional("to_queue", &request.to_queue)?;
        let filter = parse::redrive(request.filter)?;
        let max_items = parse::max_items(request.max_items)?;
        let rate = parse::rate(request.rate)?;
        // A redrive may last for hours, so it ends between two batches when its caller hangs up.
        let redriven = self
            .take(
                |engine| async move {
                    let may_create = may_create(&caller);
                    let _place = engine.place_by_use(to.as_ref(), &may_create).await?;
                    engine.redrive_items(&queue, to, filter, max_items, rate).await
                },
                |_, _| std::future::ready(()),
            )
            .await?;
        Ok(Response::new(pb::RedriveItemsResponse { redriven_items: convert::figure(redriven) }))
    }

    async fn get_broker(
        &self,
        _request: Request<pb::GetBrokerRequest>,
    ) -> Result<Response<pb::GetBrokerResponse>, Status> {
        Ok(Response::new(self.this_broker().await))
    }

    async fn list_brokers(
        &self,
        request: Request<pb::ListBrokersRequest>,
    ) -> Result<Response<pb::ListBrokersResponse>, Status> {
        caller(&request)?.may_everywhere(View)?;
        let brokers = self.run(|engine| async move { engine.brokers().await }).await?;
        let brokers = brokers.iter().map(brokers::broker).collect();
        Ok(Response::new(pb::ListBrokersResponse { brokers }))
    }

    async fn list_consumers(
        &self,
        request: Request<pb::ListConsumersRequest>,
    ) -> Result<Response<pb::ListConsumersResponse>, Status> {
        let caller = caller(&request)?;
        Ok(Response::new(self.consumers_page(&caller, request.into_inner()).await?))
    }
}

impl Api {
    async fn set_paused(
        &self,
        caller: &Caller,
        name: &str,
        paused: bool,
    ) -> Result<pb::Queue, Status> {
        caller.may(Manage, name)?;
        let name = QueueName::parse("name", name)?;
        let queue =
            self.run(|engine| async move { engine.pause_queue(&name, paused).await }).await?;
        Ok(convert::queue(&queue))
    }
}

/// Allows or refuses to make a queue's items at a limit go to the dead-letter queue that `queue` names. Each queue may have
/// its own, `<queue>.dead`.
fn may_link(caller: &Caller, queue: &pb::Queue) -> Result<(), ApiError> {
    if is_own_link(queue) { Ok(()) } else { may_lead_to(caller, &queue.dead_letter_queue) }
}

fn is_own_link(queue: &pb::Queue) -> bool {
    let rest = queue.dead_letter_queue.strip_prefix(queue.name.as_str());
    rest.is_some_and(|rest| rest == ".dead")
}

/// Returns the dead-letter queue that `queue` names, which is one queue more if it is not there; `None` for its own, which each
/// queue has.
fn linked(queue: &pb::Queue) -> Option<QueueName> {
    let to = QueueName::parse("dead_letter_queue", &queue.dead_letter_queue).ok();
    to.filter(|_| !is_own_link(queue))
}

/// Allows or refuses to make dead letters go into this queue; an empty name is none.
pub(super) fn may_lead_to(caller: &Caller, dead_letter_queue: &str) -> Result<(), ApiError> {
    if !dead_letter_queue.is_empty() {
        caller.may(Manage, dead_letter_queue)?;
    }
    Ok(())
}

pub(super) fn may_read_payloads(caller: &Caller, queue: &str) -> bool {
    caller.allows(Consume, queue) || caller.allows(Manage, queue)
}

/// Converts an item that is shown, with its payload or without.
fn shown(mut item: Item, payload: bool) -> pb::Item {
    if !payload {
        item.payload = Bytes::new();
    }
    convert::item(item)
}

/// Reads items until the page is full, by number or by bytes, there are no more, or enough were looked at.
async fn fill_page(
    engine: &Engine,
    queue: &QueueName,
    state: Option<ItemState>,
    filter: &ItemFilter,
    request: PageRequest,
) -> Result<Page<Item>, EngineError> {
    let mut page = Page { entries: Vec::new(), next: request.token };
    let is_filtered = !filter.matches_all();
    let (mut bytes, mut scanned, mut scanned_bytes, mut step) = (0, 0, 0, ITEMS_PER_READ);
    loop {
        let room = request.size - page.entries.len();
        let limit = if is_filtered { step.min(ITEMS_PER_SCAN - scanned) } else { room.min(step) };
        let mut read = engine.list_items(queue, state, page.next.as_deref(), limit).await?;
        let read_bytes: usize = read.entries.iter().map(|item| item.payload.len()).sum();
        let (mut matching, mut fitting) = (0, 0);
        for item in &read.entries {
            if filter.matches(item) {
                let with_item = bytes + item.message_bytes();
                if matching == room || with_item > MAX_MESSAGE_BYTES - TOKEN_BYTES {
                    break;
                }
                (matching, bytes) = (matching + 1, with_item);
            }
            fitting += 1;
        }
        let full = fitting < read.entries.len();
        if full {
            if fitting == 0 && !page.entries.is_empty() {
                return Ok(page); // the items just read go onto the next page
            }
            // Read as many again as fit: only the store can say where the next page starts.
            let limit = fitting.max(1);
            read = engine.list_items(queue, state, page.next.as_deref(), limit).await?;
        }
        scanned += read.entries.len();
        scanned_bytes += read_bytes;
        page.entries.extend(read.entries.into_iter().filter(|item| filter.matches(item)));
        page.next = read.next;
        let is_enough = is_filtered && (scanned >= ITEMS_PER_SCAN || scanned_bytes >= SCAN_BYTES);
        if full || is_enough || page.next.is_none() || page.entries.len() >= request.size {
            return Ok(page);
        }
        // Small items are read in larger steps.
        if is_filtered && read_bytes < SMALL_READ_BYTES {
            step = (step * 2).min(MAX_PAGE);
        }
    }
}
