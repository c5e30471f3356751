//! Reading the items of segments at the head of a queue, and claiming them.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use mongodb::bson::{RawArrayBuf, RawDocument, RawDocumentBuf, doc, raw::cstr, rawdoc};

use crate::{
    domain::{ConsumerName, ItemId, LeaseToken, Timestamp},
    store::{
        Result,
        mongo::{
            Inner,
            schema::{
                item::{Stored, oids, token_oid},
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
    pub(crate) items: Vec<Box<Stored>>,
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
                let mut item = Box::new(segment.item(at, Some(&content))?);
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

    /// The change that claims the items.
    fn change(&self) -> Result<RawDocumentBuf> {
        let after = self.front();
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
        Ok(update)
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

/// The statements that claim parts of segments. They change nothing in a segment of which anybody has claimed or detached
/// ready items since they were read. One statement claims all segments that change alike, as those do that are claimed
/// whole: a statement costs the server about as much as the change of a segment.
pub(crate) fn statements<'a>(
    parts: impl Iterator<Item = &'a Part>,
) -> Result<impl Iterator<Item = RawDocumentBuf>> {
    let mut alike: BTreeMap<_, (RawDocumentBuf, Vec<ItemId>)> = BTreeMap::new();
    for part in parts {
        let (before, change) = (part.seen.front(), part.change()?);
        let key = (before.head, before.ready, change.as_bytes().to_vec());
        alike.entry(key).or_insert_with(|| (change, Vec::new())).1.push(part.segment());
    }
    Ok(alike.into_iter().map(|((head, ready, _), (change, segments))| {
        let filter = rawdoc! {
            "_id": { "$in": oids(segments) },
            "head": head as i32,
            "ready": ready as i32,
        };
        statement(filter, Update::Operators(change))
    }))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_that_are_claimed_whole_share_a_statement() {
        let token = LeaseToken([7; 12]);
        let part = |id: u8, n: usize, count: usize| {
            let id = ItemId([id; 12]).block().0;
            let front = Front { head: 0, ready: n, runs: 0 };
            let mut part = Part::new(&Arc::new(Seen::new(id, (n, n), None, front)));
            for at in 0..count {
                let times = (Timestamp(1_000), Timestamp(31_000));
                part.add(id.at_offset(at + 1), token, times, None);
            }
            part
        };
        let parts = [part(1, 125, 125), part(2, 125, 125), part(3, 40, 40), part(4, 125, 90)];
        let mut claimed: Vec<usize> = statements(parts.iter())
            .unwrap()
            .map(|statement| {
                let filter = statement.get_document("q").unwrap();
                let ids = filter.get_document("_id").unwrap().get_array("$in").unwrap();
                ids.into_iter().count()
            })
            .collect();
        claimed.sort_unstable();
        assert_eq!(claimed, [1, 1, 2]);
    }
}
