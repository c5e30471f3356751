//! Brings files of earlier versions up to date when they are opened, in one transaction.

use rusqlite::Connection;

use super::definitions;

/// The steps from each version to the next, the first from version 1. A step that was released never changes; a later
/// change is a step of its own. New columns follow `payload`.
const STEPS: &[&str] = &[
    TO_VERSION_2,
    TO_VERSION_3,
    TO_VERSION_4,
    TO_VERSION_5,
    TO_VERSION_6,
    TO_VERSION_7,
    TO_VERSION_8,
    TO_VERSION_9,
];

/// The version of the tables that this program creates and uses.
pub(super) const VERSION: i32 = 1 + STEPS.len() as i32;

/// Defaults for limits and delays of failures, data of dead letters, since when an item was eligible, checksums, and a
/// table for items that fail theirs. A `max_attempts` of 0 meant that the limit was not set; the broker's default
/// applies to it now.
const TO_VERSION_2: &str = r"
ALTER TABLE queues ADD COLUMN attempts INTEGER;
UPDATE queues SET attempts = nullif(max_attempts, 0);
ALTER TABLE queues DROP COLUMN max_attempts;
ALTER TABLE queues RENAME COLUMN attempts TO max_attempts;
ALTER TABLE queues ADD COLUMN max_deliveries INTEGER;
ALTER TABLE queues ADD COLUMN discard_failed INTEGER NOT NULL DEFAULT 0;
ALTER TABLE items ADD COLUMN earlier INTEGER NOT NULL DEFAULT 0;
ALTER TABLE items ADD COLUMN due INTEGER;
ALTER TABLE items ADD COLUMN dead_lettered INTEGER;
ALTER TABLE items ADD COLUMN failed_attempts INTEGER;
ALTER TABLE totals ADD COLUMN popped INTEGER NOT NULL DEFAULT 0;
ALTER TABLE totals ADD COLUMN discarded INTEGER NOT NULL DEFAULT 0;
ALTER TABLE items ADD COLUMN sum INTEGER;
CREATE TABLE damaged (
  id INTEGER PRIMARY KEY,
  queue,
  found,
  why,
  key,
  content_type,
  headers,
  created,
  payload
);
";

/// Receipts are signed.
const TO_VERSION_3: &str = r"
CREATE TABLE receipt_keys (
  number INTEGER PRIMARY KEY,
  secret BLOB NOT NULL,
  created INTEGER NOT NULL
) STRICT;
";

/// Queues that the broker created by itself are deleted when nobody uses them. Of those that are there it is not known who
/// created them: they stay.
const TO_VERSION_4: &str = r"
ALTER TABLE queues ADD COLUMN unused_since INTEGER;
";

/// Operations.
const TO_VERSION_5: &str = r"
CREATE TABLE operations (
  id TEXT PRIMARY KEY,
  format INTEGER NOT NULL,
  work TEXT NOT NULL,
  dry_run INTEGER NOT NULL,
  started_by TEXT NOT NULL,
  created INTEGER NOT NULL,
  total INTEGER NOT NULL,
  state TEXT NOT NULL,
  processed INTEGER NOT NULL,
  error TEXT NOT NULL,
  updated INTEGER NOT NULL,
  claim INTEGER,
  claim_until INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
";

/// Figures of queues outlive the broker that knew them.
const TO_VERSION_6: &str = r"
CREATE TABLE figures (
  time INTEGER NOT NULL,
  step INTEGER NOT NULL,
  broker TEXT NOT NULL,
  expires INTEGER NOT NULL,
  queues TEXT NOT NULL,
  PRIMARY KEY (time, step, broker)
) STRICT, WITHOUT ROWID;
";

/// Templates of queues.
const TO_VERSION_7: &str = r#"
CREATE TABLE templates (
  pattern TEXT PRIMARY KEY,
  "group" TEXT NOT NULL,
  lease_ns INTEGER,
  max_attempts INTEGER,
  max_deliveries INTEGER,
  dead_letter_queue TEXT,
  discard_failed INTEGER NOT NULL,
  retry_initial_ns INTEGER,
  retry_multiplier REAL,
  retry_max_ns INTEGER,
  retry_jitter REAL,
  default_ttl_ns INTEGER,
  retention_ns INTEGER NOT NULL,
  dedup_window_ns INTEGER NOT NULL,
  max_depth INTEGER NOT NULL,
  sequenced INTEGER NOT NULL,
  paused INTEGER NOT NULL,
  labels TEXT NOT NULL,
  created INTEGER NOT NULL,
  updated INTEGER NOT NULL,
  revision INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
"#;

/// Large payloads are stored apart. Those that are there stay where they are.
const TO_VERSION_8: &str = r"
CREATE TABLE payloads (
  id INTEGER PRIMARY KEY,
  payload BLOB NOT NULL
) STRICT;
";

/// Leases of many items at once.
const TO_VERSION_9: &str = r"
CREATE TABLE runs (
  first INTEGER PRIMARY KEY,
  last INTEGER NOT NULL,
  queue TEXT NOT NULL,
  priority INTEGER NOT NULL,
  up_to INTEGER NOT NULL,
  until INTEGER NOT NULL,
  lock TEXT NOT NULL,
  delivered INTEGER NOT NULL,
  attempt INTEGER NOT NULL,
  consumer TEXT,
  expires INTEGER
) STRICT;
";

/// Brings a file from `version` up to [`VERSION`], if its tables are then as this version defines them. Otherwise
/// returns what is wrong with them. After a fault or an error, or if the process ends on the way, the file is as it was.
/// `new` is an empty store of this version.
pub(super) fn migrate(
    conn: &Connection,
    version: i32,
    new: &Connection,
) -> rusqlite::Result<Option<String>> {
    let done = usize::try_from(version - 1).unwrap_or_default();
    let steps = STEPS.get(done..).unwrap_or_default().concat();
    let migrated = conn
        .execute_batch(&format!("BEGIN IMMEDIATE; {steps} PRAGMA user_version = {VERSION};"))
        .and_then(|()| definitions::fault(conn, new))
        .and_then(|fault| match fault {
            None => conn.execute_batch("COMMIT").map(|()| None),
            fault => Ok(fault),
        });
    if !conn.is_autocommit() {
        conn.execute_batch("ROLLBACK")?;
    }
    migrated
}

#[cfg(test)]
mod tests;
