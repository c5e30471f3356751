//! Pushes ten items and consumes them, four at a time. Needs a broker:
//!
//! ```text
//! cargo run --bin sluicegate -- --store sqlite::memory:
//! cargo run -p sluicegate-client --example push_and_consume [URL]
//! ```

use std::time::Duration;

use sluicegate_client::{Client, NewItem, Retry};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "http://127.0.0.1:7400".to_owned());
    let client = Client::connect(url).await?;

    let producer = client.producer("example.greetings").with_auto_dedup();
    let items = (1..=10).map(|n| NewItem::new(format!("hello {n}")).content_type("text/plain"));
    for pushed in producer.push_all(items).await? {
        println!("pushed {}", pushed.id);
    }

    let summary = client
        .consumer("example.greetings")
        .max_in_flight(4)
        .idle_exit(Duration::from_secs(1)) // a real consumer runs until `shutdown`
        .run(|delivery| async move {
            // Each third item fails once, and is tried again after a moment.
            if delivery.attempt() == 1 && delivery.payload().ends_with(b"3") {
                return Err(Retry::new("try me again").after(Duration::from_millis(100)));
            }
            println!("handled {:?}, attempt {}", delivery.payload(), delivery.attempt());
            Ok(())
        })
        .await?;
    println!("{summary:?}");
    Ok(())
}
