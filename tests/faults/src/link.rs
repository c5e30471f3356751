//! A proxy for connections of any protocol, which can be cut, slowed down and silenced, for all or by whose they are.

use std::{io, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

/// What becomes of what is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Open,
    /// It arrives this much later.
    Slow(Duration),
    /// It does not arrive, and nobody is told.
    Silent,
    /// No connection can be made.
    Refusing,
}

/// A proxy at an address of its own. It ends when dropped.
pub(crate) struct Link {
    /// As `host:port`.
    pub(crate) address: String,
    shared: Arc<Shared>,
    _accepting: AbortOnDropHandle<()>,
}

struct Shared {
    target: Mutex<String>,
    lanes: Vec<Lane>,
    lane_of: LaneOf,
}

/// Returns the number of the lane for a connection from the first port to the second.
type LaneOf = Box<dyn Fn(u16, u16) -> usize + Send + Sync>;

/// The connections that share what befalls them.
struct Lane {
    mode: watch::Sender<Mode>,
    /// Ends all present connections.
    cut: Mutex<CancellationToken>,
}

impl Link {
    /// Returns a proxy to `target`, a `host:port`.
    pub(crate) async fn to(target: &str) -> Self {
        Self::with_lanes(target, 1, |_, _| 0).await
    }

    /// Returns a proxy to `target` with several lanes. `lane_of` says to which one a connection belongs, by the port it
    /// comes from and that of the proxy.
    pub(crate) async fn with_lanes(
        target: &str,
        lanes: usize,
        lane_of: impl Fn(u16, u16) -> usize + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address").to_string();
        let lane = |_| Lane { mode: watch::Sender::new(Mode::Open), cut: Mutex::default() };
        let shared = Arc::new(Shared {
            target: Mutex::new(target.to_owned()),
            lanes: (0..lanes).map(lane).collect(),
            lane_of: Box::new(lane_of),
        });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Self { address, shared, _accepting: AbortOnDropHandle::new(accepting) }
    }

    /// Leads new connections to another address.
    pub(crate) fn lead_to(&self, target: &str) {
        target.clone_into(&mut self.shared.target.lock());
    }

    /// Sets what becomes of what is sent in all lanes.
    pub(crate) fn set(&self, mode: Mode) {
        for lane in 0..self.shared.lanes.len() {
            self.set_lane(lane, mode);
        }
    }

    /// Returns the number of lanes.
    pub(crate) fn lanes(&self) -> usize {
        self.shared.lanes.len()
    }

    pub(crate) fn set_lane(&self, lane: usize, mode: Mode) {
        self.shared.lanes[lane].mode.send_replace(mode);
    }

    /// Ends all present connections.
    pub(crate) fn cut(&self) {
        for lane in &self.shared.lanes {
            std::mem::take(&mut *lane.cut.lock()).cancel();
        }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let own = listener.local_addr().expect("its address").port();
    while let Ok((near, peer)) = listener.accept().await {
        tokio::spawn(lead(near, peer.port(), own, Arc::clone(&shared)));
    }
}

/// Leads a connection from the first port to the second on to the target.
async fn lead(near: TcpStream, from: u16, own: u16, shared: Arc<Shared>) {
    let known = Arc::clone(&shared);
    // Finding out takes milliseconds, and on a busy machine much longer, in which no other connection must wait.
    let lane = tokio::task::spawn_blocking(move || (known.lane_of)(from, own));
    let lane = &shared.lanes[lane.await.expect("a lane")];
    if *lane.mode.borrow() == Mode::Refusing {
        return;
    }
    let (target, cut) = (shared.target.lock().clone(), lane.cut.lock().clone());
    let mode = lane.mode.subscribe();
    cut.run_until_cancelled_owned(async move {
        if let Ok(far) = TcpStream::connect(target).await {
            let _ = (near.set_nodelay(true), far.set_nodelay(true));
            let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
            tokio::select! {
                _ = pass(near_in, far_out, mode.clone()) => {}
                _ = pass(far_in, near_out, mode) => {}
            }
        }
    })
    .await;
}

async fn pass(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut mode: watch::Receiver<Mode>,
) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 16];
    loop {
        let count = from.read(&mut buffer).await?;
        let is_silent = |mode: &Mode| *mode == Mode::Silent;
        let Ok(now) = mode.wait_for(|mode| !is_silent(mode)).await.map(|now| *now) else {
            return Ok(());
        };
        if let Mode::Slow(time) = now {
            tokio::time::sleep(time).await;
        }
        if count == 0 {
            return Ok(());
        }
        to.write_all(&buffer[..count]).await?;
    }
}
