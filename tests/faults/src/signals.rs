//! Somebody else writes to the channel of the signals.

/// How many signals a flood consists of.
const FLOOD: usize = 20_000;
/// How many go in one message to the server.
const AT_ONCE: usize = 1_000;

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
    publish(url, database, messages).await;
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
