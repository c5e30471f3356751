//! Items of segments in lists, which change nothing.

use std::collections::{HashMap, HashSet};

use mongodb::bson::{doc, rawdoc};

use crate::{
    domain::{ItemId, QueueName},
    store::{
        Result,
        mongo::{
            Inner,
            schema::{
                item::{Stored, oids},
                layout::{BY_ID, Group, LEASED, SEGMENTS, millis},
            },
            segment::{
                claim::open,
                document::{Segment, contents},
            },
            server::connect::{command_of, read},
        },
    },
};

/// Segments that are read at once.
const STEP: usize = 64;
/// About how many bytes of payload in segments are read for one page.
const PAGE_BYTES: usize = 16 << 20;

/// Items in the order of a list.
pub(crate) struct Expanded {
    pub(crate) items: Vec<Stored>,
    /// The number of documents they come from, if the rest was too much for one page.
    pub(crate) cut: Option<usize>,
}

/// Puts ready items in the place of their segments, until there are `wanted` items. `after`: the item of a segment
/// that the page before ended with.
pub(crate) async fn expand(
    inner: &Inner,
    group: &Group,
    documents: Vec<Stored>,
    after: Option<ItemId>,
    wanted: usize,
) -> Result<Expanded> {
    let wanted = wanted + after.map_or(0, |_| ItemId::MAX_OFFSET);
    let (mut count, mut read, mut segments) = (0, 0, Vec::new());
    for document in &documents {
        if count >= wanted {
            break;
        }
        if document.ready_inside.is_some() {
            segments.push(document.id());
        }
        count += document.ready_inside.unwrap_or(1);
        read += 1;
    }
    let (mut opened, mut tried, mut bytes) = (HashMap::new(), HashSet::new(), 0);
    for segments in segments.chunks(STEP) {
        let some = open(inner, group, segments.iter().copied(), ItemId::MAX_OFFSET).await?;
        let items = some.values().flat_map(|segment| &segment.items);
        bytes += items.map(|item| payload(item)).sum::<usize>();
        opened.extend(some);
        tried.extend(segments.iter().copied());
        if bytes >= PAGE_BYTES {
            break;
        }
    }
    let is_unread =
        |document: &Stored| document.ready_inside.is_some() && !tried.contains(&document.id());
    let read = documents.iter().take(read).position(is_unread).unwrap_or(read);
    let cut = (read < documents.len()).then_some(read);
    let mut items = Vec::with_capacity(count);
    for document in documents.into_iter().take(read) {
        if document.ready_inside.is_none() {
            items.push(document);
        } else if let Some(segment) = opened.remove(&document.id()) {
            items.extend(segment.items.into_iter().map(|item| *item));
        }
    }
    if let Some(after) = after {
        items.retain(|item| !is_passed(item.id(), after));
    }
    Ok(Expanded { items, cut })
}

fn payload(item: &Stored) -> usize {
    item.payload.len()
}

/// Returns true if a list has passed an item of the same segment, wherever the item is now.
fn is_passed(item: ItemId, after: ItemId) -> bool {
    let (item, after) = (item.block(), after.block());
    item.0 == after.0 && item.1 <= after.1
}

/// The place of a reserved item among the documents of its queue, if it had one of its own.
pub(crate) type Place = (i32, i64, ItemId);

/// Returns the places of the items that are reserved in segments, in the order of a list: those behind `after`.
pub(crate) async fn reserved(
    inner: &Inner,
    group: &Group,
    queue: &QueueName,
    after: Option<Place>,
) -> Result<Vec<Place>> {
    let command = doc! {
        "find": group.items.name(), "hint": SEGMENTS, "projection": { "items": 0 },
        "filter": { "q": queue.as_str(), "lapse": { "$gte": millis(0) }, "left": { "$gte": 0 } },
    };
    let order = |(priority, when, id): Place| (-priority, when, id);
    let after = after.map(order);
    let mut places = Vec::new();
    for segment in read(&inner.db, &command_of(&command)?, Segment::read).await? {
        for at in segment.present() {
            if let Some(run) = segment.run_of(at) {
                let place = (segment.priority, LEASED + run.until.0, segment.id_of(at));
                if after.is_none_or(|after| order(place) > after) {
                    places.push(place);
                }
            }
        }
    }
    places.sort_unstable_by_key(|place| order(*place));
    Ok(places)
}

/// Returns items that are reserved in segments, those that still are, and whether there were too many for one page.
pub(crate) async fn read_reserved(
    inner: &Inner,
    group: &Group,
    places: &[Place],
) -> Result<(Vec<Stored>, bool)> {
    let ids: HashSet<ItemId> = places.iter().map(|(_, _, id)| *id).collect();
    let (mut segments, mut seen) = (Vec::new(), HashSet::new());
    for (_, _, id) in places {
        if seen.insert(id.block().0) {
            segments.push(id.block().0);
        }
    }
    let (mut found, mut tried, mut bytes) = (HashMap::new(), HashSet::new(), 0);
    for segments in segments.chunks(STEP) {
        let some = held(inner, group, segments, &ids).await?;
        bytes += some.iter().map(payload).sum::<usize>();
        found.extend(some.into_iter().map(|item| (item.id(), item)));
        tried.extend(segments.iter().copied());
        if bytes >= PAGE_BYTES {
            break;
        }
    }
    let read = places.iter().position(|(_, _, id)| !tried.contains(&id.block().0));
    let items = places.iter().take(read.unwrap_or(places.len()));
    Ok((items.filter_map(|(_, _, id)| found.remove(id)).collect(), read.is_some()))
}

/// Returns those of the items that are reserved in these segments.
async fn held(
    inner: &Inner,
    group: &Group,
    segments: &[ItemId],
    ids: &HashSet<ItemId>,
) -> Result<Vec<Stored>> {
    let command = rawdoc! {
        "find": group.items.name(),
        "filter": { "_id": { "$in": oids(segments.iter().copied()) }, "left": { "$gte": 0 } },
        "hint": BY_ID,
    };
    let found = read(&inner.db, &command, |document| {
        let segment = Segment::read(document)?;
        let mut items = Vec::new();
        for (at, content) in contents(document).enumerate() {
            let is_wanted = ids.contains(&segment.id_of(at)) && segment.holds(at);
            if is_wanted && segment.run_of(at).is_some() {
                items.push(segment.item(at, Some(&content))?);
            }
        }
        Ok(items)
    });
    Ok(found.await?.into_iter().flatten().collect())
}
