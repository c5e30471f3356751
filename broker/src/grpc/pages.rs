//! Lists by name, of which a caller may see a part.
//!
//! A page token is the name of the last entry of its page. Where that is an entry that the caller may not see, the token is sealed.

use prost::Message;
use tonic::Status;

use super::parse::{PageRequest, TOKEN_BYTES};
use crate::domain::{Invalid, ReceiptKeys, limits::MAX_MESSAGE_BYTES};

/// The most entries that one call reads. A caller who may see few of many gets pages that are not full, or empty.
const MAX_READ: usize = 2_000;
/// The size of what precedes each entry of a list: its field and its length.
const ENTRY_BYTES: usize = 6;

/// Begins a token that is sealed. No name begins with it.
const SEALED: char = '~';

/// Parses a page as [`PageRequest::parse`] does, and opens its token.
pub(super) fn request(
    keys: &ReceiptKeys,
    size: i32,
    token: String,
    default: usize,
) -> Result<PageRequest, Invalid> {
    let token = match token.strip_prefix(SEALED) {
        Some(sealed) => keys
            .open(sealed)
            .ok_or_else(|| Invalid::new("page_token", "not a page token of this broker"))?,
        None => token,
    };
    PageRequest::parse(size, token, default)
}

/// Reads a page, `step` entries at a time, and returns it with the token of the next page. The page ends early when its
/// message is full, but has at least one entry then. `shown` returns `None` for what the caller may not see.
pub(super) async fn list<N: Clone + ToString, E, P: Message, F>(
    keys: &ReceiptKeys,
    page: &PageRequest,
    mut after: Option<N>,
    step: usize,
    read: impl Fn(Option<N>, usize) -> F,
    name: impl Fn(&E) -> N,
    shown: impl Fn(E) -> Option<P>,
) -> Result<(Vec<P>, String), Status>
where
    F: Future<Output = Result<Vec<E>, Status>>,
{
    let (mut entries, mut bytes, mut seen) = (Vec::new(), 0, 0);
    let mut last_shown = None;
    loop {
        let more = read(after.clone(), step).await?;
        let ends = more.len() < step;
        seen += more.len();
        for entry in more {
            let name = name(&entry);
            if let Some(entry) = shown(entry) {
                bytes += entry.encoded_len() + ENTRY_BYTES;
                let is_full = entries.len() == page.size || bytes > MAX_MESSAGE_BYTES - TOKEN_BYTES;
                if is_full && !entries.is_empty() {
                    return Ok((entries, token(last_shown)));
                }
                entries.push(entry);
                last_shown = Some(name.clone());
            }
            after = Some(name);
        }
        if ends {
            return Ok((entries, String::new()));
        }
        if seen >= MAX_READ {
            // The last entry may be one that the caller may not see.
            let token = format!("{SEALED}{}", keys.seal(&token(after)));
            return Ok((entries, token));
        }
    }
}

fn token<N: ToString>(after: Option<N>) -> String {
    after.map(|name| name.to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use sluicegate_proto::v1 as pb;

    use super::*;

    /// Returns the names of each page, and the most entries that were read for one.
    async fn pages(
        count: usize,
        size: usize,
        step: usize,
        label: usize,
        is_shown: fn(usize) -> bool,
    ) -> (Vec<Vec<usize>>, usize) {
        let (mut pages, mut most, mut token) = (Vec::new(), 0, String::new());
        let keys = ReceiptKeys::new([]);
        loop {
            let page = request(&keys, size as i32, token, 1).unwrap();
            let after = page.token.as_ref().map(|token| token.parse().unwrap());
            let seen = Cell::new(0);
            let read = |after: Option<usize>, step| {
                let from = after.map_or(0, |after| after + 1);
                let read: Vec<usize> = (from..count.min(from + step)).collect();
                seen.set(seen.get() + read.len());
                std::future::ready(Ok(read))
            };
            let show = |n: usize| {
                let (name, labels) = (n.to_string(), [("l".to_owned(), "x".repeat(label))]);
                let labels = std::collections::HashMap::from(labels);
                is_shown(n).then(|| pb::Queue { name, labels, ..Default::default() })
            };
            let (entries, next) =
                list(&keys, &page, after, step, read, |n| *n, show).await.unwrap();
            pages.push(entries.iter().map(|queue| queue.name.parse().unwrap()).collect());
            most = most.max(seen.get());
            if next.is_empty() {
                return (pages, most);
            }
            // A token names the last entry of its page or nothing at all.
            let last = entries.last().map(|queue| &queue.name);
            assert!(last == Some(&next) || next.starts_with(SEALED), "{next}");
            token = next;
        }
    }

    #[tokio::test]
    async fn pages_hold_what_they_may_and_miss_nothing() {
        for step in [1, 2, 5, 100] {
            assert_eq!(pages(0, 2, step, 1, |_| true).await.0, [Vec::<usize>::new()]);
            assert_eq!(pages(2, 2, step, 1, |_| true).await.0.concat(), [0, 1]);
            let (found, _) = pages(7, 3, step, 1, |_| true).await;
            assert_eq!(found.concat(), [0, 1, 2, 3, 4, 5, 6], "{step} at a time");
            assert!(found.iter().all(|page| page.len() <= 3));
            let (found, _) = pages(9, 2, step, 1, |n| n % 3 == 0).await;
            assert_eq!(found.concat(), [0, 3, 6], "{step} at a time");
            // Entries of which a message holds one.
            assert_eq!(pages(3, 9, step, 3 << 20, |_| true).await.0, [[0], [1], [2]]);
            assert_eq!(pages(2, 9, step, 5 << 20, |_| true).await.0, [[0], [1]]);
        }
    }

    /// A caller who may see next to nothing does not make the broker read everything in one call.
    #[tokio::test]
    async fn one_call_reads_a_bounded_part_of_what_its_caller_may_not_see() {
        let (found, most) = pages(100_000, 1, 101, 1, |n| n == 99_000).await;
        assert_eq!(found.concat(), [99_000]);
        assert!(most <= MAX_READ + 101, "{most} read in one call");
    }
}
