//! PushStream: batch after batch on one stream, with many in progress at a time.
//!
//! Batches of one queue become visible in the order in which they were sent. Some stores write items with and without sequence numbers apart:
//! there, a batch waits for the earlier ones of the other kind.
//!
//! A stream that has reached its maximum age asks its client to end it. Everything that the client
//! has sent until then is read and answered, so that the next stream begins without unknown
//! outcomes. If the client continues nevertheless, the broker ends the stream a little later, after
//! answering what was read.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::{Stream, StreamExt, stream::FuturesUnordered};
use parking_lot::Mutex;
use sluicegate_proto::v1 as pb;
use tokio::{
    sync::mpsc::{self, OwnedPermit, Receiver, Sender},
    time::{Interval, MissedTickBehavior, Sleep, interval, sleep},
};
use tonic::Status;

use super::{
    Api, convert,
    intake::{Batch, Room},
    may_create, parse,
    status::{self, ApiError},
};
use crate::{
    access::Caller,
    domain::{Action, Queue, QueueName},
    engine::{Engine, EngineError},
    long_work,
};

/// Most batches of one stream that are in progress, or whose answers the client has not read yet.
/// Past this number the stream is not read, and HTTP/2 flow control slows the client down.
const MAX_BATCHES: usize = 64;
/// Space for `closing`, which does not wait for the client to read answers.
const OTHER_MESSAGES: usize = 1;
/// Most time that a client has to end a stream that has reached its maximum age.
const LONGEST_GRACE: Duration = Duration::from_mins(1);
/// A client that reads no answer for this long has left them: for up to twice as long they are kept.
const UNREAD: Duration = Duration::from_secs(30);

type Answer = Result<pb::PushStreamResponse, Status>;

/// Pushes `batches` in a task of its own, which runs until everything that was read is stored, even if
/// the client has gone.
pub(super) fn serve(
    api: &Api,
    caller: Caller,
    batches: impl Stream<Item = Result<Batch, Status>> + Send + Unpin + 'static,
) -> impl Stream<Item = Answer> + Send + 'static {
    let (answers, receiver) = mpsc::channel(MAX_BATCHES + OTHER_MESSAGES);
    let unread = Arc::new(Mutex::new(Unread { receiver, taken: 0, end: None }));
    api.tasks.spawn(run(api.clone(), caller, batches, answers, Watch::new(&unread)));
    Answers(unread)
}

/// Answers that the connection has not taken yet. The connection takes none while the client reads none.
struct Unread {
    receiver: Receiver<Answer>,
    /// How many answers were taken.
    taken: u64,
    /// What ends the stream, behind all answers.
    end: Option<Status>,
}

/// The response stream.
struct Answers(Arc<Mutex<Unread>>);

impl Stream for Answers {
    type Item = Answer;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Answer>> {
        let mut unread = self.0.lock();
        let answer = ready!(unread.receiver.poll_recv(context));
        unread.taken += 1;
        Poll::Ready(answer.or_else(|| unread.end.take().map(Err)))
    }
}

/// Watches whether the client reads its answers.
struct Watch {
    unread: Weak<Mutex<Unread>>,
    ticks: Interval,
    /// How many answers had been taken at the tick before, if there were others to be taken.
    seen: Option<u64>,
}

/// What the client does with its answers.
#[derive(PartialEq, Eq)]
enum Reading {
    /// It may be reading them.
    Goes,
    /// It has read all there are, or the response stream is gone.
    Done,
    /// It has left them, and they are dropped.
    Left,
}

