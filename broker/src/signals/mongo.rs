//! Signals over MongoDB: the capped collection `signals` in the store's own database, followed by a
//! tailable cursor. For deployments with MongoDB but without Redis.
//!
//! A document is a message: `{ what: "insert", queue: "orders", since: ISODate(…), broker:
//! "a1b2c3d4", at: ISODate(…) }`, with an `item` if it is one. The server drops the oldest documents.
//!
//! A cursor on a dead connection, or on a server that is no longer the primary, may look idle
//! forever. After a silence the broker therefore writes a `beat`, which the cursor has to return.

use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use mongodb::{
    Client, Collection, Cursor, Database,
    bson::{Bson, DateTime, Document, doc, oid::ObjectId},
    error::{Error, ErrorKind},
    options::{ClientOptions, CursorType, ReadConcern, SelectionCriteria, WriteConcern},
};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep};

use super::{
    message::{MISSED, Message, broker_of, broker_text, plausible},
    relay::{Lost, Receiving, STEP_TIMEOUT, Transport, bounded},
};
use crate::domain::{ItemId, QueueName, Signal, Topic};

/// The name of the collection.
const COLLECTION: &str = "signals";
/// The size of the collection: room for about ten thousand signals.
const CAPPED_BYTES: i64 = 1 << 20;
/// After a silence of this length a beat is written.
const BEAT_PAUSE: Duration = Duration::from_secs(2);
/// After a silence of this length, beats included, the cursor counts as dead.
const SILENCE: Duration = Duration::from_millis(4_500);
/// How long the server holds a request for more documents before it returns none.
const AWAIT: Duration = Duration::from_secs(1);
/// Connections: the cursor, the publisher, a beat, and one to spare.
const POOL: u32 = 4;
/// The word of a beat, which only shows that the cursor lives.
const BEAT: &str = "beat";
/// MongoDB's error code for creating a collection that exists.
const NAMESPACE_EXISTS: i32 = 48;

/// A MongoDB deployment.
pub(super) struct Mongo {
    database: Database,
    broker: [u8; 4],
    description: String,
}

impl From<Error> for Lost {
    fn from(error: Error) -> Self {
        Self(error.to_string())
    }
}

impl Mongo {
    /// Reads the address, without connecting.
    pub(super) async fn new(
        uri: &str,
        broker: [u8; 4],
        database: &str,
        description: String,
    ) -> Result<Self, Error> {
        let mut options = ClientOptions::parse(uri).await?;
        options.app_name = Some("sluicegate signals".to_owned());
        options.max_pool_size = Some(POOL);
        options.min_pool_size = None;
        options.connect_timeout = Some(STEP_TIMEOUT);
        options.server_selection_timeout = Some(STEP_TIMEOUT);
        // Signals may be lost but must not be late. The primary has them first, and need not wait
        // for other members.
        options.selection_criteria =
            Some(SelectionCriteria::ReadPreference(mongodb::options::ReadPreference::Primary));
        options.read_concern = Some(ReadConcern::local());
        options.write_concern = Some(WriteConcern::nodes(1));
        let database = Client::with_options(options)?.database(database);
        Ok(Self { database, broker, description })
    }

    fn collection(&self) -> Collection<Document> {
        self.database.collection(COLLECTION)
    }

    fn document(&self, what: &str) -> Document {
        doc! { "what": what, "broker": broker_text(self.broker), "at": DateTime::now() }
    }

    fn encode(&self, message: &Message) -> Document {
        let Message::Signal(Signal { queue, topic, since, item }) = message else {
            return self.document(MISSED);
        };
        let mut document = self.document(topic.word());
        document.insert("queue", queue.as_str());
        if let Some(since) = since {
            document.insert("since", DateTime::from_millis(since.millis()));
        }
        if let Some(item) = item {
            document.insert("item", ObjectId::from_bytes(item.0));
        }
        document
    }

    /// Ensures that the collection exists and is capped, even if other brokers do the same at this
    /// moment.
    async fn prepare(&self) -> Result<(), Error> {
        let created = self.database.create_collection(COLLECTION).capped(true);
        match created.size(CAPPED_BYTES as u64).await {
            Err(error) if is_code(&error, NAMESPACE_EXISTS) => {}
            created => return created,
        }
        let list = doc! { "listCollections": 1, "filter": { "name": COLLECTION } };
        let described = self.database.run_command(list).await?;
        let first =
            described.get_document("cursor").and_then(|cursor| cursor.get_array("firstBatch"));
        let capped = match first.ok().and_then(|found| found.first()).and_then(Bson::as_document) {
            Some(found) => {
                found.get_document("options").and_then(|o| o.get_bool("capped")).unwrap_or(false)
            }
            None => true, // dropped since; the next attempt creates it
        };
        if !capped {
            // The collection was dropped, and an insert has created a plain one since.
            let convert = doc! { "convertToCapped": COLLECTION, "size": CAPPED_BYTES };
            self.database.run_command(convert).await?;
        }
        Ok(())
    }

    /// Returns a cursor that is past all existing documents. On an empty collection a cursor ends
    /// immediately, so that a first beat is written. The beat also marks the present, because
    /// clocks cannot be trusted.
    async fn follow(&self) -> Result<Cursor<Document>, Lost> {
        self.prepare().await?;
        let collection = self.collection();
        let mark = ObjectId::new();
        let mut beat = self.document(BEAT);
        beat.insert("_id", mark);
        collection.insert_one(beat).await?;
        let cursor = collection.find(doc! {}).cursor_type(CursorType::TailableAwait);
        let mut cursor = cursor.max_await_time(AWAIT).await?;
        while let Some(document) = cursor.next().await {
            if document?.get_object_id("_id").is_ok_and(|id| id == mark) {
                return Ok(cursor);
            }
        }
        Err(Lost("the cursor ended before it got to the present".to_owned()))
    }
}

