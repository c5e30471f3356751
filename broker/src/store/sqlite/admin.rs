//! Operations of administrators: delete, purge, replay, redrive. Large jobs run in chunks, one transaction each, so
//! that pushes do not wait for them.

use rusqlite::{OptionalExtension, Row, params};

use super::{
    super::{ItemDeleted, RedriveFilter, Selection},
    browse,
    order::{self, Place, place},
    payloads::payload_length,
    queues::settings_changed,
    tx::{Tx, View},
};
use crate::domain::{ItemId, ItemState, Priority, Queue, QueueName, Timestamp};

/// Limit of items changed in one transaction.
pub(super) const CHUNK: usize = 1_000;
/// Payload bytes after which a step that deletes ends, because each page of a large payload has to be freed.
const CHUNK_BYTES: i64 = 16 << 20;

/// Deletes an item of the queue, if it is in the state `only_if`, and its deduplication id.
pub(super) fn delete_item(
    tx: &Tx<'_>,
    queue: &Queue,
    id: ItemId,
    only_if: Option<ItemState>,
) -> rusqlite::Result<ItemDeleted> {
    let Some(place) = place(tx, tx.row_id(id))? else { return Ok(ItemDeleted::NotFound) };
    if place.queue != queue.name.as_str() {
        return Ok(ItemDeleted::NotFound);
    }
    if place.expired(tx.now) {
        place.delete_expired(tx)?;
        return Ok(ItemDeleted::NotFound);
    }
    if let Some(wanted) = only_if
        && let Some(item) = browse::get(tx, queue, id)?
        && item.state != wanted
    {
        return Ok(ItemDeleted::OtherState(item.state));
    }
    erase(tx, &place)?;
    Ok(ItemDeleted::Done)
}

fn erase(tx: &Tx<'_>, place: &Place) -> rusqlite::Result<()> {
    tx.conn.prepare_cached("DELETE FROM dedup WHERE id = ?1")?.execute([place.row])?;
    place.delete(tx).map(drop)
}

/// What a purge deletes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purge {
    /// All items but reserved ones.
    Unreserved,
    /// All items.
    Everything,
}

/// Which items are old enough for a purge.
#[derive(Debug, Clone, Copy)]
pub(super) struct Before {
    /// Items of lower rows.
    row: i64,
    /// Items that were first pushed at this time or earlier.
    created: i64,
}

impl Before {
    /// Any item.
    pub(super) const ANY: Self = Self { row: i64::MAX, created: i64::MAX };

    /// Items of lower rows than this one.
    pub(super) fn row(row: i64) -> Self {
        Self { row, ..Self::ANY }
    }

    /// Items that were first pushed at this time or earlier.
    pub(super) fn created(by: Timestamp) -> Self {
        Self { created: by.0, ..Self::ANY }
    }
}

/// Deletes up to [`CHUNK`] items, or a little more than [`CHUNK_BYTES`], that came `before`. Returns how many, and
/// how many of them had not expired. Blocked items go first, so that none stays behind without an earlier item to
/// unblock it.
pub(super) fn purge_chunk(
    tx: &Tx<'_>,
    queue: &Queue,
    before: Before,
    what: Purge,
) -> rusqlite::Result<(usize, u64)> {
    const SECTIONS: [&str; 3] = [
        concat!(
            "SELECT id, ",
            payload_length!(),
            " FROM items INDEXED BY waiting
              WHERE queue = ?1 AND blocked IS NOT NULL AND id < ?2 AND created <= ?6 LIMIT ?5"
        ),
        concat!(
            "SELECT id, ",
            payload_length!(),
            " FROM items INDEXED BY history
              WHERE queue = ?1 AND processed IS NOT NULL AND id < ?2 AND created <= ?6 LIMIT ?5"
        ),
        concat!(
            "SELECT id, ",
            payload_length!(),
            r#" FROM items INDEXED BY handout WHERE queue = ?1 AND "when" IS NOT NULL
                AND id < ?2 AND created <= ?6 AND (?3 OR lock IS NULL OR "when" <= ?4) LIMIT ?5"#
        ),
    ];
    let all = what == Purge::Everything;
    let mut rows: Vec<i64> = Vec::new();
    let mut bytes = 0;
    for sql in SECTIONS {
        let left = (CHUNK - rows.len()) as i64;
        let mut statement = tx.conn.prepare_cached(sql)?;
        let name = queue.name.as_str();
        let mut found =
            statement.query(params![name, before.row, all, tx.now.0, left, before.created])?;
        while bytes < CHUNK_BYTES
            && let Some(row) = found.next()?
        {
            rows.push(row.get(0)?);
            bytes += row.get::<_, i64>(1)?;
        }
    }
    let mut counted = 0;
    for &row in &rows {
        if let Some(place) = place(tx, row)? {
            counted += u64::from(!place.expired(tx.now));
            erase(tx, &place)?;
        }
    }
    Ok((rows.len(), counted))
}

