//! `sluice pop` and `sluice reserve`.

use std::time::Duration;

use sluicegate_client::proto::ReserveRequest;

use crate::{context::Context, failure::Failure, json, values};

/// The options that both commands have.
#[derive(Debug, clap::Args)]
pub(crate) struct TakeArgs {
    /// The queue
    queue: String,
    /// At most this many items, 1 to 1000
    #[arg(long, short = 'n', value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=1000))]
    count: u16,
    /// Wait at most this long for the first item
    #[arg(long, short, value_name = "DURATION", default_value = "0", value_parser = values::duration)]
    wait: Duration,
}

/// The command line of `sluice pop`.
#[derive(Debug, clap::Args)]
pub(crate) struct PopArgs {
    #[command(flatten)]
    take: TakeArgs,
}

/// The command line of `sluice reserve`.
#[derive(Debug, clap::Args)]
pub(crate) struct ReserveArgs {
    #[command(flatten)]
    take: TakeArgs,
    /// Lease of each item [default: the queue's]
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    lease: Option<Duration>,
    /// Name of the consumer, shown with each item
    #[arg(long, value_name = "NAME", default_value = "sluice")]
    name: String,
}

pub(crate) async fn pop(context: &Context, args: PopArgs) -> Result<(), Failure> {
    let TakeArgs { queue, count, wait } = args.take;
    let items = context.client().await?.pop(queue, count, wait).await?;
    if items.is_empty() {
        return Err(Failure::Nothing);
    }
    for item in &items {
        context.output.payload(item)?;
    }
    Ok(())
}

pub(crate) async fn reserve(context: &Context, args: ReserveArgs) -> Result<(), Failure> {
    let TakeArgs { queue, count, wait } = args.take;
    let client = context.client().await?;
    let message = ReserveRequest {
        queue,
        max_items: i32::from(count),
        wait: Some(values::to_proto(wait)),
        lease: args.lease.map(values::to_proto),
        consumer: args.name,
    };
    let request = client.waiting_request(message, wait);
    let deliveries = client.queue_service().reserve(request).await?.into_inner().deliveries;
    if deliveries.is_empty() {
        return Err(Failure::Nothing);
    }
    for delivery in &deliveries {
        let payload = delivery.item.as_ref().map(|item| String::from_utf8_lossy(&item.payload));
        let text = format!("{}\t{}", delivery.receipt, payload.unwrap_or_default());
        context.output.one(&json::delivery(delivery), &text)?;
    }
    Ok(())
}
