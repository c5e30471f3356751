//! Reading the items of segments at the head of a queue, and claiming them.

use std::{collections::HashMap, sync::Arc};

use mongodb::bson::{RawArrayBuf, RawDocument, RawDocumentBuf, doc, raw::cstr, rawdoc};

use crate::{
    domain::{ConsumerName, ItemId, LeaseToken, Timestamp},
    store::{
        Result,
        mongo::{
            Inner,
            schema::{
                item::{Stored, oid, oids, token_oid},
                layout::{BY_ID, CLAIMED, Group, date, millis},
            },
            segment::{
                document::{Bits, Run, Segment, contents},
                seen::{Front, Seen},
            },
            server::{
                connect::read,
                statement::{Update, statement},
            },
        },
    },
};

/// A claim of less than one part in so many of a segment is a small one.
const SMALL: usize = 16;
/// After so many claims of a segment no more small ones are made: small claims of a large document cost more than
/// those of documents of one item.
const FEW_CLAIMS: usize = 8;

/// True if so few items of a segment with so many claims had better be documents of their own.
pub(crate) fn is_too_few(wanted: usize, n: usize, claims: usize) -> bool {
    claims >= FEW_CLAIMS && wanted * SMALL < n
}

/// The ready items of a segment, in order, as far as they were read.
pub(crate) struct Opened {
    pub(crate) items: Vec<Stored>,
    /// There are no more.
    pub(crate) whole: bool,
}

/// Reads up to so many ready items of each segment. Those that are not there any more are left out.
pub(crate) async fn open(
    inner: &Inner,
    group: &Group,
    segments: impl IntoIterator<Item = ItemId>,
    most: usize,
) -> Result<HashMap<ItemId, Opened>> {
    let command = rawdoc! {
        "find": group.items.name(),
        "filter": { "_id": { "$in": oids(segments) }, "ready": { "$gt": 0 } },
        "projection": {
            "q": 1, "when": 1, "priority": 1, "created": 1, "n": 1, "head": 1, "ready": 1, "left": 1, "done": 1,
            "runs.until": 1, "window": 1, "items": { "$slice": ["$items", "$head", most as i64] },
            "dedup": { "$slice": ["$dedup", "$head", most as i64] },
        },
        "hint": BY_ID,
    };
    let opened = read(&inner.db, &command, |document| {
        let segment = Segment::read(document)?;
        Ok((segment.id, Opened::read(&segment, document, segment.head)?))
    });
    Ok(opened.await?.into_iter().collect())
}

impl Opened {
    /// Reads the ready items of a document whose contents begin with item number `first`.
    pub(crate) fn read(segment: &Segment, document: &RawDocument, first: usize) -> Result<Self> {
        let seen = Arc::new(segment.seen());
        let mut items = Vec::with_capacity(segment.ready);
        for (place, content) in contents(document).enumerate().skip(segment.head - first) {
            let at = first + place;
            if !segment.done.contains(at) {
                let mut item = segment.item(at, Some(&content))?;
                item.segment = Some(Arc::clone(&seen));
                items.push(item);
            }
        }
        let whole = items.len() >= segment.ready;
        Ok(Self { items, whole })
    }
}

/// What a round claims of one segment: the first of its ready items.
pub(crate) struct Part {
    seen: Arc<Seen>,
    runs: Vec<Run>,
    count: usize,
    /// Behind the last of them.
    end: usize,
}

impl Part {
    pub(crate) fn new(seen: &Arc<Seen>) -> Self {
        Self { seen: Arc::clone(seen), runs: Vec::new(), count: 0, end: 0 }
    }

    pub(crate) fn segment(&self) -> ItemId {
        self.seen.id
    }

    /// Adds an item, for the lease with this token.
    pub(crate) fn add(
        &mut self,
        item: ItemId,
        lock: LeaseToken,
        (started, until): (Timestamp, Timestamp),
        consumer: Option<&ConsumerName>,
    ) {
        let at = number_of(item);
        let place = self.runs.iter().position(|run| run.lock == lock).unwrap_or_else(|| {
            self.runs.push(Run {
                lock,
                items: Bits::of(self.seen.n),
                until,
                started,
                extended: None,
                consumer: consumer.map(|consumer| consumer.as_str().to_owned()),
            });
            self.runs.len() - 1
        });
        self.runs[place].items.set(at);
        self.count += 1;
        self.end = self.end.max(at + 1);
    }

    fn front(&self) -> Front {
        let before = self.seen.front();
        let ready = before.ready.saturating_sub(self.count);
        let head = if ready == 0 { self.seen.n } else { self.end };
        Front { head, ready, runs: before.runs + self.runs.len() }
    }

    /// The statement that claims the items. It changes nothing if anybody has claimed or detached ready ones since
    /// they were read.
    pub(crate) fn statement(&self) -> Result<RawDocumentBuf> {
        let (before, after) = (self.seen.front(), self.front());
        let filter = rawdoc! {
            "_id": oid(self.seen.id),
            "head": before.head as i32,
            "ready": before.ready as i32,
        };
        let mut set = doc! { "head": after.head as i32, "ready": after.ready as i32 };
        if after.ready == 0 {
            set.insert("when", millis(CLAIMED));
        }
        let mut update = RawDocumentBuf::new();
        let set = RawDocumentBuf::try_from(&set)
            .map_err(|e| crate::store::mongo::server::error::broken(e.to_string()))?;
        update.append(cstr!("$set"), set);
        let runs: RawArrayBuf = self.runs.iter().map(Run::to_document).collect();
        update.append(cstr!("$push"), rawdoc! { "runs": { "$each": runs } });
        if let Some(first) = self.runs.iter().map(|run| run.until).min() {
            update.append(cstr!("$min"), rawdoc! { "lapse": date(first) });
        }
        Ok(statement(filter, Update::Operators(update)))
    }

    /// Notes that the claim took effect.
    pub(crate) fn won(&self, inner: &Inner, now: Timestamp) {
        let front = self.front();
        self.seen.moved(front);
        let until = self.runs.iter().map(|run| run.until).max().unwrap_or_default();
        let counts = (self.seen.left, self.count, front.ready);
        inner.known_segments.claimed(&self.seen, counts, until, now);
    }
}

/// The number of an item in its segment.
pub(crate) fn number_of(item: ItemId) -> usize {
    item.block().1.saturating_sub(1)
}

/// Which of the segments have a run under one of the tokens.
pub(crate) async fn won(
    inner: &Inner,
    group: &Group,
    segments: impl Iterator<Item = ItemId>,
    tokens: impl Iterator<Item = LeaseToken>,
) -> Result<Vec<ItemId>> {
    let tokens: RawArrayBuf = tokens.map(token_oid).collect();
    let command = rawdoc! {
        "find": group.items.name(),
        "filter": { "_id": { "$in": oids(segments) }, "runs.lock": { "$in": tokens } },
        "projection": { "_id": 1 },
        "hint": BY_ID,
    };
    read(&inner.db, &command, |document| Ok(Stored::read(document)?.id())).await
}
