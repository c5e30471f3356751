//! Who makes a call.

use std::{
    fmt,
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime},
};

use tonic::Code;

use super::{
    Access, Credential, Refused, audit,
    rules::{Needs, Rule},
    tokens::Principal,
};
use crate::domain::Action;

/// How long a stream waits at most until it looks at the clock again for the end of its permissions.
const LONGEST_SLEEP: Duration = Duration::from_hours(1);
/// How much of a queue's name is repeated in errors and in the audit log: all of every valid one.
const LONGEST_NAME: usize = 128;

/// Who makes a call, and under which rule. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Caller(Arc<Call>);

struct Call {
    access: Arc<Access>,
    rule: &'static Rule,
    peer: Option<SocketAddr>,
    /// `None`: there were no tokens when the call began.
    who: Option<(Credential, Arc<Principal>)>,
    /// The first queue that the call named, for the audit log.
    queue: OnceLock<String>,
    /// True once the caller was refused something.
    was_refused: AtomicBool,
}

impl Call {
    fn new(
        access: Arc<Access>,
        rule: &'static Rule,
        peer: Option<SocketAddr>,
        who: Option<(Credential, Arc<Principal>)>,
    ) -> Self {
        let (queue, was_refused) = (OnceLock::new(), AtomicBool::new(false));
        Self { access, rule, peer, who, queue, was_refused }
    }
}

impl Caller {
    pub(super) fn anonymous(
        access: Arc<Access>,
        rule: &'static Rule,
        peer: Option<SocketAddr>,
    ) -> Self {
        Self(Arc::new(Call::new(access, rule, peer, None)))
    }

    pub(super) fn known(
        access: Arc<Access>,
        rule: &'static Rule,
        peer: Option<SocketAddr>,
        credential: Credential,
        principal: Arc<Principal>,
    ) -> Self {
        Self(Arc::new(Call::new(access, rule, peer, Some((credential, principal)))))
    }

