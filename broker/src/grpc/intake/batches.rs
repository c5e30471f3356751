//! The batches of push streams, which are read here and not by tonic.
//!
//! tonic decodes a message before anybody can say that there is room for it. It also keeps two buffers as large as the
//! largest message of a stream for as long as the stream lives. A client may open thousands of streams, so both would be
//! bounded by nothing. Here a batch is decoded when there is room for it, keeps that room until it is stored or refused,
//! and leaves no buffer behind.
//!
//! No two batches wait for each other: what holds room for decoded batches waits for nothing but the store and a turn to decode, and who has that
//! waits for nothing.

use std::{future::ready, io::Read, sync::Arc};

use axum::{
    body::{Body, BodyDataStream, Bytes},
    extract::Request,
};
use bytes::BytesMut;
use flate2::read::GzDecoder;
use futures_util::{
    Stream, StreamExt,
    stream::{self, BoxStream},
};
use parking_lot::Mutex;
use sluicegate_proto::{codec, v1 as pb};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use tonic::{Code, Status};

use super::{GZIP_RATIO, Intake, MAX_DURATION, PREFIX, budget::Connection};
use crate::{grpc::status::ApiError, long_work};

/// The method whose requests are read here.
pub(crate) const PUSH_STREAM: &str = "/sluicegate.v1.QueueService/PushStream";
/// The most bytes of decoded batches of one stream. A larger batch is decoded when no other batch of its stream is held.
pub(super) const OF_STREAM: usize = 32 << 20;
/// How much memory a decoded item takes besides its bytes. A list that grows has up to twice the places that it needs.
const ITEM: usize = 2 * size_of::<pb::NewItem>();
/// How much memory a decoded header takes besides its bytes: its place in a hash table, and two allocations.
const HEADER: usize = 128;
/// The fewest bytes of an encoded header that is not the same as another one.
const SHORTEST_HEADER: usize = 5;
/// The most items, and the most headers of all of them, that the codec lets pass.
const MAX_ITEMS: usize = 1_000;
const MAX_HEADERS: usize = 100_000;

/// A decoded batch and the room it takes. Keep the room for as long as the batch.
#[derive(Debug)]
pub(in crate::grpc) struct Batch {
    pub(in crate::grpc) request: pb::PushStreamRequest,
    pub(in crate::grpc) room: Room,
}

/// Room for decoded batches: of those of one stream, and of those of all.
#[derive(Debug)]
pub(in crate::grpc) struct Room {
    of_stream: OwnedSemaphorePermit,
    of_all: OwnedSemaphorePermit,
}

impl Room {
    /// Waits for room for a decoded batch of at most so many bytes.
    async fn take(
        intake: &Intake,
        of_stream: &Arc<Semaphore>,
        bytes: usize,
    ) -> Result<Self, Status> {
        // At most all the room there is, because a batch larger than that would wait for ever.
        let of_stream = acquire(of_stream, bytes.min(OF_STREAM)).await?;
        let of_all = acquire(&intake.batches, bytes.min(intake.bytes)).await?;
        Ok(Self { of_stream, of_all })
    }

    /// How many bytes the batch takes at most.
    pub(in crate::grpc) fn bytes(&self) -> usize {
        self.of_all.num_permits()
    }

    /// Keeps only as much room as is needed.
    fn shrink(&mut self, bytes: usize) {
        for permit in [&mut self.of_stream, &mut self.of_all] {
            if let Some(kept) = permit.split(bytes) {
                *permit = kept;
            }
        }
    }
}

/// The body of a request on its way past tonic.
#[derive(Clone)]
struct Unread(Arc<Mutex<Option<Reader>>>);

