//! Statements of an `update` command that change many items at once.

use mongodb::bson::{Document, RawArrayBuf, RawDocumentBuf, raw::cstr, rawdoc};

use crate::store::{
    Result,
    mongo::{
        Inner,
        schema::layout::{BY_ID, Group, durable},
        server::{
            connect::{write, write_where_free},
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
    assemble(index, filter, update, true)
}

/// Like [`statement_by`], for the first item that matches, in the order of the index.
pub(crate) fn statement_for_one(
    index: &str,
    filter: RawDocumentBuf,
    update: Update,
) -> RawDocumentBuf {
    assemble(index, filter, update, false)
}

fn assemble(index: &str, filter: RawDocumentBuf, update: Update, multi: bool) -> RawDocumentBuf {
    let mut statement = rawdoc! { "q": filter };
    match update {
        Update::Operators(update) => statement.append(cstr!("u"), update),
        Update::Pipeline(update) => statement.append(cstr!("u"), update),
    }
    statement.append(cstr!("multi"), multi);
    statement.append(cstr!("hint"), index);
    statement
}

/// The change of the documents.
#[derive(Clone)]
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
    write(&inner.db, command(group, statements)).await
}

/// Like [`update_all`], with statements that a unique index may refuse: these change nothing.
pub(crate) async fn update_where_free(
    inner: &Inner,
    group: &Group,
    statements: impl IntoIterator<Item = RawDocumentBuf>,
) -> Result<Written> {
    write_where_free(&inner.db, command(group, statements)).await
}

fn command(group: &Group, statements: impl IntoIterator<Item = RawDocumentBuf>) -> RawDocumentBuf {
    rawdoc! {
        "update": group.items.name(),
        "updates": statements.into_iter().collect::<RawArrayBuf>(),
        "ordered": false,
        "writeConcern": durable(),
    }
}
