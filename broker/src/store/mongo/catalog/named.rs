//! Documents whose ids are names that people chose: queues, schedules and templates.

use mongodb::bson::{Document, doc};

use crate::store::{
    Created, Result,
    mongo::{
        Inner,
        server::{
            connect::read_documents,
            error::{failed, is_duplicate_key, unavailable},
            time_limit::{in_time, read_in_time},
        },
    },
};

/// Limit of documents of one list.
pub(crate) const MAX_LIST: usize = 10_000;
/// Limit of attempts to create a document that exists when it is inserted and is gone when it is read.
const CREATIONS: usize = 20;

/// A collection of such documents, and how they are parsed.
pub(crate) struct Named<T> {
    pub(crate) collection: &'static str,
    pub(crate) read: fn(&Document) -> Result<T>,
}

impl<T> Named<T> {
    /// Creates a document, or returns the existing one of that name.
    pub(crate) async fn create(
        &self,
        inner: &Inner,
        name: &str,
        document: &Document,
    ) -> Result<Created<T>> {
        let items = inner.db.collection::<Document>(self.collection);
        for _ in 0..CREATIONS {
            match in_time(&inner.db, items.insert_one(document)).await {
                Ok(_) => return Ok(Created::New((self.read)(document)?)),
                Err(error) if is_duplicate_key(&error) => {
                    // The driver's own retry of an insert that took effect does not end here: the server recognises the
                    // retry and reports success.
                    if let Some(existing) = self.get(inner, name).await? {
                        return Ok(Created::Existing(existing));
                    }
                }
                Err(error) => return Err(failed(error)),
            }
        }
        Err(unavailable(format!("{name} of {} keeps being deleted", self.collection)))
    }

    /// Returns the document of this name.
    pub(crate) async fn get(&self, inner: &Inner, name: &str) -> Result<Option<T>> {
        let items = inner.db.collection::<Document>(self.collection);
        let found = read_in_time(&inner.db, || items.find_one(doc! { "_id": name })).await?;
        found.as_ref().map(self.read).transpose()
    }

    /// Returns the documents whose names meet these conditions, sorted by name, without the field `left_out`.
    pub(crate) async fn list(
        &self,
        inner: &Inner,
        names: Document,
        limit: usize,
        left_out: Option<&str>,
    ) -> Result<Vec<T>> {
        if limit == 0 {
            return Ok(Vec::new());
        }
        let filter = doc! { "_id": names };
        let limit = limit.min(MAX_LIST) as i64;
        let mut command = doc! {
            "find": self.collection, "filter": filter, "sort": { "_id": 1 }, "limit": limit,
            "batchSize": limit + 1,
        };
        if let Some(field) = left_out {
            command.insert("projection", doc! { field: 0 });
        }
        read_documents(&inner.db, command).await?.iter().map(self.read).collect()
    }
}
