//! How connections to brokers are made.

use hyper_util::{client::legacy::connect::HttpConnector, rt::TokioIo};
use sluicegate_proto::gathered::Gathered;
use tokio::net::TcpStream;
use tonic::transport::{Channel, Endpoint, Error};
use tower::{ServiceExt, util::MapResponse};

/// Makes connections. What many calls write to one of them at a time is gathered.
type Connector = MapResponse<HttpConnector, fn(TokioIo<TcpStream>) -> TokioIo<Gathered<TcpStream>>>;

/// Makes a connection.
pub(crate) async fn connect(endpoint: &Endpoint) -> Result<Channel, Error> {
    endpoint.connect_with_connector(connector(endpoint)).await
}

/// Returns a channel that makes its connection when it is first used.
pub(crate) fn connect_lazy(endpoint: &Endpoint) -> Channel {
    endpoint.connect_with_connector_lazy(connector(endpoint))
}

fn connector(endpoint: &Endpoint) -> Connector {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false); // the endpoint adds TLS if the URL says so
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(endpoint.get_connect_timeout());
    tcp.map_response(|stream| TokioIo::new(Gathered::new(stream.into_inner())))
}