    /// Returns the address that the call came from.
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        self.0.peer
    }

    /// Returns true if anyone at all may make the call.
    pub(crate) fn is_stranger(&self) -> bool {
        self.0.rule.needs == Needs::Nothing
    }

    /// Allows or refuses an action on a queue. A refusal is counted and logged.
    pub(crate) fn may(&self, action: Action, queue: &str) -> Result<(), Refused> {
        if self.0.rule.is_audited() {
            self.0.queue.get_or_init(|| queue.chars().take(LONGEST_NAME).collect());
        }
        let refused = match self.now_allows(action, Some(queue)) {
            Ok(()) => return Ok(()),
            Err(refused) => refused,
        };
        self.tell(&refused, Some(queue));
        Err(refused)
    }

    /// Allows or refuses an action on whatever queue there is or will be.
    pub(crate) fn may_everywhere(&self, action: Action) -> Result<(), Refused> {
        self.now_allows(action, None).inspect_err(|refused| self.tell(refused, None))
    }

    /// Returns true if the action is allowed on the queue, for what is left out of an answer otherwise.
    pub(crate) fn allows(&self, action: Action, queue: &str) -> bool {
        self.now_allows(action, Some(queue)).is_ok()
    }

    /// Returns the caller's limit of queues if it is reached: `names` are all queues, of which those count that the caller
    /// could have created. An administrator of the queue has no limit.
    pub(crate) fn max_queues<'a>(
        &self,
        queue: &str,
        names: impl Iterator<Item = &'a str>,
    ) -> Option<u32> {
        let principal = self.current().ok().flatten()?;
        let most = principal.max_queues;
        let may = |action, name: &str| principal.permissions.iter().any(|p| p.allows(action, name));
        if most == 0 || may(Action::Admin, queue) {
            return None;
        }
        let is_counted = |name: &&str| may(Action::Create, name) && !may(Action::Admin, name);
        (names.filter(is_counted).count() >= most as usize).then_some(most)
    }

    /// Refuses a caller whose token was withdrawn or has expired since the call began.
    pub(crate) fn is_known(&self) -> Result<(), Refused> {
        self.current().map(|_| ()).inspect_err(|refused| self.tell(refused, None))
    }

    /// Waits until the action is no longer allowed on the queue, because the token was withdrawn or has expired.
    pub(crate) async fn lost(self, action: Action, queue: String) -> Refused {
        self.until_refused(move |caller| caller.may(action, &queue)).await
    }

    /// Waits until what `check` asks for is refused, because the token was withdrawn or has expired.
    pub(crate) async fn until_refused(
        self,
        check: impl Fn(&Self) -> Result<(), Refused> + Send + Sync,
    ) -> Refused {
        let mut changes = self.0.access.known.subscribe();
        loop {
            changes.mark_unchanged();
            if let Err(refused) = check(&self) {
                return refused;
            }
            let expires = self.current().ok().flatten().and_then(|principal| principal.expires);
            let left = expires.and_then(|at| at.duration_since(SystemTime::now()).ok());
            let sleep =
                left.unwrap_or(LONGEST_SLEEP).clamp(Duration::from_millis(1), LONGEST_SLEEP);
            tokio::select! {
                // The sender is in `self`, so that there is always another change to wait for.
                _ = changes.changed() => {}
                () = tokio::time::sleep(sleep) => {}
            }
        }
    }

    /// Begins what the audit log says of the call, if its rule says that it is there.
    pub(crate) fn begun(&self) -> Begun {
        Begun { caller: self.clone(), is_told: false }
    }

    /// Writes the outcome of a call that was not refused to the audit log, if its rule says so.
    fn answered(&self, outcome: &dyn fmt::Debug) {
        if self.0.rule.is_audited() {
            let queue = self.0.queue.get().map(String::as_str);
            audit::line(self.shown(queue), &format!("{outcome:?}"));
        }
    }

    /// Returns the name of the token or certificate; `None` without tokens.
    pub(crate) fn name(&self) -> Option<&str> {
        self.0.who.as_ref().map(|(_, principal)| principal.name.as_str())
    }

    /// Returns true if the caller was refused something, whatever the answer says of it.
    fn was_refused(&self) -> bool {
        self.0.was_refused.load(Ordering::Relaxed)
    }

    fn tell(&self, refused: &Refused, queue: Option<&str>) {
        self.0.was_refused.store(true, Ordering::Relaxed);
        self.0.access.refused(refused, self.shown(queue));
    }

    fn shown<'a>(&'a self, queue: Option<&'a str>) -> audit::Entry<'a> {
        audit::Entry { token: self.name(), peer: self.0.peer, call: self.0.rule.call, queue }
    }

    /// Returns who this is as of now, which the files may have changed since the call began; `None` for anyone.
    fn current(&self) -> Result<Option<Arc<Principal>>, Refused> {
        match &self.0.who {
            Some((credential, _)) => self.0.access.principal(credential).map(Some),
            // Tokens that came later do not end what was allowed to begin without them.
            None => Ok(None),
        }
    }

    fn now_allows(&self, action: Action, queue: Option<&str>) -> Result<(), Refused> {
        debug_assert!(self.0.rule.mentions(action), "{} needs {action}", self.0.rule.call);
        let Some(principal) = self.current()? else { return Ok(()) };
        let allowed = principal.permissions.iter().any(|permission| match queue {
            Some(queue) => permission.allows(action, queue),
            None => permission.allows_everywhere(action),
        });
        if allowed {
            return Ok(());
        }
        // What was sent may be no name at all, and of any length.
        let queue = queue.unwrap_or("*").chars().take(LONGEST_NAME).collect();
        Err(Refused::PermissionMissing { action, queue, call: self.0.rule.call })
    }
}

/// A call under way. Its work goes on when its caller leaves, so the audit log has a line of it then as well.
pub(crate) struct Begun {
    caller: Caller,
    is_told: bool,
}

impl Begun {
    /// Writes the outcome of a call, unless it was refused, of which there is a line already. Returns true if it was.
    pub(crate) fn answered(mut self, outcome: &dyn fmt::Debug) -> bool {
        self.is_told = true;
        let was_refused = self.caller.was_refused();
        if !was_refused {
            self.caller.answered(outcome);
        }
        was_refused
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        // Nothing is done before a queue is named.
        if !self.is_told && !self.caller.was_refused() && self.caller.0.queue.get().is_some() {
            self.caller.answered(&Code::Cancelled);
        }
    }
}
