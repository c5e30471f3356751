//! Fuzzing of page tokens and of items as they stand in the file.

use rusqlite::types::Value;

use super::{super::browse::Position, *};
use crate::{
    domain::ItemState,
    fuzz::{fuzz, near},
    store::sqlite::{
        checksum::is_damage,
        rows::{item_columns, read_item},
    },
};

#[test]
fn a_page_token_is_one_or_refused() {
    let good = ["a9.1700000000000.7", "b0.3.5", "c0.1700000000000.1", "a0.-9223372036854775808.0"];
    let good = good.map(|token| token.as_bytes().to_vec()).into();
    fuzz("page-tokens-sqlite", &near(good), |input| {
        let text = String::from_utf8_lossy(input);
        let all = Position::decode(&text, None);
        assert!(all.is_none_or(|position| position.encode() == text));
        for state in [ItemState::Ready, ItemState::Blocked, ItemState::Processed] {
            let one = Position::decode(&text, Some(state));
            assert!(one.is_none() || one == all);
        }
    });
}

/// Returns a value of a column, whatever it is, and the rest of the input.
fn value(input: &[u8]) -> (Value, &[u8]) {
    let [kind, rest @ ..] = input else { return (Value::Null, input) };
    let (eight, after) = rest.split_at(rest.len().min(8));
    let mut number = [0; 8];
    number[..eight.len()].copy_from_slice(eight);
    let (part, behind) = rest.split_at(rest.len().min(usize::from(*kind) / 8));
    match kind % 5 {
        0 => (Value::Null, rest),
        1 => (Value::Integer(i64::from_le_bytes(number)), after),
        2 => (Value::Text(String::from_utf8_lossy(part).into_owned()), behind),
        3 => (Value::Blob(part.to_vec()), behind),
        _ => (Value::Integer(i64::from(*kind) / 5), rest),
    }
}

/// A row of whatever values is an item, or damage.
#[test]
fn any_row_is_an_item_or_damage() {
    let store = SqliteStore::open("sqlite::memory:", Arc::new(Clock::system())).unwrap();
    let queue = queue(&store);
    let conn = Connection::open_in_memory().unwrap();
    let columns = item_columns!().split(", ").count();
    let marks = vec!["?"; columns].join(", ");
    let mut select = conn.prepare(&format!("SELECT {marks}")).unwrap();
    let select = std::cell::RefCell::new(&mut select);
    // A row as it is stored: a queue, a small priority, and so on.
    let good =
        vec![9, 2 + 8 * 5, b'o', b'r', b'd', b'e', b'r', 4, 1, 0, 0, 0, 1, 0x8b, 1, 0, 0, 9, 4];
    fuzz("rows", &near(vec![good, vec![4; 40], vec![0; 40]]), |input| {
        let (mut values, mut rest) = (Vec::new(), input);
        for column in 0..columns {
            let (one, behind) = value(rest);
            // Checksums seldom fit; without one the rest is read.
            values.push(if column == columns - 1 && input.len() % 8 != 0 {
                Value::Null
            } else {
                one
            });
            rest = behind;
        }
        let now = Timestamp(1_700_000_000_000);
        let view = View { conn: &conn, now, tag: [1; 4] };
        let mut select = select.borrow_mut();
        let read = select.query_row(rusqlite::params_from_iter(values), |row| {
            let stored = read_item(&view, row)?;
            Ok((stored.item, stored.lease.is_some(), stored.earlier))
        });
        match read {
            Ok((item, lapsed, earlier_deliveries)) => {
                let at_head = crate::domain::AtHead {
                    expire_time: item.expire_time,
                    lapsed,
                    attempt: item.attempt,
                    deliveries: item.deliveries,
                    earlier_deliveries,
                };
                let _ = (queue.triage(at_head, now), item.message_bytes());
            }
            Err(error) => assert!(is_damage(&error), "{error}"),
        }
    });
}
