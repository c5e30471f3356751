//! All services, behind the middleware.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum::{
    body::{Body, Bytes, HttpBody},
    extract::Request,
    http,
    response::Response,
};
use sluicegate_proto::v1::queue_service_server::QueueServiceServer;
use tonic::{codegen::Service, server::NamedService, service::Routes};

use super::{
    Api,
    answers::AnswerBody,
    middleware::{self, Edge},
};

/// All services. Clones are the same.
#[derive(Clone)]
pub(crate) struct Services(Arc<Inner>);

struct Inner {
    edge: Edge,
    /// Has nearly all of the calls, which find it without the router.
    queue: QueueServiceServer<Api>,
    others: Routes,
}

impl Services {
    pub(super) fn new(edge: Edge, queue: QueueServiceServer<Api>, others: Routes) -> Self {
        Self(Arc::new(Inner { edge, queue, others: others.prepare() }))
    }
}

impl Inner {
    async fn call(&self, request: Request) -> Response<tonic::body::Body> {
        let Ok(answer) = if is_of_queue(request.uri().path()) {
            self.queue.clone().call(request).await
        } else {
            Box::pin(self.others.clone().call(request)).await
        };
        answer
    }
}

fn is_of_queue(path: &str) -> bool {
    let method =
        path.strip_prefix('/').and_then(|path| path.strip_prefix(QueueServiceServer::<Api>::NAME));
    method.is_some_and(|method| method.starts_with('/'))
}

impl<B> Service<http::Request<B>> for Services
where
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<axum::BoxError>,
{
    type Response = Response<AnswerBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let services = Arc::clone(&self.0);
        let request = Box::new(request.map(Body::new));
        Box::pin(async move {
            let next = |request| services.call(request);
            Ok(middleware::pass(&services.edge, request, next).await)
        })
    }
}
