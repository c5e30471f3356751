//! Templates of queues.

use async_trait::async_trait;
use rusqlite::{OptionalExtension, Row, params_from_iter, types::Value};

use super::{
    super::{Created, Result, TemplateStore},
    SqliteStore,
    queues::{SETTINGS_COLUMNS, read_settings, settings_columns, settings_values},
    rows::broken,
    tx::{Tx, View},
};
use crate::domain::{Pattern, QueueTemplate, Timestamp};

macro_rules! columns {
    () => {
        concat!(settings_columns!(), ", pattern, created, updated, revision")
    };
}

fn read(row: &Row<'_>) -> rusqlite::Result<QueueTemplate> {
    const REST: usize = SETTINGS_COLUMNS;
    let pattern = Pattern::of_queues(row.get_ref(REST)?.as_str()?);
    Ok(QueueTemplate {
        pattern: pattern.ok_or_else(|| broken(REST, "not a pattern"))?,
        settings: read_settings(row, QueueTemplate::default_settings())?,
        create_time: Timestamp(row.get(REST + 1)?),
        update_time: Timestamp(row.get(REST + 2)?),
        revision: row.get(REST + 3)?,
    })
}

fn write(tx: &Tx<'_>, template: &QueueTemplate) -> rusqlite::Result<()> {
    let rest: [Value; 4] = [
        template.pattern.to_string().into(),
        template.create_time.0.into(),
        template.update_time.0.into(),
        template.revision.into(),
    ];
    tx.conn
        .prepare_cached(concat!(
            "INSERT OR REPLACE INTO templates (",
            columns!(),
            ") VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18,
               ?19, ?20, ?21)"
        ))?
        .execute(params_from_iter(settings_values(&template.settings).into_iter().chain(rest)))
        .map(drop)
}

fn get(view: &View<'_>, pattern: &Pattern) -> rusqlite::Result<Option<QueueTemplate>> {
    view.conn
        .prepare_cached(concat!("SELECT ", columns!(), " FROM templates WHERE pattern = ?1"))?
        .query_row([pattern.as_str()], read)
        .optional()
}

/// Returns all templates in the order of their patterns.
pub(super) fn list(view: &View<'_>) -> rusqlite::Result<Vec<QueueTemplate>> {
    view.conn
        .prepare_cached(concat!("SELECT ", columns!(), " FROM templates ORDER BY pattern"))?
        .query_map([], read)?
        .collect()
}

fn create(tx: &Tx<'_>, template: QueueTemplate) -> rusqlite::Result<Created<QueueTemplate>> {
    if let Some(there) = get(tx, &template.pattern)? {
        return Ok(Created::Existing(there));
    }
    let new = QueueTemplate { revision: 1, ..template };
    write(tx, &new)?;
    Ok(Created::New(new))
}

fn update(tx: &Tx<'_>, template: QueueTemplate) -> rusqlite::Result<Option<QueueTemplate>> {
    let there = get(tx, &template.pattern)?.filter(|there| there.revision == template.revision);
    let Some(QueueTemplate { create_time, revision, .. }) = there else { return Ok(None) };
    let new = QueueTemplate { create_time, revision: revision + 1, ..template };
    write(tx, &new)?;
    Ok(Some(new))
}

fn delete(tx: &Tx<'_>, pattern: &Pattern) -> rusqlite::Result<bool> {
    let mut delete = tx.conn.prepare_cached("DELETE FROM templates WHERE pattern = ?1")?;
    Ok(delete.execute([pattern.as_str()])? > 0)
}

#[async_trait]
impl TemplateStore for SqliteStore {
    async fn create_template(&self, template: &QueueTemplate) -> Result<Created<QueueTemplate>> {
        let template = template.clone();
        self.inner.write(move |tx| create(tx, template)).await
    }

    async fn get_template(&self, pattern: &Pattern) -> Result<Option<QueueTemplate>> {
        let pattern = pattern.clone();
        self.inner.read(move |view| get(view, &pattern)).await
    }

    async fn list_templates(&self) -> Result<Vec<QueueTemplate>> {
        self.inner.read(list).await
    }

    async fn update_template(&self, template: &QueueTemplate) -> Result<Option<QueueTemplate>> {
        let template = template.clone();
        self.inner.write(move |tx| update(tx, template)).await
    }

    async fn delete_template(&self, pattern: &Pattern) -> Result<bool> {
        let pattern = pattern.clone();
        self.inner.write(move |tx| delete(tx, &pattern)).await
    }
}