#[async_trait]
impl Transport for Mongo {
    type Outlet = Collection<Document>;

    fn describe(&self) -> String {
        self.description.clone()
    }

    async fn connect(&self) -> Result<Collection<Document>, Lost> {
        self.prepare().await?;
        Ok(self.collection())
    }

    async fn send(
        &self,
        outlet: &mut Collection<Document>,
        messages: &[Message],
    ) -> Result<(), Lost> {
        outlet.insert_many(messages.iter().map(|message| self.encode(message))).await?;
        Ok(())
    }

    async fn receive(&self, receiving: &Receiving) -> Lost {
        let cursor = match bounded(self.follow()).await {
            Ok(cursor) => cursor,
            Err(lost) => return lost,
        };
        receiving.listening();
        let last_received = Mutex::new(Instant::now());
        tokio::select! {
            lost = listen(cursor, receiving, &last_received) => lost,
            lost = self.supervise(&last_received) => lost,
        }
    }
}

impl Mongo {
    /// Writes a beat after each silence, until the cursor does not return one.
    async fn supervise(&self, last_received: &Mutex<Instant>) -> Lost {
        let collection = self.collection();
        loop {
            let silence = last_received.lock().elapsed();
            if silence >= SILENCE {
                return Lost("the cursor does not show what was written".to_owned());
            }
            if let Some(rest) = BEAT_PAUSE.checked_sub(silence).filter(|rest| !rest.is_zero()) {
                sleep(rest).await;
                continue;
            }
            let beat = async { Ok(collection.insert_one(self.document(BEAT)).await?) };
            if let Err(lost) = bounded(beat).await {
                return lost;
            }
            // A returned beat ends the silence long before the next check.
            sleep(Duration::from_millis(500)).await;
        }
    }
}

/// Passes on messages until the cursor ends.
async fn listen(
    mut cursor: Cursor<Document>,
    receiving: &Receiving,
    last_received: &Mutex<Instant>,
) -> Lost {
    while let Some(document) = cursor.next().await {
        let document = match document {
            Ok(document) => document,
            Err(error) => return error.into(),
        };
        *last_received.lock() = Instant::now();
        match decode(&document) {
            Some((from, message)) => receiving.received(from, message),
            None if document.get_str("what").is_ok_and(|what| what == BEAT) => {}
            None => tracing::debug!("a document among the signals is not a signal"),
        }
    }
    Lost("the cursor ended".to_owned())
}

pub(super) fn decode(document: &Document) -> Option<([u8; 4], Message)> {
    let broker = broker_of(document.get_str("broker").ok()?)?;
    let what = document.get_str("what").ok()?;
    if what == MISSED {
        return Some((broker, Message::Missed));
    }
    let topic = Topic::of_word(what)?;
    let queue = QueueName::parse("queue", document.get_str("queue").ok()?).ok()?;
    let since = match document.get_datetime("since") {
        // Whoever can write to the collection can write any time.
        Ok(at) => Some(plausible(at.timestamp_millis())?),
        Err(_) => None,
    };
    let item = document.get_object_id("item").ok().map(|item| ItemId(item.bytes()));
    Some((broker, Message::Signal(Signal { queue, topic, since, item })))
}

fn is_code(error: &Error, code: i32) -> bool {
    matches!(&*error.kind, ErrorKind::Command(command) if command.code == code)
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::{super::test_servers::mongo_uri, *};
    use crate::domain::Timestamp;

    #[tokio::test]
    async fn a_cursor_that_returns_no_written_documents_is_given_up() {
        let database = format!("sluicegate_test_{:016x}", rand::random::<u64>());
        let mongo = Mongo::new(&mongo_uri(), [1; 4], &database, "mongodb:".into()).await.unwrap();
        mongo.prepare().await.unwrap();
        // No cursor reads the beats, so that none is returned.
        let last_received = Mutex::new(Instant::now());
        let lost = timeout(Duration::from_secs(30), mongo.supervise(&last_received)).await.unwrap();
        assert_eq!(lost.to_string(), "the cursor does not show what was written");
        assert!(mongo.collection().count_documents(doc! { "what": BEAT }).await.unwrap() > 0);
        mongo.database.drop().await.unwrap();
    }

    #[tokio::test]
    async fn messages_survive_their_document_form() {
        let mongo =
            Mongo::new("mongodb://localhost/", [0xa1, 0xb2, 0xc3, 0xd4], "any", String::new());
        let mongo = mongo.await.unwrap();
        let queue = QueueName::parse("queue", "orders").unwrap();
        let signal = |since| Signal::new(queue.clone(), Topic::Insert, since);
        let known = signal(Some(Timestamp(1_700_000_000_123)));
        let named = Signal { item: Some(ItemId(*b"twelve bytes")), ..known.clone() };
        let signals = [signal(None), known, named].map(Message::Signal);
        for message in [Message::Missed].into_iter().chain(signals) {
            let document = mongo.encode(&message);
            assert_eq!(document.get_str("broker").unwrap(), "a1b2c3d4");
            assert_eq!(decode(&document), Some(([0xa1, 0xb2, 0xc3, 0xd4], message)));
        }
        assert_eq!(decode(&doc! { "what": "insert", "queue": "orders" }), None, "no sender");
    }
}
