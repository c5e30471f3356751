//! Three stations: orders are checked, packed into parcels, and labelled; what is finished is in the
//! queue `pipeline.sent`. Each step is atomic: kill this at any moment, start it again, and no parcel
//! is lost or sent twice. (`tests/e2e/pipeline.rs` does that to this very program, and to the brokers.)
//!
//! ```text
//! cargo run -p sluicegate-client --example pipeline [URL]
//! ```
//! pushes a few orders and runs all stations until nothing is left to do.
//!
//! ```text
//! cargo run -p sluicegate-client --example pipeline URL[,URL...] check|pack|label
//! ```
//! runs one station, as a service of its own would, until it is killed.

use std::{env, time::Duration};

use sluicegate_client::{Client, ClientBuilder, Delivery, NewItem, Next, Retry, Station};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// The stations, by the queues they work on. An item is a name and a weight in kg: `order4 44`.
const CHECK: &str = "pipeline.orders";
const PACK: &str = "pipeline.packing";
const LABEL: &str = "pipeline.labels";
/// The last queue.
const SENT: &str = "pipeline.sent";

/// What fits into one parcel, in kg.
const LARGEST: u32 = 20;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let mut arguments = env::args().skip(1);
    let urls = arguments.next().unwrap_or_else(|| "http://127.0.0.1:7400".to_owned());
    let brokers = brokers(&urls);
    let Some(station) = arguments.next() else {
        return all_stations(&brokers.connect().await?).await;
    };
    // A station waits for its brokers when none can be reached.
    let client = brokers.connect_lazy()?;
    let ended = match station.as_str() {
        "check" => client.station(CHECK).run(check).await,
        "pack" => client.station(PACK).run(pack).await,
        // A station can be made of any consumer: this one settles over the stream it is handed items on.
        "label" => Station::from_consumer(client.consumer(LABEL)).run(label).await,
        other => return Err(format!("{other}: not one of check, pack, label").into()),
    };
    println!("{station} has ended: {:?}", ended?);
    Ok(())
}

/// The first broker, and those to use when it cannot be reached.
fn brokers(urls: &str) -> ClientBuilder {
    let (first, others) = urls.split_once(',').unwrap_or((urls, ""));
    let others = others.split(',').filter(|url| !url.is_empty());
    others.fold(Client::builder(first), ClientBuilder::endpoint)
}

async fn all_stations(client: &Client) -> Result<(), Error> {
    // By its `dedup_id` an order that is pushed again is known: starting this again makes no new ones.
    let orders = [("order1", 1), ("order2", 12), ("order3", 0), ("order4", 44), ("order5", 7)]
        .map(|(name, weight)| NewItem::new(format!("{name} {weight}")).dedup_id(name));
    client.producer(CHECK).push_all(orders).await?;
    let station =
        |queue| Station::from_consumer(client.consumer(queue).idle_exit(Duration::from_secs(2)));
    tokio::try_join!(
        station(CHECK).run(check),
        station(PACK).run(pack),
        station(LABEL).run(label)
    )?;
    println!("nothing left to do: what was sent is in {SENT}");
    Ok(())
}

/// A choice: letters need no packing, and orders that weigh nothing are dropped.
async fn check(order: Delivery) -> Result<Next, Error> {
    let (_, weight) = begin("check", &order).await?;
    Ok(match weight {
        0 => Next::done(),
        1 => Next::move_to(LABEL).header("kind", "letter").into(),
        _ => Next::move_to(PACK).header("kind", "parcel").into(),
    })
}

/// A fork, and a loop: a heavy order becomes one parcel and a lighter order, which comes by here again.
async fn pack(order: Delivery) -> Result<Next, Error> {
    let (name, weight) = begin("pack", &order).await?;
    if weight <= LARGEST {
        return Ok(Next::move_to(LABEL).payload(format!("{name}/last {weight}")).into());
    }
    let parcel = NewItem::new(format!("{name}/{weight} {LARGEST}"));
    let rest = NewItem::new(format!("{name} {}", weight - LARGEST));
    Ok(Next::fork([(LABEL, parcel), (PACK, rest)]))
}

/// A second attempt: some labels do not stick immediately.
async fn label(parcel: Delivery) -> Result<Next, Error> {
    let (_, weight) = begin("label", &parcel).await?;
    if weight.is_multiple_of(3) && parcel.attempt() == 1 {
        return Ok(Next::retry(Retry::new("the label came off")));
    }
    Ok(Next::move_to(SENT).into())
}

/// Begins work on an item: prints so, takes a moment, and returns its name and weight.
async fn begin(station: &str, item: &Delivery) -> Result<(String, u32), Error> {
    println!("{station}: {}", item.text()?);
    tokio::time::sleep(Duration::from_millis(10)).await; // what real work would take
    let (name, weight) = item.text()?.split_once(' ').ok_or("not a name and a weight")?;
    Ok((name.to_owned(), weight.parse()?))
}
