//! Sessions of the server that are used again. Without one, the driver starts a session for each operation, and a task that
//! waits for its end: on a queue of single items that is some of what a broker does at all.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use mongodb::{Client, ClientSession, error::Result, options::SessionOptions};
use parking_lot::Mutex;

/// Sessions that were idle for so long are not used again. The server forgets them after half an hour.
const KEPT: Duration = Duration::from_mins(10);
/// The server may be at work for so long in a session whose operation nobody waits for any more. Whatever is done in it next would
/// wait for that, so it is given back to the driver, which uses it again, no earlier.
const AT_WORK: Duration = Duration::from_mins(10);

/// The sessions that are in no use. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Sessions {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Default)]
struct Shared {
    /// The sessions that can be used, and when each was used last, the latest at the end.
    idle: Vec<(Instant, ClientSession)>,
    /// Those that were left during an operation, and when, the latest at the end.
    left: VecDeque<(Instant, ClientSession)>,
}

impl Sessions {
    /// Runs an operation in a session that no other uses. The session is used again if the operation succeeds. If it fails, the driver
    /// knows whether the server may still be at work in it. If the caller stops waiting, it does not.
    pub(crate) async fn with<T>(
        &self,
        client: &Client,
        operation: impl AsyncFnOnce(&mut ClientSession) -> Result<T>,
    ) -> Result<T> {
        let session = if let Some(session) = self.take() {
            session
        } else {
            let options = SessionOptions::builder().causal_consistency(false).build();
            client.start_session().with_options(options).await?
        };
        let mut used = Used { session: None, sessions: self };
        let done = operation(used.session.insert(session)).await;
        if let (Some(session), Ok(_)) = (used.session.take(), &done) {
            self.shared.lock().idle.push((Instant::now(), session));
        }
        done
    }

    fn take(&self) -> Option<ClientSession> {
        let mut shared = self.shared.lock();
        let (used, session) = shared.idle.pop()?;
        if used.elapsed() < KEPT {
            return Some(session);
        }
        shared.idle.clear(); // the others are older
        None
    }

    fn leave(&self, session: ClientSession) {
        let mut shared = self.shared.lock();
        let over = shared.left.partition_point(|(since, _)| since.elapsed() >= AT_WORK);
        shared.left.drain(..over);
        shared.left.push_back((Instant::now(), session));
    }
}

/// A session during an operation.
struct Used<'a> {
    session: Option<ClientSession>,
    sessions: &'a Sessions,
}

impl Drop for Used<'_> {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            self.sessions.leave(session); // nobody waits for the operation any more
        }
    }
}

#[cfg(test)]
mod tests {
    use mongodb::{bson::doc, error::Error};

    use super::*;
    use crate::store::mongo::tests::Scratch;

    async fn client() -> Client {
        Client::with_uri_str(&Scratch::new().uri).await.unwrap()
    }

    /// Runs a command that writes nothing, and returns the id of its session.
    async fn session_of(sessions: &Sessions, client: &Client) -> mongodb::bson::Document {
        let ping = async |session: &mut ClientSession| {
            let id = session.id().clone();
            client.database("admin").run_command(doc! { "ping": 1 }).session(session).await?;
            Ok(id)
        };
        sessions.with(client, ping).await.unwrap()
    }

    #[tokio::test]
    async fn a_session_is_used_again_by_one_operation_at_a_time() {
        let (client, sessions) = (client().await, Sessions::default());
        let first = session_of(&sessions, &client).await;
        let second = sessions.with(&client, async |session| {
            assert_eq!(session.id(), &first);
            Ok(session_of(&sessions, &client).await)
        });
        let second = second.await.unwrap();
        assert_ne!(first, second);
        assert_eq!(sessions.shared.lock().idle.len(), 2);
        assert_eq!(session_of(&sessions, &client).await, first, "the one that was used last");
    }

    #[tokio::test]
    async fn a_session_in_which_something_failed_is_left_to_the_driver() {
        let (client, sessions) = (client().await, Sessions::default());
        session_of(&sessions, &client).await;
        let failed = sessions.with(&client, async |_| Err::<(), _>(Error::custom("failed")));
        assert!(failed.await.is_err());
        assert!(sessions.shared.lock().idle.is_empty());
        assert!(sessions.shared.lock().left.is_empty());
    }

    #[tokio::test]
    async fn a_session_that_was_left_during_an_operation_is_used_by_nobody() {
        let (client, sessions) = (client().await, Sessions::default());
        let first = session_of(&sessions, &client).await;
        let given_up = sessions.with(&client, async |_| std::future::pending::<Result<()>>().await);
        assert!(tokio::time::timeout(Duration::from_millis(1), given_up).await.is_err());
        assert_ne!(session_of(&sessions, &client).await, first);
        let of_the_driver = client.start_session().await.unwrap();
        assert_ne!(of_the_driver.id(), &first);
        assert_eq!(sessions.shared.lock().left.len(), 1);
        sessions.shared.lock().left[0].0 -= AT_WORK;
        sessions.leave(of_the_driver);
        assert_eq!(sessions.shared.lock().left.len(), 1, "the first is over");
    }

    #[tokio::test]
    async fn sessions_that_were_idle_for_long_are_not_used_again() {
        let (client, sessions) = (client().await, Sessions::default());
        session_of(&sessions, &client).await;
        sessions.shared.lock().idle[0].0 -= KEPT;
        assert!(sessions.take().is_none());
        assert!(sessions.shared.lock().idle.is_empty());
    }
}
