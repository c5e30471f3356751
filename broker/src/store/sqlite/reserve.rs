//! Reserves items: from the head of a queue to consumers.

use std::sync::Arc;

use rusqlite::params;

use super::{
    super::Reserved,
    checksum::{index_corruption, is_corruption, is_damage},
    damage::{pass_over, set_aside},
    order::{self, Place, place},
    rows::{Stored, item_columns, lock_text, read_item_of},
    runs::{self, End, Run},
    tx::Tx,
};
use crate::domain::{
    AtHead, AtLimit, Delivery, Demand, Item, ItemSize, ItemState, LeaseToken, LimitReason, Queue,
    Receipt, Timestamp, Triage, assign, limits::MAX_MESSAGE_BYTES,
};

/// Limit of items assigned in one call.
const MAX_DEALT: usize = 2_000;
/// Limit of dead or expired items removed in one call.
const MAX_CLEARED: usize = 2_000;

/// The head of a queue.
#[derive(Default)]
pub(super) struct Head {
    /// Items to assign, each with its attempt number.
    pub(super) live: Vec<(Stored, u32)>,
    /// Rows whose lease lapsed at a limit, with the limit and the number of failed attempts.
    dead: Vec<(i64, LimitReason, u32)>,
    /// Rows that have expired.
    pub(super) expired: Vec<i64>,
    /// Rows that are damaged, and why.
    damaged: Vec<(i64, rusqlite::Error)>,
    /// True if there are more items behind.
    pub(super) cut: bool,
}

/// Reserves items of the queue for the demands.
pub(super) fn reserve(
    tx: &Tx<'_>,
    queue: &Arc<Queue>,
    demands: &[Demand],
    broker: [u8; 4],
) -> rusqlite::Result<Reserved> {
    runs::write_out_if_lapsed(tx, queue)?;
    let head = read_head(tx, queue, demands)?;
    if !head.dead.is_empty() && queue.at_limit == AtLimit::Unknown {
        return Ok(Reserved { more: true, limit_unknown: true, ..Reserved::default() });
    }
    let mut reserved = Reserved { more: head.cut, ..Reserved::default() };
    for (row, why) in head.damaged {
        reserved.damaged += 1;
        reserved.more |= set_aside(tx, row, &why)?;
    }
    for row in head.expired {
        if let Some(place) = place(tx, row)? {
            reserved.more |= place.delete(tx)?;
            reserved.expired += 1;
        }
    }
    for (row, reason, failed_attempts) in head.dead {
        if let Some(place) = place(tx, row)? {
            reserved.more |= bury(tx, queue, &place, failed_attempts)?;
            reserved.at_limit.add(reason, 1);
        }
    }

    let sizes: Vec<ItemSize> = head.live.iter().map(|(stored, _)| size_of(&stored.item)).collect();
    let assigned = assign(&sizes, demands);
    reserved.more |= assigned.len() < head.live.len();
    let leased: Vec<Leased<'_>> = (head.live.into_iter().zip(assigned))
        .map(|((stored, attempt), claimant)| {
            let want = &demands[claimant];
            Leased { stored, attempt, claimant, want, end: tx.now + want.lease }
        })
        .collect();
    let token = LeaseToken::fresh(broker);
    lease(tx, queue, &leased, token)?;
    for Leased { stored, attempt, claimant, want, end } in leased {
        let mut item = stored.item;
        let deliveries = item.deliveries.saturating_add(1);
        let receipt = Receipt {
            keyed: item.ordering_key.is_some(),
            item: item.id,
            token,
            deliveries,
            earlier_deliveries: stored.earlier,
            attempt,
            queue: queue.name.clone(),
            group: queue.group.clone(),
        };
        (item.state, item.eligible_time) = (ItemState::Reserved, Some(end));
        (item.attempt, item.deliveries) = (attempt, deliveries);
        item.consumer.clone_from(&want.consumer);
        item.due_time = stored.when.map(Timestamp);
        let delivery = Delivery {
            item: Box::new(item),
            receipt,
            lease_expire_time: end,
            previous_eligible_time: Timestamp(stored.when.unwrap_or(tx.now.0)),
            former_lease: stored.lease,
            tag: 0,
        };
        reserved.deliveries.push((claimant, delivery));
    }
    Ok(reserved)
}

/// An item that a reserve hands to one of the demands.
struct Leased<'a> {
    stored: Stored,
    attempt: u32,
    /// Which of the demands.
    claimant: usize,
    want: &'a Demand,
    /// When the lease ends.
    end: Timestamp,
}

