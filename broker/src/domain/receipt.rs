//! Receipts: opaque strings that identify one reservation of one item.

use super::{
    GroupName, Invalid, ItemId, LeaseToken, QueueName,
    id::hex_text,
    receipt_key::{Mac, ReceiptKeys},
};

/// One reservation of one item. Only the newest receipt of an item is valid.
///
/// A receipt contains everything that a settle needs, so that any broker can settle without reading
/// the item first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receipt {
    /// The item.
    pub item: ItemId,
    /// The token of the lease.
    pub token: LeaseToken,
    /// How often the item had been handed out, including this time.
    pub deliveries: u32,
    /// Number of these deliveries before the item came into its queue. Limits count the others.
    pub earlier_deliveries: u32,
    /// The number of the item's attempt in this reservation.
    pub attempt: u32,
    /// True if the item has an ordering key: settling the item unblocks the next one of that key.
    pub keyed: bool,
    /// The queue from which it was reserved.
    pub queue: QueueName,
    /// That queue's group.
    pub group: GroupName,
}

const VERSION: u8 = 3;
/// Receipts of this version and the one before are not signed.
const VERSION_2: u8 = 2;
/// Receipts of this version do not hold `earlier_deliveries`.
const VERSION_1: u8 = 1;
/// A text that stands for more bytes is no receipt.
const MAX_BYTES: usize = 512;

impl Receipt {
    /// Returns how often the item had been handed out in its current queue, including this time.
    pub fn deliveries_here(&self) -> u32 {
        self.deliveries.saturating_sub(self.earlier_deliveries)
    }

    /// Returns the receipt as text, signed: URL-safe letters and digits, about 140 bytes.
    pub fn encode(&self, keys: &ReceiptKeys) -> String {
        let mut bytes =
            Vec::with_capacity(59 + self.queue.as_str().len() + self.group.as_str().len());
        bytes.push(VERSION);
        bytes.extend_from_slice(&self.item.0);
        bytes.extend_from_slice(&self.token.0);
        bytes.extend_from_slice(&self.deliveries.to_be_bytes());
        bytes.extend_from_slice(&self.attempt.to_be_bytes());
        bytes.extend_from_slice(&self.earlier_deliveries.to_be_bytes());
        bytes.push(u8::from(self.keyed));
        bytes.push(self.queue.as_str().len() as u8); // names are at most 128 bytes
        bytes.extend_from_slice(self.queue.as_str().as_bytes());
        bytes.extend_from_slice(self.group.as_str().as_bytes());
        let (number, mac) = keys.sign(&bytes);
        bytes.extend_from_slice(&number.to_be_bytes());
        bytes.extend_from_slice(&mac);
        hex_text(&bytes)
    }

    /// Parses a receipt; `field` is the caller's name for it.
    ///
    /// What is in a receipt can be relied on: a broker of this store wrote it. Brokers of earlier versions did not sign
    /// their receipts: these are read with a lease token that no item has, so that nothing comes of them.
    pub fn parse(field: &str, text: &str, keys: &ReceiptKeys) -> Result<Self, Invalid> {
        Self::parse_after(None, field, text, keys)
    }

    /// Parses one of several receipts. Most of them are for the queue of the one `before`, whose names they share then.
    pub fn parse_after(
        before: Option<&Self>,
        field: &str,
        text: &str,
        keys: &ReceiptKeys,
    ) -> Result<Self, Invalid> {
        Self::decode(before, text, keys).ok_or_else(|| {
            Invalid::new(field, "not a receipt: pass it on exactly as it was received")
        })
    }

