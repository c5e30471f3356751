//! The codec of the services: prost's codec, with a check of each request before it is decoded.
//!
//! An empty entry of a repeated field takes two bytes on the wire, less when compressed, and some
//! hundred in memory. A request of 16 KB could take gigabytes before its entries are counted. The
//! entries are therefore counted in the encoded message, by means of the descriptors of the
//! requests. Responses are not checked, because clients trust their broker.

use std::{collections::HashMap, marker::PhantomData, sync::OnceLock};

use bytes::{Buf, Bytes};
use prost::{
    Message, Name,
    encoding::{WireType, decode_key, decode_varint},
};
use prost_types::{
    DescriptorProto, FileDescriptorSet,
    field_descriptor_proto::{Label, Type},
};
use tonic::{
    Code, Status,
    codec::{BufferSettings, Codec, DecodeBuf, Decoder},
};
use tonic_prost::ProstDecoder;
use tonic_types::{ErrorDetails, StatusExt};

use crate::{FILE_DESCRIPTOR_SET, encoder::ScratchEncoder};

/// The most entries of one repeated field: items, receipts, ids.
pub const MAX_ENTRIES: usize = 1_000;
/// The most entries of all repeated fields of a request together: items, and the headers of each.
const MAX_ENTRIES_IN_ALL: usize = 100_000;
/// The most bytes of a request that holds no payload; the server bounds the others.
const MAX_SMALL_REQUEST: usize = 4 << 20;
/// The requests that hold payloads.
const LARGE: [&str; 6] = [
    "PushRequest",
    "PushStreamRequest",
    "MoveRequest",
    "CommitAndPushRequest",
    "CreateScheduleRequest",
    "UpdateScheduleRequest",
];

/// Decodes a request, and refuses one with too many entries before that.
pub fn decode<U: Message + Name + Default>(message: Bytes) -> Result<U, Status> {
    if let Some(request) = requests().get(U::NAME) {
        request.check(&message, message.len())?;
    }
    U::decode(message).map_err(|error| Status::internal(error.to_string()))
}

/// Decodes messages of type `U`, encodes those of type `T`.
#[derive(Debug, Clone)]
pub struct CountingCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for CountingCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for CountingCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Name + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ScratchEncoder<T>;
    type Decoder = CountingDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ScratchEncoder::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        CountingDecoder { shape: requests().get(U::NAME), inner: ProstDecoder::default() }
    }
}

/// Decodes messages of type `U`, and refuses those with too many entries before that.
#[derive(Debug)]
pub struct CountingDecoder<U> {
    /// The layout of the message, if it is a request.
    shape: Option<&'static Request>,
    inner: ProstDecoder<U>,
}

impl<U: Message + Default> Decoder for CountingDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buf: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        if let Some(request) = self.shape {
            request.check(buf.chunk(), buf.remaining())?;
        }
        self.inner.decode(buf)
    }

    fn buffer_settings(&self) -> BufferSettings {
        self.inner.buffer_settings()
    }
}

/// The limits and layout of one type of request.
#[derive(Debug)]
struct Request {
    /// Most bytes of the request; `None`: as many as the server accepts.
    max_bytes: Option<usize>,
    shape: Shape,
}

/// The fields of a message that are repeated, or that contain repeated fields.
#[derive(Debug, Default)]
struct Shape(Vec<Field>);

#[derive(Debug)]
struct Field {
    number: u32,
    name: String,
    repeated: bool,
    message: Option<Shape>,
}

/// The reason why a message is refused.
enum Refused {
    /// The field at this path has more than [`MAX_ENTRIES`] entries.
    Entries(String),
    /// The request has more than [`MAX_ENTRIES_IN_ALL`] entries.
    InAll,
    /// The message is malformed. The decoder reports this, because it finds the same fault at the
    /// same place.
    Malformed,
    /// A group, which proto3 does not have. The decoder would skip it and decode the following
    /// fields uncounted.
    Group,
}

