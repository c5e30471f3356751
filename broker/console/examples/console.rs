//! The console in a process of its own, in front of any broker, for work on its pages:
//! `cargo run -p sluicegate-console --example console -- http://127.0.0.1:7400 127.0.0.1:7409 [token]`.

use std::{env, error::Error, sync::Arc};

use axum::http::Extensions;
use sluicegate_console::{Options, Rights, broker, router};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let upstream = arguments.next().unwrap_or_else(|| "http://127.0.0.1:7400".to_owned());
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:7409".to_owned());
    let options = Options {
        broker: broker(Endpoint::from_shared(upstream)?.connect_lazy()),
        needs_token: arguments.next().is_some(),
        rights: Arc::new(|_, _| Rights::ALL),
        peer: |_| Extensions::new(),
        history: None,
        shutdown: CancellationToken::new(),
    };
    let listener = TcpListener::bind(&address).await?;
    axum::serve(listener, router(options)).await?;
    Ok(())
}
