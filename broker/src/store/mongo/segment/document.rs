//! A segment as a document. The fields:
//!
//! | field | meaning |
//! |---|---|
//! | `_id` | the first id of a block; item number `i`, counted from 0, has the id that is `i + 1` behind it |
//! | `q`, `priority`, `created` | as of an item |
//! | `when` | eligible time; `CLAIMED` when nothing is ready any more |
//! | `n` | how many items there were at first |
//! | `head` | items before this number are not ready any more |
//! | `ready` | how many items are ready |
//! | `left` | how many items are still here, ready or reserved; only segments have this field |
//! | `done` | bits of the items that have left, in words of [`WORD`] bits |
//! | `runs` | claims: `lock`, the token of the lease; `items`, which ones as bits; `until`, `started`, `extended`, `consumer` |
//! | `lapse` | a time no later than the first end of a lease; absent while there is none |
//! | `dedup` | the deduplication id of each item, `{q, id}`; something else that is unique if the item took its id along |
//! | `window` | until when these are remembered |
//! | `items` | what the items are: `payload`, `contentType`, `headers`, `producer` |
//!
//! When nothing is left, a segment with ids that are still remembered becomes a tombstone: `_id`, `q`, `when`, `dedup`,
//! `window`, `created` and `expires` stay.

use std::sync::Arc;

use mongodb::bson::{
    Document, RawArrayBuf, RawBsonRef, RawDocument, RawDocumentBuf, doc, oid::ObjectId, raw::cstr,
    rawdoc,
};

use crate::{
    domain::{DedupId, ItemId, LeaseToken, Timestamp},
    store::{
        Push, Result,
        mongo::{
            cursor::lease_cache::EXCLUSIVE,
            schema::{
                item::{Stored, append_content, number, oid, token_oid, window},
                layout::{CLAIMED, TOMBSTONE, date, leased, millis},
                settled::WITNESS,
            },
            segment::seen::{Front, Seen},
            server::error::broken,
        },
    },
};

/// Bits of one word of a set: the server tests masks of up to 63 bits, but calculates with 53.
pub(super) const WORD: usize = 52;

/// A set of items of one segment, by number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Bits(Vec<i64>);

impl Bits {
    /// The empty set of items of a segment of so many.
    pub(crate) fn of(n: usize) -> Self {
        Self(vec![0; n.div_ceil(WORD)])
    }

    /// Adds an item.
    pub(crate) fn set(&mut self, at: usize) {
        if self.0.len() <= at / WORD {
            self.0.resize(at / WORD + 1, 0);
        }
        self.0[at / WORD] |= 1 << (at % WORD);
    }

    pub(crate) fn contains(&self, at: usize) -> bool {
        self.0.get(at / WORD).is_some_and(|word| word & (1 << (at % WORD)) != 0)
    }

    /// The words that are not empty, each with its place.
    pub(crate) fn words(&self) -> impl Iterator<Item = (usize, i64)> + '_ {
        self.0.iter().copied().enumerate().filter(|(_, word)| *word != 0)
    }

    pub(crate) fn to_array(&self) -> RawArrayBuf {
        self.0.iter().copied().collect()
    }

    fn read(value: RawBsonRef<'_>) -> Self {
        Self(value.as_array().into_iter().flatten().flatten().map(number).collect())
    }
}

/// A claim of some items of a segment.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    pub(crate) lock: LeaseToken,
    pub(crate) items: Bits,
    pub(crate) until: Timestamp,
    pub(crate) started: Timestamp,
    /// When the lease was extended last.
    pub(crate) extended: Option<Timestamp>,
    pub(crate) consumer: Option<String>,
}

impl Run {
    pub(crate) fn to_document(&self) -> RawDocumentBuf {
        let mut run = rawdoc! {
            "lock": token_oid(self.lock),
            "until": date(self.until),
            "started": date(self.started),
            "items": self.items.to_array(),
        };
        if let Some(extended) = self.extended {
            run.append(cstr!("extended"), date(extended));
        }
        if let Some(consumer) = &self.consumer {
            run.append(cstr!("consumer"), consumer.as_str());
        }
        run
    }

