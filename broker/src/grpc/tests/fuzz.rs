//! Fuzzing of requests: whatever a client sends is answered with a status that is not the broker's fault, and nothing
//! panics.

use std::{cell::RefCell, collections::HashMap};

use proptest::{collection::vec, prelude::*, sample::select};
use prost::{
    Message,
    encoding::{self, WireType},
};
use prost_types::{DescriptorProto, FileDescriptorSet, field_descriptor_proto::Type as FieldType};
use tonic::{Request, client::Grpc, codegen::http::uri::PathAndQuery};

use super::{access::calls::Raw, *};
use crate::{
    fuzz::{changed, fuzz},
    grpc::services::Services,
};

/// Number of requests to one broker, which keeps what they store.
const REQUESTS: usize = 200;
/// How long an answer is awaited: calls that wait for items and streams are cut off.
const PATIENCE: Duration = Duration::from_millis(30);
/// How deep messages are nested.
const DEPTH: usize = 4;

/// Texts that fields ask for, and such that they refuse.
const TEXTS: [&str; 26] = [
    "",
    "orders",
    "orders.dead",
    "a",
    "_q",
    ".q",
    "-",
    "ü",
    "\u{0}",
    "0 3 * * *",
    "@daily",
    "* * 30 2 *",
    "Europe/Berlin",
    "Mars/Olympus",
    "text/plain",
    "112233440000000000000001",
    "a9.1700000000000.7",
    "l.0.0.0",
    "orders/a1020304/7",
    "name",
    "lease",
    "*",
    "orders*",
    "default_ttl",
    "9223372036854775807",
    "0330313233343536373839616261393837363534333231300000000300000002000000010106",
];
const NUMBERS: [i64; 17] = [
    0,
    1,
    2,
    9,
    10,
    -1,
    1_000,
    1_001,
    10_001,
    999_999_999,
    1_000_000_000,
    253_402_300_800,
    315_360_001,
    i32::MAX as i64,
    i32::MIN as i64,
    i64::MAX,
    i64::MIN,
];

/// What decides about a request.
struct Dice<'a>(std::slice::Iter<'a, u8>);

impl Dice<'_> {
    /// Returns a number below `end`; 0 once all is decided.
    fn below(&mut self, end: usize) -> usize {
        self.0.next().map_or(0, |byte| usize::from(*byte) % end)
    }
}

/// The messages of the API.
struct Schema {
    messages: HashMap<String, DescriptorProto>,
    /// The path of each call, and its request.
    calls: Vec<(String, String)>,
}

impl Schema {
    fn new() -> Self {
        let set = FileDescriptorSet::decode(sluicegate_proto::FILE_DESCRIPTOR_SET).unwrap();
        let (mut messages, mut calls) = (HashMap::new(), Vec::new());
        for file in set.file {
            let package = format!(".{}", file.package());
            for message in &file.message_type {
                add(&mut messages, &package, message);
            }
            for service in &file.service {
                for method in &service.method {
                    let path = format!("/{}.{}/{}", file.package(), service.name(), method.name());
                    calls.push((path, method.input_type().to_owned()));
                }
            }
        }
        Self { messages, calls }
    }

    /// Returns a message of this type, encoded.
    fn message(&self, name: &str, dice: &mut Dice<'_>, depth: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        let Some(message) = self.messages.get(name) else { return bytes };
        for field in &message.field {
            let is_list = field.label() == prost_types::field_descriptor_proto::Label::Repeated;
            let count = match dice.below(4) {
                0 => 0,
                _ if is_list => dice.below(4),
                _ => 1,
            };
            for _ in 0..count {
                self.field(field, dice, depth, &mut bytes);
            }
        }
        bytes
    }