    fn decode(before: Option<&Self>, text: &str, keys: &ReceiptKeys) -> Option<Self> {
        let mut bytes = [0; MAX_BYTES];
        let bytes = bytes.get_mut(..text.len() / 2)?;
        if !text.len().is_multiple_of(2) {
            return None;
        }
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            *byte = hex(pair[0])? << 4 | hex(pair[1])?;
        }
        let signed = *bytes.first()? == VERSION;
        let body = if signed { verified(bytes, keys)? } else { whole(bytes)? };
        let (version, rest) = body.split_first()?;
        let (item, rest) = rest.split_first_chunk::<12>()?;
        let (token, rest) = rest.split_first_chunk::<12>()?;
        let (deliveries, rest) = rest.split_first_chunk::<4>()?;
        let (attempt, rest) = rest.split_first_chunk::<4>()?;
        let (earlier, rest) = match *version {
            VERSION_1 => ([0; 4], rest),
            VERSION_2 | VERSION => {
                rest.split_first_chunk::<4>().map(|(earlier, rest)| (*earlier, rest))?
            }
            _ => return None,
        };
        let (keyed, rest) = rest.split_first()?;
        let (length, rest) = rest.split_first()?;
        let (queue, group) = rest.split_at_checked(usize::from(*length))?;
        let (queue, group) = (std::str::from_utf8(queue).ok()?, std::str::from_utf8(group).ok()?);
        let like = before.filter(|it| it.queue.as_str() == queue && it.group.as_str() == group);
        let (queue, group) = match like {
            Some(before) => (before.queue.clone(), before.group.clone()),
            None => {
                (QueueName::parse("queue", queue).ok()?, GroupName::parse("group", group).ok()?)
            }
        };
        Some(Self {
            item: ItemId(*item),
            token: if signed { LeaseToken(*token) } else { LeaseToken::NONE },
            deliveries: u32::from_be_bytes(*deliveries),
            attempt: u32::from_be_bytes(*attempt),
            earlier_deliveries: u32::from_be_bytes(earlier),
            keyed: *keyed != 0,
            queue,
            group,
        })
    }
}

/// Returns what is signed, if the signature is right.
fn verified<'a>(bytes: &'a [u8], keys: &ReceiptKeys) -> Option<&'a [u8]> {
    let (rest, mac) = bytes.split_last_chunk::<{ size_of::<Mac>() }>()?;
    let (body, number) = rest.split_last_chunk::<4>()?;
    keys.verify(u32::from_be_bytes(*number), body, mac).then_some(body)
}

/// Returns what precedes the checksum, if this is right.
fn whole(bytes: &[u8]) -> Option<&[u8]> {
    let (body, sum) = bytes.split_last_chunk::<4>()?;
    (checksum(body) == u32::from_be_bytes(*sum)).then_some(body)
}

