//! A broker without network interfaces, for simulations (feature `simulation`): its calls are made in process, and
//! its store and the way of its signals are given by whoever simulates.

use std::sync::Arc;

use axum::body::Body;
use futures_util::{Stream, StreamExt as _};
use prost::{Message, Name};
use sluicegate_proto::{
    codec::CountingCodec,
    v1::{
        admin_service_server::AdminService, queue_service_server::QueueService,
        schedule_service_server::ScheduleService,
    },
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Status, Streaming, codec::Codec as _};

pub use crate::signals::Wire;
use crate::{
    access::{Access, Peer},
    engine::{Engine, Limits, background},
    grpc::Api,
    metrics::Metrics,
    signals::{self, Signals},
    store::{Store, StoreError},
    tasks::Tasks,
};

/// A broker. Its tasks end with the runtime, or by [`Broker::shutdown`].
pub struct Broker {
    engine: Arc<Engine>,
    signals: Arc<dyn Signals>,
    access: Arc<Access>,
    api: Api,
    calls: Tasks,
    stop: CancellationToken,
}

impl Broker {
    /// Starts a broker with default settings, without access tokens.
    pub async fn start(store: Arc<dyn Store>, wire: Arc<dyn Wire>) -> Result<Self, StoreError> {
        let metrics = Arc::new(Metrics::new());
        let signals = signals::open_simulated(wire, store.broker_id(), Arc::clone(&metrics)).await;
        let (limits, access) = (Limits::default(), Access::new(None, 0, Arc::clone(&metrics)));
        let engine = Engine::new(store, Arc::clone(&signals), metrics, limits);
        engine
            .refresh_receipt_keys()
            .await
            .map_err(|error| StoreError::Unavailable { reason: error.to_string(), source: None })?;
        background::start(&engine);
        let (calls, stop) = (Tasks::default(), CancellationToken::new());
        let api = Api::new(Arc::clone(&engine), calls.clone(), stop.clone());
        Ok(Self { engine, signals, access, api, calls, stop })
    }

    /// Returns the services, as the server calls them.
    pub fn api(&self) -> impl QueueService + AdminService + ScheduleService + Clone + use<> {
        self.api.clone()
    }

    /// Returns a request of a client, for the call of this path.
    pub fn request<T>(&self, path: &str, message: T) -> Option<Request<T>> {
        let caller = self.access.admit(path, None, &Peer::default()).ok()?;
        let mut request = Request::new(message);
        request.extensions_mut().insert(caller);
        Some(request)
    }

    /// Shuts the broker down as SIGTERM does, without a limit of time.
    pub async fn shutdown(&self) {
        self.engine.drain().await;
        self.stop.cancel();
        self.calls.close();
        self.calls.wait().await;
        self.engine.close().await;
        self.signals.close().await;
        self.engine.store().close().await;
    }
}

/// Returns messages of a client as a server reads them, for a call with many of them.
pub fn requests<T>(messages: impl Stream<Item = T> + Send + 'static) -> Streaming<T>
where
    T: Message + Name + Default + 'static,
{
    let frames = messages.map(|message| {
        let message = message.encode_to_vec();
        let length = (message.len() as u32).to_be_bytes();
        Ok::<_, Status>([&[0][..], &length, &message].concat())
    });
    let decoder = CountingCodec::<(), T>::default().decoder();
    Streaming::new_request(decoder, Body::from_stream(frames), None, None)
}
