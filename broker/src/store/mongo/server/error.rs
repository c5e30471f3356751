//! Translates the driver's errors to the store's.

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
/// More such codes, of a recovering node and of an interrupted write.
const PASSING_TOO: [i32; 3] = [13436, 11601, 100];
/// The server has no resources for the request at present (`TemporarilyUnavailable`).
const NO_ROOM: i32 = 365;
/// The server's limit of open transactions is reached. The number of this code differs between versions.
const TOO_MANY_TRANSACTIONS: &str = "TooManyOpenTransactions";

/// The server's code for a violated unique index.
pub(crate) const DUPLICATE_KEY: i32 = 11000;

/// Translates an error of the driver.
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

/// Returns true if the outcome is unknown or the deployment is not ready: the call may succeed later.
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

/// Returns true if the server's code means that the call may succeed later.
pub(crate) fn passing_code(code: i32) -> bool {
    PASSING.contains(&code) || PASSING_TOO.contains(&code) || code == NO_ROOM
}

/// Describes an error in a line, without the driver's debug output.
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

/// Returns the error for a defect: the store holds or returns something that it should not.
pub(crate) fn broken(reason: impl Into<String>) -> StoreError {
    StoreError::Internal { reason: reason.into(), source: None }
}

/// Returns the error for an answer that was late or lost.
pub(crate) fn unavailable(reason: impl Into<String>) -> StoreError {
    StoreError::Unavailable { reason: reason.into(), source: None }
}

/// Repeats an error for another caller whose items shared the write.
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

/// Returns true if a unique index refused the write.
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

/// Returns the name of the index in the message of a duplicate-key error.
pub(crate) fn index_named(message: &str) -> &str {
    message.split("index: ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap_or("")
}

/// The result of a write command.
pub(crate) struct Written {
    /// Number of documents matched (update) or deleted.
    pub(crate) n: u64,
    /// True if there was an attempt before, of which nothing is known: it may have changed
    /// documents, which this one then did not match.
    pub(crate) is_repeated: bool,
}

/// Parses the reply of an `update` or `delete` command.
pub(crate) fn written(reply: &Document) -> Result<Written> {
    written_unless(reply, |_| false)
}

/// Like [`written`], and passes over statements that a unique index refused.
pub(crate) fn written_where_free(reply: &Document) -> Result<Written> {
    written_unless(reply, |code| code == DUPLICATE_KEY)
}

fn written_unless(reply: &Document, is_expected: impl Fn(i32) -> bool) -> Result<Written> {
    let errors = reply.get_array("writeErrors").into_iter().flatten();
    for error in errors.filter_map(Bson::as_document) {
        let code = error.get("code").and_then(integer).unwrap_or(0) as i32;
        if is_expected(code) {
            continue;
        }
        let message = error.get_str("errmsg").unwrap_or("write failed").to_owned();
        return Err(if passing_code(code) { unavailable(message) } else { broken(message) });
    }
    if let Ok(error) = reply.get_document("writeConcernError") {
        return Err(unavailable(error.get_str("errmsg").unwrap_or("write concern failed")));
    }
    let n = reply.get("n").and_then(integer).unwrap_or(0) as u64;
    Ok(Written { n, is_repeated: false })
}

/// Returns an integer from a number of any width.
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

    /// Errors that pass by themselves are `Unavailable`, which tells callers to repeat the call.
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
