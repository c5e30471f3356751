//! Connects to the server, finds out what it is, and runs commands.

use std::time::Duration;

use mongodb::{
    Client,
    bson::{Document, RawDocument, RawDocumentBuf, doc, raw::cstr},
    options::{Acknowledgment, ClientOptions, ReadPreference, SelectionCriteria, WriteConcern},
    raw_batch_cursor::RawBatch,
};
use tokio_stream::StreamExt;

use crate::{
    long_work,
    store::{
        Result, StoreError,
        mongo::server::{
            error::{
                Written, broken, describe, failed, passes, unavailable, written, written_where_free,
            },
            group_commit::WRITE_LIMIT,
            places::Db,
            time_limit::{ANSWER_LIMIT, NO_ANSWER, ReadError, in_time, read_in_time},
        },
    },
};

/// Time limit for finding a suitable server.
const SELECTION_LIMIT: Duration = Duration::from_secs(5);
/// Time limit for opening a connection. The driver takes a server for gone, and closes all connections to it, if a
/// heartbeat is unanswered for this long.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);
/// Pause between the driver's heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Pauses before a write is repeated.
const RETRY_PAUSES: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(400)];

/// Start of the name under which the server knows our connections. `orphaned_transactions` finds our sessions by it.
pub(crate) const APP_NAME: &str = "sluicegate";
/// Limit of the server for the name, in bytes.
const MAX_APP_NAME: usize = 128;

/// A connection to the database.
pub(crate) struct Connection {
    pub(crate) db: Db,
    /// True if the servers are reached through routers.
    pub(crate) sharded: bool,
    pub(crate) description: String,
}

/// Connects to the deployment.
///
/// # Errors
/// Within seconds, with a message for a person, if the URI is unusable, the server cannot be reached, or the server is
/// a standalone server.
pub(crate) async fn connect(uri: &str, database: &str, pool_size: u32) -> Result<Connection> {
    let mut options = ClientOptions::parse(uri)
        .await
        .map_err(|e| start_error("the MongoDB URI cannot be used", &e))?;
    options.app_name = Some(app_name(options.app_name.as_deref()));
    options.server_selection_timeout.get_or_insert(SELECTION_LIMIT);
    options.connect_timeout.get_or_insert(CONNECT_LIMIT);
    options.heartbeat_freq.get_or_insert(HEARTBEAT);
    options.max_pool_size = Some(pool_size);
    // Promises depend on these options, so the URI cannot change them.
    options.write_concern = Some(
        WriteConcern::builder()
            .w(Acknowledgment::Majority)
            .journal(true)
            .w_timeout(Duration::from_secs(15))
            .build(),
    );
    options.selection_criteria = Some(SelectionCriteria::ReadPreference(ReadPreference::Primary));
    options.read_concern = None;
    let hosts: Vec<String> = options.hosts.iter().map(ToString::to_string).collect();
    let hosts = hosts.join(",");

    let client = Client::with_options(options)
        .map_err(|e| start_error("the MongoDB URI cannot be used", &e))?;
    let db = Db::new(client.database(database), pool_size);
    let hello = in_time(&db, db.run_command(doc! { "hello": 1 }))
        .await
        .map_err(|e| start_error(&format!("MongoDB at {hosts} cannot be reached"), &e))?;
    let sharded = hello.get_str("msg").is_ok_and(|msg| msg == "isdbgrid");
    let kind = match hello.get_str("setName") {
        Ok(name) => format!("replica set {name}"),
        Err(_) if sharded => "sharded cluster".to_owned(),
        Err(_) => return Err(StoreError::Unsupported(standalone(&hosts))),
    };
    let description = format!("mongodb://{hosts}/{database} ({kind})");
    Ok(Connection { db, sharded, description })
}

/// Returns the message for a server that is not part of a replica set.
fn standalone(hosts: &str) -> String {
    format!(
        "MongoDB at {hosts} is a standalone server, which has no transactions and may lose \
         acknowledged writes when it is killed: make it a replica set, of which one node is enough. Start \
         it with `mongod --replSet rs0 ...` (its data stays), run `rs.initiate()` in mongosh once, and add \
         `replicaSet=rs0` to the options of the address, as in mongodb://{hosts}/?replicaSet=rs0"
    )
}

/// Returns the name of our connections: our own, followed by the name from the URI.
fn app_name(given: Option<&str>) -> String {
    let mut name = given.map_or_else(|| APP_NAME.to_owned(), |given| format!("{APP_NAME} {given}"));
    name.truncate(name.floor_char_boundary(MAX_APP_NAME));
    name
}

fn start_error(what: &str, error: &mongodb::error::Error) -> StoreError {
    let reason = format!("{what}: {}", describe(error));
    let source = Some(Box::new(error.clone()) as Box<dyn std::error::Error + Send + Sync>);
    if passes(error) {
        StoreError::Unavailable { reason, source }
    } else {
        StoreError::Internal { reason, source }
    }
}

/// Runs an `update` or `delete` command that may be repeated without harm, and repeats it if its outcome is unknown.
/// The driver repeats only writes of single documents.
///
/// A command without an answer is sent twice: again after [`ANSWER_LIMIT`], over another connection, and then the whole
/// answer is awaited. An abandoned attempt ends in the server within [`WRITE_LIMIT`], so that attempts do not gather in
/// a server that is stalled.
pub(crate) async fn write(db: &Db, command: RawDocumentBuf) -> Result<Written> {
    write_in_time(db, command, [ANSWER_LIMIT, WRITE_LIMIT], written).await
}

