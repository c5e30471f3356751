//! A broker without network interfaces, for simulations (feature `simulation`): its calls are made in process, and
//! its store and the way of its signals are given by whoever simulates.

use std::sync::{Arc, Weak};

use axum::body::Body;
use futures_util::{Stream, StreamExt as _};
use prost::{Message, Name};
use sluicegate_proto::{
    codec::CountingCodec,
    v1::{
        self as pb, admin_service_server::AdminService, queue_service_server::QueueService,
        schedule_service_server::ScheduleService,
    },
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Status, Streaming, codec::Codec as _};

pub use crate::signals::Wire;
use crate::{
    access::{Access, Peer},
    engine::{Engine, Limits, background},
    grpc::{Api, Intake, PUSH_STREAM},
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
    intake: Intake,
    calls: Tasks,
    stop: CancellationToken,
}

/// Room for requests, and the size of the largest one: enough for all that simulated clients send.
const INTAKE: (usize, usize) = (64 << 20, 16 << 20);

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
        let intake = Intake::new(INTAKE.0, INTAKE.1);
        Ok(Self { engine, signals, access, api, intake, calls, stop })
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

    /// Returns the request of a client that pushes these batches on a stream: the broker reads them before tonic does.
    pub fn push_stream(
        &self,
        batches: impl Stream<Item = pb::PushStreamRequest> + Send + 'static,
    ) -> Option<Request<Streaming<pb::PushStreamRequest>>> {
        let body = Body::from_stream(frames(batches));
        let request = axum::extract::Request::post(PUSH_STREAM).body(body).ok()?;
        let (parts, rest) = self.intake.meter(request, Weak::new()).into_parts();
        let mut request = self.request(PUSH_STREAM, streaming(rest))?;
        request.extensions_mut().extend(parts.extensions);
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
    streaming(Body::from_stream(frames(messages)))
}

fn streaming<T: Message + Name + Default + 'static>(body: Body) -> Streaming<T> {
    let decoder = CountingCodec::<(), T>::default().decoder();
    Streaming::new_request(decoder, body, None, None)
}

/// Returns messages as they are sent.
fn frames<T: Message>(
    messages: impl Stream<Item = T> + Send + 'static,
) -> impl Stream<Item = Result<Vec<u8>, Status>> + Send + 'static {
    messages.map(|message| {
        let message = message.encode_to_vec();
        let length = (message.len() as u32).to_be_bytes();
        Ok([&[0][..], &length, &message].concat())
    })
}
