//! The file of a backup: a line about the queue, a line for each item, a line at the end.

use std::{
    collections::HashMap,
    io::{self, BufRead, Read, Seek, Write},
    time::{Duration, SystemTime},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sluicegate_client::{NewItem, proto::Item};

use crate::{declare::queue::QueueEntry, json, output::line, values};

/// The version of the format, which is raised when older tools could not read it.
const VERSION: u32 = 1;
/// A longer line cannot be that of an item: payloads are 15 MiB at most, and escaped six times as long.
const LONGEST_LINE: u64 = 128 << 20;
/// The longest time to live, for items that do not expire in a queue that gives others a time to live.
const NEVER: Duration = Duration::from_hours(24 * 3_650);

/// The first line.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Head {
    version: u32,
    pub(super) queue: QueueEntry,
    /// When it was made, by the clock of the machine that made it.
    time: String,
}

/// The last line.
#[derive(Debug, Serialize, Deserialize)]
struct End {
    items: u64,
}

/// Any line.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Line {
    backup: Option<Head>,
    end: Option<End>,
    #[serde(flatten)]
    item: ItemLine,
}

/// An item, as far as a push can store it. What else is in its line is for people.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ItemLine {
    id: String,
    payload: Option<String>,
    payload_base64: Option<String>,
    content_type: String,
    headers: HashMap<String, String>,
    priority: u8,
    sequence: i64,
    ordering_key: String,
    state: String,
    eligible_time: Option<String>,
    expire_time: Option<String>,
}

/// Writes a backup.
pub(super) struct Writer<W> {
    output: W,
    pub(super) items: u64,
}

impl<W: Write> Writer<W> {
    pub(super) fn new(mut output: W, queue: QueueEntry) -> io::Result<Self> {
        let time = prost_types::Timestamp::from(SystemTime::now()).to_string();
        let head = Head { version: VERSION, queue, time };
        writeln!(output, "{}", line(&json!({ "backup": head })))?;
        Ok(Self { output, items: 0 })
    }

    pub(super) fn item(&mut self, item: &Item) -> io::Result<()> {
        self.items += 1;
        writeln!(self.output, "{}", line(&json::item(item)))
    }

    /// Writes the last line, without which the file counts as cut off.
    pub(super) fn end(mut self) -> io::Result<W> {
        writeln!(self.output, "{}", line(&json!({ "end": End { items: self.items } })))?;
        self.output.flush()?;
        Ok(self.output)
    }
}

/// What a file holds, after it was read once.
#[derive(Debug)]
pub(super) struct Contents {
    pub(super) queue: QueueEntry,
    pub(super) items: u64,
    /// True if the last line is missing: the backup was cut off.
    pub(super) is_cut: bool,
    /// Sequence number and place of the items that have to be stored in that order.
    sequenced: Vec<(i64, u64)>,
    /// Where the items begin, and where the last whole one ends.
    begin: u64,
    end: u64,
}

fn fault(number: u64, why: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("line {number}: {why}"))
}

