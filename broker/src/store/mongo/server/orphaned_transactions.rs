//! Ends transactions whose brokers died. The server would keep them for a minute (`transactionLifetimeLimitSeconds`),
//! and their documents with them: whoever reserves the head of the queue, or takes the next sequence number, would wait
//! for that long.
//!
//! Our transactions never pause between two statements, so one that pauses is orphaned. If its broker was only slow,
//! the broker finds the transaction gone and tries again: nothing is lost.

use std::time::Duration;

use mongodb::bson::{Bson, doc};
use tokio_util::sync::CancellationToken;

use crate::store::{
    Result,
    mongo::server::{
        connect::{APP_NAME, read_documents},
        error::failed,
        places::Db,
        time_limit::in_time,
    },
};

/// Pause between scans.
const EVERY: Duration = Duration::from_secs(2);
/// Time without a statement after which a transaction is orphaned.
const INACTIVE: Duration = Duration::from_secs(3);

/// Ends orphaned transactions of all brokers until stopped. Where the user may not list transactions, the server ends
/// them after a minute.
pub(crate) async fn end_all(db: Db, stop: CancellationToken) {
    let admin = db.sibling("admin");
    let mut complained = false;
    while stop.run_until_cancelled(tokio::time::sleep(EVERY)).await.is_some() {
        match end_once(&admin).await {
            Ok(0) => complained = false,
            Ok(count) => tracing::info!(count, "ended transactions that a broker left behind"),
            Err(error) if complained => tracing::debug!(%error, "could not look for transactions"),
            Err(error) => {
                tracing::info!(%error, "could not look for transactions that a broker left behind");
                complained = true;
            }
        }
    }
}

/// Ends the present orphaned transactions and returns how many there were.
async fn end_once(admin: &Db) -> Result<usize> {
    let inactive = i64::try_from(INACTIVE.as_micros()).unwrap_or(i64::MAX);
    let command = doc! { "aggregate": 1, "cursor": {}, "pipeline": [
        { "$currentOp": { "idleSessions": true } },
        { "$match": {
            "active": false, "appName": { "$regex": format!("^{APP_NAME}") },
            "transaction.timeInactiveMicros": { "$gt": inactive },
        } },
        { "$project": { "lsid.id": 1 } },
    ] };
    let mut sessions = Vec::new();
    for document in read_documents(admin, command).await? {
        if let Ok(id) = document.get_document("lsid").map(|lsid| lsid.get("id").cloned()) {
            sessions.extend(id.map(|id| Bson::Document(doc! { "id": id })));
        }
    }
    let count = sessions.len();
    if count > 0 {
        let end = admin.run_command(doc! { "killSessions": sessions });
        in_time(admin, end).await.map_err(failed)?;
    }
    Ok(count)
}
