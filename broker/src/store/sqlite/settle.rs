//! Settles items for the holders of receipts: commit, roll back, extend, move.
//!
//! The first statement of each settle changes the item only if the receipt is valid. All other cases (stale receipts,
//! keys, history) are examined only if it changed nothing.

use rusqlite::{OptionalExtension, params};

use super::{
    super::{EndedDelivery, Extension, Move, Push, Reservation, Rollback, RollbackTo},
    checksum::{Summed, is_damage, sum_of, summed_columns, verify},
    order::{self, Place, place},
    payloads,
    push::push,
    rows::{headers, headers_json, lock_text},
    runs,
    tx::{Tx, View},
};
use crate::domain::{Outcome, Pushed, Receipt, Timestamp, cut_reason};

/// The condition under which `?2` (token), `?3` (delivery) and `?4` (now) hold an item.
macro_rules! leased {
    () => {
        "lock = ?2 AND deliveries = ?3 AND (expires IS NULL OR expires > ?4)"
    };
}

/// The same for the item in row `?1`.
macro_rules! held {
    () => {
        concat!("id = ?1 AND ", leased!())
    };
}

/// The same for the items without ordering keys in the rows from `?1` to `?5`.
macro_rules! held_run {
    () => {
        concat!("id BETWEEN ?1 AND ?5 AND ", leased!(), " AND key IS NULL")
    };
}

/// Returns the item of a receipt, or the outcome if the receipt does not hold it.
fn look_up(tx: &Tx<'_>, receipt: &Receipt) -> rusqlite::Result<Result<Place, Outcome>> {
    let Some(place) = place(tx, tx.row_id(receipt.item))? else { return Ok(Err(Outcome::Gone)) };
    if place.expired(tx.now) {
        place.delete_expired(tx)?;
        return Ok(Err(Outcome::Gone));
    }
    if place.processed {
        return Ok(Err(Outcome::Gone));
    }
    let valid = place.lock.as_deref() == Some(lock_text(receipt.token).as_str())
        && place.deliveries == receipt.deliveries;
    Ok(if valid { Ok(place) } else { Err(Outcome::LeaseLost) })
}

