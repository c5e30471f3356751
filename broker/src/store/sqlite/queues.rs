//! Settings and totals of queues.

use std::{num::NonZeroU64, time::Duration};

use rusqlite::{OptionalExtension, Row, params, params_from_iter, types::Value};

use super::{
    super::{Created, Links},
    rows::{broken, headers, json, optional_queue_name, queue_name},
    tx::{Tx, View},
};
use crate::domain::{GroupName, Limit, Queue, QueueName, RetryPolicy, Timestamp, Totals};

/// The columns of settings, in queues and in templates.
macro_rules! settings_columns {
    () => {
        r#""group", lease_ns, max_attempts, dead_letter_queue, retry_initial_ns,
           retry_multiplier, retry_max_ns, retry_jitter, default_ttl_ns, retention_ns,
           dedup_window_ns, max_depth, sequenced, paused, labels, max_deliveries, discard_failed"#
    };
}
pub(super) use settings_columns;

/// The number of these columns.
pub(super) const SETTINGS_COLUMNS: usize = 17;

macro_rules! columns {
    () => {
        concat!(settings_columns!(), ", name, created, revision, unused_since")
    };
}

/// Returns a duration in nanoseconds, at most 292 years.
pub(super) fn nanos(span: Duration) -> i64 {
    i64::try_from(span.as_nanos()).unwrap_or(i64::MAX)
}

/// Returns the duration of a column of nanoseconds.
pub(super) fn span(nanos: i64) -> Duration {
    Duration::from_nanos(nanos.max(0).unsigned_abs())
}

/// Reads the settings, which are the first columns, into `queue`.
pub(super) fn read_settings(row: &Row<'_>, queue: Queue) -> rusqlite::Result<Queue> {
    let optional_span =
        |column| Ok::<_, rusqlite::Error>(row.get::<_, Option<i64>>(column)?.map(span));
    let retry_policy = match row.get::<_, Option<i64>>(4)? {
        Some(initial) => Some(RetryPolicy {
            initial_delay: span(initial),
            multiplier: row.get(5)?,
            max_delay: span(row.get(6)?),
            jitter: row.get(7)?,
        }),
        None => None,
    };
    Ok(Queue {
        group: GroupName::parse("group", row.get_ref(0)?.as_str()?).map_err(|e| broken(0, e))?,
        lease: optional_span(1)?,
        max_attempts: row.get::<_, Option<u32>>(2)?.map(Limit::of),
        dead_letter_queue: optional_queue_name(row, 3)?,
        retry_policy,
        default_ttl: optional_span(8)?,
        retention: span(row.get(9)?),
        dedup_window: span(row.get(10)?),
        max_depth: NonZeroU64::new(row.get::<_, i64>(11)?.cast_unsigned()),
        sequenced: row.get(12)?,
        paused: row.get(13)?,
        labels: headers(row, 14)?,
        max_deliveries: row.get::<_, Option<u32>>(15)?.map(Limit::of),
        discard_failed: row.get(16)?,
        ..queue
    })
}

/// Returns the values of the columns of settings.
pub(super) fn settings_values(queue: &Queue) -> [Value; SETTINGS_COLUMNS] {
    let retry = queue.retry_policy.as_ref();
    let number = |limit: Option<Limit>| limit.map(|limit| i64::from(limit.number()));
    [
        queue.group.to_string().into(),
        queue.lease.map(nanos).into(),
        number(queue.max_attempts).into(),
        queue.dead_letter_queue.as_ref().map(ToString::to_string).into(),
        retry.map(|retry| nanos(retry.initial_delay)).into(),
        retry.map(|retry| retry.multiplier).into(),
        retry.map(|retry| nanos(retry.max_delay)).into(),
        retry.map(|retry| retry.jitter).into(),
        queue.default_ttl.map(nanos).into(),
        nanos(queue.retention).into(),
        nanos(queue.dedup_window).into(),
        queue.max_depth.map_or(0, NonZeroU64::get).cast_signed().into(),
        queue.sequenced.into(),
        queue.paused.into(),
        json(&queue.labels).into(),
        number(queue.max_deliveries).into(),
        queue.discard_failed.into(),
    ]
}

fn read(row: &Row<'_>) -> rusqlite::Result<Queue> {
    const REST: usize = SETTINGS_COLUMNS;
    let name = queue_name(row, REST)?;
    let queue = Queue::with_defaults(name, Timestamp(row.get(REST + 1)?));
    Ok(Queue {
        revision: row.get(REST + 2)?,
        unused_since: row.get::<_, Option<i64>>(REST + 3)?.map(Timestamp),
        ..read_settings(row, queue)?
    })
}

fn write(tx: &Tx<'_>, queue: &Queue) -> rusqlite::Result<()> {
    let rest: [Value; 4] = [
        queue.name.to_string().into(),
        queue.create_time.0.into(),
        queue.revision.into(),
        queue.unused_since.map(|since| since.0).into(),
    ];
    tx.conn
        .prepare_cached(concat!(
            "INSERT OR REPLACE INTO queues (",
            columns!(),
            ") VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18,
               ?19, ?20, ?21)"
        ))?
        .execute(params_from_iter(settings_values(queue).into_iter().chain(rest)))?;
    settings_changed(tx)
}

/// Notes that the settings of a queue have changed.
pub(super) fn settings_changed(tx: &Tx<'_>) -> rusqlite::Result<()> {
    tx.conn
        .prepare_cached("UPDATE meta SET value = value + 1 WHERE key = 'settings'")?
        .execute([])
        .map(drop)
}

/// Returns the present state of all queues' settings, which include dead-letter queues.
pub(super) fn links(view: &View<'_>) -> rusqlite::Result<Links> {
    view.conn
        .prepare_cached("SELECT value FROM meta WHERE key = 'settings'")?
        .query_row([], |row| row.get(0).map(Links))
}

