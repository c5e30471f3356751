//! Three `mongod` that are a replica set.

use std::path::PathBuf;

use futures_util::future::join_all;
use mongodb::{
    Collection,
    bson::{DateTime, Document, doc},
    options::{Acknowledgment, WriteConcern},
};

use super::{
    mongo::{MongoServer, PATIENCE, is_primary, takes_part},
    until,
};

/// A MongoDB replica set of three nodes.
pub(crate) struct MongoSet {
    servers: Vec<MongoServer>,
    /// Where clients and the other members reach each.
    addresses: Vec<String>,
}

impl MongoSet {
    pub(crate) async fn start() -> Self {
        Self::start_behind(|_| Vec::new(), async |_, server| server.address()).await
    }

    /// Starts a set whose members are reached, by clients and by each other, at the addresses that `way` returns for
    /// the number of each, with the `variables` of each in its environment.
    pub(crate) async fn start_behind(
        variables: impl Fn(usize) -> Vec<(&'static str, PathBuf)>,
        mut way: impl AsyncFnMut(usize, &MongoServer) -> String,
    ) -> Self {
        let servers: Vec<_> = (0..3).map(|number| MongoServer::alone(variables(number))).collect();
        let mut addresses = Vec::new();
        for (number, server) in servers.iter().enumerate() {
            addresses.push(way(number, server).await);
        }
        servers[0].initiate(&addresses).await;
        let set = Self { servers, addresses };
        set.primary().await;
        set
    }

    pub(crate) fn uri(&self) -> String {
        format!("mongodb://{}/?replicaSet=rs0", self.addresses.join(","))
    }

    /// Returns the members.
    pub(crate) fn servers(&self) -> &[MongoServer] {
        &self.servers
    }

    /// Returns the process of each member, if it has one.
    pub(crate) fn process_ids(&self) -> Vec<Option<u32>> {
        self.servers.iter().map(MongoServer::process_id).collect()
    }

    /// Kills the primary as in a crash, and returns its index.
    pub(crate) async fn kill_primary(&mut self) -> usize {
        let primary = self.primary().await;
        self.servers[primary].kill();
        primary
    }

    /// Restarts a member on the same port and data.
    pub(crate) fn restart(&mut self, member: usize) {
        self.servers[member].spawn();
    }

    /// Kills a member as in a crash.
    pub(crate) fn kill(&mut self, member: usize) {
        self.servers[member].kill();
    }

    /// Starts a member that is not running without its data, which it copies from the others.
    pub(crate) fn restart_empty(&mut self, member: usize) {
        self.servers[member].empty().expect("a folder that can be emptied");
        self.restart(member);
    }

    /// Returns whether a member takes itself for the primary.
    pub(crate) async fn is_primary(&self, member: usize) -> bool {
        is_primary(&self.servers[member].client().await).await
    }

    /// Freezes the primary, and returns its index.
    pub(crate) async fn freeze_primary(&self) -> usize {
        let primary = self.primary().await;
        self.servers[primary].freeze();
        primary
    }

    /// Resumes a member.
    pub(crate) fn thaw(&self, member: usize) {
        self.servers[member].thaw();
    }

    /// Makes the primary a secondary, so that another one is elected.
    pub(crate) async fn step_down(&self) {
        until("a primary that steps down", || async {
            let client = self.servers[self.primary().await].client().await;
            let command = doc! { "replSetStepDown": 5, "secondaryCatchUpPeriodSecs": 4 };
            client.database("admin").run_command(command).await.ok()
        })
        .await;
    }

    /// Has the secondaries apply nothing of what they receive, or go on. Elections are not affected.
    pub(crate) async fn hold_secondaries(&self, hold: bool) {
        self.hold_at("rsSyncApplyStop", hold).await;
    }

    /// Has the secondaries copy nothing from the primary, so that an election takes back what it writes, or go on.
    pub(crate) async fn starve_secondaries(&self, starve: bool) {
        self.hold_at("stopReplProducer", starve).await;
    }

    /// Turns a fail point on in all running members but the primary, or off in all.
    async fn hold_at(&self, point: &str, on: bool) {
        let primary = if on { Some(self.primary().await) } else { None };
        let mode = if on { "alwaysOn" } else { "off" };
        for (number, server) in self.servers.iter().enumerate() {
            if Some(number) != primary && server.process_id().is_some() {
                let point = doc! { "configureFailPoint": point, "mode": mode };
                let admin = server.client().await.database("admin");
                admin.run_command(point).await.expect("a server with fail points");
            }
        }
    }

    /// Returns a collection of the present primary.
    pub(crate) async fn collection(&self, database: &str, name: &str) -> Collection<Document> {
        self.servers[self.primary().await].client().await.database(database).collection(name)
    }

    /// Tries to write so that a majority has it, once. True if it has.
    pub(crate) async fn takes_writes(&self) -> bool {
        let concern =
            WriteConcern::builder().w(Acknowledgment::Majority).w_timeout(PATIENCE).build();
        for server in self.servers.iter().filter(|server| server.process_id().is_some()) {
            let client = server.client().await;
            let writes = async {
                let probes = client.database("probes").collection::<Document>("probes");
                let write = probes.insert_one(doc! { "at": DateTime::now() });
                is_primary(&client).await && write.write_concern(concern.clone()).await.is_ok()
            };
            if tokio::time::timeout(PATIENCE * 2, writes).await.unwrap_or(false) {
                return true;
            }
        }
        false
    }

    /// Waits until all members take part in the set.
    pub(crate) async fn until_whole(&self) {
        for server in &self.servers {
            let client = server.client().await;
            let asked = || async { takes_part(&client).await.then_some(()) };
            server.until("a member of the set", asked).await;
        }
    }

    /// Returns, for each member, whether it takes part in the set.
    pub(crate) async fn taking_part(&self) -> Vec<bool> {
        let asked = async |server: &MongoServer| takes_part(&server.client().await).await;
        join_all(self.servers.iter().map(asked)).await
    }

    pub(crate) async fn primary(&self) -> usize {
        let mut running = Vec::new();
        for (number, server) in self.servers.iter().enumerate() {
            if server.process_id().is_some() {
                running.push((number, server.client().await));
            }
        }
        until("a primary", || async {
            for (number, client) in &running {
                if is_primary(client).await {
                    return Some(*number);
                }
            }
            None
        })
        .await
    }
}
