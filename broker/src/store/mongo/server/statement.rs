//! Statements of an `update` command that change many items at once.

use mongodb::bson::{Document, RawArrayBuf, RawDocumentBuf, rawdoc};

use crate::store::{
    Result,
    mongo::{
        Inner,
        schema::layout::{BY_ID, Group, durable},
        server::{
            connect::write,
            error::{Written, broken},
        },
    },
};

/// Returns a statement of an `update` command that finds its items by id and changes all that match.
pub(crate) fn statement(filter: RawDocumentBuf, update: Update) -> RawDocumentBuf {
    statement_by(BY_ID, filter, update)
}

/// Like [`statement`], with any index.
pub(crate) fn statement_by(index: &str, filter: RawDocumentBuf, update: Update) -> RawDocumentBuf {
    let mut statement = rawdoc! { "q": filter };
    let key = mongodb::bson::raw::cstr!("u");
    match update {
        Update::Operators(update) => statement.append(key, update),
        Update::Pipeline(update) => statement.append(key, update),
    }
    statement.append(mongodb::bson::raw::cstr!("multi"), true);
    statement.append(mongodb::bson::raw::cstr!("hint"), index);
    statement
}

/// The change of the documents.
pub(crate) enum Update {
    Operators(RawDocumentBuf),
    Pipeline(RawArrayBuf),
}

impl Update {
    /// Changes documents by operators such as `$set`.
    pub(crate) fn operators(update: &Document) -> Result<Self> {
        let raw = RawDocumentBuf::try_from(update).map_err(|e| broken(e.to_string()))?;
        Ok(Self::Operators(raw))
    }

    /// Changes documents by an aggregation pipeline.
    pub(crate) fn pipeline(stages: &[Document]) -> Result<Self> {
        let mut array = RawArrayBuf::new();
        for stage in stages {
            array.push(RawDocumentBuf::try_from(stage).map_err(|e| broken(e.to_string()))?);
        }
        Ok(Self::Pipeline(array))
    }
}

/// Runs statements that change all documents that match, and returns how many matched in total. If the command had to
/// be repeated, these may be fewer than were changed.
pub(crate) async fn update(
    inner: &Inner,
    group: &Group,
    statements: impl IntoIterator<Item = RawDocumentBuf>,
) -> Result<u64> {
    Ok(update_all(inner, group, statements).await?.n)
}

/// Like [`update`], and says whether the command was repeated.
pub(crate) async fn update_all(
    inner: &Inner,
    group: &Group,
    statements: impl IntoIterator<Item = RawDocumentBuf>,
) -> Result<Written> {
    let command = rawdoc! {
        "update": group.items.name(),
        "updates": statements.into_iter().collect::<RawArrayBuf>(),
        "ordered": false,
        "writeConcern": durable(),
    };
    write(&inner.db, command).await
}