/// Returns true if the queue holds an item that is neither settled nor expired.
pub(super) fn holds_items(view: &View<'_>, queue: &Queue) -> rusqlite::Result<bool> {
    const SECTIONS: [&str; 2] = [
        r#"SELECT 1 FROM items INDEXED BY handout WHERE queue = ?1 AND "when" IS NOT NULL
             AND (expires IS NULL OR expires > ?2) LIMIT 1"#,
        "SELECT 1 FROM items INDEXED BY waiting WHERE queue = ?1 AND blocked IS NOT NULL
           AND (expires IS NULL OR expires > ?2) LIMIT 1",
    ];
    for sql in SECTIONS {
        if view.conn.prepare_cached(sql)?.exists(params![queue.name.as_str(), view.now.0])? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Deletes up to [`CHUNK`] deduplication ids of the queue and returns how many.
pub(super) fn forget_chunk(tx: &Tx<'_>, queue: &QueueName) -> rusqlite::Result<usize> {
    tx.conn
        .prepare_cached(
            "DELETE FROM dedup WHERE queue = ?1 AND dedup IN
               (SELECT dedup FROM dedup WHERE queue = ?1 LIMIT ?2)",
        )?
        .execute(params![queue.as_str(), CHUNK as i64])
}

/// Deletes what is left of the queue, and then the queue itself. Returns how many items were left, and true if the
/// queue is deleted. If more is left than one step deletes, the queue stays, unless `all` is set.
pub(super) fn delete_queue(tx: &Tx<'_>, queue: &Queue, all: bool) -> rusqlite::Result<(u64, bool)> {
    let (mut late, mut is_first) = (0, true);
    loop {
        let (deleted, counted) = purge_chunk(tx, queue, Before::ANY, Purge::Everything)?;
        late += counted;
        if deleted == 0 {
            break;
        }
        if !is_first && !all {
            return Ok((late, false));
        }
        is_first = false;
    }
    if !all && forget_chunk(tx, &queue.name)? == CHUNK {
        return Ok((late, false));
    }
    for sql in [
        "DELETE FROM dedup WHERE queue = ?1",
        "DELETE FROM counters WHERE queue = ?1",
        "DELETE FROM totals WHERE queue = ?1",
        "DELETE FROM queues WHERE name = ?1",
    ] {
        tx.conn.prepare_cached(sql)?.execute([queue.name.as_str()])?;
    }
    settings_changed(tx)?;
    Ok((late, true))
}

/// Makes up to `limit` processed items ready again, the oldest first.
pub(super) fn replay_chunk(
    tx: &Tx<'_>,
    queue: &Queue,
    selection: &Selection,
    limit: usize,
) -> rusqlite::Result<u64> {
    let name = queue.name.as_str();
    let rows: Vec<i64> = match selection {
        Selection::Ids(ids) => {
            let mut found = Vec::new();
            let mut processed = tx.conn.prepare_cached(
                "SELECT processed, id FROM items WHERE id = ?1 AND queue = ?2
                   AND processed IS NOT NULL AND (expires IS NULL OR expires > ?3)",
            )?;
            for id in ids {
                let row: Option<(i64, i64)> = processed
                    .query_row(params![tx.row_id(*id), name, tx.now.0], |row| {
                        Ok((row.get(0)?, row.get(1)?))
                    })
                    .optional()?;
                found.extend(row);
            }
            found.sort_unstable();
            found.dedup();
            found.into_iter().take(limit).map(|(_, row)| row).collect()
        }
        Selection::Processed { start, end } => tx
            .conn
            .prepare_cached(
                "SELECT id FROM items INDEXED BY history WHERE queue = ?1 AND processed IS NOT NULL
                   AND processed >= ?2 AND processed < ?3 AND (expires IS NULL OR expires > ?4)
                 ORDER BY processed, id LIMIT ?5",
            )?
            .query_map(params![name, start.0, end.0, tx.now.0, limit as i64], |row| row.get(0))?
            .collect::<rusqlite::Result<_>>()?,
    };
    let expires = queue.default_ttl.map(|ttl| (tx.now + ttl).0);
    for &row in &rows {
        let Some(place) = place(tx, row)? else { continue };
        let waits = match &place.key {
            Some(key) if place.origin.is_none() => order::must_wait(tx, &queue.name, key, row)?,
            _ => false,
        };
        let (when, blocked) = times(tx, waits);
        tx.conn
            .prepare_cached(
                r#"UPDATE items SET processed = NULL, "when" = ?2, blocked = ?3, attempt = 1,
                     earlier = deliveries, expires = ?4,
                     dead_lettered = iif(origin IS NULL, NULL, dead_lettered),
                     failed_attempts = iif(origin IS NULL, NULL, failed_attempts) WHERE id = ?1"#,
            )?
            .execute(params![row, when, blocked, expires])?;
    }
    Ok(rows.len() as u64)
}

/// Returns `when` and `blocked` of an item that is due now.
fn times(tx: &Tx<'_>, waits: bool) -> (Option<i64>, Option<i64>) {
    if waits { (None, Some(tx.now.0)) } else { (Some(tx.now.0), None) }
}

/// Returns the queues from which the ready items of this one were dead-lettered.
pub(super) fn origins(view: &View<'_>, queue: &Queue) -> rusqlite::Result<Vec<QueueName>> {
    let mut origins = Vec::new();
    let mut after = String::new();
    let mut next = view.conn.prepare_cached(
        "SELECT origin FROM items INDEXED BY origins WHERE queue = ?1 AND origin > ?2
         ORDER BY origin LIMIT 1",
    )?;
    let mut ready = view.conn.prepare_cached(
        r#"SELECT 1 FROM items INDEXED BY origins WHERE queue = ?1 AND origin = ?2
             AND "when" <= ?3 AND (expires IS NULL OR expires > ?3) LIMIT 1"#,
    )?;
    let name = queue.name.as_str();
    while let Some(origin) =
        next.query_row(params![name, after], |row| row.get::<_, String>(0)).optional()?
    {
        if ready.exists(params![name, origin, view.now.0])? {
            origins.extend(QueueName::parse("origin", &origin).ok());
        }
        after = origin;
    }
    Ok(origins)
}

/// How far a redrive has come: the place of the last item that it read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reached {
    level: u8,
    when: i64,
    row: i64,
}

impl Reached {
    /// The start of a redrive.
    pub(super) const START: Self = Self { level: Priority::LEVELS - 1, when: i64::MIN, row: 0 };

    pub(super) fn encode(self) -> String {
        format!("{}.{}.{}", self.level, self.when, self.row)
    }

    pub(super) fn decode(text: &str) -> Option<Self> {
        let mut parts = text.split('.');
        let level = parts.next()?.parse().ok().filter(|level| *level < Priority::LEVELS)?;
        let (when, row) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        parts.next().is_none().then_some(Self { level, when, row })
    }
}

/// An item that a redrive has read.
struct Candidate {
    place: Reached,
    origin: Option<String>,
    reason: String,
    created: i64,
}

impl Candidate {
    fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        let place = Reached { level: row.get(0)?, when: row.get(1)?, row: row.get(2)? };
        Ok(Self { place, origin: row.get(3)?, reason: row.get(4)?, created: row.get(5)? })
    }

    fn passes(&self, filter: &RedriveFilter) -> bool {
        let from = |name: &QueueName| self.origin.as_deref() == Some(name.as_str());
        filter.origin_queue.as_ref().is_none_or(from)
            && self.reason.contains(&filter.reason_contains)
            && filter.reason.as_ref().is_none_or(|reason| self.reason == *reason)
            && filter.created_from.is_none_or(|time| self.created >= time.0)
            && filter.created_before.is_none_or(|time| self.created < time.0)
    }
}

