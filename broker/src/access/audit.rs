//! The audit log: one line, with the target `audit`, for each call that was refused and each that changes settings or
//! deletes items. No line has a payload, a token or a credential in it.

use std::net::SocketAddr;

/// The target of all lines.
pub(crate) const TARGET: &str = "audit";

/// Writes one line. `outcome` is a gRPC code, or the reason of a refusal.
pub(super) fn line(
    name: Option<&str>,
    peer: Option<SocketAddr>,
    call: &str,
    queue: Option<&str>,
    outcome: &str,
) {
    let peer = peer.map(tracing::field::display);
    // What callers send is quoted, so that it cannot forge another line.
    let (call, queue) = (shown(call), queue.map(shown));
    tracing::info!(target: TARGET, token = name, peer, call, queue, outcome);
}

/// The longest name that is shown in full.
const LONGEST: usize = 160;

fn shown(text: &str) -> String {
    text.chars().take(LONGEST).flat_map(char::escape_default).collect()
}
