//! Somebody else writes to the channel of the signals.

use std::time::Duration;

use futures_util::StreamExt;

/// How many signals a flood consists of.
const FLOOD: usize = 20_000;
/// How many go in one message to the server.
const AT_ONCE: usize = 1_000;
/// How long whoever forges signals listens to those of the brokers.
const LISTENS: Duration = Duration::from_millis(500);

/// Sends more signals at once than brokers ever do.
pub(crate) async fn flood(url: &str, database: &str) {
    let message = |number: usize| format!("insert flood-{} - {number:08x}", number % 500);
    publish(url, database, (0..FLOOD).map(|number| message(number).into_bytes()).collect()).await;
}

/// Sends garbage, and signals that no broker has sent.
pub(crate) async fn forge(url: &str, database: &str) {
    let mut messages: Vec<Vec<u8>> = vec![
        Vec::new(),
        b"\x00\xff\xfe garbage".to_vec(),
        b"insert".to_vec(),
        b"insert not/a/queue - deadbeef".to_vec(),
        b"delete a - deadbeef".to_vec(),
        vec![b'x'; 1 << 20],
    ];
    for queue in ["a", "b", "c", "pops", "a.dead", "ghost"] {
        for topic in ["insert", "settings", "settle", "missed"] {
            messages.push(format!("{topic} {queue} - deadbeef").into_bytes());
        }
        for time in [i64::MAX, i64::MIN, 95_617_497_600_000, -95_617_497_600_000] {
            messages.push(format!("insert {queue} {time} deadbeef").into_bytes());
        }
    }
    for item in heard_items(url, database).await {
        for queue in ["a", "b", "c", "pops"] {
            messages.push(format!("insert {queue} 0 deadbeef {item}").into_bytes());
            messages.push(
                format!("wanted {queue} {} deadbeef {item}", i64::from(u32::MAX) * 1_000)
                    .into_bytes(),
            );
        }
    }
    publish(url, database, messages).await;
}

/// Returns ids of items that the brokers tell each other in a while.
async fn heard_items(url: &str, database: &str) -> Vec<String> {
    let client = redis::Client::open(url).expect("an address");
    let mut items = Vec::new();
    let listening = async {
        let mut connection = client.get_async_pubsub().await?;
        connection.subscribe(format!("sluicegate:{database}")).await?;
        let mut messages = connection.on_message();
        while let Some(message) = messages.next().await {
            let text: String = message.get_payload()?;
            items.extend(text.split(' ').nth(4).map(str::to_owned));
        }
        redis::RedisResult::Ok(())
    };
    let _ = tokio::time::timeout(LISTENS, listening).await; // a server that is away tells nothing
    items
}

/// Publishes these messages. What a server that is away does not take is lost.
async fn publish(url: &str, database: &str, messages: Vec<Vec<u8>>) {
    let client = redis::Client::open(url).expect("an address");
    let Ok(mut connection) = client.get_multiplexed_async_connection().await else { return };
    for messages in messages.chunks(AT_ONCE) {
        let mut pipeline = redis::pipe();
        for message in messages {
            let publish = pipeline.cmd("PUBLISH").arg(format!("sluicegate:{database}"));
            publish.arg(message.as_slice()).ignore();
        }
        let _: redis::RedisResult<()> = pipeline.query_async(&mut connection).await;
    }
}
