//! Databases of earlier versions: brought up to date when a broker starts, in one transaction. Databases of newer
//! versions: refused, unless the newer version says that brokers of this one can go on beside it.
//!
//! The document `store` of the collection `format` says:
//!
//! | field | meaning |
//! |---|---|
//! | `version` | the version of what is stored; without the document: 1 |
//! | `oldestReader` | brokers of versions below this one must not use the database; may be ahead of `version` |
//! | `program` | the version of the program that wrote these two |
//!
//! Brokers read it when they start, and again with each look for changed settings. One that finds itself below
//! `oldestReader` refuses every call from then on. A step that such a broker would not survive is announced by
//! `oldestReader` first; it is taken [`Format::notice`] later, when each of them has noticed and its last write is over.
//!
//! Items are never rewritten: there may be millions. What reads them reads what every earlier version wrote, and a
//! field whose meaning changes gets a new name. The same holds for indexes.

use std::time::Duration;

use mongodb::{
    Client, Database,
    bson::{Document, doc},
    options::ReturnDocument,
};

use crate::store::{
    Result, StoreError,
    mongo::server::{
        error::{broken, failed, integer},
        group_commit::WRITE_LIMIT,
        time_limit::{in_time, read_in_time},
        transaction::{Failure, Patience, abort, attempt_in_time, begin, commit},
    },
};

/// The collection of the document that says which format the database has.
const FORMAT: &str = "format";
/// The `_id` of that document.
const STORE: &str = "store";
/// Brokers of versions before this one do not look for the document: nobody waits for them to notice it.
const FIRST_TO_NOTICE: i64 = 2;

/// The format of the database as this program makes and uses it.
pub(super) const THIS: Format =
    Format { steps: &[TO_VERSION_2], notice: WRITE_LIMIT.saturating_add(Duration::from_secs(10)) };

/// A format of the database.
#[derive(Clone, Copy)]
pub(super) struct Format {
    /// The steps from each version to the next, the first from version 1. A step that a release has seen does not
    /// change any more: what comes later is a step of its own.
    steps: &'static [Step],
    /// How long before the database changes brokers of earlier versions are told to stop.
    notice: Duration,
}

/// The way from a version to the next.
struct Step {
    /// What changes, in this order.
    updates: fn() -> Vec<Update>,
    /// Brokers of the version before can use the database after this step as well.
    earlier_go_on: bool,
}

/// A change of documents: few enough for a transaction.
struct Update {
    collection: &'static str,
    filter: Document,
    change: Vec<Document>,
}

/// Failures: limits by default.
/// A `maxAttempts` of 0 meant that nobody had said anything: it now is the broker's default.
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

/// What a database says of its format.
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

    /// Why a broker of this version must not use the database, if it must not.
    fn refusal(&self, db: &Database, version: i64) -> Option<String> {
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

/// Why a broker must not use the database any more, if a newer version has said so.
pub(super) async fn refusal(db: &Database, format: Format) -> Result<Option<String>> {
    let formats = db.collection::<Document>(FORMAT);
    let found = read_in_time(|| formats.find_one(doc! { "_id": STORE })).await?;
    let found = found.as_ref().map(Found::read).transpose()?;
    Ok(found.and_then(|found| found.refusal(db, format.version())))
}

impl Format {
    /// The version of the format.
    pub(super) const fn version(self) -> i64 {
        1 + self.steps.len() as i64
    }

    /// Brings a database up to this format; refuses one of a newer format that this version cannot use. If it fails,
    /// or the process ends on the way, the database is as it was, but may be announced to change.
    pub(super) async fn bring_up_to_date(self, client: &Client, db: &Database) -> Result<()> {
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
            match self.migrate(client, db, found.version, oldest_reader).await {
                Ok(()) => {
                    tracing::info!(
                        from = found.version,
                        to = self.version(),
                        "the database has a new format"
                    );
                }
                Err(Failure::Final(error)) => return Err(error),
                // Another broker may have done it.
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

    /// The oldest version that can use the database once it has this format.
    fn oldest_reader_after(self, found: &Found) -> Result<i64> {
        let steps = self.steps_after(found.version)?;
        let last = steps.iter().rposition(|step| !step.earlier_go_on);
        Ok(last.map_or(0, |last| found.version + 1 + last as i64).max(found.oldest_reader))
    }

    /// Takes the steps from `version` to this format, all or none; a conflict if it is not at that version.
    async fn migrate(
        self,
        client: &Client,
        db: &Database,
        version: i64,
        oldest_reader: i64,
    ) -> Result<(), Failure> {
        let mut session = begin(client).await?;
        let attempt = async {
            let reached = fields(self.version(), oldest_reader);
            let passed = db
                .collection::<Document>(FORMAT)
                .update_one(doc! { "_id": STORE, "version": version }, doc! { "$set": reached })
                .session(&mut session)
                .await?;
            if passed.matched_count == 0 {
                return Err(Failure::Conflict(broken("the format of the database has changed")));
            }
            for Update { collection, filter, change } in
                self.steps_after(version)?.iter().flat_map(|step| (step.updates)())
            {
                let documents = db.collection::<Document>(collection);
                documents.update_many(filter, change).session(&mut session).await?;
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

/// What the database says of its format. One that says nothing is of version 1, or empty: from now on it says so.
async fn find_or_begin(db: &Database) -> Result<Found, Failure> {
    // A write, so that no server answers that has been replaced as the primary.
    let formats = db.collection::<Document>(FORMAT);
    let begin = formats
        .find_one_and_update(doc! { "_id": STORE }, doc! { "$setOnInsert": fields(1, 1) })
        .upsert(true)
        .return_document(ReturnDocument::After);
    let found = in_time(begin).await?;
    let found = found.ok_or_else(|| broken("the document that was written is not there"))?;
    Ok(Found::read(&found)?)
}

/// Tells brokers of versions below `oldest_reader` to stop. This is not taken back.
async fn announce(db: &Database, version: i64, oldest_reader: i64) -> Result<()> {
    let filter = doc! { "_id": STORE, "version": version };
    let change = doc! {
        "$max": { "oldestReader": oldest_reader }, "$set": { "program": env!("CARGO_PKG_VERSION") },
    };
    let formats = db.collection::<Document>(FORMAT);
    in_time(formats.update_one(filter, change)).await.map_err(failed)?;
    Ok(())
}

#[cfg(test)]
mod tests;
