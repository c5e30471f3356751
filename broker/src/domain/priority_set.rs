//! Sets of priorities.

use std::ops::{BitAnd, BitOr, BitOrAssign, Sub};

use crate::domain::Priority;

/// A set of priorities, one bit each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct PrioritySet(u16);

impl PrioritySet {
    /// No priority.
    pub const EMPTY: Self = Self(0);
    /// Every priority.
    pub const ALL: Self = Self((1 << Priority::LEVELS) - 1);

    /// Returns the set of this priority alone; the empty set if there is no such priority.
    pub fn of(priority: i32) -> Self {
        let bit = u32::try_from(priority).ok().filter(|p| *p < u32::from(Priority::LEVELS));
        Self(bit.map_or(0, |priority| 1 << priority))
    }

    /// Returns true if no priority is in the set.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the priorities of the set, the highest first.
    pub fn iter(self) -> impl Iterator<Item = i32> + Clone {
        (0..i32::from(Priority::LEVELS)).rev().filter(move |p| !(self & Self::of(*p)).is_empty())
    }

    /// Returns the highest priority of the set.
    pub fn highest(self) -> Option<i32> {
        self.iter().next()
    }
}

impl FromIterator<i32> for PrioritySet {
    fn from_iter<I: IntoIterator<Item = i32>>(priorities: I) -> Self {
        priorities.into_iter().fold(Self::EMPTY, |set, priority| set | Self::of(priority))
    }
}

impl BitOr for PrioritySet {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for PrioritySet {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

impl BitAnd for PrioritySet {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

/// Returns the priorities that are in the first set and not in the second.
impl Sub for PrioritySet {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn priorities_come_highest_first() {
        let set: PrioritySet = [0, 9, 4].into_iter().collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), [9, 4, 0]);
        assert_eq!(set.highest(), Some(9));
        assert_eq!((set - PrioritySet::of(9)).highest(), Some(4));
        assert!((PrioritySet::of(-1) | PrioritySet::of(10)).is_empty());
        assert_eq!(PrioritySet::ALL.iter().count(), usize::from(Priority::LEVELS));
    }

    #[test]
    fn a_priority_is_in_a_set_or_not() {
        let mut set: PrioritySet = [4, 4].into_iter().collect();
        set |= PrioritySet::of(2);
        assert_eq!(set.iter().collect::<Vec<_>>(), [4, 2]);
    }
}