    fn read(document: &RawDocument) -> Result<Self> {
        let at = |value: RawBsonRef<'_>| {
            Timestamp(value.as_datetime().map_or(0, mongodb::bson::DateTime::timestamp_millis))
        };
        let mut run = Self {
            lock: LeaseToken([0; 12]),
            items: Bits::default(),
            until: Timestamp(0),
            started: Timestamp(0),
            extended: None,
            consumer: None,
        };
        for element in document {
            let (name, value) = element.map_err(|e| broken(format!("unreadable run: {e}")))?;
            match name.as_str() {
                "lock" => run.lock = LeaseToken(bytes(value)),
                "until" => run.until = at(value),
                "started" => run.started = at(value),
                "extended" => run.extended = Some(at(value)),
                "items" => run.items = Bits::read(value),
                "consumer" => run.consumer = value.as_str().map(str::to_owned),
                _ => {}
            }
        }
        Ok(run)
    }
}

fn bytes(value: RawBsonRef<'_>) -> [u8; 12] {
    value.as_object_id().map_or([0; 12], |id| id.bytes())
}

/// A segment, without what its items are.
#[derive(Debug, Clone)]
pub(crate) struct Segment {
    pub(crate) id: ItemId,
    pub(crate) queue: Arc<str>,
    pub(crate) when: i64,
    pub(crate) priority: i32,
    pub(crate) created: i64,
    pub(crate) n: usize,
    pub(crate) head: usize,
    pub(crate) ready: usize,
    pub(crate) left: usize,
    pub(crate) lapse: Option<i64>,
    pub(crate) window: Option<i64>,
    pub(crate) done: Bits,
    pub(crate) runs: Vec<Run>,
}

impl Segment {
    /// Returns what the next claim of the segment must name.
    pub(crate) fn seen(&self) -> Seen {
        let front = Front { head: self.head, ready: self.ready, runs: self.runs.len() };
        Seen::new(self.id, (self.n, self.left), self.window, front)
    }

    /// Reads a document that is a segment.
    pub(crate) fn read(document: &RawDocument) -> Result<Self> {
        let mut segment = Self {
            id: ItemId([0; 12]),
            queue: Arc::default(),
            when: 0,
            priority: 0,
            created: 0,
            n: 0,
            head: 0,
            ready: 0,
            left: 0,
            lapse: None,
            window: None,
            done: Bits::default(),
            runs: Vec::new(),
        };
        for element in document {
            let (name, value) = element.map_err(|e| broken(format!("unreadable segment: {e}")))?;
            let at = || value.as_datetime().map(mongodb::bson::DateTime::timestamp_millis);
            match name.as_str() {
                "_id" => segment.id = ItemId(bytes(value)),
                "q" => segment.queue = value.as_str().unwrap_or_default().into(),
                "when" => segment.when = at().unwrap_or_default(),
                "priority" => segment.priority = number(value) as i32,
                "created" => segment.created = at().unwrap_or_default(),
                "n" => segment.n = number(value) as usize,
                "head" => segment.head = number(value) as usize,
                "ready" => segment.ready = number(value) as usize,
                "left" => segment.left = number(value) as usize,
                "lapse" => segment.lapse = at(),
                "window" => segment.window = at(),
                "done" => segment.done = Bits::read(value),
                "runs" => {
                    let runs = value.as_array().into_iter().flatten().flatten();
                    segment.runs = runs
                        .filter_map(RawBsonRef::as_document)
                        .map(Run::read)
                        .collect::<Result<_>>()?;
                }
                _ => {}
            }
        }
        let Self { n, head, ready, left, .. } = segment;
        if let Some(count) = [n, head, ready, left].into_iter().find(|c| *c > ItemId::MAX_OFFSET) {
            return Err(broken(format!("unreadable segment: {count} items")));
        }
        Ok(segment)
    }

    /// True if the document is a segment.
    pub(crate) fn is_one(document: &RawDocument) -> bool {
        matches!(document.get("left"), Ok(Some(_)))
    }

    /// The id of an item.
    pub(crate) fn id_of(&self, at: usize) -> ItemId {
        self.id.at_offset(at + 1)
    }