impl Watch {
    fn new(unread: &Arc<Mutex<Unread>>) -> Self {
        let mut ticks = interval(UNREAD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { unread: Arc::downgrade(unread), ticks, seen: None }
    }

    /// Sets what the response stream ends with.
    fn end(&self, status: Status) {
        if let Some(unread) = self.unread.upgrade() {
            unread.lock().end.get_or_insert(status);
        }
    }

    /// Waits for a while, and returns what the client has done since.
    async fn next(&mut self) -> Reading {
        self.ticks.tick().await;
        let Some(unread) = self.unread.upgrade() else { return Reading::Done };
        let mut unread = unread.lock();
        let seen = (!unread.receiver.is_empty()).then_some(unread.taken);
        if seen.is_none() {
            self.seen = None;
            return Reading::Done;
        }
        if std::mem::replace(&mut self.seen, seen) != seen {
            return Reading::Goes;
        }
        while unread.receiver.try_recv().is_ok() {}
        unread.end = Some(ApiError::AnswersNotRead.into());
        Reading::Left
    }
}

async fn run(
    api: Api,
    caller: Caller,
    batches: impl Stream<Item = Result<Batch, Status>> + Send + Unpin,
    answers: Sender<Answer>,
    mut watch: Watch,
) {
    push_all(&api, &caller, batches, answers, &mut watch).await;
    // The last answers are not kept for ever either.
    while let Some(Reading::Goes) = api.shutdown.run_until_cancelled(watch.next()).await {}
}

/// Pushes batches until the stream ends, and answers them.
async fn push_all(
    api: &Api,
    caller: &Caller,
    mut batches: impl Stream<Item = Result<Batch, Status>> + Send + Unpin,
    answers: Sender<Answer>,
    watch: &mut Watch,
) {
    let mut closing = answers.clone().try_reserve_owned().ok();
    let mut age = api.stream_age().map(|age| Box::pin(sleep(age)));
    // Only this task polls the batches. It polls each for the first time in the order of arrival,
    // when the queue's settings are known, so that batches reach the store in that order.
    let mut in_flight = FuturesUnordered::new();
    let mut kinds = Kinds::default();
    // A batch that must not reach the store yet; nothing is read behind it.
    let mut held: Option<(Option<Kind>, _)> = None;
    let mut slot: Option<OwnedPermit<Answer>> = None;
    let mut reading = true;
    loop {
        if let Some((kind, batch)) = held.take_if(|(kind, _)| !kinds.could_overtake(kind.as_ref()))
        {
            kinds.begin(kind.as_ref());
            in_flight.push(async move {
                batch.await;
                kind
            });
        }
        let end = tokio::select! {
            biased;
            Some(kind) = in_flight.next() => {
                kinds.end(kind.as_ref());
                continue;
            }
            () = api.shutdown.cancelled(), if reading => Some(EngineError::ShuttingDown.into()),
            () = answers.closed(), if reading => None,
            client = watch.next(), if reading => match client {
                Reading::Left => None,
                Reading::Goes | Reading::Done => continue,
            },
            () = passed(&mut age), if reading => match closing.take() {
                Some(place) => {
                    place.send(Ok(pb::PushStreamResponse { closing: true, ..Default::default() }));
                    let grace = api.max_connection_age.min(LONGEST_GRACE);
                    age = Some(Box::pin(sleep(grace)));
                    continue;
                }
                None => Some(EngineError::StreamTooOld.into()),
            },
            // Space for the answer is reserved before each batch is read, so that sending an answer
            // never waits.
            free = answers.clone().reserve_owned(), if reading && slot.is_none() => {
                slot = free.ok();
                continue;
            }
            batch = batches.next(), if reading && slot.is_some() && held.is_none() => match batch {
                Some(Ok(Batch { request, room })) => {
                    held = Some(start(api, caller, request, room, slot.take()).await);
                    continue;
                }
                Some(Err(status)) => Some(ApiError::Transport(status).into()),
                None => None,
            },
            else => return,
        };
        reading = false;
        if let Some(status) = end {
            watch.end(status);
        }
    }
}

/// Waits for the time; forever if there is none.
async fn passed(time: &mut Option<Pin<Box<Sleep>>>) {
    match time {
        Some(time) => time.await,
        None => std::future::pending().await,
    }
}

async fn open_for_push(
    engine: &Engine,
    caller: &Caller,
    batch: &parse::Batch,
) -> Result<Arc<Queue>, EngineError> {
    engine.open_for_push(&batch.queue, batch.items.len(), &may_create(caller)).await
}

/// Batches that the store keeps in order: those of one queue, with or without sequence numbers.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Kind {
    queue: QueueName,
    numbered: bool,
}

impl Kind {
    /// Returns the kind of a batch; `None` if the store keeps those of all kinds in order.
    fn of(engine: &Engine, queue: &Queue, batch: &parse::Batch) -> Option<Self> {
        let is_told_apart = !engine.store().capabilities().one_order;
        is_told_apart.then(|| Self {
            queue: queue.name.clone(),
            numbered: batch.items.iter().any(|item| queue.numbers(item)),
        })
    }
}

/// How many batches of each kind are being pushed.
#[derive(Default)]
struct Kinds(HashMap<Kind, usize>);

impl Kinds {
    fn begin(&mut self, kind: Option<&Kind>) {
        if let Some(kind) = kind {
            *self.0.entry(kind.clone()).or_default() += 1;
        }
    }

    fn end(&mut self, kind: Option<&Kind>) {
        if let Some(kind) = kind
            && let Some(count) = self.0.get_mut(kind)
        {
            *count -= 1;
            if *count == 0 {
                self.0.remove(kind);
            }
        }
    }

    /// Returns true if a batch of this kind could become visible before one that is being pushed.
    fn could_overtake(&self, kind: Option<&Kind>) -> bool {
        kind.is_some_and(|Kind { queue, numbered }| {
            self.0.contains_key(&Kind { queue: queue.clone(), numbered: !numbered })
        })
    }
}

/// Prepares one batch. The returned future pushes the batch and sends the answer.
async fn start(
    api: &Api,
    caller: &Caller,
    request: pb::PushStreamRequest,
    room: Room,
    slot: Option<OwnedPermit<Answer>>,
) -> (Option<Kind>, impl Future<Output = ()> + use<>) {
    let pb::PushStreamRequest { batch_id, queue, items, producer } = request;
    let engine = api.engine.clone();
    let allowed = caller.may(Action::Produce, &queue).map_err(ApiError::from);
    let batch = allowed.and_then(|()| {
        let parse = || parse::batch(&queue, items, &producer, &api.rules());
        long_work::on_bytes(room.bytes(), parse)
    });
    let ready = match batch {
        Ok(batch) => {
            let span = api.traces.push(None, &batch.queue, &batch.items);
            match open_for_push(&engine, caller, &batch).await {
                Ok(queue) => Ok((queue, batch, span)),
                Err(error) => Err(span.failed(error.into())),
            }
        }
        Err(refused) => Err(refused.into()),
    };
    let kind = match &ready {
        Ok((queue, batch, _)) => Kind::of(&engine, queue, batch),
        Err(_) => None,
    };
    let pushing = async move {
        let pushed = match ready {
            Ok((queue, batch, span)) => {
                let pushed = engine.push_into(queue, batch.items, batch.producer).await;
                pushed.map_err(|error| span.failed(error.into()))
            }
            Err(status) => Err(status),
        };
        drop(room);
        let mut answer = pb::PushStreamResponse { batch_id, ..Default::default() };
        match pushed {
            Ok(pushed) => answer.results = convert::pushed(pushed),
            Err(status) => answer.error = Some(status::embedded(&status)),
        }
        if let Some(slot) = slot {
            slot.send(Ok(answer));
        }
    };
    (kind, pushing)
}
