//! What administrators see: items page by page, one item, counts.

use rusqlite::{OptionalExtension, Rows, params};

use super::{
    super::Page,
    checksum::is_damage,
    rows::{Stored, item_columns, read_item},
    runs,
    tx::View,
};
use crate::domain::{Depth, Item, ItemId, ItemState, Priority, Queue, Timestamp};

/// Where a page of items starts: behind this position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Position {
    /// In hand-out order.
    Handout { level: u8, when: i64, row: i64 },
    /// Among the blocked items.
    Waiting { seq: i64, row: i64 },
    /// In history.
    History { processed: i64, row: i64 },
}

const WAITING: Position = Position::Waiting { seq: i64::MIN, row: 0 };
const HISTORY: Position = Position::History { processed: i64::MAX, row: 0 };

impl Position {
    /// Returns where the items of a state, or of all, begin.
    pub(super) fn start(state: Option<ItemState>) -> Self {
        match state {
            Some(ItemState::Blocked) => WAITING,
            Some(ItemState::Processed) => HISTORY,
            _ => Self::Handout { level: Priority::LEVELS - 1, when: i64::MIN, row: 0 },
        }
    }

    /// Returns the position as a cursor of letters, digits and dots.
    pub(super) fn encode(self) -> String {
        match self {
            Self::Handout { level, when, row } => format!("a{level}.{when}.{row}"),
            Self::Waiting { seq, row } => format!("b0.{seq}.{row}"),
            Self::History { processed, row } => format!("c0.{processed}.{row}"),
        }
    }

    /// Parses the cursor of a list of that state. `None` if it is not one.
    pub(super) fn decode(cursor: &str, state: Option<ItemState>) -> Option<Self> {
        let mut parts = cursor.get(1..)?.split('.');
        let level = parts.next()?.parse().ok().filter(|level| *level < Priority::LEVELS)?;
        let first = parts.next()?.parse().ok()?;
        let row = parts.next()?.parse().ok()?;
        let position = match cursor.as_bytes().first()? {
            b'a' => Self::Handout { level, when: first, row },
            b'b' => Self::Waiting { seq: first, row },
            b'c' => Self::History { processed: first, row },
            _ => return None,
        };
        let kind = std::mem::discriminant(&position);
        let fits = state.is_none() || kind == std::mem::discriminant(&Self::start(state));
        (fits && position.encode() == cursor).then_some(position)
    }
}

/// About how many bytes of payload one page holds: so few that what waits behind the read does not wait long.
const PAGE_BYTES: usize = 256 << 10;

/// The items of a page.
struct Found {
    items: Vec<Stored>,
    /// The most items.
    most: usize,
    /// The payloads of the items.
    bytes: usize,
}

impl Found {
    fn is_full(&self) -> bool {
        self.items.len() >= self.most || self.bytes >= PAGE_BYTES
    }
}

/// Returns one page of a queue's items, behind `position`.
pub(super) fn list(
    view: &View<'_>,
    queue: &Queue,
    state: Option<ItemState>,
    position: Position,
    limit: usize,
) -> rusqlite::Result<Page<Item>> {
    let limit = limit.max(1);
    // One more than fits, to know whether there are more.
    let mut found = Found { items: Vec::new(), most: limit + 1, bytes: 0 };
    let mut position = position;
    if let Position::Handout { level, when, row } = position {
        for lower in (0..=level).rev() {
            let behind = if lower == level { (when, row) } else { (i64::MIN, 0) };
            handout(view, queue, state, lower, behind, &mut found)?;
        }
        position = WAITING;
    }
    if let Position::Waiting { seq, row } = position
        && matches!(state, None | Some(ItemState::Blocked))
    {
        const BLOCKED: &str = concat!(
            "SELECT ",
            item_columns!(),
            " FROM items INDEXED BY waiting WHERE queue = ?1 AND blocked IS NOT NULL
                AND seq >= ?2 AND (seq > ?2 OR id > ?3) AND (expires IS NULL OR expires > ?4)
              ORDER BY seq, id"
        );
        section(view, queue, BLOCKED, (seq, row), &mut found)?;
        position = HISTORY;
    }
    if let Position::History { processed, row } = position
        && matches!(state, None | Some(ItemState::Processed))
    {
        const PROCESSED: &str = concat!(
            "SELECT ",
            item_columns!(),
            " FROM items INDEXED BY history WHERE queue = ?1 AND processed IS NOT NULL
                AND processed <= ?2 AND (processed < ?2 OR id < ?3)
                AND (expires IS NULL OR expires > ?4)
              ORDER BY processed DESC, id DESC"
        );
        section(view, queue, PROCESSED, (processed, row), &mut found)?;
    }
    let more = found.is_full();
    let mut found = found.items;
    found.truncate(limit);
    let next = found.last().filter(|_| more).map(|last| position_of(last).encode());
    Ok(Page { entries: found.into_iter().map(|stored| stored.item).collect(), next })
}