    /// The numbers of the items that are still here.
    pub(crate) fn present(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.n).filter(|at| !self.done.contains(*at))
    }

    /// True if there is such an item, and it is still here.
    pub(crate) fn holds(&self, at: usize) -> bool {
        at < self.n && !self.done.contains(at)
    }

    /// The claim that an item is under, if it is reserved.
    pub(crate) fn run_of(&self, at: usize) -> Option<&Run> {
        self.runs.iter().find(|run| run.items.contains(at))
    }

    /// When the first lease ends of those under which there are items.
    pub(crate) fn first_end(&self) -> Option<Timestamp> {
        let held = |run: &&Run| self.present().any(|at| run.items.contains(at));
        self.runs.iter().filter(held).map(|run| run.until).min()
    }

    /// An item that is still here, as if it had a document of its own.
    pub(crate) fn item(&self, at: usize, content: Option<&Content<'_>>) -> Result<Stored> {
        let mut item = Stored::new(self.id_of(at));
        item.queue = Arc::clone(&self.queue);
        (item.priority, item.attempt, item.created) = (self.priority, 1, self.created);
        if let Some(content) = content {
            item.add(content.fields)?;
            if let Some(id) = content.dedup_id() {
                item.dedup_id = DedupId::new(id);
                item.window = self.window;
            }
        }
        if let Some(run) = self.run_of(at) {
            (item.when, item.leased, item.deliveries) = (run.until.0, true, 1);
            item.lock = Some(run.lock);
            item.consumer.clone_from(&run.consumer);
        } else {
            item.when = self.created;
        }
        Ok(item)
    }

    /// The document of its own of an item that is still here; `ready` even if it is reserved here.
    pub(crate) fn detached(&self, at: usize, content: &Content<'_>, ready: bool) -> RawDocumentBuf {
        let run = self.run_of(at).filter(|_| !ready);
        let mut d = rawdoc! {
            "_id": oid(self.id_of(at)),
            "q": &*self.queue,
            "when": run.map_or_else(|| millis(self.created), |run| leased(run.until)),
            "priority": self.priority,
            "attempt": 1_i32,
            "deliveries": i32::from(run.is_some()),
        };
        if let (Some(dedup), Some(window)) = (content.dedup, self.window) {
            d.append(cstr!("dedup"), dedup);
            d.append(cstr!("window"), millis(window));
        }
        for (name, value) in content.fields.iter().flatten() {
            d.append(name, value);
        }
        d.append(cstr!("created"), millis(self.created));
        if let Some(run) = run {
            d.append(cstr!("lock"), token_oid(run.lock));
            d.append(cstr!("started"), date(run.started));
            if let Some(extended) = run.extended {
                d.append(cstr!("extended"), date(extended));
            }
            if let Some(consumer) = &run.consumer {
                d.append(cstr!("consumer"), consumer.as_str());
            }
        }
        d
    }
}

impl Segment {
    /// Returns the tombstone of an item that is committed, for the broker that handed it out: see `settle::receipts`.
    pub(crate) fn tombstone(&self, at: usize, settled: ObjectId, now: Timestamp) -> RawDocumentBuf {
        let until = self.run_of(at).map_or(now.0, |run| run.until.0);
        let exclusive = until.clamp(now.0, now.0 + EXCLUSIVE);
        rawdoc! {
            "_id": oid(self.id_of(at)),
            "q": &*self.queue,
            "when": millis(TOMBSTONE),
            "settled": settled,
            "created": millis(self.created),
            "expires": millis(exclusive + WITNESS),
        }
    }
}

/// What the items are that were read with a segment, in order.
pub(crate) fn contents(document: &RawDocument) -> impl Iterator<Item = Content<'_>> {
    let documents = |field| {
        let array = document.get_array(field).ok();
        array.into_iter().flatten().flatten().map(RawBsonRef::as_document)
    };
    let ids = documents("dedup").chain(std::iter::repeat(None));
    documents("items").flatten().zip(ids).map(|(fields, dedup)| Content { fields, dedup })
}

/// What an item is.
pub(crate) struct Content<'a> {
    fields: &'a RawDocument,
    /// Its deduplication id, with the queue that it was pushed to.
    pub(crate) dedup: Option<&'a RawDocument>,
}

impl Content<'_> {
    fn dedup_id(&self) -> Option<&str> {
        self.dedup?.get_str("id").ok()
    }
}