pub(super) fn hex(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

/// Returns the FNV-1a checksum of a receipt that is not signed. It is no protection
/// against forgery.
fn checksum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |sum, byte| (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::domain::ReceiptKey;

    pub(in crate::domain) fn receipt() -> Receipt {
        Receipt {
            item: ItemId(*b"0123456789ab"),
            token: LeaseToken(*b"ba9876543210"),
            deliveries: 3,
            earlier_deliveries: 1,
            attempt: 2,
            keyed: true,
            queue: QueueName::parse("queue", "orders").unwrap(),
            group: GroupName::default(),
        }
    }

    pub(in crate::domain) fn keys() -> ReceiptKeys {
        ReceiptKeys::new([ReceiptKey::new(7, &[3; 32])])
    }

    /// Whoever has a receipt cannot make another one of it, whatever part is changed; nor can a broker of another store.
    #[test]
    fn a_receipt_cannot_be_forged() {
        let keys = keys();
        let text = receipt().encode(&keys);
        let other = Receipt { queue: QueueName::parse("queue", "payrol").unwrap(), ..receipt() };
        let forged = other.encode(&keys);
        let signature = text.len() - 2 * (4 + size_of::<Mac>());
        let forged = format!("{}{}", &forged[..signature], &text[signature..]);
        assert!(Receipt::parse("receipt", &forged, &keys).is_err());
        let others = ReceiptKeys::new([ReceiptKey::new(7, &[4; 32])]);
        assert!(Receipt::parse("receipt", &text, &others).is_err());
    }

    #[test]
    fn a_receipt_survives_a_change_of_keys() {
        let old = receipt().encode(&keys());
        let both = ReceiptKeys::new([ReceiptKey::new(8, &[4; 32]), ReceiptKey::new(7, &[3; 32])]);
        assert_eq!(Receipt::parse("receipt", &old, &both), Ok(receipt()));
        let new = receipt().encode(&both);
        assert!(Receipt::parse("receipt", &new, &keys()).is_err(), "signed with the first key");
    }

    /// The deliveries before an item came into its queue do not count for the limit of that queue.
    #[test]
    fn deliveries_in_its_queue_are_those_since_the_item_came() {
        let receipt = |deliveries, earlier_deliveries| Receipt {
            deliveries,
            earlier_deliveries,
            ..receipt()
        };
        assert_eq!(receipt(3, 1).deliveries_here(), 2);
        assert_eq!(receipt(100, 0).deliveries_here(), 100);
        assert_eq!(receipt(1, 3).deliveries_here(), 0);
    }

    #[test]
    fn a_receipt_survives_its_text_form() {
        let keys = keys();
        assert_eq!(Receipt::parse("receipt", &receipt().encode(&keys), &keys), Ok(receipt()));
    }

    /// Receipts of earlier versions could be forged: they are read, and match no item.
    #[test]
    fn a_receipt_that_is_not_signed_settles_nothing() {
        let version_1 = "01303132333435363738396162626139383736353433323130000000030000000201066f7264\
                         65727364656661756c74e249e756";
        let version_2 = "0230313233343536373839616262613938373635343332313000000003000000020000000101\
                         066f726465727364656661756c7447549dac";
        for (text, earlier_deliveries) in [(version_1, 0), (version_2, 1)] {
            let expected = Receipt { earlier_deliveries, token: LeaseToken::NONE, ..receipt() };
            assert_eq!(Receipt::parse("receipt", text, &keys()), Ok(expected));
            for at in 0..text.len() {
                let mut bytes = text.as_bytes().to_vec();
                bytes[at] = if bytes[at] == b'0' { b'1' } else { b'0' };
                let text = String::from_utf8(bytes).unwrap();
                assert!(Receipt::parse("receipt", &text, &keys()).is_err(), "changed at {at}");
            }
        }
    }

    #[test]
    fn a_receipt_has_its_own_names_whatever_came_before_it() {
        let name = |text| QueueName::parse("queue", text).unwrap();
        let of = |queue, group| Receipt {
            queue: name(queue),
            group: GroupName::parse("group", group).unwrap(),
            ..receipt()
        };
        let all = [of("a", "g"), of("b", "g"), of("a", "h"), of("ag", "h")];
        for before in &all {
            for receipt in &all {
                let text = receipt.encode(&keys());
                let found = Receipt::parse_after(Some(before), "receipt", &text, &keys());
                assert_eq!(found.as_ref(), Ok(receipt), "after {before:?}");
            }
        }
        let too_long = "0".repeat(2 * MAX_BYTES + 2);
        assert!(Receipt::parse("receipt", &too_long, &keys()).is_err());
    }

    #[test]
    fn a_damaged_receipt_is_refused() {
        let keys = keys();
        let text = receipt().encode(&keys);
        for cut in 0..text.len() {
            assert!(Receipt::parse("receipt", &text[..cut], &keys).is_err(), "cut at {cut}");
        }
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] = if bytes[at] == b'0' { b'1' } else { b'0' };
            let text = String::from_utf8(bytes).unwrap();
            assert!(Receipt::parse("receipt", &text, &keys).is_err(), "changed at {at}");
        }
        for longer in [format!("{text}0"), format!("{text}00"), format!("0{text}")] {
            assert!(Receipt::parse("receipt", &longer, &keys).is_err(), "{longer}");
        }
        assert_eq!(Receipt::parse("receipts[0]", "ü", &keys).unwrap_err().field, "receipts[0]");
    }
}
