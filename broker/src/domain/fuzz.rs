//! Fuzzing of receipts and names.

use super::{
    ConsumerName, GroupName, LeaseToken, QueueName, Receipt, ScheduleName,
    receipt::tests::{keys, receipt},
};
use crate::fuzz::{fuzz, near};

fn digits(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |digits, byte| digits + &format!("{byte:02x}"))
}

/// The inputs are texts.
#[test]
fn no_text_but_a_receipt_is_a_receipt() {
    let keys = keys();
    let good = receipt().encode(&keys);
    fuzz("receipt-texts", &near(vec![good.clone().into_bytes()]), |input| {
        let text = String::from_utf8_lossy(input);
        if let Ok(found) = Receipt::parse("receipt", &text, &keys) {
            assert!(text == good || found.token == LeaseToken::NONE, "{found:?}");
        }
    });
}

/// The inputs are the bytes that a broker of whatever version has signed.
#[test]
fn a_receipt_of_any_version_is_read_or_refused() {
    let keys = keys();
    let text = receipt().encode(&keys);
    let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    let body: Vec<u8> = (0..text.len() - 40).step_by(2).map(byte).collect();
    fuzz("receipts", &near(vec![body]), |input| {
        let (number, mac) = keys.sign(input);
        let text = digits(input) + &digits(&number.to_be_bytes()) + &digits(&mac);
        if let Ok(found) = Receipt::parse("receipt", &text, &keys) {
            let again = Receipt::parse("receipt", &found.encode(&keys), &keys);
            assert_eq!(again, Ok(found));
        }
    });
}

/// The names of the documentation: `[A-Za-z0-9][A-Za-z0-9._-]{0,127}`, and those of queues with `_` at the beginning too.
fn is_name(text: &str, may_begin_with_underscore: bool) -> bool {
    let is_letter = |c: char| c.is_ascii_alphanumeric();
    let mut letters = text.chars();
    letters.next().is_some_and(|c| is_letter(c) || may_begin_with_underscore && c == '_')
        && letters.all(|c| is_letter(c) || ".-_".contains(c))
        && text.len() <= 128
}

#[test]
fn names_are_as_documented() {
    let good = ["orders", "_q", "a.b-c_d", "9", "-", &"x".repeat(128), &"x".repeat(129), "ü"];
    let good = good.iter().map(|name| name.as_bytes().to_vec()).collect();
    fuzz("names", &near(good), |input| {
        let text = String::from_utf8_lossy(input);
        let queue = QueueName::parse("queue", &text);
        assert_eq!(queue.is_ok(), is_name(&text, true));
        assert!(queue.is_err() || queue.unwrap().as_str() == text);
        assert_eq!(GroupName::parse("group", &text).is_ok(), is_name(&text, false));
        assert_eq!(ConsumerName::parse("consumer", &text).is_ok(), is_name(&text, false));
        assert_eq!(ScheduleName::parse("schedule", &text).is_ok(), is_name(&text, false));
    });
}
