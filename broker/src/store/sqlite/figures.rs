//! Past figures of queues.

use std::time::Duration;

use rusqlite::params;

use super::tx::{Tx, View};
use crate::{
    domain::Timestamp,
    store::{
        FiguresPlace, KeptFigures,
        reports::{broker_text, parse_broker},
    },
};

pub(super) fn keep(tx: &Tx<'_>, kept: &KeptFigures, lasting: Duration) -> rusqlite::Result<()> {
    let FiguresPlace { time, step, broker } = kept.place;
    let queues = serde_json::to_string(&kept.queues)
        .map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))?;
    tx.conn.prepare_cached("DELETE FROM figures WHERE expires <= ?1")?.execute([tx.now.0])?;
    tx.conn
        .prepare_cached(
            "INSERT OR REPLACE INTO figures (time, step, broker, expires, queues) VALUES (?1, ?2, ?3, ?4, ?5)",
        )?
        .execute(params![time.0, step, broker_text(broker), (time + lasting).0, queues])?;
    Ok(())
}

pub(super) fn list(
    view: &View<'_>,
    after: Option<FiguresPlace>,
    limit: usize,
) -> rusqlite::Result<Vec<KeptFigures>> {
    let after =
        after.unwrap_or(FiguresPlace { time: Timestamp(i64::MIN), step: 0, broker: [0; 4] });
    let mut statement = view.conn.prepare_cached(
        "SELECT time, step, broker, queues FROM figures
         WHERE (time, step, broker) > (?1, ?2, ?3) AND expires > ?4 ORDER BY time, step, broker LIMIT ?5",
    )?;
    let (broker, limit) = (broker_text(after.broker), i64::try_from(limit).unwrap_or(i64::MAX));
    let mut rows = statement.query(params![after.time.0, after.step, broker, view.now.0, limit])?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        let (time, step, broker, queues): (i64, u32, String, String) =
            (row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?);
        // A place that cannot be read has no figures either: the others go on after it.
        let (Some(broker), Ok(queues)) = (parse_broker(&broker), serde_json::from_str(&queues))
        else {
            continue;
        };
        found.push(KeptFigures {
            place: FiguresPlace { time: Timestamp(time), step, broker },
            queues,
        });
    }
    Ok(found)
}
