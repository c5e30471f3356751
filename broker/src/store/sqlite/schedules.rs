//! Schedules.

use std::time::Duration;

use bytes::Bytes;
use rusqlite::{OptionalExtension, Row, params};

use super::{
    super::Created,
    queues::{nanos, span},
    rows::{broken, headers, json, priority, queue_name},
    tx::{Tx, View},
};
use crate::domain::{
    Eligibility, NewItem, OrderingKey, Schedule, ScheduleChange, ScheduleName, Timestamp,
};

macro_rules! other_columns {
    () => {
        "name, queue, cron, time_zone, paused, created, done_until, last, content_type, headers,
         priority, delay_ns, eligible, ttl_ns, key"
    };
}

macro_rules! columns {
    () => {
        concat!(other_columns!(), ", payload")
    };
}

fn read(row: &Row<'_>) -> rusqlite::Result<Schedule> {
    let name = row.get_ref(0)?.as_str()?;
    Ok(Schedule {
        name: ScheduleName::parse("name", name).map_err(|e| broken(0, e))?,
        queue: queue_name(row, 1)?,
        cron: row.get(2)?,
        time_zone: row.get(3)?,
        paused: row.get(4)?,
        create_time: Timestamp(row.get(5)?),
        done_until: Timestamp(row.get(6)?),
        last_time: row.get::<_, Option<i64>>(7)?.map(Timestamp),
        item: NewItem {
            content_type: row.get(8)?,
            headers: headers(row, 9)?,
            priority: priority(row, 10)?,
            eligibility: eligibility(row)?,
            ttl: row.get::<_, Option<i64>>(13)?.map(span),
            ordering_key: OrderingKey::new(row.get::<_, String>(14)?),
            payload: Bytes::copy_from_slice(row.get_ref(15)?.as_blob()?),
            dedup_id: None,
        },
    })
}

/// Reads the delay and the eligible time of a schedule's item.
fn eligibility(row: &Row<'_>) -> rusqlite::Result<Eligibility> {
    Ok(match (row.get::<_, Option<i64>>(12)?, span(row.get(11)?)) {
        (Some(time), _) => Eligibility::At(Timestamp(time)),
        (None, Duration::ZERO) => Eligibility::Immediate,
        (None, delay) => Eligibility::After(delay),
    })
}

pub(super) fn get(view: &View<'_>, name: &ScheduleName) -> rusqlite::Result<Option<Schedule>> {
    view.conn
        .prepare_cached(concat!("SELECT ", columns!(), " FROM schedules WHERE name = ?1"))?
        .query_row([name.as_str()], read)
        .optional()
}

pub(super) fn list(
    view: &View<'_>,
    after: Option<&ScheduleName>,
    limit: usize,
    payloads: bool,
) -> rusqlite::Result<Vec<Schedule>> {
    macro_rules! list {
        ($columns:expr) => {
            concat!("SELECT ", $columns, " FROM schedules WHERE name > ?1 ORDER BY name LIMIT ?2")
        };
    }
    let list = if payloads {
        list!(columns!())
    } else {
        list!(concat!(other_columns!(), ", x'' AS payload"))
    };
    view.conn
        .prepare_cached(list)?
        .query_map(params![after.map_or("", ScheduleName::as_str), limit as i64], read)?
        .collect()
}

pub(super) fn create(tx: &Tx<'_>, schedule: Schedule) -> rusqlite::Result<Created<Schedule>> {
    if let Some(there) = get(tx, &schedule.name)? {
        return Ok(Created::Existing(there));
    }
    write(tx, &schedule)?;
    Ok(Created::New(schedule))
}

pub(super) fn update(
    tx: &Tx<'_>,
    name: &ScheduleName,
    change: &ScheduleChange,
) -> rusqlite::Result<Option<Schedule>> {
    let Some(mut schedule) = get(tx, name)? else { return Ok(None) };
    change.apply(&mut schedule);
    write(tx, &schedule)?;
    Ok(Some(schedule))
}

/// Writes a schedule in the place of the one of its name.
fn write(tx: &Tx<'_>, schedule: &Schedule) -> rusqlite::Result<()> {
    let item = &schedule.item;
    let (delay, eligible_time) = match item.eligibility {
        Eligibility::Immediate => (Duration::ZERO, None),
        Eligibility::After(delay) => (delay, None),
        Eligibility::At(time) => (Duration::ZERO, Some(time)),
    };
    tx.conn
        .prepare_cached(concat!(
            "INSERT OR REPLACE INTO schedules (",
            columns!(),
            ") VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16)"
        ))?
        .execute(params![
            schedule.name.as_str(),
            schedule.queue.as_str(),
            schedule.cron,
            schedule.time_zone,
            schedule.paused,
            schedule.create_time.0,
            schedule.done_until.0,
            schedule.last_time.map(Timestamp::millis),
            item.content_type,
            json(&item.headers),
            item.priority.level(),
            nanos(delay),
            eligible_time.map(Timestamp::millis),
            item.ttl.map(nanos),
            OrderingKey::text_of(item.ordering_key.as_ref()),
            item.payload.as_ref(),
        ])
        .map(drop)
}

pub(super) fn pause(
    tx: &Tx<'_>,
    name: &ScheduleName,
    paused: bool,
    done_until: Timestamp,
) -> rusqlite::Result<Option<Schedule>> {
    tx.conn
        .prepare_cached(
            "UPDATE schedules SET paused = ?2, done_until = max(done_until, ?3) WHERE name = ?1",
        )?
        .execute(params![name.as_str(), paused, done_until.0])?;
    get(tx, name)
}

pub(super) fn tick_done(tx: &Tx<'_>, name: &ScheduleName, tick: Timestamp) -> rusqlite::Result<()> {
    tx.conn
        .prepare_cached(
            "UPDATE schedules SET last = ?2, done_until = max(done_until, ?2)
             WHERE name = ?1 AND (last IS NULL OR last < ?2)",
        )?
        .execute(params![name.as_str(), tick.0])
        .map(drop)
}

pub(super) fn delete(tx: &Tx<'_>, name: &ScheduleName) -> rusqlite::Result<bool> {
    let deleted = tx
        .conn
        .prepare_cached("DELETE FROM schedules WHERE name = ?1")?
        .execute([name.as_str()])?;
    Ok(deleted > 0)
}
