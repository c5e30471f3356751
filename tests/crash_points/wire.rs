//! MongoDB's wire protocol, as far as the proxy reads it: messages, commands, replies.

use std::io;

use mongodb::bson::{Document, RawDocument, RawDocumentBuf, doc};
use tokio::io::{AsyncRead, AsyncReadExt};

/// The operation code of `OP_MSG`.
const OP_MSG: i32 = 2013;
/// Bytes of a message's header and, in `OP_MSG`, of the flags behind it.
const HEADER: usize = 16;
const FLAGS: usize = 4;
/// Limit of a message, as the server's.
const LARGEST: usize = 48_000_000;

/// A message in either direction.
pub(crate) struct Message(Vec<u8>);

impl Message {
    /// Reads the next message; `None` at the end of the connection.
    pub(crate) async fn read(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Self>> {
        let mut bytes = vec![0; HEADER];
        match from.read_exact(&mut bytes).await {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            result => result?,
        };
        let length = number(&bytes, 0) as usize;
        if !(HEADER..=LARGEST).contains(&length) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        bytes.resize(length, 0);
        from.read_exact(&mut bytes[HEADER..]).await?;
        Ok(Some(Self(bytes)))
    }

    /// Returns a reply to the request with this number.
    pub(crate) fn reply(request: i32, body: &Document) -> Self {
        let body = RawDocumentBuf::try_from(body).expect("a document that can be encoded");
        let length = HEADER + FLAGS + 1 + body.as_bytes().len();
        let mut bytes = Vec::with_capacity(length);
        for part in [length as i32, 0, request, OP_MSG, 0] {
            bytes.extend(part.to_le_bytes());
        }
        bytes.push(0);
        bytes.extend(body.as_bytes());
        Self(bytes)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the number of the request.
    pub(crate) fn number(&self) -> i32 {
        number(&self.0, 4)
    }

    /// Returns the number of the request that this is the reply to.
    pub(crate) fn answers(&self) -> i32 {
        number(&self.0, 8)
    }

    /// Returns the sections behind the flags: the kind of each, where it begins, and where it ends.
    fn sections(&self) -> Vec<(u8, usize, usize)> {
        let mut sections = Vec::new();
        let mut at = HEADER + FLAGS;
        while number(&self.0, 12) == OP_MSG && at + 5 <= self.0.len() {
            let end = at + 1 + number(&self.0, at + 1) as usize;
            if end > self.0.len() {
                break;
            }
            sections.push((self.0[at], at + 1, end));
            at = end;
        }
        sections
    }

    /// Returns the document that names the command, or the reply.
    pub(crate) fn body(&self) -> Option<&RawDocument> {
        let (_, from, to) = self.sections().into_iter().find(|(kind, ..)| *kind == 0)?;
        RawDocument::from_bytes(&self.0[from..to]).ok()
    }

    /// Returns the command of a request.
    pub(crate) fn command(&self) -> Option<Command> {
        let body = self.body()?;
        let (name, value) = body.iter().next()?.ok()?;
        let array = |field| body.get_array(field).map_or(0, |array| array.into_iter().count());
        let sequences = self.sections().into_iter().filter(|(kind, ..)| *kind == 1);
        let in_body = ["documents", "updates", "deletes"].map(array).into_iter().sum::<usize>();
        let statements =
            in_body + sequences.map(|(_, from, to)| self.documents(from, to)).sum::<usize>();
        let collection =
            value.as_str().or_else(|| body.get_str("collection").ok()).unwrap_or_default();
        let in_transaction = body.get_bool("autocommit").is_ok_and(|auto| !auto);
        Some(Command {
            name: name.as_str().to_owned(),
            collection: collection.to_owned(),
            database: body.get_str("$db").unwrap_or_default().to_owned(),
            in_transaction,
            is_retryable: body.get("txnNumber").is_ok_and(|number| number.is_some()),
            statements,
            is_background: !in_transaction && self.is_background(body, collection),
        })
    }

    /// Returns whether the broker sends this now and then, whatever its clients do: signals, the refresh of settings and of
    /// the time, the list of schedules, totals, counts, terms of tasks that one broker does for all.
    fn is_background(&self, body: &RawDocument, collection: &str) -> bool {
        let names = |text: &str| self.0.windows(text.len()).any(|part| part == text.as_bytes());
        match collection {
            "" => body.get("hello").is_ok_and(|hello| hello.is_some()),
            "signals" | "format" | "receiptKeys" => true,
            "queues" => body.get_str("hint").is_ok_and(|hint| hint == "updated"),
            "deletedQueues" => body.get("find").is_ok_and(|find| find.is_some()),
            "schedules" => body.get("sort").is_ok_and(|sort| sort.is_some()),
            "counters" => names("lead/") || names("ping") || names("totals/"),
            items if items.starts_with("items.") => names("$group\0"), // counts
            _ => false,
        }
    }

    /// Returns the number of documents in a sequence, which begins with its size and its name.
    fn documents(&self, from: usize, to: usize) -> usize {
        let name = self.0[from + 4..to].iter().position(|byte| *byte == 0).unwrap_or(0);
        let (mut at, mut count) = (from + 4 + name + 1, 0);
        while at + 4 <= to {
            at += (number(&self.0, at) as usize).max(5);
            count += 1;
        }
        count
    }

    /// Returns the same command with the first half of its statements alone, if it has several in its body.
    pub(crate) fn first_half(&self) -> Option<Self> {
        let (_, from, to) = self.sections().into_iter().find(|(kind, ..)| *kind == 0)?;
        if to != self.0.len() {
            return None;
        }
        let mut body = Document::try_from(RawDocument::from_bytes(&self.0[from..to]).ok()?).ok()?;
        let field = ["updates", "deletes"].into_iter().find(|field| body.contains_key(*field))?;
        let statements = body.get_array_mut(field).ok()?;
        let half = statements.len() / 2;
        if half == 0 {
            return None;
        }
        statements.truncate(half);
        let mut message = Self::reply(0, &body);
        message.0[4..8].copy_from_slice(&self.0[4..8]);
        Some(message)
    }
}

fn number(bytes: &[u8], at: usize) -> i32 {
    let mut four = [0; 4];
    four.copy_from_slice(&bytes[at..at + 4]);
    i32::from_le_bytes(four)
}

/// What the proxy needs to know of a command.
#[derive(Debug, Clone, Default)]
pub(crate) struct Command {
    pub(crate) name: String,
    pub(crate) collection: String,
    pub(crate) database: String,
    pub(crate) in_transaction: bool,
    /// The driver sends it again by itself.
    pub(crate) is_retryable: bool,
    /// How many documents, updates or deletions it consists of.
    pub(crate) statements: usize,
    /// The broker sends it now and then, whatever its clients do.
    pub(crate) is_background: bool,
}

impl std::fmt::Display for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let transaction = if self.in_transaction { " in a transaction" } else { "" };
        write!(f, "{} {}{transaction}", self.name, self.collection)
    }
}

