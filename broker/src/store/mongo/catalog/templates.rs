//! Stores templates of queues.

use mongodb::{
    bson::{Document, doc},
    options::ReturnDocument,
};

use crate::{
    domain::{Pattern, QueueTemplate, Timestamp},
    store::{
        Created, Result,
        mongo::{
            Inner,
            catalog::{
                named::{MAX_LIST, Named},
                queues::{read_settings, settings},
            },
            schema::layout::date,
            server::{
                error::{broken, failed, integer},
                time_limit::in_time,
            },
        },
    },
};

const TEMPLATES: &str = "templates";
const NAMED: Named<QueueTemplate> = Named { collection: TEMPLATES, read };

fn read(document: &Document) -> Result<QueueTemplate> {
    let time =
        |name: &str| Timestamp(document.get_datetime(name).map_or(0, |at| at.timestamp_millis()));
    let pattern = Pattern::of_queues(document.get_str("_id").unwrap_or_default());
    let stored = document.get_document("settings").map_err(|e| broken(e.to_string()))?;
    Ok(QueueTemplate {
        pattern: pattern.ok_or_else(|| broken("unreadable template: its id is no pattern"))?,
        settings: read_settings(stored, QueueTemplate::default_settings().name)?,
        create_time: time("created"),
        update_time: time("updated"),
        revision: document.get("revision").and_then(integer).unwrap_or_default(),
    })
}

/// Creates a template, or returns the existing one.
pub(crate) async fn create(
    inner: &Inner,
    template: &QueueTemplate,
) -> Result<Created<QueueTemplate>> {
    let document = doc! {
        "_id": template.pattern.as_str(), "settings": settings(&template.settings),
        "created": date(template.create_time), "updated": date(template.update_time), "revision": 1_i64,
    };
    NAMED.create(inner, template.pattern.as_str(), &document).await
}

/// Returns a template.
pub(crate) async fn get(inner: &Inner, pattern: &Pattern) -> Result<Option<QueueTemplate>> {
    NAMED.get(inner, pattern.as_str()).await
}

/// Returns all templates sorted by pattern.
pub(crate) async fn list(inner: &Inner) -> Result<Vec<QueueTemplate>> {
    NAMED.list(inner, doc! { "$gt": "" }, MAX_LIST, None).await
}

/// Replaces the settings, if the template still has this revision.
pub(crate) async fn update(
    inner: &Inner,
    template: &QueueTemplate,
) -> Result<Option<QueueTemplate>> {
    let set = doc! {
        "settings": settings(&template.settings), "updated": date(template.update_time),
        "revision": template.revision + 1,
    };
    let filter = doc! { "_id": template.pattern.as_str(), "revision": template.revision };
    let templates = inner.db.collection::<Document>(TEMPLATES);
    let update = templates
        .find_one_and_update(filter, doc! { "$set": set })
        .return_document(ReturnDocument::After);
    let found = in_time(&inner.db, update).await.map_err(failed)?;
    found.as_ref().map(read).transpose()
}

/// Deletes a template. Returns false if it did not exist.
pub(crate) async fn delete(inner: &Inner, pattern: &Pattern) -> Result<bool> {
    let templates = inner.db.collection::<Document>(TEMPLATES);
    let delete = templates.delete_one(doc! { "_id": pattern.as_str() });
    let deleted = in_time(&inner.db, delete).await.map_err(failed)?;
    Ok(deleted.deleted_count > 0)
}
