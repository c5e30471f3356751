//! Operations.

use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{OptionalExtension, Row, params};

use super::{
    super::{
        Advance, Claim, Created, Operation, OperationPlace, OperationState, OperationStore, Result,
        stored_work::{FORMAT, decode, encode},
    },
    SqliteStore,
    rows::broken,
    tx::{Tx, View},
};
use crate::domain::{OperationId, Timestamp};

macro_rules! columns {
    () => {
        "id, work, dry_run, started_by, created, total, state, processed, error, updated, claim"
    };
}

fn read(row: &Row<'_>) -> rusqlite::Result<Operation> {
    let id = row.get_ref(0)?.as_str()?.parse().map_err(|()| broken(0, "not an id"))?;
    let state = row.get_ref(6)?.as_str()?;
    Ok(Operation {
        id,
        work: decode(row.get_ref(1)?.as_str()?).map_err(|e| broken(1, e))?,
        dry_run: row.get(2)?,
        started_by: row.get(3)?,
        create_time: Timestamp(row.get(4)?),
        total: row.get::<_, i64>(5)?.cast_unsigned(),
        state: OperationState::parse(state).ok_or_else(|| broken(6, "there is no such state"))?,
        processed: row.get::<_, i64>(7)?.cast_unsigned(),
        error: row.get(8)?,
        update_time: Timestamp(row.get(9)?),
        claim: row.get::<_, Option<i64>>(10)?.map(Claim::of_number),
    })
}

fn create(tx: &Tx<'_>, operation: Operation) -> rusqlite::Result<Created<Operation>> {
    if let Some(there) = get(tx, operation.id)? {
        return Ok(Created::Existing(there));
    }
    tx.conn
        .prepare_cached(concat!(
            "INSERT INTO operations (",
            columns!(),
            ", format, claim_until) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, NULL, ?11, 0)"
        ))?
        .execute(params![
            operation.id.to_string(),
            encode(&operation.work),
            operation.dry_run,
            operation.started_by,
            operation.create_time.0,
            operation.total.cast_signed(),
            operation.state.as_str(),
            operation.processed.cast_signed(),
            operation.error,
            operation.update_time.0,
            FORMAT,
        ])?;
    Ok(Created::New(Operation { claim: None, ..operation }))
}

fn get(view: &View<'_>, id: OperationId) -> rusqlite::Result<Option<Operation>> {
    view.conn
        .prepare_cached(concat!(
            "SELECT ",
            columns!(),
            " FROM operations WHERE id = ?1 AND format = ?2"
        ))?
        .query_row(params![id.to_string(), FORMAT], read)
        .optional()
}

fn list(
    view: &View<'_>,
    after: Option<OperationPlace>,
    limit: usize,
) -> rusqlite::Result<Vec<Operation>> {
    let (created, id) = after
        .map_or((i64::MAX, String::new()), |after| (after.create_time.0, after.id.to_string()));
    view.conn
        .prepare_cached(concat!(
            "SELECT ",
            columns!(),
            " FROM operations WHERE format = ?4 AND (created, id) < (?1, ?2)
             ORDER BY created DESC, id DESC LIMIT ?3"
        ))?
        .query_map(params![created, id, limit as i64, FORMAT], read)?
        .collect()
}

fn count_running(view: &View<'_>) -> rusqlite::Result<u64> {
    view.conn
        .prepare_cached("SELECT count(*) FROM operations WHERE state = 'running'")?
        .query_row([], |row| row.get::<_, i64>(0))
        .map(i64::cast_unsigned)
}

/// Returns the oldest running operation that nobody has a claim on.
fn unclaimed(view: &View<'_>) -> rusqlite::Result<Option<OperationId>> {
    let id: Option<String> = view
        .conn
        .prepare_cached(
            "SELECT id FROM operations WHERE state = 'running' AND format = ?2 AND claim_until <= ?1
             ORDER BY created, id LIMIT 1",
        )?
        .query_row(params![view.now.0, FORMAT], |row| row.get(0))
        .optional()?;
    id.map(|id| id.parse().map_err(|()| broken(0, "not an id"))).transpose()
}

fn take(tx: &Tx<'_>, claim: Claim, lasting: Duration) -> rusqlite::Result<Option<OperationId>> {
    let Some(id) = unclaimed(tx)? else { return Ok(None) };
    tx.conn
        .prepare_cached("UPDATE operations SET claim = ?2, claim_until = ?3 WHERE id = ?1")?
        .execute(params![id.to_string(), claim.to_number(), (tx.now + lasting).0])?;
    Ok(Some(id))
}

fn note(
    tx: &Tx<'_>,
    id: OperationId,
    claim: Claim,
    advance: &Advance,
    lasting: Duration,
) -> rusqlite::Result<Option<Operation>> {
    let changed = tx
        .conn
        .prepare_cached(
            "UPDATE operations SET processed = max(processed, ?3), updated = ?4, claim_until = ?5,
               error = iif(state = 'running', ?6, error), state = iif(state = 'running', ?7, state)
             WHERE id = ?1 AND claim = ?2",
        )?
        .execute(params![
            id.to_string(),
            claim.to_number(),
            advance.processed.cast_signed(),
            tx.now.0,
            (tx.now + lasting).0,
            advance.error,
            advance.state.as_str(),
        ])?;
    if changed == 0 { Ok(None) } else { get(tx, id) }
}

