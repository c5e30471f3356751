//! Brings databases of earlier versions up to date when a broker starts, in one transaction. Refuses databases of newer
//! versions, unless the newer version says that brokers of this one can go on.
//!
//! The document `store` of the collection `format` says:
//!
//! | field | meaning |
//! |---|---|
//! | `version` | the version of what is stored; without the document: 1 |
//! | `oldestReader` | brokers of versions below this one must not use the database; may be ahead of `version` |
//! | `program` | the version of the program that wrote these two |
//!
//! A broker reads the document when it starts, and again with each read of changed settings. A broker below
//! `oldestReader` refuses every call from then on. A step that brokers of earlier versions would not survive is
//! announced by `oldestReader` first. It is taken [`Format::notice`] later, when each of them has noticed and its last
//! write is over.
//!
//! Items are never rewritten, because there may be millions. Code that reads items reads what every earlier version
//! wrote, and a field whose meaning changes gets a new name. The same holds for indexes.

use std::time::Duration;

use mongodb::{
    bson::{Document, doc},
    options::ReturnDocument,
};

use crate::store::{
    Result, StoreError,
    mongo::server::{
        error::{broken, failed, integer},
        group_commit::WRITE_LIMIT,
        places::Db,
        time_limit::{in_time, read_in_time},
        transaction::{Failure, Patience, abort, attempt_in_time, begin, commit},
    },
};

/// The collection of the document that says which format the database has.
const FORMAT: &str = "format";
/// The `_id` of that document.
const STORE: &str = "store";
/// Brokers of versions before this one do not read the document, so nobody waits for them to notice it.
const FIRST_TO_NOTICE: i64 = 2;

/// The format of the database that this program creates and uses.
pub(super) const THIS: Format = Format {
    steps: &[TO_VERSION_2, TO_VERSION_3],
    notice: WRITE_LIMIT.saturating_add(Duration::from_secs(10)),
};

/// A format of the database.
#[derive(Clone, Copy)]
pub(super) struct Format {
    /// The steps from each version to the next, the first from version 1. A step that was released never changes; a
    /// later change is a step of its own.
    steps: &'static [Step],
    /// How long before the change brokers of earlier versions are told to stop.
    notice: Duration,
}

/// The step from a version to the next.
struct Step {
    /// The changes, in this order.
    updates: fn() -> Vec<Update>,
    /// True if brokers of the version before can use the database after this step.
    earlier_go_on: bool,
}

/// A change of documents, few enough for a transaction.
struct Update {
    collection: &'static str,
    filter: Document,
    change: Vec<Document>,
}

/// Limits of failures have defaults. A `maxAttempts` of 0 meant that the limit was not set; the broker's default
/// applies to it now.
const TO_VERSION_2: Step = Step {
    updates: || {
        let limit = doc! { "$cond": [{ "$gt": ["$maxAttempts", 0] }, "$maxAttempts", "$$REMOVE"] };
        let update = |collection| Update {
            collection,
            filter: doc! { "maxAttempts": { "$exists": true } },
            change: vec![
                doc! { "$set": { "attemptLimit": { "$ifNull": ["$attemptLimit", limit.clone()] } } },
                doc! { "$unset": "maxAttempts" },
            ],
        };
        vec![update("queues"), update("deletedQueues")]
    },
    earlier_go_on: false,
};

/// Items that were pushed together may share a document. Brokers of earlier versions would hand such a document out as
/// one item without a payload.
const TO_VERSION_3: Step = Step { updates: Vec::new, earlier_go_on: false };

/// The format that a database says it has.
struct Found {
    version: i64,
    oldest_reader: i64,
    program: String,
}

impl Found {
    fn read(document: &Document) -> Result<Self> {
        let whole = |name: &str| document.get(name).and_then(integer);
        let (Some(version), Some(oldest_reader)) = (whole("version"), whole("oldestReader")) else {
            return Err(broken(format!(
                "the document {STORE:?} of the collection {FORMAT:?} has no version"
            )));
        };
        let program = document.get_str("program").unwrap_or_default().to_owned();
        Ok(Self { version, oldest_reader, program })
    }

    /// Returns why a broker of this version must not use the database, if it must not.
    fn refusal(&self, db: &Db, version: i64) -> Option<String> {
        (self.oldest_reader > version).then(|| {
            format!(
                "the MongoDB database {} was written by a newer version of this program (format {}, by version {}; \
                 here {version}, version {}): start that version or a later one here, or name another database",
                db.name(),
                self.version.max(self.oldest_reader),
                self.program,
                env!("CARGO_PKG_VERSION"),
            )
        })
    }
}

/// Returns why a broker must not use the database any more, if a newer version has said so.
pub(super) async fn refusal(db: &Db, format: Format) -> Result<Option<String>> {
    let formats = db.collection::<Document>(FORMAT);
    let found = read_in_time(db, || formats.find_one(doc! { "_id": STORE })).await?;
    let found = found.as_ref().map(Found::read).transpose()?;
    Ok(found.and_then(|found| found.refusal(db, format.version())))
}

