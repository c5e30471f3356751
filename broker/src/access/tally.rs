//! Which refusals of a period are told in full, and how many more of each kind there were.

use std::{collections::HashMap, net::IpAddr};

/// The most refusals of one kind that are told in full.
const IN_FULL: u64 = 20;
/// The most kinds that are counted apart.
const MAX_KINDS: usize = 1_000;

/// Refusals that are counted together.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Kind {
    /// The network of those who were refused; `None`: all that have no count of their own.
    pub(super) network: Option<IpAddr>,
    /// The name of their token or certificate.
    pub(super) token: Option<String>,
    /// The call, for those whose token or certificate is known.
    pub(super) call: Option<&'static str>,
    /// The reason.
    pub(super) reason: &'static str,
}

impl Kind {
    /// Returns what is counted in place of this kind when there are too many.
    fn of_all(&self) -> Self {
        Self { network: None, token: None, call: None, reason: self.reason }
    }
}

#[derive(Debug, Default)]
struct Counts {
    in_full: u64,
    more: u64,
}

/// The refusals of one period.
#[derive(Debug)]
pub(super) struct Tally {
    /// The most refusals of all kinds together that are told in full.
    most_in_full: u64,
    in_full: u64,
    kinds: HashMap<Kind, Counts>,
}

impl Tally {
    pub(super) fn new(most_in_full: u64) -> Self {
        Self { most_in_full, in_full: 0, kinds: HashMap::new() }
    }

    /// Counts a refusal. Returns true if it is to be told in full.
    pub(super) fn is_told(&mut self, kind: Kind) -> bool {
        let is_apart = self.kinds.len() < MAX_KINDS || self.kinds.contains_key(&kind);
        // There are as many of the others as reasons.
        let kind = if is_apart { kind } else { kind.of_all() };
        let counts = self.kinds.entry(kind).or_default();
        let is_told = counts.in_full < IN_FULL && self.in_full < self.most_in_full;
        if is_told {
            counts.in_full += 1;
            self.in_full += 1;
        } else {
            counts.more += 1;
        }
        is_told
    }

    /// Begins the next period. Returns how many refusals of this one were not told in full.
    pub(super) fn end_period(&mut self) -> Vec<(Kind, u64)> {
        self.in_full = 0;
        let kinds = std::mem::take(&mut self.kinds).into_iter();
        kinds.map(|(kind, counts)| (kind, counts.more)).filter(|(_, more)| *more > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stranger(network: u32, reason: &'static str) -> Kind {
        Kind { network: Some(IpAddr::V4(network.into())), token: None, call: None, reason }
    }

    /// Counts so many refusals of a kind. Returns how many are told in full.
    fn told(tally: &mut Tally, kind: &Kind, refusals: u64) -> u64 {
        (0..refusals).map(|_| u64::from(tally.is_told(kind.clone()))).sum()
    }

    #[test]
    fn of_each_kind_the_first_are_told_and_the_rest_is_counted() {
        let mut tally = Tally::new(1_000);
        let (flood, rare) = (stranger(1, "TOKEN_UNKNOWN"), stranger(1, "TOKEN_MISSING"));
        for _ in 0..2 {
            assert_eq!(told(&mut tally, &flood, 5_000), IN_FULL);
            assert_eq!(told(&mut tally, &rare, 3), 3);
            assert_eq!(told(&mut tally, &stranger(2, "TOKEN_UNKNOWN"), 3), 3);
            assert_eq!(tally.end_period(), [(flood.clone(), 5_000 - IN_FULL)]);
        }
        assert_eq!(tally.end_period(), []);
    }

    #[test]
    fn no_number_of_addresses_takes_more_memory_or_lines_and_none_is_lost_from_the_count() {
        let most = 500;
        let mut tally = Tally::new(most);
        let refusals = 5 * MAX_KINDS as u64;
        let told: u64 =
            (0..refusals).map(|n| told(&mut tally, &stranger(n as u32, "TOKEN_UNKNOWN"), 1)).sum();
        assert_eq!(told, most);
        assert_eq!(tally.kinds.len(), MAX_KINDS + 1);
        let more = tally.end_period();
        assert_eq!(told + more.iter().map(|(_, more)| more).sum::<u64>(), refusals);
        let others = stranger(0, "TOKEN_UNKNOWN").of_all();
        assert!(more.contains(&(others, refusals - MAX_KINDS as u64)), "{more:?}");
    }
}
