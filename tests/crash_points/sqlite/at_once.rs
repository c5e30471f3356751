//! Several clients that call at the same time, each of which remembers what it was told.
//!
//! Syncs take a while here, so that the store goes on beside them, and an answer that does not wait for one is noticed.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use sluicegate_proto::v1::{
    CommitRequest, ConsumeRequest, ItemState, ListItemsRequest, NewItem, Outcome, PushRequest,
    ReserveRequest,
};
use tokio_stream::StreamExt as _;
use tonic::Status;

use super::{
    promises::Notes,
    write_log::{FailingSyncs, Recorded, Recording},
};
use crate::harness::{Api, Broker, duration, text};

/// Clients that push, take, commit and list. One more consumes a stream.
const CLIENTS: usize = 8;
/// How long a sync takes.
const SYNC: Duration = Duration::from_millis(10);
/// After so many steps with clients a broker is killed, or the syncs of its log fail.
const STEPS: u64 = 250;
/// How many calls each client makes of the last broker.
const LAST_CALLS: usize = 12;
/// No client makes so many calls before a broker has ended that is to end.
const MOST_CALLS: usize = 2_000;
const LEASE: Duration = Duration::from_mins(10);
/// The queue from which clients take, and the one of the stream.
const TAKEN: &str = "taken";
const STREAMED: &str = "streamed";

/// How a broker ends.
#[derive(Debug, Clone, Copy)]
pub(crate) enum End {
    Kill,
    /// Its disk no longer syncs.
    FailedSync(FailingSyncs),
}

/// Lets clients call one broker after the other, each of which ends while they do, and then one that is stopped.
pub(crate) async fn record(ends: &[End]) -> Recording {
    let Recorded { store: _store, launch, log, .. } = Recorded::begin();
    log.slow_syncs(SYNC);
    let notes = Arc::new(Notes::new(log.clone()));
    let mut clients: Vec<Client> =
        (0..CLIENTS).map(|number| Client::new(number, Arc::clone(&notes))).collect();
    let mut restarts = Vec::new();
    for end in ends {
        let broker = launch.start().await;
        let connections = connect(&broker).await;
        let begun = log.position();
        if let End::Kill = end {
            log.kill_after(STEPS as usize);
        }
        let failing = async {
            let End::FailedSync(which) = end else { return };
            while log.position() < begun + STEPS {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            log.fail_syncs(*which);
        };
        let (calls, ()) = tokio::join!(call_all(&mut clients, &connections, MOST_CALLS), failing);
        assert!(calls.iter().all(Result::is_err), "a broker that {end:?} does not end goes on");
        broker.ended().await;
        log.kill_after(0);
        log.fail_syncs(FailingSyncs::None);
        restarts.push(log.position());
    }
    let broker = launch.start().await;
    let connections = connect(&broker).await;
    for done in call_all(&mut clients, &connections, LAST_CALLS).await {
        done.expect("answered calls");
    }
    broker.stop().await;
    drop(clients);
    let notes = Arc::into_inner(notes).expect("clients that have ended");
    log.finish(notes.into_promises(), restarts)
}

/// Returns a connection for each client and one for the consumer.
async fn connect(broker: &Broker) -> Vec<Api> {
    let connections = join_all((0..=CLIENTS).map(|_| broker.api())).await;
    for queue in [TAKEN, STREAMED] {
        connections[0].ensure(queue).await;
    }
    connections
}

/// Lets all clients make so many calls, beside a consumer.
async fn call_all(
    clients: &mut [Client],
    connections: &[Api],
    calls: usize,
) -> Vec<Result<(), Status>> {
    let notes = Arc::clone(&clients[0].notes);
    let consumer = tokio::spawn(consume(connections[CLIENTS].clone(), notes));
    let calling = clients.iter_mut().zip(connections);
    let done = join_all(calling.map(|(client, api)| client.call(api, calls))).await;
    consumer.abort();
    if let Err(error) = consumer.await
        && error.is_panic()
    {
        std::panic::resume_unwind(error.into_panic());
    }
    done
}

/// Commits what a stream delivers, until it ends.
async fn consume(api: Api, notes: Arc<Notes>) -> Result<(), Status> {
    let request = ConsumeRequest {
        queue: STREAMED.to_owned(),
        max_in_flight: 4,
        lease: duration(LEASE),
        ..ConsumeRequest::default()
    };
    let mut stream = api.queue.clone().consume(request).await?.into_inner();
    while let Some(message) = stream.next().await {
        for delivery in message?.deliveries {
            commit(&api, &notes, &delivery.receipt, &text(&delivery)).await?;
        }
    }
    Ok(())
}

/// Commits an item that was delivered just now.
async fn commit(api: &Api, notes: &Notes, receipt: &str, item: &str) -> Result<(), Status> {
    notes.is_there(item);
    notes.leaves(item);
    let request = CommitRequest { receipts: vec![receipt.to_owned()] };
    let results = api.queue.clone().commit(request).await?.into_inner().results;
    assert_eq!(results[0].outcome(), Outcome::Ok, "the commit of {item}, under its lease");
    notes.is_gone(item);
    Ok(())
}

struct Client {
    number: usize,
    notes: Arc<Notes>,
    /// How many calls it has made.
    made: usize,
    /// The push whose outcome it does not know.
    open: Option<PushRequest>,
}

impl Client {
    fn new(number: usize, notes: Arc<Notes>) -> Self {
        Self { number, notes, made: 0, open: None }
    }

    /// Makes so many calls, or until one fails.
    async fn call(&mut self, api: &Api, calls: usize) -> Result<(), Status> {
        if let Some(push) = self.open.take() {
            self.push(api, push).await?;
        }
        for _ in 0..calls {
            self.made += 1;
            match (self.number + self.made) % 5 {
                0 | 1 => self.push(api, self.new_items(STREAMED, 1)).await?,
                2 => self.push(api, self.new_items(TAKEN, 3)).await?,
                3 => self.take(api).await?,
                _ => self.list(api).await?,
            }
        }
        Ok(())
    }

    fn new_items(&self, queue: &str, count: usize) -> PushRequest {
        let item = |place| {
            let name = format!("{}-{}-{place}", self.number, self.made);
            NewItem { payload: name.clone().into(), dedup_id: name, ..NewItem::default() }
        };
        PushRequest {
            queue: queue.to_owned(),
            items: (0..count).map(item).collect(),
            ..PushRequest::default()
        }
    }

    async fn push(&mut self, api: &Api, push: PushRequest) -> Result<(), Status> {
        self.open = Some(push.clone());
        api.queue.clone().push(push).await?;
        for item in self.open.take().into_iter().flat_map(|push| push.items) {
            self.notes.is_there(&item.dedup_id);
        }
        Ok(())
    }

    async fn take(&self, api: &Api) -> Result<(), Status> {
        let request = ReserveRequest {
            queue: TAKEN.to_owned(),
            max_items: 1,
            lease: duration(LEASE),
            ..ReserveRequest::default()
        };
        for delivery in api.queue.clone().reserve(request).await?.into_inner().deliveries {
            commit(api, &self.notes, &delivery.receipt, &text(&delivery)).await?;
        }
        Ok(())
    }

    async fn list(&self, api: &Api) -> Result<(), Status> {
        let request = ListItemsRequest {
            queue: TAKEN.to_owned(),
            state: ItemState::Ready.into(),
            page_size: 100,
            ..ListItemsRequest::default()
        };
        for item in api.admin.clone().list_items(request).await?.into_inner().items {
            self.notes.is_there(&String::from_utf8_lossy(&item.payload));
        }
        Ok(())
    }
}
