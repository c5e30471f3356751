//! The audit log: lines with the target `audit` for calls that were refused, and one for each call that changes settings or
//! deletes items. No line has a payload, a token or a credential in it.
//!
//! Who is refused again and again neither fills the log nor hides others in it. In each period, the first refusals of a kind are told
//! in full, and at its end one line says how many more there were. A kind is an address and a reason; of those who showed
//! a token or certificate that is known, also its name and the call. They are counted apart from strangers, whose floods hide
//! nothing of them.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::{
    peers::network,
    rules::Rule,
    tally::{Kind, Tally},
};

/// The target of all lines.
const TARGET: &str = "audit";
/// How long a period lasts.
const PERIOD: Duration = Duration::from_mins(1);
/// The most refusals of strangers in a period that are told in full, however many addresses they come from.
const MOST_OF_STRANGERS: u64 = 1_000;
/// The most of those who are known.
const MOST_OF_KNOWN: u64 = 10_000;

/// One call, as a line shows it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry<'a> {
    /// The name of the token or certificate; `None` for strangers.
    pub(super) token: Option<&'a str>,
    /// Where the call came from.
    pub(super) peer: Option<SocketAddr>,
    /// The call, in the words of the caller.
    pub(super) call: &'a str,
    /// The queue that the call named.
    pub(super) queue: Option<&'a str>,
}

/// Writes a call and its outcome, a gRPC code or the reason of a refusal.
pub(super) fn line(of: Entry<'_>, outcome: &str) {
    let Entry { token, peer, call, queue } = of;
    let peer = peer.map(tracing::field::display);
    // What callers send is quoted, so that it cannot forge another line.
    let (call, queue) = (shown(call), queue.map(shown));
    tracing::info!(target: TARGET, token, peer, call, queue, outcome);
}

/// The refusals of this period.
pub(super) struct Refusals {
    of_strangers: Mutex<Tally>,
    of_known: Mutex<Tally>,
}

impl Default for Refusals {
    fn default() -> Self {
        Self {
            of_strangers: Mutex::new(Tally::new(MOST_OF_STRANGERS)),
            of_known: Mutex::new(Tally::new(MOST_OF_KNOWN)),
        }
    }
}

impl Refusals {
    /// Writes a refused call, or counts it.
    pub(super) fn note(&self, of: Entry<'_>, reason: &'static str) {
        if self.is_told(of, reason) {
            line(of, reason);
        }
    }

    /// Counts a refusal. Returns true if it is to be told in full.
    pub(super) fn is_told(&self, of: Entry<'_>, reason: &'static str) -> bool {
        let network = of.peer.map(|peer| network(peer.ip()));
        let token = of.token.map(str::to_owned);
        let tally = if token.is_some() { &self.of_known } else { &self.of_strangers };
        // Strangers may name any call.
        let call = of.token.and_then(|_| Rule::of(of.call)).map(|rule| rule.call);
        tally.lock().is_told(Kind { network, token, call, reason })
    }

    /// Ends each period in time, until `stop`. What is left then is up to [`Self::end_period`].
    pub(super) async fn run(&self, stop: CancellationToken) {
        while stop.run_until_cancelled(sleep(PERIOD)).await.is_some() {
            self.end_period();
        }
    }

    /// Writes how many refusals of this period were only counted.
    pub(super) fn end_period(&self) {
        for tally in [&self.of_known, &self.of_strangers] {
            let counted = tally.lock().end_period();
            for (Kind { network, token, call, reason }, more) in counted {
                let peer = network.map(shown_network).map(tracing::field::display);
                tracing::info!(target: TARGET, token, peer, call, outcome = reason, more);
            }
        }
    }
}

/// The longest name that is shown in full.
const LONGEST: usize = 160;

fn shown(text: &str) -> String {
    text.chars().take(LONGEST).flat_map(char::escape_default).collect()
}

fn shown_network(network: IpAddr) -> String {
    match network {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(first) => format!("{first}/64"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PUSH: &str = "/sluicegate.v1.QueueService/Push";
    const DELETE: &str = "/sluicegate.v1.AdminService/DeleteQueue";

    fn from(address: u32, token: Option<&'static str>, call: &'static str) -> Entry<'static> {
        let peer = SocketAddr::new(IpAddr::V4(address.into()), 1);
        Entry { token, peer: Some(peer), call, queue: None }
    }

    #[test]
    fn no_number_of_strangers_and_no_number_of_its_calls_hides_what_is_done_with_a_known_token() {
        let refusals = Refusals::default();
        let strangers = 2 * MOST_OF_STRANGERS as u32;
        let told =
            (0..strangers).filter(|n| refusals.is_told(from(*n, None, PUSH), "TOKEN_MISSING"));
        assert_eq!(told.count() as u64, MOST_OF_STRANGERS);
        let is_told = |token, call| refusals.is_told(from(7, Some(token), call), "TOKEN_EXPIRED");
        let told = (0..5_000).filter(|_| is_told("shop", PUSH)).count();
        assert!((1..100).contains(&told), "{told}");
        assert!(is_told("shop", DELETE) && is_told("mail", PUSH));
    }

    #[test]
    fn addresses_are_shown_as_far_as_they_count() {
        let shown = |text: &str| shown_network(network(text.parse().unwrap()));
        assert_eq!(shown("192.0.2.7"), "192.0.2.7");
        assert_eq!(shown("2001:db8::7"), "2001:db8::/64");
    }
}
