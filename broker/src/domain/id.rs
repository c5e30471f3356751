//! Ids of items and of operations, and tokens of leases: twelve bytes, written as 24 hexadecimal digits.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    hash::{BuildHasher, RandomState},
    str::FromStr,
    sync::LazyLock,
};

use foldhash::{
    SharedSeed,
    fast::{FoldHasher, SeedableRandomState},
};
use parking_lot::Mutex;

use super::Timestamp;

/// Writes bytes as hexadecimal digits, two for each byte; `digits` must be twice as long. Ids and receipts of
/// every item pass through this function. Writing byte by byte through `fmt` would cost as much as the rest of a receipt.
fn write_hex(bytes: &[u8], digits: &mut [u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for (byte, pair) in bytes.iter().zip(digits.chunks_exact_mut(2)) {
        pair[0] = DIGITS[usize::from(byte >> 4)];
        pair[1] = DIGITS[usize::from(byte & 15)];
    }
}

/// Returns bytes as hexadecimal digits.
pub(super) fn hex_text(bytes: &[u8]) -> String {
    let mut digits = vec![0; bytes.len() * 2];
    write_hex(bytes, &mut digits);
    String::from_utf8(digits).unwrap_or_default() // digits are text
}

macro_rules! twelve_bytes {
    ($(#[$doc:meta])* $type:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $type(pub [u8; 12]);

        impl $type {
            /// Returns the digits.
            pub fn to_text(self) -> String {
                hex_text(&self.0)
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let mut digits = [0; 24];
                write_hex(&self.0, &mut digits);
                f.write_str(std::str::from_utf8(&digits).map_err(|_| fmt::Error)?)
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $type {
            type Err = ();
            fn from_str(text: &str) -> Result<Self, ()> {
                if text.len() != 24 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
                    return Err(());
                }
                let mut bytes = [0; 12];
                for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
                    let digits = std::str::from_utf8(pair).map_err(|_| ())?;
                    *byte = u8::from_str_radix(digits, 16).map_err(|_| ())?;
                }
                Ok(Self(bytes))
            }
        }
    };
}

twelve_bytes!(
    /// Identifies an item. Opaque: only [`IdSource`] knows what the bytes mean.
    ItemId
);
twelve_bytes!(
    /// Identifies one reservation. Each reservation has a new token, which is never used again.
    LeaseToken
);
twelve_bytes!(
    /// Identifies an operation. Random, so that nobody finds one by guessing.
    OperationId
);

/// A map by ids or tokens, hashed quickly, because every item passes through several of these.
pub type IdMap<K, V> = HashMap<K, V, IdHash>;
/// A set of ids or tokens.
pub type IdSet<K> = HashSet<K, IdHash>;

/// How these are hashed. All of its seeds are secret, because a receipt that is not signed may name any ids, and with a seed
/// that is known some of them have one hash. They come from the standard library, whose own a simulation repeats.
#[derive(Debug, Clone)]
pub struct IdHash(SeedableRandomState);

impl Default for IdHash {
    fn default() -> Self {
        static SEEDS: LazyLock<(u64, SharedSeed)> = LazyLock::new(|| {
            let random = RandomState::new();
            (random.hash_one(0), SharedSeed::from_u64(random.hash_one(1)))
        });
        Self(SeedableRandomState::with_seed(SEEDS.0, &SEEDS.1))
    }
}

impl BuildHasher for IdHash {
    type Hasher = FoldHasher<'static>;

    fn build_hasher(&self) -> Self::Hasher {
        self.0.build_hasher()
    }
}

/// Creates item ids that sort in the order in which one broker created them, and across brokers by
/// time.
///
/// Layout: 4 bytes seconds, 10 bits milliseconds and 22 bits counter, 4 random bytes per source.
/// The first four bytes are those of a MongoDB ObjectId, so that MongoDB's tools show the correct
/// time.
#[derive(Debug)]
pub struct IdSource {
    source: [u8; 4],
    /// The millisecond and the counter of the last id.
    last: Mutex<(i64, u32)>,
}

const COUNTER_BITS: u32 = 22;
/// So many consecutive ids of one source form a block, which begins at a multiple of this.
const BLOCK: u32 = 1 << 10;

impl ItemId {
    /// How many ids there are in a block besides the first.
    pub const MAX_OFFSET: usize = BLOCK as usize - 1;

    fn fine(self) -> u32 {
        u32::from_be_bytes([self.0[4], self.0[5], self.0[6], self.0[7]])
    }

    fn with_fine(mut self, fine: u32) -> Self {
        self.0[4..8].copy_from_slice(&fine.to_be_bytes());
        self
    }

    /// Returns the first id of the block that this one is in, and how many ids this one is behind it.
    pub fn block(self) -> (Self, usize) {
        let fine = self.fine();
        (self.with_fine(fine & !(BLOCK - 1)), (fine & (BLOCK - 1)) as usize)
    }

    /// Returns the id that is so far behind this one, the first of a block; at most [`Self::MAX_OFFSET`].
    #[must_use]
    pub fn at_offset(self, offset: usize) -> Self {
        self.with_fine(self.fine() | offset as u32 & (BLOCK - 1))
    }
}

impl IdSource {
    /// Returns a new source, which differs from others by four random bytes.
    pub fn new() -> Self {
        Self { source: rand::random(), last: Mutex::new((0, 0)) }
    }

    /// Returns the next id. It is greater than every id that this source created before, even if
    /// the clock steps back.
    pub fn next(&self, now: Timestamp) -> ItemId {
        let mut last = self.last.lock();
        *last = after(*last, now, last.1 + 1);
        self.id(*last)
    }

    /// Returns the first id of a new block, greater than every id that this source made before. None of the others in
    /// the block is given to anybody else.
    pub fn next_block(&self, now: Timestamp) -> ItemId {
        let mut last = self.last.lock();
        let first = after(*last, now, (last.1 | (BLOCK - 1)) + 1);
        *last = (first.0, first.1 | (BLOCK - 1));
        self.id(first)
    }

    /// Marks the place between the ids that this source has made and those that it will make.
    pub fn mark(&self) -> IdMark {
        IdMark::of_broker(self.id(*self.last.lock()))
    }

    fn id(&self, (millis, counter): (i64, u32)) -> ItemId {
        let seconds = (millis / 1000) as u32;
        let fine = ((millis % 1000) as u32) << COUNTER_BITS | counter;
        let mut bytes = [0; 12];
        bytes[..4].copy_from_slice(&seconds.to_be_bytes());
        bytes[4..8].copy_from_slice(&fine.to_be_bytes());
        bytes[8..].copy_from_slice(&self.source);
        ItemId(bytes)
    }
}

/// Returns the millisecond and the counter of the next id; `counter` if the clock has not moved on.
fn after(last: (i64, u32), now: Timestamp, counter: u32) -> (i64, u32) {
    if now.0 > last.0 {
        (now.0, 0)
    } else if counter < 1 << COUNTER_BITS {
        (last.0, counter)
    } else {
        (last.0 + 1, 0)
    }
}

/// The place in time of one broker between the items that it has pushed and those that it will push.
#[derive(Debug, Clone, Copy)]
pub struct IdMark {
    last: ItemId,
    /// True if there is one source only.
    of_all: bool,
}

impl IdMark {
    /// Returns the mark behind an id whose last four bytes say which broker made it, as an [`IdSource`] makes them.
    pub fn of_broker(last: ItemId) -> Self {
        Self { last, of_all: false }
    }

    /// Returns the mark behind an id, of a store for which one broker makes all ids, and in order.
    pub fn behind(last: ItemId) -> Self {
        Self { last, of_all: true }
    }

    /// Returns true if the mark's broker has made the id, and after the mark. Ids of others say nothing: their clocks differ.
    pub fn is_before(self, id: ItemId) -> bool {
        id > self.last && (self.of_all || id.0[8..] == self.last.0[8..])
    }
}

impl Default for IdSource {
    fn default() -> Self {
        Self::new()
    }
}

impl LeaseToken {
    /// A token that no lease has.
    pub const NONE: Self = Self([0; 12]);

    /// Returns a new token whose first four bytes identify the broker that issues the lease.
    pub fn fresh(broker: [u8; 4]) -> Self {
        let mut bytes = [0; 12];
        bytes[..4].copy_from_slice(&broker);
        bytes[4..].copy_from_slice(&rand::random::<[u8; 8]>());
        Self(bytes)
    }

    /// Returns the broker that created the token.
    pub fn broker(self) -> [u8; 4] {
        [self.0[0], self.0[1], self.0[2], self.0[3]]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The end of these ids is what the hash mixes it with, where its seeds are those that everybody can read.
    #[test]
    fn nobody_can_choose_ids_of_one_hash() {
        const KNOWN: u64 = 0x3f84_d5b5_b547_0917;
        let id = |n: u32| {
            let mut bytes = [0; 12];
            bytes[..4].copy_from_slice(&n.to_ne_bytes());
            bytes[4..].copy_from_slice(&KNOWN.to_ne_bytes());
            ItemId(bytes)
        };
        let hashes =
            |hash: &dyn Fn(ItemId) -> u64| (0..1_000).map(id).map(hash).collect::<HashSet<_>>();
        let known = foldhash::fast::FixedState::with_seed(RandomState::new().hash_one(0));
        assert_eq!(hashes(&|id| known.hash_one(id)).len(), 1, "the ids are well chosen");
        let secret = IdHash::default();
        assert!(hashes(&|id| secret.hash_one(id)).len() > 990);
    }

    #[test]
    fn ids_grow_even_when_the_clock_steps_back() {
        let ids = IdSource::new();
        let mut last = ids.next(Timestamp(1_000_000));
        for now in [1_000_000, 1_000_000, 999_000, 1_000_001, 1_002_000, 1_001_999] {
            let next = ids.next(Timestamp(now));
            assert!(next > last, "{next} after {last}");
            last = next;
        }
    }

    #[test]
    fn blocks_are_their_owners_alone() {
        let ids = IdSource::new();
        let now = Timestamp(1_000_000);
        let mut last = ids.next(now);
        for n in 0..10_000 {
            let first = ids.next_block(now);
            assert!(first > last, "{first} after {last}");
            assert_eq!(
                [0, 1, 700].map(|n| first.at_offset(n).block()),
                [0, 1, 700].map(|n| (first, n))
            );
            last = first.at_offset(ItemId::MAX_OFFSET);
            assert_eq!((first.block(), last.block()), ((first, 0), (first, ItemId::MAX_OFFSET)));
            if n % 7 == 0 {
                let next = ids.next(now);
                assert!(next > last, "{next} after {last}");
                last = next;
            }
        }
    }

    /// MongoDB's tools show the time of an id.
    #[test]
    fn an_id_begins_with_its_time() {
        let id = IdSource::new().next(Timestamp(1_700_000_000_123));
        assert_eq!(id.0[..4], 1_700_000_000_u32.to_be_bytes());
        assert_eq!(id.fine() >> COUNTER_BITS, 123);
    }

    /// So the ids of several brokers sort by time, however many one of them creates at once.
    #[test]
    fn ids_have_the_time_of_the_clock_until_a_millisecond_has_no_more() {
        let ids = IdSource::new();
        let now = Timestamp(1_700_000_000_123);
        let millisecond = |id: ItemId| id.fine() >> COUNTER_BITS;
        for _ in 0..(1 << COUNTER_BITS) / BLOCK {
            assert_eq!(millisecond(ids.next_block(now)), 123);
        }
        assert_eq!(millisecond(ids.next(now)), 124);
    }

    #[test]
    fn a_token_names_its_broker_and_is_new() {
        let token = LeaseToken::fresh([7, 0, 255, 9]);
        assert_eq!(token.broker(), [7, 0, 255, 9]);
        assert_ne!(token, LeaseToken::fresh([7, 0, 255, 9]));
    }

    #[test]
    fn ids_survive_their_text_form() {
        let id = IdSource::new().next(Timestamp(1_700_000_000_123));
        assert_eq!(id.to_string().parse(), Ok(id));
        for bad in ["", "zz", "0123456789abcdef0123456", "+123456789abcdef012345678"] {
            assert_eq!(bad.parse::<ItemId>(), Err(()), "{bad:?}");
        }
    }
}
