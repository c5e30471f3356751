//! Stands between a broker and its MongoDB server, and lets a fault happen at one command.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::{
    io::AsyncWriteExt as _,
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use crate::{
    faults::{Effect, Fault},
    lane::Seen,
    wire::{Command, Message, ServerError},
};

/// Commands of transitions.
const COUNTED: [&str; 9] = [
    "find",
    "aggregate",
    "distinct",
    "insert",
    "update",
    "delete",
    "findAndModify",
    "commitTransaction",
    "getMore",
];

/// How long an outage lasts: longer than a broker repeats a command.
const OUTAGE: Duration = Duration::from_millis(800);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A proxy. It ends when dropped.
pub(crate) struct Proxy {
    /// The address that the broker is given, as `host:port`.
    pub(crate) address: String,
    shared: Arc<Shared>,
    _accepting: AbortOnDropHandle<()>,
}

/// Kills the broker, and returns when it has ended.
pub(crate) type Kill = Arc<dyn Fn() + Send + Sync>;

struct Shared {
    database: String,
    armed: Mutex<Option<Armed>>,
    /// Until when no connection can be made.
    out_until: Mutex<Option<Instant>>,
    /// Ends all present connections.
    all: Mutex<CancellationToken>,
}

/// The fault to come, and the commands since.
struct Armed {
    /// At which command it happens, counted from 1; 0: at none.
    at: usize,
    fault: Option<Fault>,
    kill: Kill,
    commands: Vec<Command>,
    happened: bool,
    /// How many more commands of this name are refused.
    refusing: Option<(String, usize, ServerError)>,
}

/// What to do with a command.
enum Verdict {
    Pass,
    Cut,
    Outage,
    Kill(Kill),
    Refuse(ServerError),
    /// To be passed on; something happens when the reply comes.
    Then(Then),
    /// Half of it is passed on, and the reply replaced.
    Half(Message, ServerError),
}

/// What to do with a reply.
enum Then {
    Cut,
    Outage,
    Kill(Kill),
    Unsure(ServerError, Command),
    Refuse(ServerError, Command),
}

impl Proxy {
    /// Returns a proxy for brokers that use `database` on the server at this address.
    pub(crate) async fn start(server: &str, database: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address").to_string();
        let shared = Arc::new(Shared {
            database: database.to_owned(),
            armed: Mutex::default(),
            out_until: Mutex::default(),
            all: Mutex::default(),
        });
        let (ours, server) = (Arc::clone(&shared), server.to_owned());
        let accepting = tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                if lock(&ours.out_until).is_some_and(|until| Instant::now() < until) {
                    continue;
                }
                let (shared, server) = (Arc::clone(&ours), server.clone());
                tokio::spawn(async move {
                    if let Ok(far) = TcpStream::connect(server).await {
                        connect(near, far, shared).await;
                    }
                });
            }
        });
        Self { address, shared, _accepting: AbortOnDropHandle::new(accepting) }
    }

    /// Lets the fault happen at command number `at` from now on.
    pub(crate) fn arm(&self, at: usize, fault: Option<Fault>, kill: Kill) {
        let armed =
            Armed { at, fault, kill, commands: Vec::new(), happened: false, refusing: None };
        *self.shared.armed() = Some(armed);
    }

    /// Ends what [`arm`](Self::arm) began.
    pub(crate) fn disarm(&self) -> Seen {
        let armed = self.shared.armed().take().expect("an armed proxy");
        Seen { commands: armed.commands, happened: armed.happened }
    }
}

