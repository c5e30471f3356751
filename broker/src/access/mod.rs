//! Who may do what: one place for gRPC and HTTP.
//!
//! # Layout
//! * [`rules`]: the table of what each call needs.
//! * [`tokens`]: the file of tokens and certificates.
//! * [`caller`]: who makes a call, asked for each queue that the call names.
//! * [`peers`]: the other ends of connections, and how much of the broker each uses.
//! * [`slowdown`]: peers that fail again and again wait longer and longer.
//! * [`audit`]: the log of refusals and of what operators do; [`tally`]: which refusals it tells in full.
//!
//! A call passes [`Access::admit`] first, which knows the call and its token but not what is in the request. Whoever reads
//! the request then asks [`Caller::may`] for each queue in it.

mod audit;
mod caller;
mod peers;
pub(crate) mod rules;
mod slowdown;
mod tally;
pub(crate) mod tokens;

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{domain::Action, metrics::Metrics};

use self::{
    audit::{Entry, Refusals},
    rules::{Needs, Rule},
    tokens::{Principal, TokenHash, Tokens},
};

pub(crate) use caller::Caller;
pub(crate) use peers::{Count, Peer, Peers, Usage, network};
pub(crate) use slowdown::Slowdown;

/// Why a call is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    /// There is no such call.
    #[error("this broker has no such method")]
    NoSuchCall,
    /// The call carries no token, and its connection no certificate that is known.
    #[error("a token is needed")]
    TokenMissing,
    /// The call carries a token that is not known.
    #[error("the token is not known")]
    TokenUnknown,
    /// The permissions of the token or certificate have ended.
    #[error("the token has expired")]
    TokenExpired,
    /// The token or certificate does not allow this.
    #[error("the permission {action}@{queue} is missing")]
    PermissionMissing {
        /// What was to be done.
        action: Action,
        /// The queue, or `*` for all queues.
        queue: String,
        /// The call.
        call: &'static str,
    },
}

impl Refused {
    /// Returns the stable word for this reason, in errors, in the audit log and in metrics.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::NoSuchCall => "UNIMPLEMENTED",
            Self::TokenMissing => "TOKEN_MISSING",
            Self::TokenUnknown => "TOKEN_UNKNOWN",
            Self::TokenExpired => "TOKEN_EXPIRED",
            Self::PermissionMissing { .. } => "PERMISSION_MISSING",
        }
    }
}

/// Decides who may do what. Shared by all edges of the broker.
pub(crate) struct Access {
    /// `None`: there are no tokens, and everyone may do everything.
    known: watch::Sender<Option<Arc<Tokens>>>,
    slowdown: Slowdown,
    refusals: Refusals,
    metrics: Arc<Metrics>,
}

/// A call that is not let in.
struct NotAdmitted {
    refused: Refused,
    /// Whose call it is, if that is known.
    who: Option<Arc<Principal>>,
}

impl From<Refused> for NotAdmitted {
    fn from(refused: Refused) -> Self {
        Self { refused, who: None }
    }
}

/// What a caller shows.
#[derive(Clone)]
enum Credential {
    Token(TokenHash),
    Certificate(Arc<OnceLock<Vec<String>>>),
}

impl Access {
    /// Returns the access that these tokens give; without tokens everyone may do everything. After `free_failures` refusals in
    /// a minute, a peer is answered later and later; 0: never.
    pub(crate) fn new(
        tokens: Option<Arc<Tokens>>,
        free_failures: u32,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        let known = watch::Sender::new(tokens);
        let (slowdown, refusals) = (Slowdown::new(free_failures), Refusals::default());
        Arc::new(Self { known, slowdown, refusals, metrics })
    }

    /// Replaces all tokens and certificates. Calls and streams under way lose what is no longer allowed.
    pub(crate) fn replace(&self, tokens: Tokens) {
        self.known.send_replace(Some(Arc::new(tokens)));
    }

    /// Lets a call in, or refuses it, by its name, its `authorization` and its connection.
    pub(crate) fn admit(
        self: &Arc<Self>,
        call: &str,
        authorization: Option<&[u8]>,
        peer: &Peer,
    ) -> Result<Caller, Refused> {
        self.try_admit(call, authorization, peer).map_err(|NotAdmitted { refused, who }| {
            let token = who.as_ref().map(|who| who.name.as_str());
            self.refused(&refused, Entry { token, peer: peer.address, call, queue: None });
            refused
        })
    }

