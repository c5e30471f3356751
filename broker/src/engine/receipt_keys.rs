//! Keys with which receipts are signed: the same for all brokers of a store, and new ones from time to time.
//!
//! A receipt is of use until its lease ends, which is at most `max_lease` (30 days at most) after it was signed. A key signs
//! for [`ROTATION`], and is kept until [`RECEIPT_KEYS`] newer ones are there: longer than any receipt that it signed is of use.
//!
//! [`RECEIPT_KEYS`]: crate::store::RECEIPT_KEYS

use std::{sync::Arc, time::Duration};

use crate::{
    domain::{ReceiptKey, ReceiptKeys, Timestamp},
    store::{StoreError, StoredReceiptKey},
};

use super::{Engine, Result};

/// How often the keys are read.
pub(super) const REFRESH: Duration = Duration::from_mins(1);
/// A key signs from this time on: by then every broker has read it, several times.
const NOTICE: Duration = Duration::from_mins(10);
/// A new key is made when the newest one is this old.
const ROTATION: Duration = Duration::from_hours(30 * 24);

impl Engine {
    /// Returns the keys of now.
    pub(crate) fn receipt_keys(&self) -> Arc<ReceiptKeys> {
        Arc::clone(&self.receipt_keys.read())
    }

    /// Reads the keys of the store, and makes a new one if it is time.
    pub(crate) async fn refresh_receipt_keys(&self) -> Result<()> {
        let mut stored = self.store.receipt_keys().await?;
        let now = self.now();
        if stored.first().is_none_or(|newest| newest.created.until(now) >= ROTATION) {
            let number = stored.first().map_or(1, |newest| newest.number + 1);
            let key = StoredReceiptKey { number, secret: rand::random(), created: now };
            self.store.add_receipt_key(&key).await?;
            // Another broker may have made the key of this number.
            stored = self.store.receipt_keys().await?;
            if stored.is_empty() {
                let reason = "the key of receipts that was just made cannot be read yet".to_owned();
                return Err(StoreError::Unavailable { reason, source: None }.into());
            }
        }
        *self.receipt_keys.write() = Arc::new(in_order(stored, now));
        Ok(())
    }
}

/// Returns the keys with the one that signs in front: the newest that every broker knows. The first key of a store signs at
/// once, since each broker reads it before it serves.
fn in_order(mut stored: Vec<StoredReceiptKey>, now: Timestamp) -> ReceiptKeys {
    let known = stored.iter().position(|key| key.created.until(now) >= NOTICE);
    let signing = known.unwrap_or(stored.len().saturating_sub(1));
    stored[..].get_mut(..=signing).unwrap_or_default().rotate_right(1);
    ReceiptKeys::new(stored.iter().map(|key| ReceiptKey::new(key.number, &key.secret)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_key_signs_when_every_broker_knows_it() {
        let day = 24 * 60 * 60 * 1000;
        let key = |number: u32, created: i64| StoredReceiptKey {
            number,
            secret: [number as u8; 32],
            created: Timestamp(created),
        };
        let order = |keys: &[StoredReceiptKey], now: i64| {
            format!("{:?}", in_order(keys.to_vec(), Timestamp(now)))
        };
        assert_eq!(order(&[key(1, 0)], 0), "[1]", "the first key signs at once");
        let keys = [key(2, 30 * day), key(1, 0)];
        assert_eq!(order(&keys, 30 * day), "[1, 2]");
        assert_eq!(order(&keys, 30 * day + 10 * 60 * 1000), "[2, 1]");
        let keys = [key(3, 60 * day), key(2, 30 * day), key(1, 0)];
        assert_eq!(order(&keys, 60 * day), "[2, 3, 1]");
    }
}