impl Shared {
    fn armed(&self) -> MutexGuard<'_, Option<Armed>> {
        lock(&self.armed)
    }

    /// Ends all connections, and lets no other be made for a while.
    fn begin_outage(&self) {
        *lock(&self.out_until) = Some(Instant::now() + OUTAGE);
        std::mem::take(&mut *lock(&self.all)).cancel();
    }

    fn counts(&self, command: &Command) -> bool {
        COUNTED.contains(&command.name.as_str())
            && (command.database == self.database || command.name == "commitTransaction")
            && !command.is_background
    }

    fn verdict(&self, message: &Message) -> Verdict {
        let mut guard = self.armed();
        let Some(armed) = guard.as_mut() else { return Verdict::Pass };
        let Some(command) = message.command().filter(|command| self.counts(command)) else {
            return Verdict::Pass;
        };
        armed.commands.push(command.clone());
        if let Some((name, count, error)) = &mut armed.refusing
            && *name == command.name
            && *count > 0
        {
            *count -= 1;
            return Verdict::Refuse(*error);
        }
        let Some(fault) = armed.fault.filter(|_| armed.commands.len() == armed.at) else {
            return Verdict::Pass;
        };
        if !fault.can_happen_at(&command) {
            return Verdict::Pass;
        }
        armed.happened = true;
        let kill = Arc::clone(&armed.kill);
        match fault.effect {
            Effect::CutBefore => Verdict::Cut,
            Effect::CutAfter => Verdict::Then(Then::Cut),
            Effect::OutageBefore => Verdict::Outage,
            Effect::OutageAfter => Verdict::Then(Then::Outage),
            Effect::KillBefore => Verdict::Kill(kill),
            Effect::KillAfter => Verdict::Then(Then::Kill(kill)),
            Effect::Refuse(error) => Verdict::Refuse(error),
            Effect::Unsure(error) => Verdict::Then(Then::Unsure(error, command)),
            Effect::RefuseAgain(error) => {
                armed.refusing = Some((command.name.clone(), 2, error));
                Verdict::Then(Then::Refuse(error, command))
            }
            Effect::Half(error) => match message.first_half() {
                Some(half) => Verdict::Half(half, error),
                None => Verdict::Pass,
            },
        }
    }
}

/// What the two directions of a connection share.
struct Connection {
    shared: Arc<Shared>,
    cut: CancellationToken,
    /// By the number of the request.
    then: Mutex<HashMap<i32, Then>>,
    to_broker: tokio::sync::Mutex<OwnedWriteHalf>,
}

async fn connect(near: TcpStream, far: TcpStream, shared: Arc<Shared>) {
    let _ = (near.set_nodelay(true), far.set_nodelay(true));
    let (from_broker, to_broker) = near.into_split();
    let (from_server, to_server) = far.into_split();
    let cut = lock(&shared.all).child_token();
    let connection = Connection {
        shared,
        cut,
        then: Mutex::default(),
        to_broker: tokio::sync::Mutex::new(to_broker),
    };
    let (requests, replies) =
        (connection.requests(from_broker, to_server), connection.replies(from_server));
    tokio::select! {
        _ = requests => {}
        _ = replies => {}
        () = connection.cut.cancelled() => {}
    }
}

impl Connection {
    async fn requests(&self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> io::Result<()> {
        while let Some(message) = Message::read(&mut from).await? {
            match self.shared.verdict(&message) {
                Verdict::Pass => to.write_all(message.bytes()).await?,
                Verdict::Cut => self.cut.cancel(),
                Verdict::Outage => self.shared.begin_outage(),
                Verdict::Kill(kill) => {
                    kill();
                    self.cut.cancel();
                }
                Verdict::Refuse(error) => {
                    if let Some(command) = message.command() {
                        let reply = Message::reply(message.number(), &error.refusal(&command));
                        self.to_broker.lock().await.write_all(reply.bytes()).await?;
                    }
                }
                Verdict::Then(then) => {
                    self.then().insert(message.number(), then);
                    to.write_all(message.bytes()).await?;
                }
                Verdict::Half(half, error) => {
                    if let Some(command) = message.command() {
                        self.then().insert(message.number(), Then::Refuse(error, command));
                        to.write_all(half.bytes()).await?;
                    }
                }
            }
            if self.cut.is_cancelled() {
                return Ok(());
            }
        }
        Ok(())
    }

    async fn replies(&self, mut from: OwnedReadHalf) -> io::Result<()> {
        while let Some(message) = Message::read(&mut from).await? {
            let then = self.then().remove(&message.answers());
            let reply = match then {
                None => message,
                Some(Then::Cut) => {
                    self.cut.cancel();
                    return Ok(());
                }
                Some(Then::Outage) => {
                    self.shared.begin_outage();
                    return Ok(());
                }
                Some(Then::Kill(kill)) => {
                    kill();
                    self.cut.cancel();
                    return Ok(());
                }
                Some(Then::Unsure(error, command)) => {
                    let number = message.answers();
                    let unsure = message.body().and_then(|body| error.concern(&command, body));
                    unsure.map_or(message, |unsure| Message::reply(number, &unsure))
                }
                Some(Then::Refuse(error, command)) => {
                    Message::reply(message.answers(), &error.refusal(&command))
                }
            };
            self.to_broker.lock().await.write_all(reply.bytes()).await?;
        }
        Ok(())
    }

    fn then(&self) -> MutexGuard<'_, HashMap<i32, Then>> {
        lock(&self.then)
    }
}
