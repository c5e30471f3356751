//! Who is signed in. A browser holds a random id; the token stays in the broker's memory.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// A session ends when it was not used for this time.
const IDLE: Duration = Duration::from_hours(12);
/// The most sessions. One more ends the one that was not used for the longest time.
const MAX_SESSIONS: usize = 1_000;
/// The most sessions of one token, so that its bearer does not sign out everybody else.
const MAX_OF_TOKEN: usize = 100;
/// The name of the cookie.
pub(crate) const COOKIE: &str = "sluicegate-session";

struct Session {
    token: String,
    used: Instant,
}

/// All sessions.
#[derive(Default)]
pub(crate) struct Sessions(Mutex<HashMap<String, Session>>);

impl Sessions {
    /// Begins a session for the bearer of a token. Returns its id of 256 random bits.
    pub(crate) fn begin(&self, token: String) -> String {
        let id = format!("{:032x}{:032x}", rand::random::<u128>(), rand::random::<u128>());
        let mut sessions = self.0.lock();
        sessions.retain(|_, session| session.used.elapsed() < IDLE);
        let of_token = sessions.values().filter(|session| session.token == token).count();
        let is_candidate = |session: &Session| of_token < MAX_OF_TOKEN || session.token == token;
        if of_token >= MAX_OF_TOKEN || sessions.len() >= MAX_SESSIONS {
            let candidates = sessions.iter().filter(|(_, session)| is_candidate(session));
            let oldest = candidates.min_by_key(|(_, session)| session.used);
            let oldest = oldest.map(|(id, _)| id.clone());
            oldest.map(|id| sessions.remove(&id));
        }
        sessions.insert(id.clone(), Session { token, used: Instant::now() });
        id
    }

    /// Returns the token of a session, if it has not ended.
    pub(crate) fn token(&self, id: &str) -> Option<String> {
        let mut sessions = self.0.lock();
        let session = sessions.get_mut(id)?;
        if session.used.elapsed() >= IDLE {
            sessions.remove(id);
            return None;
        }
        session.used = Instant::now();
        Some(session.token.clone())
    }

    /// Ends a session.
    pub(crate) fn end(&self, id: &str) {
        self.0.lock().remove(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_have_ids_that_cannot_be_guessed_and_an_end() {
        let sessions = Sessions::default();
        let (first, second) = (sessions.begin("a".to_owned()), sessions.begin("b".to_owned()));
        assert!(first.len() == 64 && first != second);
        assert_eq!(sessions.token(&first).as_deref(), Some("a"));
        sessions.end(&first);
        assert_eq!(sessions.token(&first), None);
        assert_eq!(sessions.token(&second).as_deref(), Some("b"));
        sessions.0.lock().get_mut(&second).unwrap().used =
            Instant::now().checked_sub(IDLE).unwrap();
        assert_eq!(sessions.token(&second), None, "idle for too long");
    }

    #[test]
    fn sessions_are_bounded_and_the_oldest_ends_first() {
        let sessions = Sessions::default();
        let first = sessions.begin("first".to_owned());
        let others: Vec<_> = (0..MAX_SESSIONS).map(|n| sessions.begin(n.to_string())).collect();
        assert_eq!(sessions.0.lock().len(), MAX_SESSIONS);
        assert!(sessions.token(&first).is_none() && sessions.token(&others[0]).is_some());
    }

    #[test]
    fn who_signs_in_again_and_again_signs_out_nobody_else() {
        let sessions = Sessions::default();
        let other = sessions.begin("other".to_owned());
        let own: Vec<_> = (0..2 * MAX_SESSIONS).map(|_| sessions.begin("own".to_owned())).collect();
        assert!(sessions.token(&other).is_some());
        assert_eq!(sessions.0.lock().len(), 1 + MAX_OF_TOKEN);
        let is_there = |id: &String| sessions.token(id).is_some();
        assert!(!is_there(&own[0]) && own.last().is_some_and(is_there));
    }
}
