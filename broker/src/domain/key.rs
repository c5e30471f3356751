//! Texts by which items are told apart within a queue: ordering keys and deduplication ids.

use std::fmt;

macro_rules! key {
    ($(#[$doc:meta])* $type:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $type(String);

        impl $type {
            /// Returns `None` if the text is empty. The limit of its length is checked at the edge.
            pub fn new(text: impl Into<String>) -> Option<Self> {
                Some(text.into()).filter(|text| !text.is_empty()).map(Self)
            }

            /// Returns it as text, which is not empty.
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// Returns the text of one that may be missing; empty if it is.
            pub fn text_of(key: Option<&Self>) -> &str {
                key.map_or("", Self::as_str)
            }
        }

        impl From<$type> for String {
            fn from(key: $type) -> Self {
                key.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }
    };
}

key!(
    /// The key of items that are delivered one at a time, in order.
    OrderingKey
);
key!(
    /// The id by which a repeated push is recognised.
    DedupId
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_text_is_no_key() {
        assert_eq!(OrderingKey::new(""), None);
        assert_eq!(OrderingKey::new("k").unwrap().as_str(), "k");
        assert_eq!(DedupId::text_of(DedupId::new("d").as_ref()), "d");
        assert_eq!(DedupId::text_of(None), "");
    }
}
