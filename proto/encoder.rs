//! The encoder of the services: prost's, which writes each message into memory of the thread first. A message of items has dozens of
//! short fields for each of them, and the buffer of a call looks for room, and may grow, before each.

use std::{cell::RefCell, marker::PhantomData};

use bytes::BufMut;
use prost::Message;
use tonic::{
    Status,
    codec::{EncodeBuf, Encoder},
};

/// Messages of up to so many bytes are encoded apart, and copied: a thousand items of some hundred bytes. Larger ones are payload for the
/// most part.
const SCRATCH: usize = 512 << 10;

thread_local! {
    /// One for each thread, because no call is left in the middle of a message. Zeros take no memory before something is written over them.
    static APART: RefCell<Box<[u8]>> = RefCell::new(vec![0; SCRATCH].into());
}

/// Encodes messages of type `T`.
#[derive(Debug, Clone)]
pub struct ScratchEncoder<T>(PhantomData<T>);

impl<T> Default for ScratchEncoder<T> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T: Message> Encoder for ScratchEncoder<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, message: T, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        APART.with_borrow_mut(|apart| {
            let mut rest = &mut apart[..];
            match message.encode(&mut rest) {
                Ok(()) => {
                    let length = SCRATCH - rest.len();
                    buffer.put_slice(&apart[..length]);
                    Ok(())
                }
                Err(too_large) => {
                    buffer.reserve(too_large.required_capacity());
                    message.encode(buffer).map_err(|error| Status::internal(error.to_string()))
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http_body_util::BodyExt as _;
    use tonic::codec::EncodeBody;

    use super::*;
    use crate::v1::{NewItem, PushRequest};

    fn push(payload: usize) -> PushRequest {
        let item = NewItem { payload: Bytes::from(vec![7; payload]), ..NewItem::default() };
        PushRequest { queue: "orders".to_owned(), items: vec![item; 3], ..PushRequest::default() }
    }

    /// One after the other through one encoder, of sizes on both sides of the limit.
    #[tokio::test]
    async fn messages_of_all_sizes_are_encoded() {
        let around = SCRATCH / 3;
        let sizes = [0, 1, 1_000, around - 30, around - 10, around, around + 10, 1 << 20, 5];
        let messages: Vec<PushRequest> = sizes.into_iter().map(push).collect();
        let source = tokio_stream::iter(messages.clone().into_iter().map(Ok::<_, Status>));
        let body = EncodeBody::new_client(ScratchEncoder::default(), source, None, None);
        let mut bytes = &body.collect().await.unwrap().to_bytes()[..];
        for message in messages {
            let (header, rest) = bytes.split_at(5);
            let length = u32::from_be_bytes(header[1..].try_into().unwrap()) as usize;
            assert_eq!(PushRequest::decode(&rest[..length]).unwrap(), message);
            bytes = &rest[length..];
        }
        assert!(bytes.is_empty());
    }
}
