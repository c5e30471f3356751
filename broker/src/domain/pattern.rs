//! Patterns of names.

use std::fmt;

use super::limits::MAX_NAME_BYTES;

/// A name in which `*` stands for any number of any characters.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pattern(Box<str>);

impl Pattern {
    /// Returns the pattern that this text is.
    pub fn new(text: &str) -> Self {
        Self(text.into())
    }

    /// Returns the pattern of names of queues that this text is, if it is one.
    pub fn of_queues(text: &str) -> Option<Self> {
        let may_stand =
            |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b'*');
        let is_one = (1..=MAX_NAME_BYTES).contains(&text.len()) && text.bytes().all(may_stand);
        is_one.then(|| Self::new(text))
    }

    /// Returns the pattern as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns true if the pattern matches every name.
    pub fn is_everything(&self) -> bool {
        self.0.bytes().all(|byte| byte == b'*') && !self.0.is_empty()
    }

    /// Returns true if the name is one of those that the pattern stands for. Takes time in proportion to the product of both
    /// lengths at most.
    ///
    /// A name that is itself a pattern is matched if all names that it stands for are: no name has a `*` in it, so that only a
    /// `*` of this pattern takes a `*` of the other one, and takes whatever stands there as well.
    pub fn matches(&self, name: &str) -> bool {
        let (pattern, name) = (self.0.as_bytes(), name.as_bytes());
        let (mut at, mut in_name) = (0, 0);
        // The last `*`, and where the name goes on after what this `*` stands for.
        let mut star: Option<(usize, usize)> = None;
        while in_name < name.len() {
            match pattern.get(at) {
                Some(b'*') => {
                    star = Some((at, in_name));
                    at += 1;
                }
                Some(byte) if *byte == name[in_name] => {
                    at += 1;
                    in_name += 1;
                }
                _ => {
                    let Some((star_at, covered)) = star else { return false };
                    star = Some((star_at, covered + 1));
                    at = star_at + 1;
                    in_name = covered + 1;
                }
            }
        }
        pattern[at..].iter().all(|byte| *byte == b'*')
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_star_stands_for_any_part_of_a_name() {
        for (pattern, matching, others) in [
            ("orders", &["orders"][..], &["order", "orders2", "", "Orders"][..]),
            ("*", &["orders", "a", ""], &[]),
            ("orders.*", &["orders.", "orders.eu", "orders.eu.dead"], &["orders", "xorders.eu"]),
            ("*.dead", &["a.dead", ".dead", "a.dead.dead"], &["dead", "a.dead2"]),
            ("a*b*c", &["abc", "axxbyyc", "abbcc", "abcbc"], &["ab", "acb", "abcd"]),
            ("**", &["", "x"], &[]),
        ] {
            let pattern = Pattern::new(pattern);
            for name in matching {
                assert!(pattern.matches(name), "{pattern} {name}");
            }
            for name in others {
                assert!(!pattern.matches(name), "{pattern} {name}");
            }
        }
    }

    /// A pattern full of stars does not take time that grows with the number of ways to match.
    #[test]
    fn many_stars_take_no_time() {
        let pattern = Pattern::new(&"a*".repeat(64));
        assert!(!pattern.matches(&format!("{}b", "a".repeat(63))));
    }

    #[test]
    fn a_pattern_of_queues_has_the_characters_of_their_names() {
        for good in ["*", "a", "orders.*", "_*-*.dead", &"x".repeat(128)] {
            assert_eq!(Pattern::of_queues(good), Some(Pattern::new(good)));
        }
        for bad in ["", "a b", "a?", "ä*", &"*".repeat(129)] {
            assert_eq!(Pattern::of_queues(bad), None, "{bad:?}");
        }
    }

    /// Returns all names of up to this many letters.
    fn names(most: usize) -> Vec<String> {
        let mut all = vec![String::new()];
        let mut from = 0;
        for _ in 0..most {
            let longest = all.len();
            for at in from..longest {
                all.extend(["a", "b", "c"].map(|letter| format!("{}{letter}", all[at])));
            }
            from = longest;
        }
        all
    }

    proptest! {
        /// A permission on the queues of one pattern is one on the queues of another pattern only if it is one on each of them.
        /// `c` is in neither pattern and stands for all that only a `*` takes.
        #[test]
        fn a_pattern_matches_another_one_if_it_matches_all_that_it_stands_for(
            one in "[ab*]{0,5}", other in "[ab*]{0,3}"
        ) {
            let (one, other) = (Pattern::new(&one), Pattern::new(&other));
            let all = names(6).iter().filter(|name| other.matches(name)).all(|name| one.matches(name));
            prop_assert_eq!(one.matches(other.as_str()), all, "{} {}", one, other);
        }
    }
}