    fn field(
        &self,
        field: &prost_types::FieldDescriptorProto,
        dice: &mut Dice<'_>,
        depth: usize,
        bytes: &mut Vec<u8>,
    ) {
        let number = field.number().cast_unsigned();
        let mut delimited = |content: &[u8]| {
            encoding::encode_key(number, WireType::LengthDelimited, bytes);
            encoding::encode_varint(content.len() as u64, bytes);
            bytes.extend_from_slice(content);
        };
        match field.r#type() {
            FieldType::Message if depth == 0 => {}
            FieldType::Message => delimited(&self.message(field.type_name(), dice, depth - 1)),
            FieldType::String | FieldType::Bytes => match dice.below(TEXTS.len() + 2) {
                at if at < TEXTS.len() => delimited(TEXTS[at].as_bytes()),
                at => delimited(&vec![b'x'; if at == TEXTS.len() { 128 } else { 20_000 }]),
            },
            FieldType::Double => {
                encoding::encode_key(number, WireType::SixtyFourBit, bytes);
                let values = [0.0, 0.2, 1.0, 2.0, -1.0, f64::NAN, f64::INFINITY, f64::MAX];
                bytes.extend_from_slice(&values[dice.below(values.len())].to_le_bytes());
            }
            _ => {
                encoding::encode_key(number, WireType::Varint, bytes);
                let value = NUMBERS[dice.below(NUMBERS.len())];
                encoding::encode_varint(value.cast_unsigned(), bytes);
            }
        }
    }
}

fn add(messages: &mut HashMap<String, DescriptorProto>, within: &str, message: &DescriptorProto) {
    let name = format!("{within}.{}", message.name());
    for nested in &message.nested_type {
        add(messages, &name, nested);
    }
    messages.insert(name, message.clone());
}

/// Returns requests: the path of a call, a line end, and a message.
fn requests(schema: &Arc<Schema>) -> impl Strategy<Value = Vec<u8>> + use<> {
    let encoded = {
        let schema = Arc::clone(schema);
        move |((path, request), choices): ((String, String), Vec<u8>)| {
            let message = schema.message(&request, &mut Dice(choices.iter()), DEPTH);
            (path, message)
        }
    };
    let messages = (select(schema.calls.clone()), vec(any::<u8>(), 0..120)).prop_map(encoded);
    let with_path =
        |(path, message): (String, Vec<u8>)| [path.as_bytes(), b"\n", &message].concat();
    let whole = messages.clone().prop_map(with_path);
    let damaged = messages.prop_flat_map(move |(path, message)| {
        changed(Just(message)).prop_map(move |message| with_path((path.clone(), message)))
    });
    prop_oneof![3 => whole, 1 => damaged]
}

/// Makes a call, and returns the status of its answer, or `None` if it is still waiting.
async fn call(services: &Services, path: &str, message: Vec<u8>) -> Option<Status> {
    let mut grpc = Grpc::new(services.clone());
    let answered = async {
        grpc.ready().await.unwrap();
        let to = PathAndQuery::try_from(path).unwrap();
        let request = Request::new(tokio_stream::iter([message]));
        let mut answers = grpc.streaming(request, to, Raw).await?.into_inner();
        while answers.message().await?.is_some() {}
        Ok::<_, Status>(())
    };
    match tokio::time::timeout(PATIENCE, answered).await {
        Ok(Ok(())) => Some(Status::ok("")),
        Ok(Err(status)) => Some(status),
        Err(_) => None,
    }
}

#[test]
fn no_request_is_answered_as_a_fault_of_the_broker() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let schema = Arc::new(Schema::new());
    let serving: RefCell<Option<(usize, Broker, Services)>> = RefCell::default();
    fuzz("requests", &requests(&schema), |input| {
        let Some(end) = input.iter().position(|byte| *byte == b'\n') else { return };
        let path = String::from_utf8_lossy(&input[..end]).into_owned();
        if !schema.calls.iter().any(|(call, _)| *call == path) {
            return;
        }
        let mut serving = serving.borrow_mut();
        if serving.as_ref().is_none_or(|(count, ..)| *count >= REQUESTS) {
            let broker = runtime.block_on(Broker::start());
            let server = runtime.block_on(Server::new(broker.api.clone(), super::open())).unwrap();
            let services = server.services();
            *serving = Some((0, broker, services));
        }
        let (count, _, services) = serving.as_mut().unwrap();
        *count += 1;
        let status = runtime.block_on(call(services, &path, input[end + 1..].to_vec()));
        let Some(status) = status else { return };
        // tonic's word for a message that is none.
        let is_no_message = status.message().contains("failed to decode Protobuf message");
        let is_fault = matches!(status.code(), Code::Internal | Code::Unknown | Code::DataLoss);
        assert!(!is_fault || is_no_message, "{path}: {status:?}");
    });
}