impl Format {
    /// Returns the version of the format.
    pub(super) const fn version(self) -> i64 {
        1 + self.steps.len() as i64
    }

    /// Brings a database up to this format.
    ///
    /// # Errors
    /// Refuses a database of a newer format that this version cannot use. After an error, or if the process ends on the
    /// way, the database is as it was, but a change may be announced.
    pub(super) async fn bring_up_to_date(self, db: &Db) -> Result<()> {
        let mut patience = Patience::new();
        loop {
            let found = match find_or_begin(db).await {
                Ok(found) => found,
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Conflict(error)) => {
                    patience.next(error).await?;
                    continue;
                }
            };
            if let Some(refusal) = found.refusal(db, self.version()) {
                return Err(StoreError::Unsupported(refusal));
            }
            if found.version >= self.version() {
                return Ok(());
            }
            let oldest_reader = self.oldest_reader_after(&found)?;
            if oldest_reader > found.version && found.version >= FIRST_TO_NOTICE {
                announce(db, found.version, oldest_reader).await?;
                tracing::info!(
                    from = found.version, to = self.version(), wait = ?self.notice,
                    "the database gets a new format: brokers of earlier versions stop now"
                );
                tokio::time::sleep(self.notice).await;
                patience = Patience::new();
            }
            match self.migrate(db, found.version, oldest_reader).await {
                Ok(()) => {
                    tracing::info!(
                        from = found.version,
                        to = self.version(),
                        "the database has a new format"
                    );
                }
                Err(Failure::Final(error)) => return Err(error),
                // Another broker may have migrated the database.
                Err(Failure::Conflict(error)) => patience.next(error).await?,
            }
        }
    }

    fn steps_after(self, version: i64) -> Result<&'static [Step]> {
        let done = usize::try_from(version - 1).ok();
        done.and_then(|done| self.steps.get(done..)).ok_or_else(|| {
            broken(format!("the database has a format {version}, which there never was"))
        })
    }

    /// Returns the oldest version that can use the database once it has this format.
    fn oldest_reader_after(self, found: &Found) -> Result<i64> {
        let steps = self.steps_after(found.version)?;
        let last = steps.iter().rposition(|step| !step.earlier_go_on);
        Ok(last.map_or(0, |last| found.version + 1 + last as i64).max(found.oldest_reader))
    }

    /// Takes the steps from `version` to this format, all or none. Returns a conflict if the database is not at that
    /// version.
    async fn migrate(self, db: &Db, version: i64, oldest_reader: i64) -> Result<(), Failure> {
        let mut session = begin(db).await?;
        let attempt = async {
            let reached = fields(self.version(), oldest_reader);
            let passed = db
                .collection::<Document>(FORMAT)
                .update_one(doc! { "_id": STORE, "version": version }, doc! { "$set": reached })
                .session(&mut *session)
                .await?;
            if passed.matched_count == 0 {
                return Err(Failure::Conflict(broken("the format of the database has changed")));
            }
            for Update { collection, filter, change } in
                self.steps_after(version)?.iter().flat_map(|step| (step.updates)())
            {
                let documents = db.collection::<Document>(collection);
                documents.update_many(filter, change).session(&mut *session).await?;
            }
            commit(&mut session).await
        };
        let migrated = attempt_in_time(attempt).await;
        if migrated.is_err() {
            abort(&mut session).await;
        }
        migrated
    }
}

fn fields(version: i64, oldest_reader: i64) -> Document {
    doc! { "version": version, "oldestReader": oldest_reader, "program": env!("CARGO_PKG_VERSION") }
}

/// Returns the format that the database says it has. A database that says nothing has version 1 or is empty; from now
/// on it says so.
async fn find_or_begin(db: &Db) -> Result<Found, Failure> {
    // A write instead of a read, so that a server that was replaced as the primary cannot answer.
    let formats = db.collection::<Document>(FORMAT);
    let begin = formats
        .find_one_and_update(doc! { "_id": STORE }, doc! { "$setOnInsert": fields(1, 1) })
        .upsert(true)
        .return_document(ReturnDocument::After);
    let found = in_time(db, begin).await?;
    let found = found.ok_or_else(|| broken("the document that was written is missing"))?;
    Ok(Found::read(&found)?)
}

/// Tells brokers of versions below `oldest_reader` to stop. This is never undone.
async fn announce(db: &Db, version: i64, oldest_reader: i64) -> Result<()> {
    let filter = doc! { "_id": STORE, "version": version };
    let change = doc! {
        "$max": { "oldestReader": oldest_reader }, "$set": { "program": env!("CARGO_PKG_VERSION") },
    };
    let formats = db.collection::<Document>(FORMAT);
    in_time(db, formats.update_one(filter, change)).await.map_err(failed)?;
    Ok(())
}

#[cfg(test)]
mod tests;
