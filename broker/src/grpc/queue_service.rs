//! QueueService: producers and consumers.

use std::{
    pin::Pin,
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures_util::{Stream, stream};
use sluicegate_proto::v1::{self as pb, queue_service_server::QueueService};
use tonic::{Request, Response, Status, Streaming};

use super::{
    Api, caller, consume_stream, convert,
    delivery_stream::DeliveryStream,
    intake::batches,
    may_create, may_settle,
    parse::{self, CommitAndPush, Take},
    push_stream,
};
use crate::{
    domain::{
        Action::{Consume, Produce},
        Delivery,
    },
    engine::{Engine, Identity},
    traces::{self, Operation},
};

/// A stream of responses.
pub(super) type Responses<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl QueueService for Api {
    type PushStreamStream = Responses<pb::PushStreamResponse>;
    type ConsumeStream = Responses<pb::ConsumeResponse>;
    type ConsumeStreamStream = Responses<pb::ConsumeStreamResponse>;

    async fn push(
        &self,
        request: Request<pb::PushRequest>,
    ) -> Result<Response<pb::PushResponse>, Status> {
        let caller = caller(&request)?;
        let trace = self.traces.of_call(request.metadata());
        let pb::PushRequest { queue, items, producer } = request.into_inner();
        caller.may(Produce, &queue)?;
        let mut batch = parse::batch(&queue, items, &producer, &self.rules())?;
        traces::carry(trace.as_ref(), &mut batch.items);
        let span = self.traces.push(trace.as_ref(), &batch.queue, &batch.items);
        let push = |engine: Arc<Engine>| async move {
            let may_create = may_create(&caller);
            let queue = engine.open_for_push(&batch.queue, batch.items.len(), &may_create).await?;
            engine.push_into(queue, batch.items, batch.producer).await
        };
        let pushed = span.of(self.run(push).await)?;
        Ok(Response::new(pb::PushResponse { results: convert::pushed(pushed) }))
    }

    async fn push_stream(
        &self,
        request: Request<Streaming<pb::PushStreamRequest>>,
    ) -> Result<Response<Self::PushStreamStream>, Status> {
        let caller = caller(&request)?;
        let batches = batches(request.extensions());
        Ok(Response::new(Box::pin(push_stream::serve(self, caller, batches))))
    }

    async fn pop(
        &self,
        request: Request<pb::PopRequest>,
    ) -> Result<Response<pb::PopResponse>, Status> {
        let caller = caller(&request)?;
        caller.may(Consume, &request.get_ref().queue)?;
        let (trace, started) = (self.traces.of_call(request.metadata()), SystemTime::now());
        let request = request.into_inner();
        let Take { queue, max_items, wait } =
            parse::take(&request.queue, request.max_items, request.wait)?;
        let Some(wait) = self.until_created(&caller, &queue, wait).await? else {
            return Ok(Response::new(pb::PopResponse::default()));
        };
        let peer = caller.peer();
        let work =
            |engine: Arc<Engine>| async move { engine.pop(&queue, max_items, wait, peer).await };
        // At-most-once delivery: items committed when the caller hangs up are lost.
        let items = self.take(work, |_, _| std::future::ready(())).await?;
        let taken = items.iter().map(|item| (item.id, &item.headers));
        self.traces.delivered(Operation::Pop, trace.as_ref(), &request.queue, started, taken);
        let items = items.into_iter().map(convert::item).collect();
        Ok(Response::new(pb::PopResponse { items }))
    }

    async fn reserve(
        &self,
        request: Request<pb::ReserveRequest>,
    ) -> Result<Response<pb::ReserveResponse>, Status> {
        let caller = caller(&request)?;
        caller.may(Consume, &request.get_ref().queue)?;
        let (trace, started) = (self.traces.of_call(request.metadata()), SystemTime::now());
        let request = request.into_inner();
        let Take { queue, max_items, wait } =
            parse::take(&request.queue, request.max_items, request.wait)?;
        let lease = parse::lease("lease", request.lease, &self.rules())?;
        let name = parse::consumer(&request.consumer)?;
        let consumer = Identity { name, peer: caller.peer() };
        let Some(wait) = self.until_created(&caller, &queue, wait).await? else {
            return Ok(Response::new(pb::ReserveResponse::default()));
        };
        let work = |engine: Arc<Engine>| async move {
            engine.reserve(&queue, max_items, wait, lease, consumer).await
        };
        let deliveries = self.take(work, release).await?;
        let taken = deliveries.iter().map(|d| (d.item.id, &d.item.headers));
        self.traces.delivered(Operation::Reserve, trace.as_ref(), &request.queue, started, taken);
        let keys = self.engine.receipt_keys();
        let deliveries =
            deliveries.into_iter().map(|d| convert::delivery(d, false, &keys)).collect();
        Ok(Response::new(pb::ReserveResponse { deliveries }))
    }

    async fn consume(
        &self,
        request: Request<pb::ConsumeRequest>,
    ) -> Result<Response<Self::ConsumeStream>, Status> {
        let caller = caller(&request)?;
        caller.may(Consume, &request.get_ref().queue)?;
        let mut options = parse::consume(request.get_ref(), &self.rules())?;
        options.peer = caller.peer();
        let (api, queue) = (self.clone(), options.queue.clone());
        let mut opening = Box::pin(async move {
            api.until_created(&caller, &options.queue, Duration::MAX).await?;
            let auto_commit = options.auto_commit;
            let subscription =
                api.run(|engine| async move { engine.consume(options).await }).await?;
            Ok::<_, Status>(DeliveryStream::new(subscription, auto_commit, &api, caller))
        });
        // The answer begins before the queue is there, because clients wait for its beginning.
        let is_there = self.run(|engine| async move { engine.has_queue(&queue).await }).await?;
        let opened = if is_there { Some(opening.as_mut().await?) } else { None };
        // The connection itself polls the stream, so that no items wait in a buffer between them.
        let stream = stream::try_unfold((opened, opening), |(opened, mut opening)| async move {
            let mut outgoing = match opened {
                Some(outgoing) => outgoing,
                None => opening.as_mut().await?,
            };
            let message = outgoing.deliveries().await?;
            Ok(Some((message, (Some(outgoing), opening))))
        });
        Ok(Response::new(Box::pin(stream)))
    }

    async fn consume_stream(
        &self,
        request: Request<Streaming<pb::ConsumeStreamRequest>>,
    ) -> Result<Response<Self::ConsumeStreamStream>, Status> {
        Ok(Response::new(Box::pin(consume_stream::serve(
            self.clone(),
            caller(&request)?,
            request.into_inner(),
        ))))
    }

    async fn commit(
        &self,
        request: Request<pb::CommitRequest>,
    ) -> Result<Response<pb::CommitResponse>, Status> {
        let caller = caller(&request)?;
        let trace = self.traces.of_call(request.metadata());
        let pb::CommitRequest { receipts } = request.into_inner();
        let parsed = parse::receipts(&receipts, &self.engine.receipt_keys())?;
        may_settle(&caller, &parsed)?;
        let span = self.traces.settle(Operation::Commit, trace.as_ref(), &parsed);
        let outcomes =
            span.of(self.run(|engine| async move { engine.commit(&parsed).await }).await)?;
        let results = convert::settled(receipts, outcomes);
        Ok(Response::new(pb::CommitResponse { results }))
    }

    async fn rollback(
        &self,
        request: Request<pb::RollbackRequest>,
    ) -> Result<Response<pb::RollbackResponse>, Status> {
        let caller = caller(&request)?;
        let trace = self.traces.of_call(request.metadata());
        let (receipts, parsed) =
            parse::rollbacks(request.into_inner(), &self.engine.receipt_keys())?;
        may_settle(&caller, parsed.iter().map(|rollback| &rollback.receipt))?;
        let settled = parsed.iter().map(|rollback| &rollback.receipt);
        let span = self.traces.settle(Operation::Rollback, trace.as_ref(), settled);
        let outcomes =
            span.of(self.run(|engine| async move { engine.rollback(parsed).await }).await)?;
        let results = convert::settled(receipts, outcomes);
        Ok(Response::new(pb::RollbackResponse { results }))
    }

    async fn extend(
        &self,
        request: Request<pb::ExtendRequest>,
    ) -> Result<Response<pb::ExtendResponse>, Status> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let (parsed, lease) = parse::extend(&request, &self.rules(), &self.engine.receipt_keys())?;
        may_settle(&caller, &parsed)?;
        let outcomes = self.run(|engine| async move { engine.extend(parsed, lease).await }).await?;
        Ok(Response::new(convert::extended(request.receipts, outcomes)))
    }

    async fn r#move(
        &self,
        request: Request<pb::MoveRequest>,
    ) -> Result<Response<pb::MoveResponse>, Status> {
        let caller = caller(&request)?;
        let trace = self.traces.of_call(request.metadata());
        let request =
            parse::move_item(request.into_inner(), &self.rules(), &self.engine.receipt_keys())?;
        may_settle(&caller, [&request.receipt])?;
        let to = request.to_queue.as_str();
        if request.changes_item() || !caller.allows(Consume, to) {
            caller.may(Produce, to)?;
        }
        let id = request.receipt.item.to_string();
        let span = self.traces.settle(Operation::Move, trace.as_ref(), [&request.receipt]);
        let work = |engine: Arc<Engine>| async move {
            engine.move_item(request, &may_create(&caller)).await
        };
        let outcome = span.of(self.run(work).await)?;
        Ok(Response::new(pb::MoveResponse { outcome: convert::outcome(outcome).into(), id }))
    }

    async fn commit_and_push(
        &self,
        request: Request<pb::CommitAndPushRequest>,
    ) -> Result<Response<pb::CommitAndPushResponse>, Status> {
        let caller = caller(&request)?;
        let trace = self.traces.of_call(request.metadata());
        let CommitAndPush { receipt, mut pushes } = parse::commit_and_push(
            request.into_inner(),
            &self.rules(),
            &self.engine.receipt_keys(),
        )?;
        may_settle(&caller, [&receipt])?;
        for (queue, _) in &pushes {
            caller.may(Produce, queue.as_str())?;
        }
        traces::carry(trace.as_ref(), pushes.iter_mut().map(|(_, item)| item));
        let span = self.traces.settle(Operation::CommitAndPush, trace.as_ref(), [&receipt]);
        let work = |engine: Arc<Engine>| async move {
            engine.commit_and_push(receipt, pushes, &may_create(&caller)).await
        };
        let (outcome, pushed) = span.of(self.run(work).await)?;
        Ok(Response::new(pb::CommitAndPushResponse {
            outcome: convert::outcome(outcome).into(),
            results: convert::pushed(pushed),
        }))
    }
}

/// Rolls back items whose caller has gone without receiving them.
async fn release(engine: Arc<Engine>, deliveries: Vec<Delivery>) {
    engine.release_unanswered(deliveries).await;
}
