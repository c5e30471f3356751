-- The tables of version 1, as release 0.1.0 made them, with something in each.
CREATE TABLE meta (
  key TEXT PRIMARY KEY,         -- next_id, settings (changes of any queue's settings), tag (first 8 digits of all ids), pinged (written to see whether that is possible)
  value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE queues (
  name TEXT PRIMARY KEY,
  "group" TEXT NOT NULL,
  lease_ns INTEGER,
  max_attempts INTEGER NOT NULL,
  dead_letter_queue TEXT,
  retry_initial_ns INTEGER,     -- these four are NULL without a retry policy
  retry_multiplier REAL,
  retry_max_ns INTEGER,
  retry_jitter REAL,
  default_ttl_ns INTEGER,
  retention_ns INTEGER NOT NULL,
  dedup_window_ns INTEGER NOT NULL,
  max_depth INTEGER NOT NULL,
  sequenced INTEGER NOT NULL,
  paused INTEGER NOT NULL,
  labels TEXT NOT NULL,         -- JSON
  created INTEGER NOT NULL,     -- this and all times below: milliseconds since 1970, UTC
  revision INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE items (
  id INTEGER PRIMARY KEY,       -- in order of arrival; printf('%016x', id) ends the id that users see
  queue TEXT NOT NULL,
  priority INTEGER NOT NULL,
  "when" INTEGER,               -- may be handed out from then on; end of the lease; NULL: blocked or processed
  attempt INTEGER NOT NULL,
  deliveries INTEGER NOT NULL,
  lock TEXT,                    -- lease token
  producer TEXT,
  consumer TEXT,
  key TEXT,                     -- ordering key
  seq INTEGER,                  -- sequence number
  dedup TEXT,
  content_type TEXT,
  headers TEXT,                 -- JSON
  created INTEGER NOT NULL,
  blocked INTEGER,              -- waits for its key's turn; its own eligible time
  processed INTEGER,
  expires INTEGER,              -- end of its life, or of its time as history
  reason TEXT,                  -- why the last attempt failed
  origin TEXT,                  -- dead-lettered from
  payload BLOB NOT NULL
) STRICT;
CREATE INDEX handout ON items (queue, priority DESC, "when") WHERE "when" IS NOT NULL;
CREATE INDEX key_order ON items (queue, key, seq)
  WHERE key IS NOT NULL AND processed IS NULL AND origin IS NULL;
CREATE INDEX waiting ON items (queue, seq) WHERE blocked IS NOT NULL;
CREATE INDEX history ON items (queue, processed) WHERE processed IS NOT NULL;
CREATE INDEX expiry ON items (expires) WHERE expires IS NOT NULL;
CREATE INDEX origins ON items (queue, origin) WHERE origin IS NOT NULL;

CREATE TABLE dedup (
  queue TEXT NOT NULL,          -- the queue it was pushed to
  dedup TEXT NOT NULL,
  id INTEGER NOT NULL,          -- the first item, which may be gone
  seq INTEGER,
  until INTEGER NOT NULL,
  PRIMARY KEY (queue, dedup)
) STRICT, WITHOUT ROWID;
CREATE INDEX dedup_id ON dedup (id);
CREATE INDEX dedup_until ON dedup (until);

CREATE TABLE counters (
  queue TEXT PRIMARY KEY,
  value INTEGER NOT NULL        -- the last sequence number given
) STRICT, WITHOUT ROWID;

CREATE TABLE totals (
  queue TEXT PRIMARY KEY,
  pushed INTEGER NOT NULL,
  delivered INTEGER NOT NULL,
  committed INTEGER NOT NULL,
  rolled_back INTEGER NOT NULL,
  moved INTEGER NOT NULL,
  dead_lettered INTEGER NOT NULL,
  expired INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE schedules (
  name TEXT PRIMARY KEY,
  queue TEXT NOT NULL,
  cron TEXT NOT NULL,
  time_zone TEXT NOT NULL,
  paused INTEGER NOT NULL,
  created INTEGER NOT NULL,
  done_until INTEGER NOT NULL,
  last INTEGER,
  content_type TEXT NOT NULL,
  headers TEXT NOT NULL,        -- JSON
  priority INTEGER NOT NULL,
  delay_ns INTEGER NOT NULL,
  eligible INTEGER,
  ttl_ns INTEGER,
  key TEXT NOT NULL,
  payload BLOB NOT NULL
) STRICT, WITHOUT ROWID;

INSERT INTO meta VALUES ('next_id', 11), ('settings', 5), ('tag', 287454020), ('pinged', 0);

-- One queue that says nothing, one with a limit and a policy, one that keeps history.
INSERT INTO queues VALUES
  ('plain', 'default', NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL, 0, 300000000000, 0, 0, 0, '{}', 1700000000000, 1),
  ('work', 'eu', 5000000000, 3, 'dead', 1000000000, 3.0, 60000000000, 0.5, 900000000000000000, 0, 300000000000, 9, 1, 0, '{"team":"a"}', 1700000000001, 4),
  ('dead', 'eu', NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL, 0, 300000000000, 0, 0, 0, '{}', 1700000000002, 1),
  ('kept', 'default', NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL, 9000000000000000000, 300000000000, 0, 0, 1, '{}', 1700000000003, 2);

INSERT INTO items (id, queue, priority, "when", attempt, deliveries, lock, producer, consumer, key, seq, dedup,
    content_type, headers, created, blocked, processed, expires, reason, origin, payload) VALUES
  -- ready
  (1, 'plain', 4, 1700000001000, 1, 0, NULL, 'p', NULL, NULL, NULL, NULL, 'text/plain', '{"h":"v"}', 1700000001000, NULL, NULL, NULL, NULL, NULL, CAST('ready' AS BLOB)),
  -- delayed
  (2, 'plain', 0, 32503680000000, 1, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1700000002000, NULL, NULL, NULL, NULL, NULL, CAST('delayed' AS BLOB)),
  -- reserved, after a failure
  (3, 'work', 9, 32503680000000, 2, 2, '0123456789abcdef01234567', NULL, 'c', NULL, 1, 'once', NULL, NULL, 1700000003000, NULL, NULL, NULL, 'failed', NULL, CAST('reserved' AS BLOB)),
  -- first and second of a key
  (4, 'work', 0, 1700000004000, 1, 0, NULL, NULL, NULL, 'k', 2, NULL, NULL, NULL, 1700000004000, NULL, NULL, NULL, NULL, NULL, CAST('first' AS BLOB)),
  (5, 'work', 0, NULL, 1, 0, NULL, NULL, NULL, 'k', 3, NULL, NULL, NULL, 1700000005000, 1700000005000, NULL, NULL, NULL, NULL, CAST('blocked' AS BLOB)),
  -- dead-lettered
  (6, 'dead', 0, 1700000006000, 3, 3, NULL, NULL, 'c', NULL, NULL, NULL, NULL, NULL, 1700000003500, NULL, NULL, NULL, 'broken', 'work', CAST('dead' AS BLOB)),
  -- history
  (7, 'kept', 0, NULL, 1, 1, NULL, NULL, 'c', NULL, NULL, NULL, NULL, NULL, 1700000007000, NULL, 1700000008000, 32503680000000, NULL, NULL, CAST('processed' AS BLOB)),
  -- with a lease that lapsed long ago
  (8, 'plain', 0, 1700000009000, 1, 1, 'ba9876543210ba9876543210', NULL, 'c', NULL, NULL, NULL, NULL, NULL, 1700000008500, NULL, NULL, NULL, NULL, NULL, CAST('lapsed' AS BLOB));

INSERT INTO dedup VALUES ('work', 'once', 3, 1, 32503680000000), ('plain', 'gone', 9, NULL, 32503680000000);
INSERT INTO counters VALUES ('work', 3);
INSERT INTO totals VALUES ('work', 10, 9, 8, 7, 6, 5, 4);
INSERT INTO schedules VALUES
  ('nightly', 'plain', '0 3 * * *', 'Europe/Berlin', 0, 1700000000000, 1700000000000, NULL, 'text/plain', '{}', 0, 0, NULL, NULL, '', CAST('tick' AS BLOB));

PRAGMA application_id = 1397506887;
PRAGMA user_version = 1;
