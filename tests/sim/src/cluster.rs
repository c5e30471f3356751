//! The brokers of a simulation: started, killed, shut down, started again.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use sluicegate_broker::simulation::Broker;
use sluicegate_checker::history::Answer;
use tonic::{Code, Response, Status};

use crate::{
    net::{BrokerLink, Net},
    store::{Database, ModelStore},
};

/// A broker as long as it lives.
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) link: Arc<BrokerLink>,
    pub(crate) broker: Broker,
    /// Whether the broker is shutting down.
    pub(crate) leaves: AtomicBool,
}

/// All brokers, and the store that they share.
pub(crate) struct Cluster {
    pub(crate) net: Arc<Net>,
    pub(crate) database: Database,
    nodes: Mutex<Vec<Arc<Node>>>,
    started: AtomicU32,
}

impl Cluster {
    pub(crate) fn new(net: Arc<Net>) -> Arc<Self> {
        let (database, nodes, started) = (Database::default(), Mutex::default(), AtomicU32::new(0));
        Arc::new(Self { net, database, nodes, started })
    }

    /// Starts a broker, and returns when it serves.
    pub(crate) async fn start(&self) {
        loop {
            let number = self.started.fetch_add(1, Ordering::Relaxed) + 1;
            let (name, id) = (format!("broker {number}"), number.to_be_bytes());
            let link = BrokerLink::new(&self.net, name.clone(), id);
            link.set_skew(self.net.dice.number(0, 10) as i64 - 5);
            let store = Arc::new(ModelStore::new(&self.database, Arc::clone(&link), id));
            let wire = Arc::clone(&link);
            if let Ok(broker) = Broker::start(store, wire).await {
                link.started();
                self.nodes.lock().push(Arc::new(Node {
                    name,
                    link,
                    broker,
                    leaves: AtomicBool::new(false),
                }));
                return;
            }
        }
    }

    /// Returns a broker that serves.
    pub(crate) fn any(&self) -> Option<Arc<Node>> {
        let nodes = self.nodes.lock().clone();
        self.net.dice.one_of(&nodes).cloned()
    }

    /// Kills a broker: from now on it does nothing that anybody sees.
    pub(crate) fn kill_one(&self) {
        if let Some(node) = self.take() {
            self.net.step(&node.name, "killed");
            node.link.killed.cancel();
        }
    }

    /// Shuts a broker down in order, as far as the store lets it.
    pub(crate) fn shut_down_one(&self) {
        if let Some(node) = self.take() {
            self.net.step(&node.name, "shut down");
            node.leaves.store(true, Ordering::Relaxed);
            tokio::spawn(async move {
                let orderly = node.broker.shutdown();
                let _ = tokio::time::timeout(Duration::from_secs(10), orderly).await;
                node.link.killed.cancel();
            });
        }
    }

    fn take(&self) -> Option<Arc<Node>> {
        let chosen = self.any()?;
        self.nodes.lock().retain(|node| node.name != chosen.name);
        Some(chosen)
    }
}

/// Why a call has no answer.
#[derive(Debug)]
pub(crate) struct Failed(pub(crate) Answer);

impl Node {
    /// Makes a call with a request that the broker admits. The client gives up after `patience`.
    pub(crate) async fn call<T>(
        &self,
        patience: Option<Duration>,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, Failed> {
        let gives_up = async {
            match patience {
                Some(patience) => tokio::time::sleep(patience).await,
                None => std::future::pending().await,
            }
        };
        let unknown = |why: &str| Err(Failed(Answer::Unknown(why.to_owned())));
        let answered = async {
            let answer = call.await;
            self.link.pass().await;
            answer
        };
        tokio::select! {
            biased;
            () = self.link.killed.cancelled() => unknown("killed"),
            answer = answered => answer.map(Response::into_inner).map_err(|status| failed(&status)),
            () = gives_up => unknown("given up"),
        }
    }
}

/// Returns what a status says about the outcome.
pub(crate) fn failed(status: &Status) -> Failed {
    let code: Code = status.code();
    Failed(Answer::from_code(&format!("{code:?}")))
}
