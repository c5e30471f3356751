//! When a queue without ready items has one again.

use crate::{
    domain::{GroupName, QueueName, Timestamp},
    store::{
        Result,
        mongo::{
            Inner,
            cursor::watermarks::QueueCursor,
            priorities::{first_between, in_index},
            reserve::lapse::Leases,
            schema::layout::READY_END,
        },
    },
};

/// Returns when the first item that is not eligible at `after` becomes eligible, or when the first lease ends,
/// whichever is earlier.
pub(crate) async fn next_eligible(
    inner: &Inner,
    cursor: &QueueCursor,
    queue: &QueueName,
    group: &GroupName,
    after: Timestamp,
) -> Result<Option<Timestamp>> {
    let group = inner.group(group).await?;
    let mut used = cursor.priorities_in_use();
    if used.is_empty() {
        if !cursor.sweep_due(true) {
            return Ok(None); // the index had no entry of the queue just now
        }
        used = in_index(inner, group.items.name(), queue).await?;
        cursor.add_used(used);
    }
    let delayed =
        first_between(inner, group.items.name(), queue, used, (after.0 + 1, READY_END)).await?;
    let leases = Leases { inner, group: &group, cursor, queue, used };
    let leased = leases.first(inner.now()).await?;
    Ok(delayed.map(Timestamp).into_iter().chain(leased).min())
}
