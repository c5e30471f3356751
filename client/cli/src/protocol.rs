//! What an address speaks that does not speak gRPC: a common mistake is the port of the console in place of that of gRPC.

use std::time::Duration;

use sluicegate_client::tonic::codegen::http::Uri;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

/// How long the address may take to connect, and to answer.
const LIMIT: Duration = Duration::from_secs(2);
/// How HTTP/2 begins, with an empty frame of settings.
const HTTP2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// A protocol in plain text, as an answer shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// HTTP/1 and not HTTP/2.
    Http1,
    /// HTTP/2 without TLS, as gRPC needs it.
    Http2,
    /// TLS, whatever is in it.
    Tls,
}

/// Returns what is spoken at the address of `url`; `None` if nothing there answers, or nothing that is known.
pub(crate) async fn spoken_at(url: &str) -> Option<Protocol> {
    let url: Uri = url.parse().ok()?;
    let host = url.host()?;
    let port = url.port_u16().unwrap_or(if url.scheme_str() == Some("https") { 443 } else { 80 });
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    // First as gRPC does: a server of HTTP/2 may answer HTTP/1 as well, to say that it does not serve it.
    let spoken = answer(bare, port, HTTP2).await.as_deref().and_then(protocol_of);
    if spoken.is_some() {
        return spoken;
    }
    let request = format!("GET / HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n");
    protocol_of(&answer(bare, port, request.as_bytes()).await?)
}

/// Returns the first bytes that come back.
async fn answer(host: &str, port: u16, sent: &[u8]) -> Option<Vec<u8>> {
    let mut stream = timeout(LIMIT, TcpStream::connect((host, port))).await.ok()?.ok()?;
    stream.write_all(sent).await.ok()?;
    let mut bytes = Vec::new();
    let reading = async {
        while bytes.len() < 7 && stream.read_buf(&mut bytes).await.is_ok_and(|read| read > 0) {}
    };
    // What came in time counts.
    let _ = timeout(LIMIT, reading).await;
    Some(bytes)
}

fn protocol_of(answer: &[u8]) -> Option<Protocol> {
    match answer {
        [b'H', b'T', b'T', b'P', b'/', b'1', ..] => Some(Protocol::Http1),
        // An alert: what was sent is not TLS.
        [0x15, 0x03, ..] => Some(Protocol::Tls),
        // SETTINGS or GOAWAY, the frames with which a server begins.
        [_, _, _, 0x4 | 0x7, ..] => Some(Protocol::Http2),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// Returns the URL of a server that gives this answer to each connection.
    async fn server(answer: &'static [u8]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = [0; 256];
                let _ = stream.read(&mut request).await;
                let _ = stream.write_all(answer).await;
            }
        });
        format!("http://127.0.0.1:{port}")
    }

    #[tokio::test]
    async fn the_answer_shows_the_protocol() {
        let spoken = |answer| async move { spoken_at(&server(answer).await).await };
        assert_eq!(spoken(b"HTTP/1.1 400 Bad Request\r\n\r\n").await, Some(Protocol::Http1));
        assert_eq!(spoken(b"\0\0\0\x04\0\0\0\0\0").await, Some(Protocol::Http2));
        assert_eq!(spoken(b"\x15\x03\x01\0\x02\x02\x46").await, Some(Protocol::Tls));
        assert_eq!(spoken(b"220 mail ready\r\n").await, None);
        assert_eq!(spoken(b"").await, None);
        assert_eq!(spoken_at("http://127.0.0.1:1").await, None);
    }
}
