//! Servers for the tests of signals: a private Redis, the MongoDB that the environment names, and
//! a proxy that can cut connections or freeze them.

use std::{
    env, net,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
    time::sleep,
};

use crate::test_port::free_port;

/// How long a test waits for an event that has to come: enough on a busy machine, and only a failing test waits that long.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// A Redis server of the test, which the test can kill and start again.
pub(super) struct RedisServer {
    port: u16,
    child: Option<Child>,
}

impl RedisServer {
    /// Returns a server that does not run yet.
    pub(super) fn stopped() -> Self {
        Self { port: free_port(), child: None }
    }

    pub(super) async fn started() -> Self {
        let mut server = Self::stopped();
        server.start().await;
        server
    }

    pub(super) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub(super) async fn start(&mut self) {
        let program = env::var_os("SLUICEGATE_TEST_REDIS_SERVER")
            .map_or_else(|| PathBuf::from("redis-server"), PathBuf::from);
        let child = Command::new(&program)
            .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--port"])
            .arg(self.port.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        self.child = Some(child.unwrap_or_else(|error| {
            panic!(
                "{}: {error}; these tests need a redis-server: install it, or set \
                 SLUICEGATE_TEST_REDIS_SERVER to one",
                program.display()
            )
        }));
        until("redis-server answers", || net::TcpStream::connect(self.address()).is_ok()).await;
    }

    pub(super) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns the address of the MongoDB server to test with.
pub(super) fn mongo_uri() -> String {
    env::var("SLUICEGATE_TEST_MONGODB_URI").unwrap_or_else(|_| {
        panic!(
            "these tests need a MongoDB server: set SLUICEGATE_TEST_MONGODB_URI to the address of \
             one, for example mongodb://127.0.0.1:27017/"
        )
    })
}

/// What a proxy does with connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Pass,
    /// Keeps them open and passes nothing, like a network that drops packets.
    Freeze,
    /// Ends them, old and new.
    Cut,
}

/// A proxy between a broker and its server.
pub(super) struct Proxy {
    port: u16,
    mode: watch::Sender<Mode>,
    _tasks: JoinSet<()>,
}

impl Proxy {
    /// Starts a proxy to `target`, which need not exist yet.
    pub(super) async fn to(target: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let mode = watch::Sender::new(Mode::Pass);
        let mut tasks = JoinSet::new();
        let modes = mode.subscribe();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.unwrap();
                if *modes.borrow() != Mode::Cut {
                    connections.spawn(carry(client, target.clone(), modes.clone()));
                }
            }
        });
        Self { port, mode, _tasks: tasks }
    }

    pub(super) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub(super) fn pass(&self) {
        self.mode.send_replace(Mode::Pass);
    }

    pub(super) fn freeze(&self) {
        self.mode.send_replace(Mode::Freeze);
    }

    pub(super) fn cut(&self) {
        self.mode.send_replace(Mode::Cut);
    }
}

async fn carry(mut client: TcpStream, target: String, mut modes: watch::Receiver<Mode>) {
    let mut cut = modes.clone();
    let connection = async {
        passing(&mut modes).await;
        let Ok(mut server) = TcpStream::connect(target).await else { return };
        let (mut from_client, mut to_client) = client.split();
        let (mut from_server, mut to_server) = server.split();
        let mut up = vec![0; 65_536];
        let mut down = vec![0; 65_536];
        loop {
            // Bytes that arrive while the proxy is frozen are lost with the connection, as packets would be.
            let passed = tokio::select! {
                n = from_client.read(&mut up) => match n {
                    Ok(n) if n > 0 => { passing(&mut modes).await; to_server.write_all(&up[..n]).await }
                    _ => return,
                },
                n = from_server.read(&mut down) => match n {
                    Ok(n) if n > 0 => { passing(&mut modes).await; to_client.write_all(&down[..n]).await }
                    _ => return,
                },
            };
            if passed.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = connection => {}
        _ = cut.wait_for(|mode| *mode == Mode::Cut) => {}
    }
}

/// Waits until nothing is frozen.
async fn passing(modes: &mut watch::Receiver<Mode>) {
    // An error means that the test is over.
    let _ = modes.wait_for(|mode| *mode == Mode::Pass).await;
}

/// Waits between two checks of a condition that has no event of its own.
pub(super) async fn pause() {
    sleep(Duration::from_millis(5)).await;
}

/// Waits until a condition holds.
pub(super) async fn until(what: &str, so: impl Fn() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < PATIENCE, "not so after {PATIENCE:?}: {what}");
        pause().await;
    }
}