impl Leased<'_> {
    /// Returns how many bytes there are of what the producer sent.
    fn bytes(&self) -> usize {
        let Item { payload, headers, .. } = &self.stored.item;
        let of_headers: usize = headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        payload.len() + of_headers
    }

    /// Returns true if one statement can lease both, because `next` follows in the table, and all that is written is the same.
    fn goes_with(&self, next: &Self) -> bool {
        self.stored.row.checked_add(1) == Some(next.stored.row)
            && (next.stored.item.deliveries, next.attempt, next.end)
                == (self.stored.item.deliveries, self.attempt, self.end)
            && next.want.consumer == self.want.consumer
    }
}

/// Writes the leases: one statement for all items that lie side by side, which costs a third less than one for each, or none at all
/// where one commit is likely to end all of them.
fn lease(
    tx: &Tx<'_>,
    queue: &Queue,
    all: &[Leased<'_>],
    token: LeaseToken,
) -> rusqlite::Result<()> {
    let lock = lock_text(token);
    for side_by_side in all.chunk_by(Leased::goes_with) {
        let ([first, ..], [.., last]) = (side_by_side, side_by_side) else { continue };
        let run = Run {
            first: first.stored.row,
            last: last.stored.row,
            queue: queue.name.as_str().to_owned(),
            priority: first.stored.item.priority.level(),
            up_to: last.stored.when.unwrap_or(tx.now.0),
            until: first.end.0,
            lock: lock.clone(),
            delivered: first.stored.item.deliveries,
            attempt: first.attempt,
            consumer: first.want.consumer.as_ref().map(|name| name.as_str().to_owned()),
            expires: side_by_side
                .iter()
                .filter_map(|one| one.stored.item.expire_time)
                .min()
                .map(Timestamp::millis),
        };
        let is_one_commit = queue.retention.is_zero()
            && !first.want.spare
            && side_by_side.iter().all(|one| {
                one.claimant == first.claimant
                    && one.stored.item.priority == first.stored.item.priority
                    && one.stored.item.ordering_key.is_none()
            });
        let bytes = || side_by_side.iter().map(Leased::bytes).sum();
        if is_one_commit && runs::add(tx, &run, bytes())? {
            continue;
        }
        if runs::lease(tx.conn, &run)? != side_by_side.len() {
            return Err(index_corruption("it names an item twice"));
        }
    }
    Ok(())
}

/// Reads items as the index lists them. The last column says whether the item is where the index says, because a
/// damaged index may name items of other queues, leased items, or none.
macro_rules! level {
    ($condition:literal) => {
        concat!(
            "SELECT ",
            item_columns!(),
            r#", queue = ?1 AND priority = ?2 AND "when" = entry_when
               FROM (SELECT id AS entry, "when" AS entry_when FROM items INDEXED BY handout
                     WHERE queue = ?1 AND priority = ?2 AND "when" <= ?3 AND ("when", id) > (?4, ?5)"#,
            $condition,
            ") LEFT JOIN items ON id = entry ORDER BY entry_when, entry"
        )
    };
}
pub(super) const LEVEL: &str = level!("");
/// Like [`LEVEL`], without rows that cannot be read.
const LEVEL_IN_PART: &str = level!(" AND id NOT IN (SELECT value FROM json_each(?6))");
/// The column of [`level`] that says whether the item is where the index says.
const IS_THERE: usize = 26;

/// Reads the items that the demands can take, and one more to know whether there are more.
pub(super) fn read_head(
    view: &Tx<'_>,
    queue: &Queue,
    demands: &[Demand],
) -> rusqlite::Result<Head> {
    let max_items = demands.iter().fold(0_usize, |sum, want| sum.saturating_add(want.max_items));
    let max_items = max_items.min(MAX_DEALT);
    let max_bytes = demands
        .iter()
        .fold(0_usize, |sum, want| sum.saturating_add(want.max_bytes.min(MAX_MESSAGE_BYTES)));
    let mut head = Head::default();
    if max_items == 0 {
        return Ok(head);
    }
    let mut bytes = 0_usize;
    // One priority at a time, because each has delayed and reserved items of its own behind its ready ones.
    let passed_over = view.passed_over();
    let mut level_head = view.conn.prepare_cached(match passed_over {
        None => LEVEL,
        Some(_) => LEVEL_IN_PART,
    })?;
    let ends = if view.runs.any() { runs::ends(view, queue)? } else { End::all_at_start() };
    for (level, end) in ends.into_iter().enumerate().rev() {
        let (name, level) = (queue.name.as_str(), level as u8);
        let mut rows = match &passed_over {
            None => level_head.query(params![name, level, view.now.0, end.when, end.row])?,
            Some(rows) => {
                level_head.query(params![name, level, view.now.0, end.when, end.row, rows])?
            }
        };
        loop {
            let row = match rows.next() {
                Ok(Some(row)) => row,
                Ok(None) => break,
                Err(error) if is_corruption(&error) => {
                    if let Some((row, why)) = find_unreadable(view, queue, level)? {
                        pass_over(view, row, &why);
                    }
                    return Err(error); // this transaction can do nothing more; the next one passes the item over
                }
                Err(error) => return Err(error),
            };
            if row.get::<_, Option<bool>>(IS_THERE)? != Some(true) {
                return Err(index_corruption("it names an item that does not exist"));
            }
            let id: i64 = row.get(0)?;
            let stored = match read_item_of(view, queue.name.clone(), row) {
                Ok(stored) => stored,
                Err(error) if is_damage(&error) => {
                    head.damaged.push((id, error));
                    head.cut = head.damaged.len() >= MAX_CLEARED;
                    if head.cut {
                        return Ok(head);
                    }
                    continue;
                }
                Err(error) => return Err(error),
            };
            match queue.triage(at_head(&stored), view.now) {
                Triage::Expired => head.expired.push(stored.row),
                Triage::AtLimit { reason, failed_attempts } => {
                    head.dead.push((stored.row, reason, failed_attempts));
                }
                Triage::Live { attempt } => {
                    bytes = bytes.saturating_add(stored.item.payload.len());
                    head.live.push((stored, attempt));
                }
            }
            // Limits the bytes read into memory. Each demand may take one item that exceeds its limit.
            head.cut = head.live.len() > max_items
                || (bytes > max_bytes && head.live.len() > demands.len())
                || head.expired.len() + head.dead.len() >= MAX_CLEARED;
            if head.cut {
                return Ok(head);
            }
        }
    }
    Ok(head)
}

fn size_of(item: &Item) -> ItemSize {
    ItemSize { payload: item.payload.len(), message: item.message_bytes() }
}

/// Returns the first item of the priority that cannot be read, where the file is damaged. The index alone says which
/// items there are.
fn find_unreadable(
    tx: &Tx<'_>,
    queue: &Queue,
    level: u8,
) -> rusqlite::Result<Option<(i64, rusqlite::Error)>> {
    let passed_over = tx.passed_over().unwrap_or_else(|| "[]".to_owned());
    let mut all = tx.conn.prepare_cached(
        r#"SELECT id FROM items INDEXED BY handout WHERE queue = ?1 AND priority = ?2 AND "when" <= ?3
             AND id NOT IN (SELECT value FROM json_each(?4)) ORDER BY "when", id"#,
    )?;
    let mut one =
        tx.conn.prepare_cached(concat!("SELECT ", item_columns!(), " FROM items WHERE id = ?1"))?;
    let mut ids = all.query(params![queue.name.as_str(), level, tx.now.0, passed_over])?;
    while let Some(id) = ids.next()? {
        let id: i64 = id.get(0)?;
        match one.query_row([id], |row| read_item_of(tx, queue.name.clone(), row).map(drop)) {
            Err(rusqlite::Error::QueryReturnedNoRows) | Ok(()) => {}
            Err(error) if is_damage(&error) => return Ok(Some((id, error))),
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

fn at_head(stored: &Stored) -> AtHead {
    let Item { attempt, deliveries, expire_time, .. } = stored.item;
    let (lapsed, earlier_deliveries) = (stored.lease.is_some(), stored.earlier);
    AtHead { expire_time, lapsed, attempt, deliveries, earlier_deliveries }
}

fn bury(tx: &Tx<'_>, queue: &Queue, place: &Place, failed_attempts: u32) -> rusqlite::Result<bool> {
    let reason: Option<String> = tx
        .conn
        .prepare_cached("SELECT nullif(reason, '') FROM items WHERE id = ?1")?
        .query_row([place.row], |row| row.get(0))?;
    let reason = reason.unwrap_or_else(|| "lease lapsed".to_owned());
    match &queue.at_limit {
        AtLimit::DeadLetter(to) => {
            order::dead_letter(tx, queue, place, to, failed_attempts, Some(&reason))
        }
        AtLimit::Discard => order::discard(tx, queue, place, failed_attempts, Some(&reason)),
        // The caller handles `Unknown`, and with `Nowhere` no item is at a limit.
        AtLimit::Unknown | AtLimit::Nowhere => Ok(false),
    }
}