/// Returns the queues whose dead-letter queue is this one, at most a hundred of them.
pub(super) fn dead_letter_sources(
    view: &View<'_>,
    name: &QueueName,
) -> rusqlite::Result<Vec<Queue>> {
    view.conn
        .prepare_cached(concat!(
            "SELECT ",
            columns!(),
            " FROM queues WHERE dead_letter_queue = ?1 ORDER BY name LIMIT 100"
        ))?
        .query_map([name.as_str()], read)?
        .collect()
}

/// Creates or updates a queue, if no settings have changed since `since`.
pub(super) fn link(tx: &Tx<'_>, queue: Queue, since: Links) -> rusqlite::Result<Option<Queue>> {
    if links(tx)? != since {
        return Ok(None);
    }
    if queue.revision > 0 {
        return update(tx, queue);
    }
    Ok(match create(tx, queue)? {
        Created::New(queue) => Some(queue),
        Created::Existing(_) => None,
    })
}

/// Returns true if neither this queue nor any other settings have changed since they were read.
pub(super) fn is_current(view: &View<'_>, queue: &Queue, since: Links) -> rusqlite::Result<bool> {
    let found = get(view, &queue.name)?;
    Ok(links(view)? == since && found.is_some_and(|found| found.revision == queue.revision))
}

pub(super) fn get(view: &View<'_>, name: &QueueName) -> rusqlite::Result<Option<Queue>> {
    view.conn
        .prepare_cached(concat!("SELECT ", columns!(), " FROM queues WHERE name = ?1"))?
        .query_row([name.as_str()], read)
        .optional()
}

pub(super) fn list(
    view: &View<'_>,
    prefix: &str,
    after: Option<&QueueName>,
    limit: usize,
) -> rusqlite::Result<Vec<Queue>> {
    let after = after.map_or("", QueueName::as_str);
    view.conn
        .prepare_cached(concat!(
            "SELECT ",
            columns!(),
            " FROM queues WHERE name >= ?1 AND name < ?2 AND name <> ?3 ORDER BY name LIMIT ?4"
        ))?
        .query_map(
            params![after.max(prefix), QueueName::end_of_prefix(prefix), after, limit as i64],
            read,
        )?
        .collect()
}

pub(super) fn create(tx: &Tx<'_>, mut queue: Queue) -> rusqlite::Result<Created<Queue>> {
    if let Some(there) = get(tx, &queue.name)? {
        return Ok(Created::Existing(there));
    }
    queue.revision = 1;
    write(tx, &queue)?;
    Ok(Created::New(queue))
}

pub(super) fn update(tx: &Tx<'_>, mut queue: Queue) -> rusqlite::Result<Option<Queue>> {
    if get(tx, &queue.name)?.is_none_or(|there| there.revision != queue.revision) {
        return Ok(None);
    }
    queue.revision += 1;
    write(tx, &queue)?;
    Ok(Some(queue))
}

/// Adds to the totals of queues.
pub(super) fn add_totals(tx: &Tx<'_>, changes: &[(QueueName, Totals)]) -> rusqlite::Result<()> {
    let mut add = tx.conn.prepare_cached(
        "INSERT INTO totals (queue, pushed, delivered, committed, rolled_back, moved, dead_lettered,
           expired, popped, discarded)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10) ON CONFLICT (queue) DO UPDATE SET
           pushed = pushed + ?2, delivered = delivered + ?3, committed = committed + ?4,
           rolled_back = rolled_back + ?5, moved = moved + ?6,
           dead_lettered = dead_lettered + ?7, expired = expired + ?8,
           popped = popped + ?9, discarded = discarded + ?10",
    )?;
    for (queue, totals) in changes {
        add.execute(params![
            queue.as_str(),
            totals.pushed.cast_signed(),
            totals.delivered.cast_signed(),
            totals.committed.cast_signed(),
            totals.rolled_back.cast_signed(),
            totals.moved.cast_signed(),
            totals.dead_lettered.cast_signed(),
            totals.expired.cast_signed(),
            totals.popped.cast_signed(),
            totals.discarded.cast_signed(),
        ])?;
    }
    Ok(())
}

macro_rules! totals {
    () => {
        "pushed, delivered, committed, rolled_back, moved, dead_lettered, expired, popped, discarded"
    };
}

/// Reads totals whose first column is `first`.
fn read_totals(row: &Row<'_>, first: usize) -> rusqlite::Result<Totals> {
    let count = |place| Ok::<_, rusqlite::Error>(row.get::<_, i64>(first + place)?.cast_unsigned());
    Ok(Totals {
        pushed: count(0)?,
        delivered: count(1)?,
        committed: count(2)?,
        rolled_back: count(3)?,
        moved: count(4)?,
        dead_lettered: count(5)?,
        expired: count(6)?,
        popped: count(7)?,
        discarded: count(8)?,
    })
}

pub(super) fn totals(view: &View<'_>, queue: &QueueName) -> rusqlite::Result<Totals> {
    view.conn
        .prepare_cached(concat!("SELECT ", totals!(), " FROM totals WHERE queue = ?1"))?
        .query_row([queue.as_str()], |row| read_totals(row, 0))
        .optional()
        .map(Option::unwrap_or_default)
}

pub(super) fn all_totals(view: &View<'_>) -> rusqlite::Result<Vec<(QueueName, Totals)>> {
    view.conn
        .prepare_cached(concat!("SELECT queue, ", totals!(), " FROM totals"))?
        .query_map([], |row| Ok((queue_name(row, 0)?, read_totals(row, 1)?)))?
        .collect()
}