/// Like [`write()`], with statements that a unique index may refuse: these change nothing.
pub(crate) async fn write_where_free(db: &Db, command: RawDocumentBuf) -> Result<Written> {
    write_in_time(db, command, [ANSWER_LIMIT, WRITE_LIMIT], written_where_free).await
}

/// Does the same with other time limits: of the first attempt, and of those after one that was not answered in time.
/// `written` parses the reply.
pub(crate) async fn write_in_time(
    db: &Db,
    mut command: RawDocumentBuf,
    [first, second]: [Duration; 2],
    written: fn(&Document) -> Result<Written>,
) -> Result<Written> {
    command.append(cstr!("maxTimeMS"), WRITE_LIMIT.as_millis() as i64);
    let mut pauses = RETRY_PAUSES.iter();
    let mut limit = first;
    let (mut is_slow, mut is_repeated) = (false, false);
    let _place = db.place().await?;
    loop {
        let result = match tokio::time::timeout(limit, db.run(command.clone())).await {
            Ok(Ok(reply)) => written(&reply).map(|written| Written { is_repeated, ..written }),
            Ok(Err(error)) => Err(failed(error)),
            Err(_) if is_slow => return Err(unavailable(NO_ANSWER)),
            Err(_) => {
                (limit, is_slow, is_repeated) = (second, true, true);
                continue;
            }
        };
        is_repeated = true;
        match (&result, pauses.next()) {
            (Err(StoreError::Unavailable { .. }), Some(pause)) => tokio::time::sleep(*pause).await,
            _ => return result,
        }
    }
}

/// Runs a `find` or `aggregate` command and parses each document of its result: the whole result, in as many batches as
/// the server makes of it. The filter or limit of the command bounds its size.
pub(crate) async fn read<T>(
    db: &Db,
    command: &RawDocumentBuf,
    read: impl Fn(&RawDocument) -> Result<T>,
) -> Result<Vec<T>> {
    read_in_time(db, || read_batches(db, command, &read)).await
}

async fn read_batches<T>(
    db: &Db,
    command: &RawDocumentBuf,
    read: &impl Fn(&RawDocument) -> Result<T>,
) -> Result<Vec<T>, ReadError> {
    let mut values = Vec::new();
    let mut batches = db.run_raw_cursor_command(command.clone()).batch().await?;
    while let Some(batch) = batches.next().await {
        read_into(&mut values, &batch?, read)?;
    }
    Ok(values)
}

/// Runs a `find` command and parses the first batch of its result, which the server cuts at 16 MiB. `batchSize` must be
/// larger than `limit`, so that a result that was not cut leaves no cursor behind.
pub(crate) async fn read_first<T>(
    db: &Db,
    command: &RawDocumentBuf,
    read: impl Fn(&RawDocument) -> Result<T>,
) -> Result<First<T>> {
    read_in_time(db, || read_first_batch(db, command, &read)).await
}

async fn read_first_batch<T>(
    db: &Db,
    command: &RawDocumentBuf,
    read: &impl Fn(&RawDocument) -> Result<T>,
) -> Result<First<T>, ReadError> {
    let mut batches = db.run_raw_cursor_command(command.clone()).batch().await?;
    let mut first = First { values: Vec::new(), cut: false };
    if let Some(batch) = batches.next().await {
        let batch = batch?;
        let cursor = batch.as_raw_document().get_document("cursor");
        let id = cursor.and_then(|cursor| cursor.get_i64("id"));
        first.cut = id.map_err(|e| broken(e.to_string()))? != 0;
        read_into(&mut first.values, &batch, read)?;
    }
    // The driver closes a remaining cursor when it is dropped.
    Ok(first)
}

fn read_into<T>(
    values: &mut Vec<T>,
    batch: &RawBatch,
    read: &impl Fn(&RawDocument) -> Result<T>,
) -> Result<(), ReadError> {
    long_work::on_bytes(batch.as_raw_document().as_bytes().len(), || {
        for document in batch.doc_slices()? {
            let document = document.map_err(|e| broken(e.to_string()))?;
            let document = document.as_document().ok_or_else(|| broken("not a document"))?;
            values.push(read(document)?);
        }
        Ok(())
    })
}

/// The result of [`read_first`].
pub(crate) struct First<T> {
    /// The parsed documents.
    pub(crate) values: Vec<T>,
    /// True if there are more documents, which did not fit into the batch.
    pub(crate) cut: bool,
}

/// Like [`read`], with documents that are not parsed further. For small or rare results.
pub(crate) async fn read_documents(db: &Db, command: Document) -> Result<Vec<Document>> {
    let tree = |d: &RawDocument| Document::try_from(d).map_err(|e| broken(e.to_string()));
    read(db, &command_of(&command)?, tree).await
}

/// Returns a command in the form in which it is sent.
pub(crate) fn command_of(command: &Document) -> Result<RawDocumentBuf> {
    RawDocumentBuf::try_from(command).map_err(|e| broken(e.to_string()))
}

/// Returns the number of documents that match, by the named index alone if the filter allows it.
pub(crate) async fn count(db: &Db, collection: &str, filter: Document, index: &str) -> Result<u64> {
    let command = doc! { "count": collection, "query": filter, "hint": index };
    let reply = read_in_time(db, || db.run_command(command.clone())).await?;
    reply
        .get("n")
        .and_then(crate::store::mongo::server::error::integer)
        .map(|n| n as u64)
        .ok_or_else(|| unavailable("the result of count has no number"))
}
