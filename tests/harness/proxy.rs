//! A proxy whose connections a test can cut.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::net::{TcpListener, TcpStream};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

/// Passes connections on to a broker until it is dropped.
pub(crate) struct Proxy {
    pub(crate) address: String,
    cut: Arc<std::sync::Mutex<CancellationToken>>,
    accepted: Arc<AtomicUsize>,
    _accepting: AbortOnDropHandle<()>,
}

impl Proxy {
    /// Returns a proxy for the broker at this address.
    pub(crate) async fn to(broker: &str) -> Self {
        let target = broker.trim_start_matches("http://").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("its address"));
        let cut = Arc::new(std::sync::Mutex::new(CancellationToken::new()));
        let current = Arc::clone(&cut);
        let accepted = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&accepted);
        let accepting = tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                counter.fetch_add(1, Ordering::Relaxed);
                let (target, cut) = (target.clone(), current.lock().expect("no panic").clone());
                tokio::spawn(cut.run_until_cancelled_owned(async move {
                    if let Ok(mut broker) = TcpStream::connect(target).await {
                        let _ = tokio::io::copy_bidirectional(&mut client, &mut broker).await;
                    }
                }));
            }
        });
        Self { address, cut, accepted, _accepting: AbortOnDropHandle::new(accepting) }
    }

    /// Returns how many connections there have been.
    pub(crate) fn accepted(&self) -> usize {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Cuts all connections. New ones are passed on.
    pub(crate) fn cut(&self) {
        let before = std::mem::take(&mut *self.cut.lock().expect("no panic"));
        before.cancel();
    }
}
