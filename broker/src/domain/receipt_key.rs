//! Keys with which brokers sign receipts and seal page tokens, so that nobody else can make one.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac as _};
use sha2::Sha256;

/// What is kept of the HMAC-SHA-256 of a receipt: 128 bits are beyond guessing.
pub(super) type Mac = [u8; 16];

/// A key of a store.
#[derive(Clone)]
pub struct ReceiptKey {
    number: u32,
    /// The state after the key alone, which spares half of the work for each receipt.
    keyed: Hmac<Sha256>,
}

impl ReceiptKey {
    /// Returns the key of this number.
    pub fn new(number: u32, secret: &[u8; 32]) -> Self {
        // This does not fail: keys may have any length.
        let keyed = Hmac::new_from_slice(secret).unwrap_or_else(|_| Hmac::new(&[0; 64].into()));
        Self { number, keyed }
    }

    fn mac(&self, text: &[u8]) -> Mac {
        let whole = self.keyed.clone().chain_update(text).finalize().into_bytes();
        let mut mac = Mac::default();
        mac.copy_from_slice(&whole[..size_of::<Mac>()]);
        mac
    }
}

/// The keys of a store: the first one signs, all of them verify.
#[derive(Clone)]
pub struct ReceiptKeys(Vec<ReceiptKey>);

impl ReceiptKeys {
    /// Returns these keys. With none, receipts are signed by a key that is made for this, and nobody else has.
    pub fn new(keys: impl IntoIterator<Item = ReceiptKey>) -> Self {
        let mut keys: Vec<_> = keys.into_iter().collect();
        if keys.is_empty() {
            keys.push(ReceiptKey::new(0, &rand::random()));
        }
        Self(keys)
    }

    /// Returns the number of the key that signs, and the signature.
    pub(super) fn sign(&self, text: &[u8]) -> (u32, Mac) {
        let key = &self.0[0];
        (key.number, key.mac(text))
    }

    /// Returns what the key of this number signs a text with.
    pub(super) fn mac_by(&self, number: u32, text: &[u8]) -> Option<Mac> {
        self.0.iter().find(|key| key.number == number).map(|key| key.mac(text))
    }

    /// Returns true if the key of this number made the signature.
    pub(super) fn verify(&self, number: u32, text: &[u8], mac: &Mac) -> bool {
        let key = self.0.iter().find(|key| key.number == number);
        key.is_some_and(|key| {
            // Takes the same time wherever the two differ.
            key.keyed.clone().chain_update(text).verify_truncated_left(mac).is_ok()
        })
    }
}

impl fmt::Debug for ReceiptKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|key| key.number)).finish()
    }
}