/// Takes the body out of the request of a push stream; leaves other requests as they are.
pub(super) fn divert(intake: &Intake, request: Request) -> Request {
    if request.uri().path() != PUSH_STREAM {
        return request;
    }
    let connection = super::connection(&request);
    let (mut parts, body) = request.into_parts();
    let is_gzip = parts.headers.get("grpc-encoding").is_some_and(|encoding| encoding == "gzip");
    let reader = Reader {
        intake: intake.clone(),
        connection,
        of_stream: Arc::new(Semaphore::new(OF_STREAM)),
        frames: body.into_data_stream(),
        rest: Bytes::new(),
        is_gzip,
    };
    parts.extensions.insert(Unread(Arc::new(Mutex::new(Some(reader)))));
    Request::from_parts(parts, Body::empty())
}

/// Returns the batches of a push stream, and an error as the last entry if the stream breaks.
pub(in crate::grpc) fn batches(
    extensions: &tonic::Extensions,
) -> impl Stream<Item = Result<Batch, Status>> + Send + Unpin + use<> {
    let reader = extensions.get::<Unread>().and_then(|unread| unread.0.lock().take());
    let Some(reader) = reader else {
        return stream::once(ready(Err(ApiError::TaskDied.into()))).boxed();
    };
    batches_of(reader)
}

fn batches_of(reader: Reader) -> BoxStream<'static, Result<Batch, Status>> {
    stream::try_unfold(reader, |mut reader| async move {
        Ok(reader.next().await?.map(|batch| (batch, reader)))
    })
    .boxed()
}

struct Reader {
    intake: Intake,
    connection: Connection,
    of_stream: Arc<Semaphore>,
    frames: BodyDataStream,
    /// What has been received and not read.
    rest: Bytes,
    is_gzip: bool,
}

impl Reader {
    async fn next(&mut self) -> Result<Option<Batch>, Status> {
        let Some(prefix) = self.read(PREFIX).await? else { return Ok(None) };
        let is_packed = self.is_packed(prefix[0])?;
        let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
        let limit = self.intake.max_message;
        if length > limit {
            return Err(Status::out_of_range(format!(
                "the message is {length} bytes, more than the limit of {limit}"
            )));
        }
        // Freed when the message is decoded.
        let _room = self.intake.room(self.connection, length).await?;
        let message = timeout(MAX_DURATION, self.read(length)).await;
        let message = message.map_err(|_| super::too_slow())??.ok_or_else(cut_off)?;
        let unpacked = if is_packed { limit.min((length + 1) * GZIP_RATIO) } else { length };
        let mut room = Room::take(&self.intake, &self.of_stream, largest(unpacked)).await?;
        let work = super::work(length, is_packed);
        let is_long = long_work::is_long(work);
        let _turn = if is_long { Some(self.intake.turn().await?) } else { None };
        long_work::on_bytes(work, || {
            let message = if is_packed { unpack(&message, unpacked, limit)? } else { message };
            let bytes = message.len();
            let request: pb::PushStreamRequest = codec::decode(message)?;
            let headers: usize = request.items.iter().map(|item| item.headers.len()).sum();
            room.shrink(bytes + request.items.len() * ITEM + headers * HEADER);
            Ok(Some(Batch { request, room }))
        })
    }

    fn is_packed(&self, flag: u8) -> Result<bool, Status> {
        match flag {
            0 => Ok(false),
            1 if self.is_gzip => Ok(true),
            _ => Err(Status::internal("the compressed-flag of a message is not valid")),
        }
    }

    /// Reads so many bytes; `None` at the end of the stream.
    async fn read(&mut self, length: usize) -> Result<Option<Bytes>, Status> {
        let mut bytes = BytesMut::with_capacity(length);
        loop {
            let part = self.rest.len().min(length - bytes.len());
            bytes.extend_from_slice(&self.rest.split_to(part));
            if bytes.len() == length {
                return Ok(Some(bytes.freeze()));
            }
            match self.frames.next().await {
                Some(Ok(frame)) => self.rest = frame,
                Some(Err(error)) => {
                    let status = Status::from_error(error.into());
                    let is_gone = status.code() == Code::Cancelled; // which is no fault
                    return if is_gone { Ok(None) } else { Err(status) };
                }
                None if bytes.is_empty() => return Ok(None),
                None => return Err(cut_off()),
            }
        }
    }
}