/// The document of a new segment. Places of items that are left out are empty. Its items are ready, or all under the
/// lease under which they are pushed.
pub(crate) fn encode(
    pushes: &[Option<&Push>],
    id: ItemId,
    now: Timestamp,
) -> Result<RawDocumentBuf> {
    let n = pushes.len();
    let mut done = Bits::of(n);
    let (mut items, mut ids) = (RawArrayBuf::new(), RawArrayBuf::new());
    for (at, push) in pushes.iter().enumerate() {
        let mut item = RawDocumentBuf::new();
        if let Some(push) = push {
            append_content(&mut item, push)?;
            let dedup_id = DedupId::text_of(push.item.dedup_id.as_ref());
            ids.push(rawdoc! { "q": push.queue.name.as_str(), "id": dedup_id });
        } else {
            done.set(at);
            ids.push(oid(id.at_offset(at + 1)));
        }
        items.push(item);
    }
    let mut there = pushes.iter().flatten();
    let first = there.next().ok_or_else(|| broken("a segment without items"))?;
    let count = 1 + there.count() as i32;
    let run = first.first_lease.as_deref().map(|lease| {
        let mut items = Bits::of(n);
        (0..n).filter(|at| pushes[*at].is_some()).for_each(|at| items.set(at));
        Run {
            lock: lease.token,
            items,
            until: now + lease.lasts,
            started: now,
            extended: None,
            consumer: lease.consumer.as_ref().map(|consumer| consumer.as_str().to_owned()),
        }
    });
    let (when, head, ready) =
        if run.is_some() { (millis(CLAIMED), n as i32, 0) } else { (date(now), 0, count) };
    // What changes stands before what does not.
    let mut document = rawdoc! {
        "_id": oid(id),
        "q": first.queue.name.as_str(),
        "when": when,
        "priority": i32::from(first.item.priority.level()),
        "n": n as i32,
        "head": head,
        "ready": ready,
        "left": count,
        "done": done.to_array(),
        "runs": run.iter().map(Run::to_document).collect::<RawArrayBuf>(),
        "created": date(now),
    };
    if let Some(run) = &run {
        document.append(cstr!("lapse"), date(run.until));
    }
    if let Some(window) = window(first, now) {
        document.append(cstr!("window"), date(window));
        document.append(cstr!("dedup"), ids);
    }
    document.append(cstr!("items"), items);
    Ok(document)
}

/// Fields of a segment that its tombstone has no more.
const BURIED: [&str; 9] =
    ["priority", "n", "head", "ready", "left", "done", "runs", "lapse", "items"];

/// Returns the change that makes a tombstone of a segment in which nothing is left.
pub(crate) fn burial(window: i64) -> Document {
    let gone: Document = BURIED.iter().map(|field| ((*field).to_owned(), 1.into())).collect();
    doc! { "$set": { "when": millis(TOMBSTONE), "expires": millis(window) }, "$unset": gone }
}

/// The same as a pipeline, for segments with ids that are remembered for different times.
pub(crate) fn burial_of_many() -> Vec<Document> {
    vec![
        doc! { "$set": { "when": millis(TOMBSTONE), "expires": "$window" } },
        doc! { "$unset": BURIED.to_vec() },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_grows_by_words_of_52_bits() {
        for at in [0, 1, 51, 52, 53, 103, 104, 999] {
            let mut set = Bits::default();
            assert!(!set.contains(at));
            set.set(at);
            let words: Vec<(usize, i64)> = set.words().collect();
            assert_eq!(words, [(at / 52, 1 << (at % 52))], "{at}");
            let others = [0, 1, 51, 52, 53, 103, 104, 999, 1_000];
            assert!(others.into_iter().all(|other| set.contains(other) == (other == at)), "{at}");
        }
    }

    #[test]
    fn the_set_of_a_claim_has_its_length_from_the_beginning() {
        for (items, words) in [(1, 1), (52, 1), (53, 2), (1_000, 20)] {
            let mut set = Bits::of(items);
            assert_eq!((set.0.len(), set.words().count()), (words, 0));
            set.set(items - 1);
            assert_eq!(set.0.len(), words);
        }
    }
}