fn cancel(tx: &Tx<'_>, id: OperationId) -> rusqlite::Result<Option<Operation>> {
    tx.conn
        .prepare_cached(
            "UPDATE operations SET state = 'cancelled', updated = ?2
             WHERE id = ?1 AND state = 'running'",
        )?
        .execute(params![id.to_string(), tx.now.0])?;
    get(tx, id)
}

/// Returns operations that ended before this time, and those beyond the `keep` that ended last.
fn outdated(
    view: &View<'_>,
    ended_before: Timestamp,
    keep: usize,
) -> rusqlite::Result<Vec<String>> {
    view.conn
        .prepare_cached(
            "SELECT id FROM operations WHERE state <> 'running' AND (updated < ?1 OR id NOT IN
               (SELECT id FROM operations WHERE state <> 'running'
                ORDER BY updated DESC, created DESC, id DESC LIMIT ?2))",
        )?
        .query_map(params![ended_before.0, keep as i64], |row| row.get(0))?
        .collect()
}

fn delete(tx: &Tx<'_>, ids: &[String]) -> rusqlite::Result<()> {
    let mut delete =
        tx.conn.prepare_cached("DELETE FROM operations WHERE id = ?1 AND state <> 'running'")?;
    for id in ids {
        delete.execute([id])?;
    }
    Ok(())
}

#[async_trait]
impl OperationStore for SqliteStore {
    async fn create_operation(&self, operation: &Operation) -> Result<Created<Operation>> {
        let operation = operation.clone();
        self.inner.write(move |tx| create(tx, operation)).await
    }

    async fn get_operation(&self, id: OperationId) -> Result<Option<Operation>> {
        self.inner.read(move |view| get(view, id)).await
    }

    async fn list_operations(
        &self,
        after: Option<OperationPlace>,
        limit: usize,
    ) -> Result<Vec<Operation>> {
        self.inner.read(move |view| list(view, after, limit)).await
    }

    async fn running_operations(&self) -> Result<u64> {
        self.inner.read(count_running).await
    }

    /// Looks before it writes: an idle broker asks again and again. Reads after it: one that cannot be read is claimed too, so
    /// that it does not hold up the others.
    async fn claim_operation(&self, claim: Claim, lasting: Duration) -> Result<Option<Operation>> {
        if self.inner.read(unclaimed).await?.is_none() {
            return Ok(None);
        }
        match self.inner.write(move |tx| take(tx, claim, lasting)).await? {
            Some(id) => self.inner.read(move |view| get(view, id)).await,
            None => Ok(None),
        }
    }

    async fn advance_operation(
        &self,
        id: OperationId,
        claim: Claim,
        advance: &Advance,
        lasting: Duration,
    ) -> Result<Option<Operation>> {
        let advance = advance.clone();
        self.inner.write(move |tx| note(tx, id, claim, &advance, lasting)).await
    }

    async fn cancel_operation(&self, id: OperationId) -> Result<Option<Operation>> {
        self.inner.write(move |tx| cancel(tx, id)).await
    }

    async fn delete_operations(&self, ended_before: Timestamp, keep: usize) -> Result<()> {
        let find = move |view: &View<'_>| outdated(view, ended_before, keep);
        let ids = self.inner.read(find).await?;
        if ids.is_empty() {
            return Ok(());
        }
        self.inner.write(move |tx| delete(tx, &ids)).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        domain::{Clock, QueueName},
        store::{OperationState, Work},
    };

    #[tokio::test]
    async fn an_operation_that_cannot_be_read_holds_up_no_other() {
        let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
        let operation = |id: u8, create_time| Operation {
            id: OperationId([id; 12]),
            work: Work::Purge { queue: QueueName::parse("queue", "q").unwrap() },
            dry_run: false,
            started_by: String::new(),
            create_time: Timestamp(create_time),
            total: 0,
            state: OperationState::Running,
            processed: 0,
            error: String::new(),
            update_time: Timestamp(create_time),
            claim: None,
        };
        for (id, create_time) in [(1, 100), (2, 200)] {
            store.create_operation(&operation(id, create_time)).await.unwrap();
        }
        let damage = |tx: &Tx<'_>| {
            tx.conn.execute("UPDATE operations SET work = '{' WHERE created = 100", [])
        };
        store.inner.write(damage).await.unwrap();
        let claim =
            || store.claim_operation(Claim { broker: [1; 4], number: 1 }, Duration::from_mins(1));
        claim().await.unwrap_err();
        assert_eq!(claim().await.unwrap().map(|claimed| claimed.id), Some(OperationId([2; 12])));
    }
}
