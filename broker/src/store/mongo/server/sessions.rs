//! Sessions of the server that are used again. Without one, the driver starts a session for each operation, and a task that
//! waits for its end: on a queue of single items that is some of what a broker does at all.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use mongodb::{Client, ClientSession, error::Result, options::SessionOptions};
use parking_lot::Mutex;

/// Sessions that were idle for so long are not used again. The server forgets them after half an hour.
const KEPT: Duration = Duration::from_mins(10);

/// The sessions that are idle, and when each was used last, the latest at the end. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Sessions {
    idle: Arc<Mutex<Vec<(Instant, ClientSession)>>>,
}

impl Sessions {
    /// Runs an operation in a session that no other uses. The session is used again if the operation succeeds: after an error, or if
    /// the caller stops waiting, the server may still be at work in it.
    pub(crate) async fn with<T>(
        &self,
        client: &Client,
        operation: impl AsyncFnOnce(&mut ClientSession) -> Result<T>,
    ) -> Result<T> {
        let mut session = if let Some(session) = self.take() {
            session
        } else {
            let options = SessionOptions::builder().causal_consistency(false).build();
            client.start_session().with_options(options).await?
        };
        let done = operation(&mut session).await;
        if done.is_ok() {
            self.idle.lock().push((Instant::now(), session));
        }
        done
    }

    fn take(&self) -> Option<ClientSession> {
        let mut idle = self.idle.lock();
        let (used, session) = idle.pop()?;
        if used.elapsed() < KEPT {
            return Some(session);
        }
        idle.clear(); // the others are older
        None
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
        assert_eq!(sessions.idle.lock().len(), 2);
        assert_eq!(session_of(&sessions, &client).await, first, "the one that was used last");
    }

    #[tokio::test]
    async fn a_session_in_which_something_failed_is_not_used_again() {
        let (client, sessions) = (client().await, Sessions::default());
        session_of(&sessions, &client).await;
        let failed = sessions.with(&client, async |_| Err::<(), _>(Error::custom("failed")));
        assert!(failed.await.is_err());
        assert!(sessions.idle.lock().is_empty());
        session_of(&sessions, &client).await;
        let given_up = sessions.with(&client, async |_| std::future::pending::<Result<()>>().await);
        assert!(tokio::time::timeout(Duration::from_millis(1), given_up).await.is_err());
        assert!(sessions.idle.lock().is_empty());
    }

    #[tokio::test]
    async fn sessions_that_were_idle_for_long_are_not_used_again() {
        let (client, sessions) = (client().await, Sessions::default());
        session_of(&sessions, &client).await;
        sessions.idle.lock()[0].0 -= KEPT;
        assert!(sessions.take().is_none());
        assert!(sessions.idle.lock().is_empty());
    }
}
