//! Translates errors of SQLite to the store's.

use super::{
    super::StoreError,
    checksum::{is_corruption, is_damage},
};

/// An error of SQLite that several callers can get.
#[derive(Clone)]
pub(super) struct Failure {
    pub(super) class: Class,
    pub(super) reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    Full,
    Unavailable,
    /// An item is not what was stored.
    Damaged,
    /// The file is not as SQLite wrote it.
    Corrupt,
    Internal,
}

impl Class {
    pub(super) fn of(error: &rusqlite::Error) -> Self {
        use rusqlite::ErrorCode as Code;
        match error.sqlite_error_code() {
            Some(Code::DiskFull) => Self::Full,
            Some(
                Code::SystemIoFailure
                | Code::DatabaseBusy
                | Code::DatabaseLocked
                | Code::ReadOnly
                | Code::CannotOpen
                | Code::OutOfMemory,
            ) => Self::Unavailable,
            _ if is_corruption(error) => Self::Corrupt,
            _ if is_damage(error) => Self::Damaged,
            _ => Self::Internal,
        }
    }
}

impl Failure {
    /// Returns the failure of a call that is refused before it is tried.
    pub(super) fn no_room() -> Self {
        Self { class: Class::Full, reason: "the disk is nearly full".to_owned() }
    }

    /// Returns the failure for a call that stores items (`grows`) or does not. Only the former is refused for lack of
    /// room.
    pub(super) fn told(mut self, grows: bool) -> Self {
        if self.class == Class::Full && !grows {
            self.class = Class::Unavailable;
        }
        self
    }

    /// Returns true if stored data is damaged.
    pub(super) fn is_damage(&self) -> bool {
        matches!(self.class, Class::Damaged | Class::Corrupt)
    }

    pub(super) fn into_error(self, source: Option<rusqlite::Error>) -> StoreError {
        let (reason, source) = (self.reason, source.map(Into::into));
        match self.class {
            Class::Full => StoreError::Full { reason },
            Class::Unavailable => StoreError::Unavailable { reason, source },
            Class::Damaged | Class::Corrupt => StoreError::Damaged { reason, source },
            Class::Internal => StoreError::Internal { reason, source },
        }
    }
}

impl From<&rusqlite::Error> for Failure {
    fn from(error: &rusqlite::Error) -> Self {
        Self { class: Class::of(error), reason: error.to_string() }
    }
}

/// Translates an error for callers that store nothing.
pub(super) fn failed(error: rusqlite::Error) -> StoreError {
    Failure::from(&error).told(false).into_error(Some(error))
}

/// Returns the error of a call to a writer that has ended.
pub(super) fn ended() -> StoreError {
    StoreError::Unavailable { reason: "the writer has ended".to_owned(), source: None }
}
