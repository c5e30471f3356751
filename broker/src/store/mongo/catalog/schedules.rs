//! Stores schedules. The engine's background work runs them.

use std::time::Duration;

use bytes::Bytes;
use mongodb::{
    bson::{Document, doc},
    options::ReturnDocument,
};

use crate::{
    domain::{
        Eligibility, Invalid, NewItem, OrderingKey, Priority, QueueName, Schedule, ScheduleChange,
        ScheduleName, Timestamp,
    },
    store::{
        Created, Result,
        mongo::{
            Inner,
            catalog::{named::Named, queues::span},
            schema::{
                item::{binary, texts},
                layout::date,
            },
            server::{
                error::{broken, failed, integer},
                time_limit::in_time,
            },
        },
    },
};

const SCHEDULES: &str = "schedules";
const NAMED: Named<Schedule> = Named { collection: SCHEDULES, read };

fn write_item(new: &NewItem) -> Document {
    let mut item = doc! {
        "payload": binary(&new.payload), "contentType": &new.content_type,
        "headers": texts(&new.headers),
        "priority": i32::from(new.priority.level()),
        "key": OrderingKey::text_of(new.ordering_key.as_ref()),
    };
    match new.eligibility {
        Eligibility::Immediate => {}
        Eligibility::After(delay) => drop(item.insert("delay", span(delay))),
        Eligibility::At(time) => drop(item.insert("eligibleTime", date(time))),
    }
    if let Some(ttl) = new.ttl {
        item.insert("ttl", span(ttl));
    }
    item
}

fn write(schedule: &Schedule) -> Document {
    let mut d = doc! {
        "_id": schedule.name.as_str(), "queue": schedule.queue.as_str(), "cron": &schedule.cron,
        "timeZone": &schedule.time_zone, "item": write_item(&schedule.item),
        "paused": schedule.paused,
        "created": date(schedule.create_time), "doneUntil": date(schedule.done_until),
    };
    if let Some(last) = schedule.last_time {
        d.insert("lastTime", date(last));
    }
    d
}

fn read(document: &Document) -> Result<Schedule> {
    fn time(d: &Document, name: &str) -> Option<Timestamp> {
        d.get_datetime(name).ok().map(|at| Timestamp(at.timestamp_millis()))
    }
    fn text(d: &Document, name: &str) -> String {
        d.get_str(name).unwrap_or_default().to_owned()
    }
    let bad = |e: Invalid| broken(format!("unreadable schedule: {e}"));
    let item = document.get_document("item").map_err(|e| broken(e.to_string()))?;
    let whole = |name: &str| item.get(name).and_then(integer);
    let headers = item.get_document("headers").into_iter().flatten();
    // A list may leave it out.
    let payload = item.get_binary_generic("payload").map_or(&[][..], Vec::as_slice);
    Ok(Schedule {
        name: ScheduleName::parse("_id", &text(document, "_id")).map_err(bad)?,
        queue: QueueName::parse("queue", &text(document, "queue")).map_err(bad)?,
        cron: text(document, "cron"),
        time_zone: text(document, "timeZone"),
        item: NewItem {
            payload: Bytes::copy_from_slice(payload),
            content_type: text(item, "contentType"),
            headers: headers
                .filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())))
                .collect(),
            priority: Priority::parse("priority", whole("priority").unwrap_or_default() as i32)
                .map_err(bad)?,
            eligibility: match (time(item, "eligibleTime"), whole("delay")) {
                (Some(time), _) => Eligibility::At(time),
                (None, None | Some(0)) => Eligibility::Immediate,
                (None, Some(ms)) => Eligibility::After(Duration::from_millis(ms as u64)),
            },
            ttl: whole("ttl").map(|ms| Duration::from_millis(ms as u64)),
            ordering_key: OrderingKey::new(text(item, "key")),
            dedup_id: None,
        },
        paused: document.get_bool("paused").unwrap_or_default(),
        create_time: time(document, "created").unwrap_or_default(),
        done_until: time(document, "doneUntil").unwrap_or_default(),
        last_time: time(document, "lastTime"),
    })
}

/// Creates a schedule, or returns the existing one.
pub(crate) async fn create(inner: &Inner, schedule: &Schedule) -> Result<Created<Schedule>> {
    NAMED.create(inner, schedule.name.as_str(), &write(schedule)).await
}

/// Returns a schedule.
pub(crate) async fn get(inner: &Inner, name: &ScheduleName) -> Result<Option<Schedule>> {
    NAMED.get(inner, name.as_str()).await
}

/// Returns schedules sorted by name.
pub(crate) async fn list(
    inner: &Inner,
    after: Option<&ScheduleName>,
    limit: usize,
    payloads: bool,
) -> Result<Vec<Schedule>> {
    let left_out = if payloads { None } else { Some("item.payload") };
    let names = doc! { "$gt": after.map_or("", ScheduleName::as_str) };
    NAMED.list(inner, names, limit, left_out).await
}

/// Changes a schedule.
pub(crate) async fn update(
    inner: &Inner,
    name: &ScheduleName,
    change: &ScheduleChange,
) -> Result<Option<Schedule>> {
    let mut set = Document::new();
    if let Some(queue) = &change.queue {
        set.insert("queue", queue.as_str());
    }
    if let Some(cron) = &change.cron {
        set.insert("cron", cron);
    }
    if let Some(time_zone) = &change.time_zone {
        set.insert("timeZone", time_zone);
    }
    if let Some(item) = &change.item {
        set.insert("item", write_item(item));
    }
    let mut update = doc! { "$set": set };
    if let Some(until) = change.done_until {
        update.insert("$max", doc! { "doneUntil": date(until) });
    }
    change_one(inner, name, update).await
}

/// Pauses or resumes a schedule.
pub(crate) async fn pause(
    inner: &Inner,
    name: &ScheduleName,
    paused: bool,
    done_until: Timestamp,
) -> Result<Option<Schedule>> {
    let update = doc! { "$set": { "paused": paused }, "$max": { "doneUntil": date(done_until) } };
    change_one(inner, name, update).await
}

async fn change_one(
    inner: &Inner,
    name: &ScheduleName,
    update: Document,
) -> Result<Option<Schedule>> {
    let schedules = inner.db.collection::<Document>(SCHEDULES);
    let update = schedules
        .find_one_and_update(doc! { "_id": name.as_str() }, update)
        .return_document(ReturnDocument::After);
    let found = in_time(&inner.db, update).await.map_err(failed)?;
    found.as_ref().map(read).transpose()
}

/// Notes that a tick was pushed, unless a later one was noted before.
pub(crate) async fn tick_done(inner: &Inner, name: &ScheduleName, tick: Timestamp) -> Result<()> {
    let schedules = inner.db.collection::<Document>(SCHEDULES);
    let update = schedules.update_one(
        doc! { "_id": name.as_str() },
        doc! { "$max": { "doneUntil": date(tick), "lastTime": date(tick) } },
    );
    in_time(&inner.db, update).await.map_err(failed)?;
    Ok(())
}

/// Deletes a schedule. Returns false if it did not exist.
pub(crate) async fn delete(inner: &Inner, name: &ScheduleName) -> Result<bool> {
    let schedules = inner.db.collection::<Document>(SCHEDULES);
    let delete = schedules.delete_one(doc! { "_id": name.as_str() });
    let deleted = in_time(&inner.db, delete).await.map_err(failed)?;
    Ok(deleted.deleted_count > 0)
}
