//! Three stations: orders are checked, packed, and sent; what is too heavy for one parcel becomes several.
//! Each step is atomic: kill this at any moment, start it again, and no parcel is lost or sent twice.
//!
//! ```text
//! cargo run -p sluicegate-client --example pipeline [URL]
//! ```

use std::time::Duration;

use sluicegate_client::{Client, NewItem, Next};

type Error = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "http://127.0.0.1:7400".to_owned());
    let client = Client::connect(url).await?;
    let weights = ["5", "12", "zero", "44", "7"];
    let orders = client.producer("example.orders").with_auto_dedup();
    orders.push_all(weights.map(NewItem::from)).await?;

    // A choice: good orders go on, bad ones are dropped.
    let check = client.station("example.orders").run(|order| async move {
        Ok::<_, Error>(match order.text()?.parse::<u32>() {
            Ok(_) => Next::move_to("example.packing").header("checked", "yes").into(),
            Err(_) => Next::done(),
        })
    });

    // A fork, and a loop: a heavy order becomes one parcel and a lighter order, which comes by here again.
    let pack = client.station("example.packing").run(|order| async move {
        let weight: u32 = order.text()?.parse()?;
        Ok::<_, Error>(if weight <= 20 {
            Next::move_to("example.parcels").payload(format!("parcel of {weight} kg")).into()
        } else {
            Next::fork([
                ("example.parcels", NewItem::new("parcel of 20 kg")),
                ("example.packing", NewItem::new((weight - 20).to_string())),
            ])
        })
    });

    let send = client.consumer("example.parcels").idle_exit(Duration::from_secs(1)).run(
        |parcel| async move {
            println!("sent {}", parcel.text()?);
            Ok::<(), Error>(())
        },
    );

    // The first two run until the last one has nothing to do.
    tokio::select! {
        ended = check => println!("check ended: {:?}", ended?),
        ended = pack => println!("pack ended: {:?}", ended?),
        ended = send => println!("send ended: {:?}", ended?),
    }
    Ok(())
}
