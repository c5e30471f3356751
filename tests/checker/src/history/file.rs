//! Histories as files: one event per line, as JSON.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    fs::File,
    io::{self, BufRead, BufReader},
    path::Path,
};

use super::{Event, Time, What};

/// Reads a file, one event after the other. The last line may be cut, because its process was killed.
pub fn read(path: &Path) -> io::Result<impl Iterator<Item = io::Result<Event>> + use<>> {
    let mut lines = BufReader::with_capacity(1 << 18, File::open(path)?);
    let mut line = Vec::new();
    Ok(std::iter::from_fn(move || {
        line.clear();
        match lines.read_until(b'\n', &mut line) {
            Err(error) => Some(Err(error)),
            Ok(_) if line.last() != Some(&b'\n') => None,
            Ok(_) => Some(serde_json::from_slice(&line).map_err(io::Error::from)),
        }
    }))
}

/// Puts the histories of several processes together, in the order of time.
pub fn read_merged(paths: &[&Path]) -> io::Result<impl Iterator<Item = io::Result<Event>>> {
    let sources = paths.iter().map(|path| read(path)).collect::<io::Result<Vec<_>>>()?;
    Ok(merge(sources))
}

/// Merges histories of which each is in the order of time. Of events at the same time those that start
/// calls come first, so that calls that may have been under way together are taken so.
pub fn merge<I>(mut sources: Vec<I>) -> impl Iterator<Item = io::Result<Event>>
where
    I: Iterator<Item = io::Result<Event>>,
{
    fn rank(event: &Event) -> (Time, bool) {
        (event.at, !matches!(event.what, What::Start { .. }))
    }
    let mut heads: Vec<_> = sources.iter_mut().map(Iterator::next).collect();
    let mut order = BinaryHeap::new();
    for (source, head) in heads.iter().enumerate() {
        let rank = head.as_ref().map(|head| head.as_ref().map_or((0, false), rank));
        order.extend(rank.map(|rank| Reverse((rank, source))));
    }
    std::iter::from_fn(move || {
        let Reverse((_, source)) = order.pop()?;
        let event = std::mem::replace(&mut heads[source], sources[source].next());
        if let Some(Ok(next)) = &heads[source] {
            order.push(Reverse((rank(next), source)));
        } else if heads[source].is_some() {
            order.push(Reverse(((0, false), source)));
        }
        event
    })
}
