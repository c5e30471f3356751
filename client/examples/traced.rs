//! A producer and a consumer whose spans go to a collector of OpenTelemetry on this machine:
//!
//! ```sh
//! sluicegate --otlp-endpoint http://127.0.0.1:4317
//! cargo run -p sluicegate-client --features opentelemetry --example traced
//! ```
//!
//! The trace: `order`, in it `push orders` of the broker, and `process orders`, which is the handler's, with `print` in it.

use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::{Resource, trace::SdkTracerProvider};
use sluicegate_client::{Client, Retry};
use tracing::Instrument;
use tracing_subscriber::layer::SubscriberExt;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    // To http://localhost:4317, or where OTEL_EXPORTER_OTLP_ENDPOINT says.
    let exporter = SpanExporter::builder().with_tonic().build()?;
    let spans = SdkTracerProvider::builder()
        .with_resource(Resource::builder().with_service_name("print-shop").build())
        .with_batch_exporter(exporter)
        .build();
    let layer = tracing_opentelemetry::layer().with_tracer(spans.tracer("print-shop"));
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(layer))?;

    let broker = std::env::var("SLUICE_SERVER").unwrap_or("http://127.0.0.1:7400".into());
    let client = Client::connect(broker).await?;
    let order = async { client.producer("orders").push("two pounds of apples").await };
    order.instrument(tracing::info_span!("order")).await?;

    let consumer = client.consumer("orders").limit(1);
    consumer
        .run(|delivery| async move {
            let text = delivery.text()?;
            tracing::info_span!("print").in_scope(|| println!("{text}"));
            Ok::<(), Retry>(())
        })
        .await?;
    tokio::task::spawn_blocking(move || spans.shutdown()).await??;
    Ok(())
}
