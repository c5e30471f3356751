//! HTTP/2 by hand: frames that no well-behaved client sends, or at no such rate.

use tokio::{io::AsyncWriteExt, net::TcpStream};

use super::neighbour::socket;

pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
pub(super) const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
pub(super) const RST_STREAM: u8 = 3;
pub(super) const SETTINGS: u8 = 4;
pub(super) const PING: u8 = 6;
pub(super) const GOAWAY: u8 = 7;
pub(super) const WINDOW_UPDATE: u8 = 8;
pub(super) const CONTINUATION: u8 = 9;
pub(super) const ACK: u8 = 1;
pub(super) const END_STREAM: u8 = 1;
pub(super) const END_HEADERS: u8 = 4;

pub(super) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a short frame").to_be_bytes();
    let mut bytes = vec![length[1], length[2], length[3], kind, flags];
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// The headers of a gRPC call, without compression.
pub(super) fn call(path: &str) -> Vec<u8> {
    let literal =
        |text: &str| [&[u8::try_from(text.len()).expect("short")], text.as_bytes()].concat();
    // :method POST and :scheme http are in the static table; the name of :path is its entry 4.
    let mut block = vec![0x83, 0x86, 0x04];
    block.extend(literal(path));
    for (name, value) in
        [(":authority", "broker"), ("content-type", "application/grpc"), ("te", "trailers")]
    {
        block.push(0);
        block.extend(literal(name));
        block.extend(literal(value));
    }
    block
}

/// A call that is reset at once, the nth of a connection.
pub(super) fn reset(call: &[u8], n: u32) -> Vec<u8> {
    let id = 2 * n + 1;
    let begun = frame(HEADERS, END_HEADERS, id, call);
    [begun, frame(RST_STREAM, 0, id, &8_u32.to_be_bytes())].concat()
}

/// A connection that has begun HTTP/2, to an address.
pub(super) async fn begin(address: &str) -> TcpStream {
    let mut stream = socket(address).await;
    stream.write_all(PREFACE).await.expect("to write");
    stream.write_all(&frame(SETTINGS, 0, 0, &[])).await.expect("to write");
    stream
}