fn position_of(stored: &Stored) -> Position {
    let row = stored.row;
    match (stored.item.process_time, stored.when) {
        (Some(time), _) => Position::History { processed: time.0, row },
        (None, Some(when)) => Position::Handout { level: stored.item.priority.level(), when, row },
        (None, None) => Position::Waiting { seq: stored.item.sequence.unwrap_or(0), row },
    }
}

fn handout(
    view: &View<'_>,
    queue: &Queue,
    state: Option<ItemState>,
    level: u8,
    (when, row): (i64, i64),
    found: &mut Found,
) -> rusqlite::Result<()> {
    let (from, to, locked) = match state {
        Some(ItemState::Ready) => (i64::MIN, view.now.0, None),
        Some(ItemState::Delayed) => (view.now.0 + 1, i64::MAX, Some(false)),
        Some(ItemState::Reserved) => (view.now.0 + 1, i64::MAX, Some(true)),
        _ => (i64::MIN, i64::MAX, None),
    };
    let mut statement = view.conn.prepare_cached(concat!(
        "SELECT ",
        item_columns!(),
        r#" FROM items INDEXED BY handout WHERE queue = ?1 AND priority = ?2
              AND "when" >= max(?3, ?4) AND "when" <= ?5 AND ("when" > ?4 OR id > ?6)
              AND (?7 IS NULL OR (lock IS NOT NULL) = ?7) AND (expires IS NULL OR expires > ?8)
            ORDER BY "when", id"#
    ))?;
    let name = queue.name.as_str();
    let mut rows =
        statement.query(params![name, level, from, when, to, row, locked, view.now.0])?;
    take_good(view, &mut rows, found)
}