/// Returns when the receipt's lease ends or has ended, or `None` if the receipt does not hold its item.
pub(super) fn lease_end(view: &View<'_>, receipt: &Receipt) -> rusqlite::Result<Option<Timestamp>> {
    view.conn
        .prepare_cached(concat!(r#"SELECT "when" FROM items WHERE "#, held!()))?
        .query_row(
            params![
                view.row_id(receipt.item),
                lock_text(receipt.token),
                receipt.deliveries,
                view.now.0
            ],
            |row| row.get(0).map(Timestamp),
        )
        .optional()
}

/// Commits items.
pub(super) fn commit(tx: &Tx<'_>, items: &[Reservation]) -> rusqlite::Result<Vec<Outcome>> {
    let mut outcomes = Vec::with_capacity(items.len());
    let mut rows = Vec::new();
    for run in items.chunk_by(|one, next| goes_with(tx, one, next)) {
        if delete_leased_together(tx, run)? || delete_side_by_side(tx, run)? {
            rows.extend(run.iter().map(|held| tx.row_id(held.receipt.item)));
            outcomes.resize(outcomes.len() + run.len(), Outcome::Ok);
            continue;
        }
        for held in run {
            outcomes.push(commit_one(tx, held, &mut rows)?);
        }
    }
    payloads::delete_all(tx, &rows)?;
    Ok(outcomes)
}

/// Returns true if one statement can commit both, because `next` follows in the table, and was reserved together with `one`.
fn goes_with(tx: &Tx<'_>, one: &Reservation, next: &Reservation) -> bool {
    let (receipt, following) = (&one.receipt, &next.receipt);
    tx.row_id(receipt.item).checked_add(1) == Some(tx.row_id(following.item))
        && (following.token, following.deliveries) == (receipt.token, receipt.deliveries)
        && [one, next].iter().all(|held| held.queue.retention.is_zero() && !held.receipt.keyed)
}

/// Deletes items that lie side by side, if [`runs`] hold all of them for their receipts. Otherwise returns false; then none of their
/// leases is in a run.
fn delete_leased_together(tx: &Tx<'_>, run: &[Reservation]) -> rusqlite::Result<bool> {
    let ([first, ..], [.., last]) = (run, run) else { return Ok(false) };
    if !first.queue.retention.is_zero() {
        return runs::write_out(tx).map(|()| false);
    }
    let rows = [first, last].map(|held| tx.row_id(held.receipt.item));
    runs::commit(tx, rows, &first.receipt)
}

/// Deletes two items or more that lie side by side, if all of their receipts hold them, for half of what it costs to delete each.
/// Otherwise does nothing and returns false.
fn delete_side_by_side(tx: &Tx<'_>, run: &[Reservation]) -> rusqlite::Result<bool> {
    let [Reservation { receipt: first, .. }, .., Reservation { receipt: last, .. }] = run else {
        return Ok(false);
    };
    let lock = lock_text(first.token);
    let held =
        params![tx.row_id(first.item), lock, first.deliveries, tx.now.0, tx.row_id(last.item)];
    let count: u32 = tx
        .conn
        .prepare_cached(concat!("SELECT count(*) FROM items WHERE ", held_run!()))?
        .query_row(held, |row| row.get(0))?;
    if (count as usize) < run.len() {
        return Ok(false);
    }
    tx.conn.prepare_cached(concat!("DELETE FROM items WHERE ", held_run!()))?.execute(held)?;
    Ok(true)
}

/// Commits one item. Notes its row if it is deleted, and its payload may be stored apart.
fn commit_one(
    tx: &Tx<'_>,
    Reservation { queue, receipt }: &Reservation,
    rows: &mut Vec<i64>,
) -> rusqlite::Result<Outcome> {
    if queue.retention.is_zero() {
        let row = tx.row_id(receipt.item);
        let deleted = tx
            .conn
            .prepare_cached(concat!("DELETE FROM items WHERE ", held!(), " AND key IS NULL"))?
            .execute(params![row, lock_text(receipt.token), receipt.deliveries, tx.now.0])?;
        if deleted == 1 {
            rows.push(row);
            return Ok(Outcome::Ok);
        }
    }
    match look_up(tx, receipt)? {
        Ok(place) => order::finish(tx, queue, &place).map(|_| Outcome::Ok),
        Err(outcome) => Ok(outcome),
    }
}

/// Commits one item and pushes others. Does neither unless the outcome is `Ok`.
pub(super) fn commit_and_push(
    tx: &Tx<'_>,
    held: &Reservation,
    items: &[Push],
) -> rusqlite::Result<(Outcome, Vec<Pushed>)> {
    match commit(tx, std::slice::from_ref(held))?[..] {
        [Outcome::Ok] => Ok((Outcome::Ok, push(tx, items)?)),
        [outcome] => Ok((outcome, Vec::new())),
        _ => unreachable!("one outcome for one item"),
    }
}

/// Rolls one item back.
pub(super) fn roll_back(tx: &Tx<'_>, rollback: &Rollback) -> rusqlite::Result<Outcome> {
    let Rollback { held: Reservation { queue, receipt }, to, reason } = rollback;
    let reason = reason.clone().map(cut_reason);
    match to {
        RollbackTo::Queue { eligible_time, attempt, ended } => {
            let (unsent, former_lease) = match ended {
                EndedDelivery::Unsent { former_lease } => (true, *former_lease),
                EndedDelivery::Counted | EndedDelivery::Withdrawn => (false, None),
            };
            let rolled_back = tx
                .conn
                .prepare_cached(concat!(
                    r#"UPDATE items SET "when" = ?5, attempt = ?6, lock = ?9,
                         deliveries = deliveries - ?10,
                         reason = coalesce(?7, reason), earlier = earlier + ?8 WHERE "#,
                    held!()
                ))?
                .execute(params![
                    tx.row_id(receipt.item),
                    lock_text(receipt.token),
                    receipt.deliveries,
                    tx.now.0,
                    eligible_time.0,
                    attempt,
                    reason,
                    *ended == EndedDelivery::Withdrawn,
                    former_lease.map(lock_text),
                    unsent,
                ])?;
            if rolled_back == 1 {
                return Ok(Outcome::Ok);
            }
            Ok(look_up(tx, receipt)?.err().unwrap_or(Outcome::LeaseLost))
        }
        RollbackTo::DeadLetter { to, failed_attempts, .. } => match look_up(tx, receipt)? {
            Ok(place) => {
                order::dead_letter(tx, queue, &place, to, *failed_attempts, reason.as_deref())?;
                Ok(Outcome::DeadLettered)
            }
            Err(outcome) => Ok(outcome),
        },
        RollbackTo::Discard { failed_attempts, .. } => match look_up(tx, receipt)? {
            Ok(place) => {
                order::discard(tx, queue, &place, *failed_attempts, reason.as_deref())?;
                Ok(Outcome::DeadLettered)
            }
            Err(outcome) => Ok(outcome),
        },
    }
}

/// Sets the end of one lease.
pub(super) fn extend(tx: &Tx<'_>, extension: &Extension) -> rusqlite::Result<Outcome> {
    let Extension { held: Reservation { receipt, .. }, until, is_renewal } = extension;
    let extended = tx
        .conn
        .prepare_cached(concat!(
            r#"UPDATE items SET "when" = CASE WHEN ?6 THEN max("when", ?5) ELSE ?5 END WHERE "#,
            held!()
        ))?
        .execute(params![
            tx.row_id(receipt.item),
            lock_text(receipt.token),
            receipt.deliveries,
            tx.now.0,
            until.0,
            is_renewal
        ])?;
    if extended == 1 {
        return Ok(Outcome::Ok);
    }
    Ok(look_up(tx, receipt)?.err().unwrap_or(Outcome::LeaseLost))
}

/// Moves one item to another queue.
pub(super) fn move_item(tx: &Tx<'_>, item: &Move) -> rusqlite::Result<Outcome> {
    let place = match look_up(tx, &item.held.receipt)? {
        Ok(place) => place,
        Err(outcome) => return Ok(outcome),
    };
    if item.payload.is_some() || item.content_type.is_some() || !item.headers.is_empty() {
        replace_content(tx, item, place.row)?;
    }
    let waits = match &place.key {
        Some(key) => order::must_wait(tx, &item.to.name, key, place.row)?,
        None => false,
    };
    let sequence = order::stamp(tx, &item.to, place.key.is_some())?;
    let time = item.eligible_time.0;
    let (when, blocked) = if waits { (None, Some(time)) } else { (Some(time), None) };
    tx.conn
        .prepare_cached(
            r#"UPDATE items SET queue = ?2, "when" = ?3, blocked = ?4, seq = ?5,
                 priority = coalesce(?6, priority), attempt = 1, earlier = deliveries,
                 lock = NULL, origin = NULL, dead_lettered = NULL, failed_attempts = NULL
               WHERE id = ?1"#,
        )?
        .execute(params![
            place.row,
            item.to.name.as_str(),
            when,
            blocked,
            sequence,
            item.priority.map(crate::domain::Priority::level),
        ])?;
    place.pass_turn(tx)?;
    Ok(Outcome::Ok)
}

fn replace_content(tx: &Tx<'_>, item: &Move, row: i64) -> rusqlite::Result<()> {
    // A damaged item does not become good by a partial replacement: it keeps a checksum that does not fit.
    let is_good = sum_fits(tx, row)?;
    let mut merged = tx
        .conn
        .prepare_cached("SELECT headers FROM items WHERE id = ?1")?
        .query_row([row], |row| headers(row, 0))?;
    merged.extend(item.headers.clone());
    let payload = match &item.payload {
        Some(payload) => {
            payloads::delete(tx, row)?;
            Some(payloads::store(tx, row, payload)?)
        }
        None => None,
    };
    tx.conn
        .prepare_cached(
            "UPDATE items SET headers = ?2, content_type = coalesce(?3, content_type),
               payload = coalesce(?4, payload) WHERE id = ?1",
        )?
        .execute(params![row, headers_json(&merged), item.content_type, payload])?;
    if is_good {
        let sum = tx
            .conn
            .prepare_cached(concat!("SELECT ", summed_columns!(), " FROM items WHERE id = ?1"))?
            .query_row([row], |row| sum_of(row, Summed::ALONE))?;
        tx.conn
            .prepare_cached("UPDATE items SET sum = ?2 WHERE id = ?1")?
            .execute(params![row, sum])?;
    }
    Ok(())
}

/// Returns true if the item is what was stored, or has no checksum.
fn sum_fits(tx: &Tx<'_>, row: i64) -> rusqlite::Result<bool> {
    let verified = tx
        .conn
        .prepare_cached(concat!("SELECT ", summed_columns!(), " FROM items WHERE id = ?1"))?
        .query_row([row], |row| verify(row, Summed::ALONE));
    match verified {
        Ok(_) => Ok(true),
        Err(error) if is_damage(&error) => Ok(false),
        Err(error) => Err(error),
    }
}