/// Reads the next [`CHUNK`] items, or those whose ids are given, and moves those that pass the filter, at most
/// `limit`. Returns how many it moved, and where to go on, `None` at the end.
pub(super) fn redrive_chunk(
    tx: &Tx<'_>,
    queue: &Queue,
    to: &Queue,
    filter: &RedriveFilter,
    limit: u64,
    from: Reached,
) -> rusqlite::Result<(u64, Option<Reached>)> {
    let ready_by = filter.ready_by.map_or(tx.now, |by| by.min(tx.now));
    let candidates = if filter.ids.is_empty() {
        ready_behind(tx, queue, from, ready_by)?
    } else {
        ready_of(tx, queue, &filter.ids, ready_by)?
    };
    // Items that were moved are no longer found by their ids.
    let is_cut = filter.ids.is_empty() && candidates.len() == CHUNK;
    let next = candidates.last().map(|last| last.place).filter(|_| is_cut);
    let mut moved = 0;
    for candidate in candidates.iter().filter(|candidate| candidate.passes(filter)) {
        if let Some(place) = place(tx, candidate.place.row)? {
            redrive(tx, &place, to)?;
            moved += 1;
        }
        if moved == limit {
            return Ok((moved, Some(candidate.place)));
        }
    }
    Ok((moved, next))
}

