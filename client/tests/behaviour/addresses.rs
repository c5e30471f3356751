//! Calls that leave an address that fails.

use std::time::Duration;

use sluicegate_client::{Client, proto::PopRequest, tonic::Code};

use crate::broker::Broker;

/// Returns clients of a broker and of an address at which nobody listens. Each begins at either.
fn clients(broker: &Broker) -> impl Iterator<Item = Client> {
    let builder = broker.builder().endpoint("http://127.0.0.1:1"); // port 1 is closed
    std::iter::repeat_with(move || builder.clone().connect_lazy().unwrap()).take(64)
}

#[tokio::test]
async fn a_pop_that_finds_nobody_sends_the_next_one_elsewhere() {
    let broker = Broker::start().await;
    let mut codes = Vec::new();
    for client in clients(&broker) {
        for _ in 0..2 {
            let popped = client.pop("q", 1, Duration::ZERO).await;
            codes.push(popped.unwrap_err().code());
        }
        if codes[0] == Some(Code::Unavailable) {
            break;
        }
        codes.clear();
    }
    // This broker has no pops.
    assert_eq!(codes, [Some(Code::Unavailable), Some(Code::Unimplemented)]);
}

#[tokio::test]
async fn a_call_on_a_stub_that_finds_nobody_sends_the_next_one_elsewhere() {
    let broker = Broker::start().await;
    let mut codes = Vec::new();
    for client in clients(&broker) {
        let mut stub = client.queue_service();
        for _ in 0..2 {
            let request =
                client.request(PopRequest { queue: "q".to_owned(), ..Default::default() });
            codes.push(stub.pop(request).await.unwrap_err().code());
        }
        if codes[0] == Code::Unavailable {
            break;
        }
        codes.clear();
    }
    assert_eq!(codes, [Code::Unavailable, Code::Unimplemented]);
}
