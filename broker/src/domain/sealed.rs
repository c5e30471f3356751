//! Texts that clients carry and cannot read: what a page token says of entries that its caller may not see.

use super::{
    id::hex_text,
    receipt::hex,
    receipt_key::{Mac, ReceiptKeys},
};

/// Receipts begin with their version, so that nothing that is signed here is a receipt.
const SEALED: &[u8] = b"sealed text ";
const MASK: &[u8] = b"mask ";
/// The number of the key and the signature precede the text.
const OVERHEAD: usize = 4 + size_of::<Mac>();
/// The longest text that is sealed, as long as two names.
const LONGEST: usize = 256;

impl ReceiptKeys {
    /// Returns the text in a form that only brokers of this store can read or make: letters and digits, twice as many as the
    /// text has bytes, and 40 more. The same text has the same form while its key signs.
    pub fn seal(&self, text: &str) -> String {
        let (number, mac) = self.sign(&[SEALED, text.as_bytes()].concat());
        let masked = self.masked(number, &mac, text.as_bytes()).unwrap_or_default();
        hex_text(&[&number.to_be_bytes()[..], &mac, &masked].concat())
    }

    /// Returns the text that was sealed; `None` if this is no sealed text.
    pub fn open(&self, sealed: &str) -> Option<String> {
        if sealed.len() > 2 * (OVERHEAD + LONGEST) || !sealed.len().is_multiple_of(2) {
            return None;
        }
        let pairs = sealed.as_bytes().chunks_exact(2);
        let bytes: Vec<u8> =
            pairs.map(|pair| Some(hex(pair[0])? << 4 | hex(pair[1])?)).collect::<Option<_>>()?;
        let (number, rest) = bytes.split_first_chunk::<4>()?;
        let (mac, masked) = rest.split_first_chunk::<{ size_of::<Mac>() }>()?;
        let number = u32::from_be_bytes(*number);
        let text = self.masked(number, mac, masked)?;
        let is_ours = self.verify(number, &[SEALED, &text].concat(), mac);
        is_ours.then(|| String::from_utf8(text).ok()).flatten()
    }

    /// Masks a text, or takes the mask off, which the signature decides: no two texts have the same one.
    fn masked(&self, number: u32, mac: &Mac, text: &[u8]) -> Option<Vec<u8>> {
        let mut masked = Vec::with_capacity(text.len());
        for (block, part) in (0_u32..).zip(text.chunks(size_of::<Mac>())) {
            let mask = self.mac_by(number, &[MASK, mac, &block.to_be_bytes()].concat())?;
            masked.extend(part.iter().zip(mask).map(|(byte, mask)| byte ^ mask));
        }
        Some(masked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::ReceiptKey;

    #[test]
    fn a_sealed_text_tells_nothing_and_nobody_else_makes_one() {
        let key = |number: u32| ReceiptKey::new(number, &[number as u8; 32]);
        let keys = ReceiptKeys::new([key(1)]);
        for text in ["", "a", "orders.of-somebody-else", &"x".repeat(LONGEST)] {
            let sealed = keys.seal(text);
            assert_eq!(keys.open(&sealed).as_deref(), Some(text));
            assert_eq!(sealed.len(), 2 * (OVERHEAD + text.len()));
            let rotated = ReceiptKeys::new([key(2), key(1)]);
            assert_eq!(rotated.open(&sealed).as_deref(), Some(text), "by the key of before");
            assert_eq!(ReceiptKeys::new([key(2)]).open(&sealed), None);
            for at in 0..sealed.len() {
                let mut forged = sealed.clone().into_bytes();
                forged[at] = if forged[at] == b'0' { b'1' } else { b'0' };
                assert_eq!(keys.open(std::str::from_utf8(&forged).unwrap()), None, "{at}");
            }
        }
        let sealed = keys.seal("orders");
        for wrong in [format!("{sealed}0"), format!("{sealed}00"), sealed.to_uppercase()] {
            assert_eq!(keys.open(&wrong), None, "{wrong}");
        }
        assert_eq!(keys.open(&keys.seal(&"x".repeat(LONGEST + 1))), None, "longer than two names");
        let repeated = keys.seal(&"x".repeat(64));
        let blocks: std::collections::HashSet<_> = repeated.as_bytes().chunks(32).collect();
        assert_eq!(blocks.len(), repeated.len().div_ceil(32), "{repeated}");
        for wrong in ["", "0", "00", "zz", "\u{e4}\u{e4}", &"0".repeat(80), &"0".repeat(2_000)] {
            assert_eq!(keys.open(wrong), None, "{wrong}");
        }
    }
}
