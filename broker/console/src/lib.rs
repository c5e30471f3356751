//! The web console: pages for people, rendered on the server out of what the gRPC API answers.
//!
//! The console knows the broker only through the generated clients, over a service that leads through the broker's own
//! gRPC middleware. Rights, limits and the audit log are therefore those of gRPC, and are checked in one place.
//!
//! # Layout
//! * [`gate`]: what every request passes: host, origin, session, security headers.
//! * [`visitor`]: who looks at a page; [`session`]: who is signed in.
//! * [`api`]: the generated clients for one visitor.
//! * [`board`]: what is known about all queues, kept up to date by one stream for all browsers of a token; the history.
//! * [`followers`]: how many pages follow the broker at a time.
//! * [`operation`]: long actions, with progress.
//! * [`pages`]: the pages. [`text`] says figures and times in words.
//! * [`assets`]: style, script and the vendored chart library.

mod api;
mod assets;
mod board;
mod followers;
mod gate;
mod operation;
mod pages;
mod problem;
mod session;
mod text;
mod visitor;

use std::sync::Arc;

use axum::{
    Router,
    http::{Extensions, Request, Response},
    middleware,
    response::Redirect,
    routing::get,
};
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tower::util::BoxCloneSyncService;

pub use crate::board::{HistoryKeeper, PastFigures, TakeFigures};
use crate::{board::Boards, followers::Followers, operation::Operations, session::Sessions};

/// The broker's gRPC services, with the middleware in front of them.
pub type Broker =
    BoxCloneSyncService<Request<Body>, Response<Body>, Box<dyn std::error::Error + Send + Sync>>;

/// What a visitor may do with a queue, so that the pages show no action that would be refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rights {
    /// To push items.
    pub produce: bool,
    /// To change settings, and to delete, redrive and replay items.
    pub manage: bool,
    /// To create the queue.
    pub create: bool,
}

impl Rights {
    /// All rights, as everyone has them if there are no tokens.
    pub const ALL: Self = Self { produce: true, manage: true, create: true };
}

/// Returns what the bearer of a token may do with a queue, or with any queue at all if the name is empty; without a token,
/// what everyone may do.
pub type FindRights = dyn Fn(Option<&str>, &str) -> Rights + Send + Sync;

/// What the console needs.
pub struct Options {
    /// The broker.
    pub broker: Broker,
    /// True if callers need a token: visitors sign in with theirs.
    pub needs_token: bool,
    /// The rights of tokens. The broker checks them again.
    pub rights: Arc<FindRights>,
    /// Picks what accompanies a browser's request on its way to the broker, for example the address of the browser.
    pub peer: fn(&Extensions) -> Extensions,
    /// Where the history is kept, so that it survives the broker; `None`: nowhere.
    pub history: Option<Arc<dyn HistoryKeeper>>,
    /// Cancelled when the broker drains: streams of events end.
    pub shutdown: CancellationToken,
}

/// What all requests share.
struct Console {
    broker: Broker,
    needs_token: bool,
    rights: Arc<FindRights>,
    peer: fn(&Extensions) -> Extensions,
    shutdown: CancellationToken,
    sessions: Sessions,
    boards: Boards,
    operations: Operations,
    followers: Followers,
}

/// Returns the pages of the console. Must be called within a tokio runtime.
pub fn router(options: Options) -> Router {
    let Options { broker, needs_token, rights, peer, history, shutdown } = options;
    let console = Arc::new(Console {
        broker,
        needs_token,
        rights,
        peer,
        boards: Boards::new(history, shutdown.clone()),
        shutdown,
        sessions: Sessions::default(),
        operations: Operations::default(),
        followers: Followers::default(),
    });
    let pages = Router::new()
        .route("/", get(|| async { Redirect::temporary("/queues") }))
        .merge(pages::routes())
        .layer(middleware::from_fn_with_state(Arc::clone(&console), gate::pass))
        .with_state(console);
    assets::routes().merge(pages).layer(middleware::map_response(gate::harden))
}

/// Makes a [`Broker`] of any service that is one, for example a [`tonic::transport::Channel`].
pub fn broker<S, B>(service: S) -> Broker
where
    S: tower::Service<Request<Body>, Response = Response<B>> + Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>> + 'static,
    B: axum::body::HttpBody<Data = bytes::Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    use tower::ServiceExt as _;
    let service =
        service.map_err(Into::into).map_response(|response: Response<B>| response.map(Body::new));
    BoxCloneSyncService::new(service)
}

#[cfg(test)]
mod tests;