/// Reads items and leaves out damaged ones, which the next reserve sets aside.
fn take_good(view: &View<'_>, rows: &mut Rows<'_>, found: &mut Found) -> rusqlite::Result<()> {
    while !found.is_full()
        && let Some(row) = rows.next()?
    {
        match read_item(view, row) {
            Ok(stored) => {
                found.bytes += stored.item.payload.len();
                found.items.push(stored);
            }
            Err(error) if is_damage(&error) => {
                tracing::error!(row = row.get::<_, i64>(0)?, %error, "an item is damaged: left out of a list");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn section(
    view: &View<'_>,
    queue: &Queue,
    sql: &str,
    (first, row): (i64, i64),
    found: &mut Found,
) -> rusqlite::Result<()> {
    let mut statement = view.conn.prepare_cached(sql)?;
    let mut rows = statement.query(params![queue.name.as_str(), first, row, view.now.0])?;
    take_good(view, &mut rows, found)
}

/// Returns an item of the queue, unless it has expired.
pub(super) fn get(view: &View<'_>, queue: &Queue, id: ItemId) -> rusqlite::Result<Option<Item>> {
    view.conn
        .prepare_cached(concat!(
            "SELECT ",
            item_columns!(),
            " FROM items WHERE id = ?1 AND queue = ?2 AND (expires IS NULL OR expires > ?3)"
        ))?
        .query_row(params![view.row_id(id), queue.name.as_str(), view.now.0], |row| {
            read_item(view, row)
        })
        .optional()
        .map(|stored| stored.map(|stored| stored.item))
}

/// Returns when the first item that is not eligible at `after` becomes eligible, or when the first lease ends after
/// that.
pub(super) fn next_eligible(
    view: &View<'_>,
    queue: &Queue,
    after: Timestamp,
) -> rusqlite::Result<Option<Timestamp>> {
    let mut earliest: Option<i64> = None;
    let mut statement = view.conn.prepare_cached(
        r#"SELECT "when" FROM items INDEXED BY handout WHERE queue = ?1 AND priority = ?2
             AND "when" > ?3 AND ("when", id) > (?4, ?5) AND (expires IS NULL OR expires > "when")
           ORDER BY "when" LIMIT 1"#,
    )?;
    for (level, end) in runs::ends(view, queue)?.into_iter().enumerate() {
        let (name, level) = (queue.name.as_str(), level as u8);
        let next = statement
            .query_row(params![name, level, after.0, end.when, end.row], |row| row.get(0))
            .optional()?;
        earliest = earliest.into_iter().chain(next).min();
    }
    let lapse = runs::next_lapse(view, queue, after)?;
    Ok(earliest.into_iter().chain(lapse).min().map(Timestamp))
}

/// Counts the items of a queue.
pub(super) fn depth(view: &View<'_>, queue: &Queue) -> rusqlite::Result<Depth> {
    let (name, now) = (queue.name.as_str(), view.now.0);
    let mut depth =
        Depth { next_eligible: next_eligible(view, queue, view.now)?, ..Depth::default() };
    let count = |sql: &str| {
        view.conn
            .prepare_cached(sql)?
            .query_row(params![name], |row| row.get::<_, i64>(0))
            .map(i64::cast_unsigned)
    };
    // The index alone answers these queries. Expired items that are not removed yet are subtracted below.
    depth.blocked = count(
        "SELECT count(*) FROM items INDEXED BY waiting WHERE queue = ?1 AND blocked IS NOT NULL",
    )?;
    depth.processed = count(
        "SELECT count(*) FROM items INDEXED BY history WHERE queue = ?1 AND processed IS NOT NULL",
    )?;
    let mut ready = view.conn.prepare_cached(
        r#"SELECT count(*) FROM items INDEXED BY handout
           WHERE queue = ?1 AND priority = ?2 AND "when" <= ?3"#,
    )?;
    let mut first = view.conn.prepare_cached(
        r#"SELECT "when" FROM items INDEXED BY handout WHERE queue = ?1 AND priority = ?2
             AND "when" <= ?3 AND (expires IS NULL OR expires > ?3) ORDER BY "when", id LIMIT 1"#,
    )?;
    let mut later = view.conn.prepare_cached(
        r#"SELECT count(*), count(lock) FROM items INDEXED BY handout
           WHERE queue = ?1 AND priority = ?2 AND "when" > ?3"#,
    )?;
    for level in (0..Priority::LEVELS).rev() {
        let at = params![name, level, now];
        depth.ready += ready.query_row(at, |row| row.get::<_, i64>(0))?.cast_unsigned();
        if depth.oldest_ready.is_none() {
            depth.oldest_ready = first.query_row(at, |row| row.get(0)).optional()?.map(Timestamp);
        }
        let (all, reserved) =
            later.query_row(at, |row| Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?)))?;
        depth.reserved += reserved.cast_unsigned();
        depth.delayed += (all - reserved).cast_unsigned();
    }
    let mut expired = view.conn.prepare_cached(
        r#"SELECT processed, blocked, "when", lock IS NOT NULL FROM items INDEXED BY expiry
           WHERE expires <= ?2 AND queue = ?1"#,
    )?;
    let mut rows = expired.query(params![name, now])?;
    while let Some(row) = rows.next()? {
        let is = |column| row.get::<_, Option<i64>>(column);
        let counter = match (is(0)?, is(1)?, is(2)?) {
            (Some(_), _, _) => &mut depth.processed,
            (_, Some(_), _) => &mut depth.blocked,
            (_, _, Some(when)) if when > now && row.get(3)? => &mut depth.reserved,
            (_, _, Some(when)) if when > now => &mut depth.delayed,
            _ => &mut depth.ready,
        };
        *counter = counter.saturating_sub(1);
    }
    Ok(depth)
}