async fn acquire(budget: &Arc<Semaphore>, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
    let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
    // Neither budget is ever closed.
    Arc::clone(budget).acquire_many_owned(bytes).await.map_err(|_| ApiError::TaskDied)
}

fn cut_off() -> Status {
    Status::internal("the stream ended within a message")
}

/// Returns how much memory a message of `bytes` takes at most when it is decoded.
fn largest(bytes: usize) -> usize {
    let items = (bytes / 2).min(MAX_ITEMS);
    let headers = (bytes / SHORTEST_HEADER).min(MAX_HEADERS);
    bytes + items * ITEM + headers * HEADER
}

/// Unpacks a message of at most `limit` bytes, which cannot be larger than `largest`.
fn unpack(packed: &[u8], largest: usize, limit: usize) -> Result<Bytes, Status> {
    let mut bytes = Vec::with_capacity(largest + 1);
    let mut unpacked = GzDecoder::new(packed).take(limit as u64 + 1);
    unpacked.read_to_end(&mut bytes).map_err(|error| Status::internal(error.to_string()))?;
    if bytes.len() > limit {
        return Err(Status::resource_exhausted(format!(
            "the unpacked message is larger than the limit of {limit} bytes"
        )));
    }
    bytes.shrink_to_fit();
    Ok(bytes.into())
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, io::Write, task::Poll};

    use flate2::{Compression, write::GzEncoder};
    use futures_util::poll;
    use prost::Message;
    use tokio::{sync::mpsc, task::coop::unconstrained};
    use tokio_stream::wrappers::ReceiverStream;

    use super::*;

    fn batch(batch_id: i64, payload: usize) -> pb::PushStreamRequest {
        let item = pb::NewItem { payload: vec![0; payload].into(), ..Default::default() };
        pb::PushStreamRequest { batch_id, items: vec![item], ..Default::default() }
    }

    fn framed(flag: u8, message: &[u8]) -> Vec<u8> {
        let length = u32::try_from(message.len()).unwrap();
        [&[flag][..], &length.to_be_bytes(), message].concat()
    }

    fn plain(request: &pb::PushStreamRequest) -> Vec<u8> {
        framed(0, &request.encode_to_vec())
    }

    fn packed(request: &pb::PushStreamRequest) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(&request.encode_to_vec()).unwrap();
        framed(1, &encoder.finish().unwrap())
    }

    struct Stream {
        frames: mpsc::Sender<Result<Vec<u8>, Infallible>>,
        batches: BoxStream<'static, Result<Batch, Status>>,
    }

    fn stream(intake: &Intake) -> Stream {
        let (frames, receiver) = mpsc::channel(999);
        let request = Request::builder().uri(PUSH_STREAM).header("grpc-encoding", "gzip");
        let request = request.body(Body::from_stream(ReceiverStream::new(receiver))).unwrap();
        let request = divert(intake, request);
        let unread = request.extensions().get::<Unread>().unwrap();
        let reader = unread.0.lock().take().unwrap();
        Stream { frames, batches: batches_of(reader) }
    }

    impl Stream {
        async fn send(&self, bytes: &[u8]) {
            self.frames.send(Ok(bytes.to_vec())).await.unwrap();
        }

        async fn next(&mut self) -> Batch {
            self.batches.next().await.unwrap().unwrap()
        }
    }

    /// However the bytes are cut, packed or not, each batch is what was sent.
    #[tokio::test]
    async fn batches_are_read_however_they_are_cut() {
        let intake = Intake::new(99 << 20, 16 << 20);
        let requests: Vec<_> = (0..4).map(|n| batch(n, 30 * n as usize)).collect();
        let bytes =
            [plain(&requests[0]), packed(&requests[1]), plain(&requests[2]), packed(&requests[3])];
        let bytes = bytes.concat();
        for size in [1, 3, 7, bytes.len()] {
            let mut stream = stream(&intake);
            for part in bytes.chunks(size) {
                stream.send(part).await;
            }
            for request in &requests {
                assert_eq!(stream.next().await.request, *request);
            }
            drop(stream.frames);
            assert!(stream.batches.next().await.is_none());
        }
        assert_eq!(intake.batches.available_permits(), 99 << 20);
    }

    /// Batches that are not stored yet hold their room: a stream is read no further when they have used it up, and neither
    /// are all streams together.
    #[tokio::test]
    async fn decoded_batches_are_bounded_for_one_stream_and_for_all() {
        const MIB: usize = 1 << 20;
        let intake = Intake::new(48 * MIB, 16 * MIB);
        let mut streams = [(); 3].map(|()| stream(&intake));
        // A few kilobytes each.
        let batches: Vec<_> = (0..5).map(|n| packed(&batch(n, 4 * MIB))).collect();
        for stream in &streams {
            for batch in &batches {
                stream.send(batch).await;
            }
        }
        let mut held = Vec::new();
        for stream in &mut streams {
            let mut of_stream = 0;
            // What does not fit waits.
            while let Poll::Ready(batch) = poll!(unconstrained(stream.batches.next())) {
                of_stream += 4 * MIB;
                held.push(batch.unwrap().unwrap());
            }
            assert!(of_stream <= OF_STREAM, "{of_stream}");
        }
        // Two streams get their share, and leave no room for a third one.
        assert_eq!(
            held.iter().map(|batch| batch.request.batch_id).collect::<Vec<_>>(),
            [0, 1, 2, 3, 0, 1, 2, 3]
        );
        // Whatever becomes free goes to those that wait.
        drop(held);
        for stream in &mut streams {
            stream.next().await;
        }
        drop(streams);
        assert_eq!(intake.batches.available_permits(), 48 * MIB);
        assert_eq!(intake.budget.free(), 48 * MIB);
    }

    /// What is counted is what a batch takes in memory: empty items take more than their bytes.
    #[tokio::test]
    async fn many_small_items_count_with_what_they_take_in_memory() {
        let intake = Intake::new(64 << 20, 16 << 20);
        let mut stream = stream(&intake);
        let items = vec![pb::NewItem::default(); 1_000];
        stream.send(&plain(&pb::PushStreamRequest { items, ..Default::default() })).await;
        let batch = stream.next().await;
        let held = (64 << 20) - intake.batches.available_permits();
        assert!(held >= 1_000 * size_of::<pb::NewItem>(), "{held}");
        assert!(held < 1 << 20, "{held}: no more than it needs");
        drop(batch);
    }

    /// Too large, packed or not; not packed as it says; cut off; a message that does not come.
    #[tokio::test(start_paused = true)]
    async fn what_cannot_be_read_ends_the_stream_and_frees_its_room() {
        let intake = Intake::new(64 << 20, 1 << 20);
        let large = batch(1, 2 << 20);
        for (bytes, ends, code) in [
            (plain(&large), false, Code::OutOfRange),
            (packed(&large), false, Code::ResourceExhausted),
            (framed(1, b"no gzip"), false, Code::Internal),
            (framed(2, b""), false, Code::Internal),
            (framed(0, &[0xff; 9]), false, Code::Internal),
            (plain(&batch(1, 100))[..50].to_vec(), true, Code::Internal),
            (plain(&batch(1, 100_000))[..50].to_vec(), false, Code::DeadlineExceeded),
        ] {
            let Stream { frames, mut batches } = stream(&intake);
            frames.send(Ok(bytes)).await.unwrap();
            let frames = (!ends).then_some(frames);
            let refused = batches.next().await.unwrap().unwrap_err();
            assert_eq!(refused.code(), code, "{refused}");
            assert!(batches.next().await.is_none());
            drop(frames);
        }
        assert_eq!(intake.budget.free(), 64 << 20);
        assert_eq!(intake.batches.available_permits(), 64 << 20);
    }
}
