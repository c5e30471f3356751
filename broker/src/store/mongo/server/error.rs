//! The driver's errors as the store's.

use mongodb::{
    bson::{Bson, Document},
    error::{
        Error, ErrorKind, RETRYABLE_ERROR, RETRYABLE_WRITE_ERROR, TRANSIENT_TRANSACTION_ERROR,
        WriteFailure,
    },
};

use crate::store::{Result, StoreError};

/// Server codes that mean "not now, not here": stepping down, shutting down, timed out, host unreachable.
const PASSING: [i32; 16] =
    [6, 7, 50, 64, 89, 91, 112, 134, 189, 262, 9001, 10058, 10107, 11600, 11602, 13435];
/// Further such codes, of a node that recovers and of an interrupted write.
const PASSING_TOO: [i32; 3] = [13436, 11601, 100];
/// The server has no room for more just now (`TemporarilyUnavailable`).
const NO_ROOM: i32 = 365;
/// The server has as many transactions as it takes; its number differs between versions.
const TOO_MANY_TRANSACTIONS: &str = "TooManyOpenTransactions";

/// The server's code for a violated unique index.
pub(crate) const DUPLICATE_KEY: i32 = 11000;

/// Translates the driver's error.
#[expect(clippy::needless_pass_by_value, reason = "made for `map_err`")]
pub(crate) fn failed(error: Error) -> StoreError {
    let reason = describe(&error);
    let source = Some(Box::new(error.clone()) as Box<dyn std::error::Error + Send + Sync>);
    if passes(&error) {
        StoreError::Unavailable { reason, source }
    } else {
        StoreError::Internal { reason, source }
    }
}

/// True if the outcome is unknown or the deployment not fit to answer: later may be better.
pub(crate) fn passes(error: &Error) -> bool {
    let labelled = [RETRYABLE_WRITE_ERROR, RETRYABLE_ERROR, TRANSIENT_TRANSACTION_ERROR]
        .iter()
        .any(|label| error.contains_label(label));
    labelled
        || match error.kind.as_ref() {
            ErrorKind::Io(_)
            | ErrorKind::ServerSelection { .. }
            | ErrorKind::ConnectionPoolCleared { .. }
            | ErrorKind::DnsResolve { .. }
            | ErrorKind::Write(WriteFailure::WriteConcernError(_))
            | ErrorKind::Shutdown => true,
            ErrorKind::Command(command) => {
                passing_code(command.code) || command.code_name == TOO_MANY_TRANSACTIONS
            }
            ErrorKind::Write(WriteFailure::WriteError(error)) => passing_code(error.code),
            ErrorKind::InsertMany(insert) => insert.write_concern_error.is_some(),
            _ => false,
        }
}

/// True if the server's code means that later may be better.
pub(crate) fn passing_code(code: i32) -> bool {
    PASSING.contains(&code) || PASSING_TOO.contains(&code) || code == NO_ROOM
}

/// What went wrong, in a line, without the driver's debug output around it.
pub(crate) fn describe(error: &Error) -> String {
    match error.kind.as_ref() {
        ErrorKind::Command(command) => {
            format!("{} (code {})", command.message, command.code)
        }
        ErrorKind::Write(WriteFailure::WriteError(error)) => error.message.clone(),
        ErrorKind::Write(WriteFailure::WriteConcernError(error)) => error.message.clone(),
        ErrorKind::Authentication { message, .. } => format!("authentication failed: {message}"),
        kind => kind.to_string(),
    }
}

/// A defect: the store holds or answers something it should not.
pub(crate) fn broken(reason: impl Into<String>) -> StoreError {
    StoreError::Internal { reason: reason.into(), source: None }
}

/// No answer in time, or none at all.
pub(crate) fn unavailable(reason: impl Into<String>) -> StoreError {
    StoreError::Unavailable { reason: reason.into(), source: None }
}

/// The same error for another caller whose items shared the write.
pub(crate) fn repeat(error: &StoreError) -> StoreError {
    match error {
        StoreError::Unavailable { reason, .. } => unavailable(reason.clone()),
        StoreError::Unsupported(message) => StoreError::Unsupported(message.clone()),
        StoreError::BadCursor => StoreError::BadCursor,
        StoreError::Damaged { reason, .. } => {
            StoreError::Damaged { reason: reason.clone(), source: None }
        }
        StoreError::Full { reason } => StoreError::Full { reason: reason.clone() },
        StoreError::Internal { reason, .. } => broken(reason.clone()),
    }
}

/// True if a unique index refused the write.
pub(crate) fn is_duplicate_key(error: &Error) -> bool {
    match error.kind.as_ref() {
        ErrorKind::Command(command) => command.code == DUPLICATE_KEY,
        ErrorKind::Write(WriteFailure::WriteError(error)) => error.code == DUPLICATE_KEY,
        ErrorKind::InsertMany(insert) => insert
            .write_errors
            .as_ref()
            .is_some_and(|errors| errors.iter().any(|error| error.code == DUPLICATE_KEY)),
        _ => false,
    }
}

/// The index a duplicate-key message names.
pub(crate) fn index_named(message: &str) -> &str {
    message.split("index: ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap_or("")
}

/// What a write command answered.
pub(crate) struct Written {
    /// Documents matched (update) or deleted.
    pub(crate) n: u64,
}

/// Reads the answer of an `update` or `delete` command.
pub(crate) fn written(reply: &Document) -> Result<Written> {
    if let Some(error) = first_write_error(reply) {
        let code = error.get("code").and_then(integer).unwrap_or(0) as i32;
        let message = error.get_str("errmsg").unwrap_or("write failed").to_owned();
        return Err(if passing_code(code) { unavailable(message) } else { broken(message) });
    }
    if let Ok(error) = reply.get_document("writeConcernError") {
        return Err(unavailable(error.get_str("errmsg").unwrap_or("write concern failed")));
    }
    Ok(Written { n: reply.get("n").and_then(integer).unwrap_or(0) as u64 })
}

fn first_write_error(reply: &Document) -> Option<&Document> {
    reply.get_array("writeErrors").ok()?.first()?.as_document()
}

/// A number of whatever width.
pub(crate) fn integer(value: &Bson) -> Option<i64> {
    match value {
        Bson::Int32(n) => Some(i64::from(*n)),
        Bson::Int64(n) => Some(*n),
        Bson::Double(n) => Some(*n as i64),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use mongodb::bson::{deserialize_from_document, doc};

    use super::*;

    /// What passes by itself is `Unavailable`, which callers are told to repeat.
    #[test]
    fn a_server_without_room_is_unavailable() {
        for (code, name, passing) in [
            (365, "TemporarilyUnavailable", true),
            (1_000_000, "TooManyOpenTransactions", true),
            (91, "ShutdownInProgress", true),
            (9, "FailedToParse", false),
        ] {
            let reply = doc! { "code": code, "codeName": name, "errmsg": "no" };
            let error = ErrorKind::Command(deserialize_from_document(reply).unwrap());
            let error = failed(error.into());
            assert_eq!(matches!(error, StoreError::Unavailable { .. }), passing, "{name}: {error}");
            let reply =
                doc! { "n": 0, "writeErrors": [{ "index": 0, "code": code, "errmsg": "no" }] };
            let unavailable = matches!(written(&reply), Err(StoreError::Unavailable { .. }));
            assert_eq!(unavailable, passing && code != 1_000_000, "{name}");
        }
    }
}