    fn try_admit(
        self: &Arc<Self>,
        call: &str,
        authorization: Option<&[u8]>,
        peer: &Peer,
    ) -> Result<Caller, NotAdmitted> {
        let rule = Rule::of(call).ok_or(Refused::NoSuchCall)?;
        let anonymous = self.known.borrow().is_none() || rule.needs == Needs::Nothing;
        if anonymous {
            return Ok(Caller::anonymous(Arc::clone(self), rule, peer.address));
        }
        let credential = match authorization {
            Some(authorization) => {
                let token = bearer(authorization).ok_or(Refused::TokenUnknown)?;
                Credential::Token(TokenHash::of(token))
            }
            None if peer.names.get().is_some_and(|names| !names.is_empty()) => {
                Credential::Certificate(Arc::clone(&peer.names))
            }
            None => return Err(Refused::TokenMissing.into()),
        };
        let principal = self.entry(&credential)?;
        if principal.is_expired() {
            return Err(NotAdmitted { refused: Refused::TokenExpired, who: Some(principal) });
        }
        if let Needs::Permissions([first, ..]) = rule.needs
            && !principal.permissions.iter().any(|permission| permission.covers(first.action))
        {
            let (action, queue) = (first.action, "*".to_owned());
            let missing = Refused::PermissionMissing { action, queue, call: rule.call };
            return Err(NotAdmitted { refused: missing, who: Some(principal) });
        }
        Ok(Caller::known(Arc::clone(self), rule, peer.address, credential, principal))
    }

    /// Returns whether the bearer of a token may do this to a queue, or to any queue at all if none is named. This is for
    /// pages, which offer nothing else; nothing is counted or logged.
    pub(crate) fn allows(&self, token: Option<&str>, action: Action, queue: Option<&str>) -> bool {
        let known = self.known.borrow();
        let Some(tokens) = known.as_ref() else { return true };
        let principal = token.and_then(|token| tokens.bearer(TokenHash::of(token.as_bytes())));
        let Some(principal) = principal.filter(|principal| !principal.is_expired()) else {
            return false;
        };
        principal.permissions.iter().any(|permission| match queue {
            Some(queue) => permission.allows(action, queue),
            None => permission.covers(action),
        })
    }

    /// Returns who shows this, as of now.
    fn principal(&self, credential: &Credential) -> Result<Arc<Principal>, Refused> {
        let principal = self.entry(credential)?;
        if principal.is_expired() { Err(Refused::TokenExpired) } else { Ok(principal) }
    }

    /// Returns whose entry this belongs to, which may have expired.
    fn entry(&self, credential: &Credential) -> Result<Arc<Principal>, Refused> {
        let known = self.known.borrow();
        let entry = known.as_ref().and_then(|tokens| match credential {
            Credential::Token(hash) => tokens.bearer(*hash),
            Credential::Certificate(names) => tokens.owner(names.get().map_or(&[], Vec::as_slice)),
        });
        entry.map(Arc::clone).ok_or(match credential {
            Credential::Token(_) => Refused::TokenUnknown,
            Credential::Certificate(_) => Refused::TokenMissing,
        })
    }

    /// Counts a refusal and writes it to the audit log.
    fn refused(&self, refused: &Refused, of: Entry<'_>) {
        self.metrics.call_refused(refused.reason());
        self.refusals.note(of, refused.reason());
    }

    /// Notes that a connection from there failed before it could make a call. Returns true if this is to be logged; the rest is in the audit log,
    /// with refusals.
    pub(crate) fn handshake_failed(&self, peer: Option<SocketAddr>) -> bool {
        let of = Entry { token: None, peer, call: "", queue: None };
        self.refusals.is_told(of, "TLS_FAILED")
    }

    /// Writes at intervals, until `stop`, how many refusals there were that the audit log does not show one by one.
    pub(crate) async fn sum_up(self: Arc<Self>, stop: CancellationToken) {
        self.refusals.run(stop).await;
    }

    /// Writes how many there were since then, when the broker ends.
    pub(crate) fn close(&self) {
        self.refusals.end_period();
    }

    /// Returns true if refusals of this peer are held back.
    pub(crate) fn is_slowed_down(&self, peer: &Peer) -> bool {
        peer.network().is_some_and(|network| !self.slowdown.delay(network).is_zero())
    }

    /// Notes that a call of this peer was refused, and returns how much later than now it should be answered.
    pub(crate) fn penalty(&self, peer: &Peer) -> Duration {
        peer.network().map_or(Duration::ZERO, |network| self.slowdown.failed(network))
    }
}

fn bearer(authorization: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = authorization.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then_some(token).filter(|token| !token.is_empty())
}

#[cfg(test)]
mod tests;