/// Reads one line. `None` at the end; false if the line has no end.
fn read_line(input: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<Option<bool>> {
    line.clear();
    let read = input.by_ref().take(LONGEST_LINE).read_until(b'\n', line)?;
    Ok((read > 0).then(|| line.ends_with(b"\n")))
}

impl Contents {
    /// Reads the whole file and checks it.
    pub(super) fn read(input: &mut impl BufRead) -> io::Result<Self> {
        let mut text = Vec::new();
        read_line(input, &mut text)?;
        let no_backup = |_| fault(1, "this is no backup of `sluice backup`");
        let head: Line = serde_json::from_slice(&text).map_err(no_backup)?;
        let head = head.backup.ok_or_else(|| fault(1, "this is no backup of `sluice backup`"))?;
        if head.version != VERSION {
            return Err(fault(1, format!("a backup of version {}, not {VERSION}", head.version)));
        }
        let mut at = text.len() as u64;
        let (queue, begin, end) = (head.queue, at, at);
        let mut contents =
            Self { queue, items: 0, is_cut: true, sequenced: Vec::new(), begin, end };
        for number in 2_u64.. {
            let Some(is_whole) = read_line(input, &mut text)? else { break };
            if !contents.is_cut {
                return Err(fault(number, "there is something behind the end of the backup"));
            }
            let parsed = match serde_json::from_slice::<Line>(&text) {
                Ok(parsed) => parsed,
                // What was being written when the backup was cut off.
                Err(_) if !is_whole => break,
                Err(error) => return Err(fault(number, error)),
            };
            if let Some(End { items }) = parsed.end {
                if items != contents.items {
                    let why = format!("{} items, and there should be {items}", contents.items);
                    return Err(fault(number, why));
                }
                contents.is_cut = false;
                continue;
            }
            parsed.item.check().map_err(|why| fault(number, why))?;
            if parsed.item.sequence != 0 {
                contents.sequenced.push((parsed.item.sequence, at));
            }
            contents.items += 1;
            at += text.len() as u64;
            contents.end = at;
        }
        contents.sequenced.sort_unstable();
        Ok(contents)
    }

    /// Returns the items in the order in which they are to be stored: first those without a sequence number, as they stand in the
    /// file, which is the order in which they would have been handed out; then the others by their numbers.
    pub(super) fn items<I: BufRead + Seek>(
        &self,
        mut input: I,
    ) -> impl Iterator<Item = io::Result<ItemLine>> {
        let mut at = self.begin;
        let mut text = Vec::new();
        let mut sequenced = self.sequenced.iter();
        let mut is_plain = true;
        std::iter::from_fn(move || {
            loop {
                if is_plain && at >= self.end {
                    is_plain = false;
                }
                let place = if is_plain { at } else { sequenced.next()?.1 };
                let item = match read_item(&mut input, place, &mut text) {
                    Ok(item) => item,
                    Err(error) => return Some(Err(error)),
                };
                at += if is_plain { text.len() as u64 } else { 0 };
                if !is_plain || item.sequence == 0 {
                    return Some(Ok(item));
                }
            }
        })
    }
}

fn read_item(
    input: &mut (impl BufRead + Seek),
    at: u64,
    text: &mut Vec<u8>,
) -> io::Result<ItemLine> {
    // Relative, because that keeps what has been read ahead.
    let here = input.stream_position()?;
    input.seek_relative(at as i64 - here as i64)?;
    read_line(input, text)?;
    Ok(serde_json::from_slice(text)?)
}

/// What becomes of an item of the file.
#[derive(Debug, PartialEq)]
pub(super) enum Restored {
    Push(Box<NewItem>),
    /// It has expired.
    Expired,
}

impl ItemLine {
    fn check(&self) -> Result<(), String> {
        if self.id.is_empty() {
            return Err("neither an item nor the end of the backup".to_owned());
        }
        if self.payload.is_some() == self.payload_base64.is_some() {
            return Err("one of payload and payload_base64 has to be there".to_owned());
        }
        if let Some(text) = &self.payload_base64 {
            STANDARD.decode(text).map_err(|error| format!("payload_base64: {error}"))?;
        }
        for time in [&self.eligible_time, &self.expire_time].into_iter().flatten() {
            values::instant(time)?;
        }
        Ok(())
    }

    /// Returns about how many bytes it takes.
    pub(super) fn size(&self) -> usize {
        let payload = [&self.payload, &self.payload_base64].into_iter().flatten();
        payload.map(String::len).sum::<usize>()
            + self.headers.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>()
    }

    /// Returns the item as it is pushed at `now`, by the broker's clock. `has_ttl` says whether the queue gives items a time to live
    /// that have none.
    pub(super) fn restored(self, now: SystemTime, has_ttl: bool) -> Result<Restored, String> {
        let time = |text: &Option<String>| -> Result<Option<SystemTime>, String> {
            let Some(text) = text else { return Ok(None) };
            let time = SystemTime::try_from(values::instant(text)?);
            time.map(Some).map_err(|error| error.to_string())
        };
        let ttl = match time(&self.expire_time)? {
            Some(end) => match end.duration_since(now) {
                Ok(left) if !left.is_zero() => Some(left),
                _ => return Ok(Restored::Expired),
            },
            None => has_ttl.then_some(NEVER),
        };
        let payload = match (self.payload, self.payload_base64) {
            (Some(text), _) => text.into_bytes(),
            (None, Some(text)) => STANDARD.decode(text).map_err(|error| error.to_string())?,
            (None, None) => Vec::new(),
        };
        // The id of the item, and not the dedup id of its push: two items of one queue can have the same one, if its window had ended.
        let mut item = NewItem::new(payload)
            .content_type(self.content_type)
            .priority(self.priority)
            .dedup_id(format!("restore-{}", self.id));
        for (key, value) in self.headers {
            item = item.header(key, value);
        }
        if !self.ordering_key.is_empty() {
            item = item.ordering_key(self.ordering_key);
        }
        if let Some(ttl) = ttl {
            item = item.ttl(ttl);
        }
        // That of a reserved item is the end of its lease, which nobody holds here.
        let eligible = if self.state == "reserved" { None } else { time(&self.eligible_time)? };
        if let Some(eligible) = eligible.filter(|eligible| *eligible > now) {
            item = item.eligible_at(eligible);
        }
        Ok(Restored::Push(Box::new(item)))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use prost_types::Timestamp;
    use sluicegate_client::proto::{ItemState, new_item::Eligibility};

    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp { seconds, nanos: 0 }
    }

    fn item(id: &str, sequence: i64) -> Item {
        Item { id: id.to_owned(), sequence, payload: id.to_owned().into(), ..Item::default() }
    }

    fn written(items: &[Item]) -> Vec<u8> {
        let mut writer = Writer::new(Vec::new(), QueueEntry::default()).unwrap();
        for item in items {
            writer.item(item).unwrap();
        }
        writer.end().unwrap()
    }

    fn read(file: &[u8]) -> io::Result<(Contents, Vec<ItemLine>)> {
        let contents = Contents::read(&mut Cursor::new(file))?;
        let items = contents.items(Cursor::new(file)).collect::<io::Result<_>>()?;
        Ok((contents, items))
    }

    fn ids(items: &[ItemLine]) -> Vec<&str> {
        items.iter().map(|item| item.id.as_str()).collect()
    }

    fn pushed(line: ItemLine, now: u64) -> sluicegate_client::proto::NewItem {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(now);
        match line.restored(now, false) {
            Ok(Restored::Push(item)) => item.into_proto(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_a_push_can_store_survives_the_file() {
        let full = Item {
            payload: vec![0xff, 0, b'\n'].into(),
            content_type: "a/b".to_owned(),
            headers: [("k".to_owned(), "v\u{1b}\u{9b}\n".to_owned())].into(),
            priority: 9,
            ordering_key: "key".to_owned(),
            dedup_id: "theirs".to_owned(),
            state: ItemState::Delayed.into(),
            eligible_time: Some(at(2_000)),
            expire_time: Some(at(3_000)),
            ..item("id-1", 4)
        };
        let (_, items) = read(&written(&[full])).unwrap();
        let item = pushed(items.into_iter().next().unwrap(), 1_000);
        assert_eq!(item.payload.as_ref(), [0xff, 0, b'\n']);
        assert_eq!((item.content_type.as_str(), item.priority), ("a/b", 9));
        assert_eq!(item.headers["k"], "v\u{1b}\u{9b}\n");
        assert_eq!(item.ordering_key, "key");
        assert_eq!(item.dedup_id, "restore-id-1");
        assert_eq!(item.eligibility, Some(Eligibility::EligibleTime(at(2_000))));
        assert_eq!(item.ttl.map(|ttl| ttl.seconds), Some(2_000));
    }

    #[test]
    fn sequence_numbers_give_the_order_whatever_the_order_of_the_file() {
        // Blocked items stand by priority, and not in the order of their key.
        let file = written(&[item("a", 0), item("third", 3), item("b", 0), item("first", 1)]);
        let (contents, items) = read(&file).unwrap();
        assert_eq!(ids(&items), ["a", "b", "first", "third"]);
        assert!(contents.items == 4 && !contents.is_cut);
    }

    #[test]
    fn a_file_that_was_cut_off_anywhere_is_noticed() {
        let file = written(&[item("a", 0), item("b", 1)]);
        let lines: Vec<usize> =
            file.iter().enumerate().filter(|(_, c)| **c == b'\n').map(|(at, _)| at + 1).collect();
        for end in lines[0]..file.len() - 1 {
            let (contents, items) = read(&file[..end]).unwrap();
            let whole = lines[1..3].iter().filter(|line| **line <= end + 1).count();
            // A last line that lacks nothing but its end is whole, and so is the end without its end.
            assert_eq!(items.len(), whole, "{end}");
            assert!(contents.is_cut, "{end}");
        }
        assert!(!read(&file).unwrap().0.is_cut);
        assert!(!read(&file[..file.len() - 1]).unwrap().0.is_cut);
        for end in 0..lines[0] - 1 {
            assert!(read(&file[..end]).is_err(), "{end}");
        }
    }

    #[test]
    fn what_is_no_backup_is_refused_with_its_line() {
        let file = String::from_utf8(written(&[item("a", 0), item("b", 0)])).unwrap();
        let lines: Vec<&str> = file.lines().collect();
        let without_one = [lines[0], lines[2], lines[3]].join("\n");
        let with_more = format!("{file}{}\n", lines[1]);
        let broken = file.replacen(lines[1], "{\"id\":", 1);
        let newer = file.replacen("\"version\":1", "\"version\":2", 1);
        let base64 = file.replacen("\"payload\":\"a\"", "\"payload_base64\":\"?\"", 1);
        for (text, why) in [
            ("", "no backup"),
            ("{}\n", "no backup"),
            (without_one.as_str(), "1 items, and there should be 2"),
            (with_more.as_str(), "line 5: there is something behind"),
            (broken.as_str(), "line 2"),
            (newer.as_str(), "version 2"),
            (base64.as_str(), "line 2: payload_base64"),
        ] {
            let error = read(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(why), "{why}: {error}");
        }
    }

    #[test]
    fn an_item_keeps_its_end_and_a_reserved_one_is_ready() {
        let reserved = Item {
            state: ItemState::Reserved.into(),
            eligible_time: Some(at(2_000)),
            ..item("a", 0)
        };
        let expired = Item { expire_time: Some(at(900)), ..item("b", 0) };
        let (_, items) = read(&written(&[reserved, expired, item("c", 0)])).unwrap();
        let mut items = items.into_iter();
        assert_eq!(pushed(items.next().unwrap(), 1_000).eligibility, None);
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000);
        assert_eq!(items.next().unwrap().restored(now, false), Ok(Restored::Expired));
        let Ok(Restored::Push(kept)) = items.next().unwrap().restored(now, true) else { panic!() };
        assert_eq!(kept.into_proto().ttl.map(|ttl| ttl.seconds), Some(315_360_000));
    }
}
