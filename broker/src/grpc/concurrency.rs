//! How many calls are under way: of one peer, and in all.
//!
//! A call counts until the last byte of its answer is on its way, so that answers that nobody reads count as well. Calls that need no token and
//! calls that are refused are counted apart from the others: whoever has no token takes no place from those who have one, and health is told
//! when there is no place left.

use std::sync::Arc;

use sluicegate_proto::v1::ErrorReason;

use crate::{
    access::{Count, Peer, Usage},
    config::Bounds,
};

/// A call is not begun, because too many others are under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{setting} is {most}, and so many are under way")]
pub(crate) struct TooMany {
    /// The setting that limits calls like this one.
    pub(crate) setting: &'static str,
    /// The limit.
    pub(crate) most: usize,
    is_stream: bool,
}

impl TooMany {
    /// Returns the reason in errors and in metrics.
    pub(crate) fn reason(self) -> ErrorReason {
        if self.is_stream { ErrorReason::TooManyStreams } else { ErrorReason::TooManyRequests }
    }
}

/// A setting and its value.
type Limit = (&'static str, usize);

/// The limits of one kind of calls.
#[derive(Debug)]
struct Limits {
    of_peer: Limit,
    in_all: Limit,
}

/// Bounds how many calls are under way.
#[derive(Debug)]
pub(super) struct ConcurrencyLimits {
    requests: Limits,
    streams: Limits,
    all: Arc<Usage>,
    /// Of all who have not shown that they may call anything.
    strangers: Arc<Usage>,
}

impl ConcurrencyLimits {
    pub(super) fn new(bounds: &Bounds) -> Self {
        let limit = |setting, most| (setting, if most == 0 { usize::MAX } else { most as usize });
        Self {
            requests: Limits {
                of_peer: limit("max_requests_per_peer", bounds.max_requests_per_peer),
                in_all: limit("max_requests", bounds.max_requests),
            },
            streams: Limits {
                of_peer: limit("max_streams_per_peer", bounds.max_streams_per_peer),
                in_all: limit("max_streams", bounds.max_streams),
            },
            all: Arc::default(),
            strangers: Arc::default(),
        }
    }

    /// Counts a call of this peer, or refuses it.
    pub(super) fn of_peer(&self, is_stream: bool, peer: &Peer) -> Result<Place, TooMany> {
        Place::take(&peer.usage, is_stream, self.limits(is_stream).of_peer)
    }

    /// Counts the same call among all, or among all those of strangers, or refuses it.
    pub(super) fn in_all(&self, of_peer: Place, is_stranger: bool) -> Result<CallPermit, TooMany> {
        let usage = if is_stranger { &self.strangers } else { &self.all };
        let is_stream = of_peer.is_stream;
        let in_all = Place::take(usage, is_stream, self.limits(is_stream).in_all)?;
        Ok(CallPermit { _places: [of_peer, in_all] })
    }

    /// Returns an error if strangers have all of their places.
    pub(super) fn room_for_strangers(&self, is_stream: bool) -> Result<(), TooMany> {
        Place::take(&self.strangers, is_stream, self.limits(is_stream).in_all).map(drop)
    }

    fn limits(&self, is_stream: bool) -> &Limits {
        if is_stream { &self.streams } else { &self.requests }
    }
}

fn count(usage: &Usage, is_stream: bool) -> &Count {
    if is_stream { &usage.streams } else { &usage.requests }
}

/// Counts a call for as long as it is held.
#[derive(Debug)]
pub(super) struct CallPermit {
    _places: [Place; 2],
}

/// One of the places for calls of one kind.
#[derive(Debug)]
pub(super) struct Place {
    usage: Arc<Usage>,
    is_stream: bool,
}

impl Place {
    fn take(usage: &Arc<Usage>, is_stream: bool, (setting, most): Limit) -> Result<Self, TooMany> {
        if count(usage, is_stream).take(most) {
            Ok(Self { usage: Arc::clone(usage), is_stream })
        } else {
            Err(TooMany { setting, most, is_stream })
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        count(&self.usage, self.is_stream).release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A peer that has used up its share leaves room for others, until all room is used up.
    #[test]
    fn calls_are_bounded_for_one_peer_and_in_all() {
        let limits = ConcurrencyLimits::new(&Bounds {
            max_requests: 3,
            max_requests_per_peer: 2,
            max_streams: 1,
            max_streams_per_peer: 0,
            ..Bounds::default()
        });
        let (one, other) = (Peer::default(), Peer::default());
        let begin = |is_stream, peer| {
            limits.of_peer(is_stream, peer).and_then(|place| limits.in_all(place, false))
        };
        let refused = |is_stream, peer| begin(is_stream, peer).unwrap_err();
        let held = [begin(false, &one).unwrap(), begin(false, &one).unwrap()];
        for _ in 0..3 {
            assert_eq!(refused(false, &one).setting, "max_requests_per_peer");
        }
        let third = begin(false, &other).unwrap();
        assert_eq!(refused(false, &other).setting, "max_requests");
        let stream = begin(true, &one).expect("streams have limits of their own");
        let too_many = refused(true, &other);
        assert_eq!(
            (too_many.setting, too_many.reason()),
            ("max_streams", ErrorReason::TooManyStreams)
        );
        drop(held);
        let _held = [begin(false, &other).unwrap(), begin(false, &one).unwrap()];
        assert_eq!(refused(false, &one).setting, "max_requests");
        drop((third, stream));
        begin(true, &other).unwrap();
        begin(false, &one).unwrap();
    }

    #[test]
    fn strangers_take_no_place_from_others() {
        let limits = ConcurrencyLimits::new(&Bounds { max_streams: 1, ..Bounds::default() });
        let peer = Peer::default();
        let begin = |is_stranger| {
            limits.of_peer(true, &peer).and_then(|place| limits.in_all(place, is_stranger))
        };
        let _stranger = begin(true).unwrap();
        assert_eq!(begin(true).unwrap_err().setting, "max_streams");
        let _known = begin(false).unwrap();
        assert_eq!(begin(false).unwrap_err().setting, "max_streams");
    }
}