impl Request {
    fn check(&self, message: &[u8], length: usize) -> Result<(), Status> {
        if let Some(limit) = self.max_bytes.filter(|limit| length > *limit) {
            return Err(Status::resource_exhausted(format!(
                "the request is {length} bytes, more than the {limit} that are enough for any of its kind"
            )));
        }
        if message.len() != length {
            return Err(Status::internal("the message is in several parts"));
        }
        let mut left = MAX_ENTRIES_IN_ALL;
        match self.shape.count(message, &mut left) {
            Ok(()) | Err(Refused::Malformed) => Ok(()),
            Err(Refused::Entries(field)) => Err(too_many(&field)),
            Err(Refused::Group) => Err(Status::invalid_argument(
                "the request holds a group, which proto3 does not have",
            )),
            Err(Refused::InAll) => Err(Status::resource_exhausted(format!(
                "the request has more than {MAX_ENTRIES_IN_ALL} entries in all"
            ))),
        }
    }
}

/// Returns the same status as for a list that is a little too long.
fn too_many(field: &str) -> Status {
    let why = format!("must hold 1 to {MAX_ENTRIES} entries, not more");
    let info = HashMap::from([("field".to_owned(), field.to_owned())]);
    let mut details = ErrorDetails::with_error_info("INVALID_FIELD", "sluicegate", info);
    details.add_bad_request_violation(field, &why);
    Status::with_error_details(Code::InvalidArgument, format!("{field}: {why}"), details)
}

impl Shape {
    /// Counts the entries of an encoded message down from `left`.
    fn count(&self, mut message: &[u8], left: &mut usize) -> Result<(), Refused> {
        let malformed = |_| Refused::Malformed;
        let mut counts = [0_usize; 16];
        while !message.is_empty() {
            let (number, wire_type) = decode_key(&mut message).map_err(malformed)?;
            let value = match wire_type {
                WireType::LengthDelimited => {
                    let length = decode_varint(&mut message).map_err(malformed)?;
                    let length = usize::try_from(length).map_err(|_| Refused::Malformed)?;
                    message.split_off(..length).ok_or(Refused::Malformed)?
                }
                WireType::Varint => {
                    decode_varint(&mut message).map_err(malformed)?;
                    continue;
                }
                WireType::SixtyFourBit => {
                    message.split_off(..8).ok_or(Refused::Malformed)?;
                    continue;
                }
                WireType::ThirtyTwoBit => {
                    message.split_off(..4).ok_or(Refused::Malformed)?;
                    continue;
                }
                WireType::StartGroup | WireType::EndGroup => return Err(Refused::Group),
            };
            let Some(at) = self.0.iter().position(|field| field.number == number) else { continue };
            let field = &self.0[at];
            // The decoder merges messages that are given more than once, so each of them counts.
            *left = left.checked_sub(1).ok_or(Refused::InAll)?;
            if field.repeated {
                counts[at] += 1;
                if counts[at] > MAX_ENTRIES {
                    return Err(Refused::Entries(field.name.clone()));
                }
            }
            if let Some(shape) = &field.message {
                shape.count(value, left).map_err(|refused| match refused {
                    Refused::Entries(inner) => Refused::Entries(format!("{}.{inner}", field.name)),
                    other => other,
                })?;
            }
        }
        Ok(())
    }
}

/// Returns the limits and layouts of all requests, by the names of their types.
fn requests() -> &'static HashMap<String, Request> {
    static REQUESTS: OnceLock<HashMap<String, Request>> = OnceLock::new();
    REQUESTS.get_or_init(|| {
        // The build of this crate writes the descriptors, so they are well formed. A test checks
        // that they are not empty: without them nothing would be refused.
        let files = FileDescriptorSet::decode(FILE_DESCRIPTOR_SET).unwrap_or_default().file;
        let mut messages = HashMap::new();
        for file in &files {
            let package = format!(".{}", file.package());
            collect(&package, &file.message_type, &mut messages);
        }
        let methods =
            files.iter().flat_map(|file| &file.service).flat_map(|service| &service.method);
        methods
            .filter_map(|method| {
                let message = messages.get(method.input_type())?;
                let name = message.name().to_owned();
                let max_bytes = (!LARGE.contains(&name.as_str())).then_some(MAX_SMALL_REQUEST);
                Some((name, Request { max_bytes, shape: shape(message, &messages) }))
            })
            .collect()
    })
}