/// Returns up to [`CHUNK`] items behind a place that are ready, in hand-out order.
fn ready_behind(
    view: &View<'_>,
    queue: &Queue,
    from: Reached,
    by: Timestamp,
) -> rusqlite::Result<Vec<Candidate>> {
    let mut found = Vec::new();
    let mut statement = view.conn.prepare_cached(
        r#"SELECT priority, "when", id, origin, coalesce(reason, ''), created
           FROM items INDEXED BY handout
           WHERE queue = ?1 AND priority = ?2 AND "when" >= ?3 AND "when" <= ?5
             AND ("when" > ?3 OR id > ?4) AND (expires IS NULL OR expires > ?7)
           ORDER BY "when", id LIMIT ?6"#,
    )?;
    for level in (0..=from.level).rev() {
        let (when, row) = if level == from.level { (from.when, from.row) } else { (i64::MIN, 0) };
        let left = (CHUNK - found.len()) as i64;
        let candidates = statement.query_map(
            params![queue.name.as_str(), level, when, row, by.0, left, view.now.0],
            Candidate::read,
        )?;
        for candidate in candidates {
            found.push(candidate?);
        }
    }
    Ok(found)
}

/// Returns those of the items that are ready in the queue, in hand-out order.
fn ready_of(
    view: &View<'_>,
    queue: &Queue,
    ids: &[ItemId],
    by: Timestamp,
) -> rusqlite::Result<Vec<Candidate>> {
    let rows: Vec<String> = ids.iter().map(|id| view.row_id(*id).to_string()).collect();
    let rows = format!("[{}]", rows.join(","));
    view.conn
        .prepare_cached(
            r#"SELECT priority, "when", id, origin, coalesce(reason, ''), created FROM items
               WHERE id IN (SELECT value FROM json_each(?1)) AND +queue = ?2 AND +"when" <= ?3
                 AND (expires IS NULL OR expires > ?4)
               ORDER BY priority DESC, "when", id"#,
        )?
        .query_map(params![rows, queue.name.as_str(), by.0, view.now.0], Candidate::read)?
        .collect()
}

fn redrive(tx: &Tx<'_>, place: &Place, to: &Queue) -> rusqlite::Result<()> {
    let waits = match &place.key {
        Some(key) => order::must_wait(tx, &to.name, key, place.row)?,
        None => false,
    };
    let (when, blocked) = times(tx, waits);
    tx.conn
        .prepare_cached(
            r#"UPDATE items SET queue = ?2, "when" = ?3, blocked = ?4, attempt = 1, earlier = deliveries,
                 lock = NULL, origin = NULL, dead_lettered = NULL, failed_attempts = NULL WHERE id = ?1"#,
        )?
        .execute(params![place.row, to.name.as_str(), when, blocked])?;
    if place.origin.as_deref() != Some(to.name.as_str()) {
        let sequence = order::stamp(tx, to, place.key.is_some())?;
        tx.conn
            .prepare_cached("UPDATE items SET seq = ?2 WHERE id = ?1")?
            .execute(params![place.row, sequence])?;
    }
    place.pass_turn(tx).map(drop)
}