/// `NoSuchTransaction`.
const NO_TRANSACTION: i32 = 251;
/// Errors after which a retryable write may be sent again: `NotWritablePrimary`, `InterruptedDueToReplStateChange`,
/// `PrimarySteppedDown`.
const RETRYABLE: [i32; 3] = [10107, 11602, 189];

/// An error that a server gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ServerError {
    pub(crate) code: i32,
    pub(crate) name: &'static str,
}

impl ServerError {
    /// Returns the reply by which the server refuses a command, with the labels that it adds.
    pub(crate) fn refusal(self, command: &Command) -> Document {
        let mut reply = doc! { "ok": 0.0 };
        reply.extend(self.error());
        let transient = command.in_transaction && command.name != "commitTransaction";
        if transient || self.code == NO_TRANSACTION {
            reply.insert("errorLabels", ["TransientTransactionError"]);
        } else if self.is_retryable_for(command) {
            reply.insert("errorLabels", ["RetryableWriteError"]);
        }
        reply
    }

    /// Returns the reply that says that a write was done, and that it is not known whether it will last.
    pub(crate) fn concern(self, command: &Command, reply: &RawDocument) -> Option<Document> {
        let mut reply = Document::try_from(reply).ok()?;
        let mut error = self.error();
        error.insert("errInfo", doc! { "writeConcern": { "w": "majority", "wtimeout": 15_000 } });
        reply.insert("writeConcernError", error);
        if self.is_retryable_for(command) {
            reply.insert("errorLabels", ["RetryableWriteError"]);
        }
        Some(reply)
    }

    fn error(self) -> Document {
        doc! { "code": self.code, "codeName": self.name, "errmsg": format!("test: {}", self.name) }
    }

    /// Returns whether the server tells the driver to send the command again.
    fn is_retryable_for(self, command: &Command) -> bool {
        let can_repeat = command.name == "commitTransaction"
            || (command.is_retryable && !command.in_transaction);
        can_repeat && RETRYABLE.contains(&self.code)
    }
}