fn collect<'a>(
    scope: &str,
    types: &'a [DescriptorProto],
    messages: &mut HashMap<String, &'a DescriptorProto>,
) {
    for message in types {
        let name = format!("{scope}.{}", message.name());
        collect(&name, &message.nested_type, messages);
        messages.insert(name, message);
    }
}

/// Returns the layout of a message. The recursion ends because no request contains itself.
fn shape(message: &DescriptorProto, messages: &HashMap<String, &DescriptorProto>) -> Shape {
    let field = |field: &prost_types::FieldDescriptorProto| {
        let repeated = field.label() == Label::Repeated;
        let inner = (field.r#type() == Type::Message)
            .then(|| messages.get(field.type_name()))
            .flatten()
            .map(|message| shape(message, messages))
            .filter(|shape| !shape.0.is_empty());
        let number = u32::try_from(field.number()).ok()?;
        let name = field.name().to_owned();
        (repeated || inner.is_some()).then_some(Field { number, name, repeated, message: inner })
    };
    Shape(message.field.iter().filter_map(field).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::{
        CommitRequest, ConsumeStreamRequest, NewItem, PushRequest, consume_stream_request::Action,
    };

    fn check<M: Message + Name>(message: &M) -> Result<(), Status> {
        let encoded = message.encode_to_vec();
        requests()[M::NAME].check(&encoded, encoded.len())
    }

    fn push(items: usize, headers: usize) -> PushRequest {
        let headers = (0..headers).map(|n| (n.to_string(), String::new())).collect();
        let item = NewItem { headers, ..Default::default() };
        PushRequest { items: vec![item; items], ..Default::default() }
    }

    /// Every request has an entry, and none has more repeated fields than are counted.
    #[test]
    fn all_requests_have_a_layout() {
        fn widest(shape: &Shape) -> usize {
            let inner = shape.0.iter().filter_map(|field| field.message.as_ref()).map(widest);
            inner.max().unwrap_or_default().max(shape.0.len())
        }
        assert!(requests().len() > 30, "{}", requests().len());
        assert!(requests().values().all(|request| widest(&request.shape) <= 16));
        assert!(LARGE.iter().all(|name| requests()[*name].max_bytes.is_none()));
        assert!(!requests().contains_key("PushResponse"));
    }

    #[test]
    fn valid_requests_are_accepted() {
        assert!(check(&push(1_000, 64)).is_ok());
        assert!(check(&CommitRequest { receipts: vec!["r".repeat(1_024); 1_000] }).is_ok());
    }

    #[test]
    fn entries_are_counted_wherever_they_are() {
        let refused = check(&push(1_001, 0)).unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        let violations = refused.get_details_bad_request().unwrap().field_violations;
        assert_eq!(violations[0].field, "items");
        assert!(check(&push(1, 1_001)).unwrap_err().message().starts_with("items.headers: "));
        assert_eq!(check(&push(1_000, 100)).unwrap_err().code(), Code::ResourceExhausted);
        let commit = CommitRequest { receipts: vec![String::new(); 1_001] };
        let message = ConsumeStreamRequest { action: Some(Action::Commit(commit)) };
        assert!(check(&message).unwrap_err().message().starts_with("commit.receipts: "));
        let long = CommitRequest { receipts: vec!["r".repeat(5_000); 1_000] };
        assert_eq!(check(&long).unwrap_err().code(), Code::ResourceExhausted);
    }

    #[test]
    fn malformed_messages_are_left_to_the_decoder() {
        let request = &requests()["PushRequest"];
        for bytes in [&[0x12, 0x7f][..], &[0xff; 20], &[0x12, 0x02, 0x0a, 0x7f]] {
            assert!(request.check(bytes, bytes.len()).is_ok());
        }
    }

    /// The decoder skips a group, but the entries behind it are counted.
    #[test]
    fn a_group_does_not_end_the_count() {
        let bytes = [&[0x7b, 0x7c][..], &push(2_000, 0).encode_to_vec()].concat();
        assert_eq!(
            requests()["PushRequest"].check(&bytes, bytes.len()).unwrap_err().code(),
            Code::InvalidArgument
        );
    }
}
