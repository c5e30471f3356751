//! Texts as numbers: the checker remembers a name by its hash.

use std::{
    collections::{HashMap, HashSet},
    hash::{BuildHasherDefault, DefaultHasher, Hash, Hasher},
};

/// The hash of a name. Two names of a history share one by a chance of 1 to 10^7 for a million names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Key(u64);

impl Key {
    pub(super) fn of(name: &str) -> Self {
        Self::hash(name)
    }

    /// Returns the key of a name inside of something else, for example of an ordering key in a queue.
    pub(super) fn within(self, name: &str) -> Self {
        Self::hash((self.0, name))
    }

    /// Returns the key of both.
    pub(super) fn and(self, other: Self) -> Self {
        Self::hash((self.0, other.0))
    }

    fn hash(value: impl Hash) -> Self {
        let mut hasher = DefaultHasher::new();
        value.hash(&mut hasher);
        Self(hasher.finish())
    }
}

/// A map by numbers that are spread well already.
pub(super) type Map<K, V> = HashMap<K, V, BuildHasherDefault<Spread>>;

/// A set of such numbers.
pub(super) type Set<K> = HashSet<K, BuildHasherDefault<Spread>>;

/// Takes a key as its own hash.
#[derive(Default)]
pub(super) struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write_u64(&mut self, value: u64) {
        // Numbers of calls and sequences grow one by one; the map looks at the first bits.
        self.0 = (self.0.rotate_left(5) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }
}
