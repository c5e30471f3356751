//! Names: `[A-Za-z0-9][A-Za-z0-9._-]{0,127}`, cheap to clone. Names of queues may also begin with `_`.

use std::{borrow::Borrow, fmt, sync::Arc};

use super::{Invalid, limits::MAX_NAME_BYTES};

fn check(field: &str, text: &str, underscore_first: bool) -> Result<(), Invalid> {
    let bytes = text.as_bytes();
    let may_begin =
        |first: &u8| first.is_ascii_alphanumeric() || (underscore_first && *first == b'_');
    let well_formed = bytes.first().is_some_and(may_begin)
        && bytes.len() <= MAX_NAME_BYTES
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'));
    if well_formed {
        return Ok(());
    }
    let why = if text.is_empty() { "must be given: " } else { "" };
    Err(Invalid::new(
        field,
        format!(
            "{why}1 to {MAX_NAME_BYTES} letters, digits, '.', '_' or '-', the first a letter{} digit",
            if underscore_first { ", '_' or" } else { " or" }
        ),
    ))
}

macro_rules! name {
    ($(#[$doc:meta])* $type:ident, underscore_first: $underscore_first:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $type(Arc<str>);

        impl $type {
            /// Parses a name; `field` is the caller's name for the field.
            pub fn parse(field: &str, text: &str) -> Result<Self, Invalid> {
                check(field, text, $underscore_first)?;
                Ok(Self(text.into()))
            }

            /// Parses an optional name.
            pub fn parse_optional(field: &str, text: &str) -> Result<Option<Self>, Invalid> {
                if text.is_empty() { Ok(None) } else { Self::parse(field, text).map(Some) }
            }

            /// Returns the name as text.
            pub fn as_str(&self) -> &str {
                &self.0
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

        impl Borrow<str> for $type {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

name!(
    /// The name of a queue.
    QueueName,
    underscore_first: true
);
impl QueueName {
    /// Returns the name of no queue, in place of a name where there are settings alone.
    pub(crate) fn none() -> Self {
        Self("".into())
    }

    /// Returns a text behind all names that begin with `prefix`, and before all others that are behind it.
    pub fn end_of_prefix(prefix: &str) -> String {
        format!("{prefix}\u{7f}") // every character of a name comes before
    }
}
name!(
    /// The name of a group: a set of queues stored in one collection.
    GroupName,
    underscore_first: false
);
name!(
    /// The name of a producer or a consumer.
    ConsumerName,
    underscore_first: false
);
name!(
    /// The name of a schedule.
    ScheduleName,
    underscore_first: false
);

impl Default for GroupName {
    fn default() -> Self {
        Self("default".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked_and_the_field_is_named() {
        for good in ["a", "0", "orders.eu-west_1", &"x".repeat(128)] {
            assert_eq!(QueueName::parse("queue", good).unwrap().as_str(), good);
        }
        for bad in ["", ".a", "-a", "a b", "a/b", "ä", "a\0", &"x".repeat(129)] {
            assert_eq!(QueueName::parse("queue", bad).unwrap_err().field, "queue", "{bad:?}");
        }
    }

    /// Stores look for names by the range from a prefix to its end.
    #[test]
    fn the_end_of_a_prefix_is_behind_all_names_that_begin_with_it_and_before_all_others() {
        let letters = (0..=0x7f_u8)
            .map(char::from)
            .filter(|c| QueueName::parse("", &format!("a{c}")).is_ok());
        let letters: Vec<char> = letters.collect();
        assert_eq!(letters.len(), 26 + 26 + 10 + 3);
        for prefix in ["", "a", "orders.", "Z", "_", "a-"] {
            let end = QueueName::end_of_prefix(prefix);
            for (one, other) in letters.iter().flat_map(|a| letters.iter().map(move |b| (a, b))) {
                let name = format!("{prefix}{one}{other}");
                assert!(name < end, "{name}");
                let name = format!("{one}{other}");
                assert_eq!(
                    name.as_str() >= prefix && name < end,
                    name.starts_with(prefix),
                    "{name} {prefix}"
                );
            }
        }
    }

    #[test]
    fn names_of_queues_alone_may_begin_with_an_underscore() {
        assert_eq!(QueueName::parse("queue", "_internal").unwrap().as_str(), "_internal");
        assert_eq!(QueueName::parse("queue", "_").unwrap().as_str(), "_");
        assert!(GroupName::parse("group", "_g").is_err());
        assert!(ScheduleName::parse("schedule", "_s").is_err());
        assert!(ConsumerName::parse("consumer", "_c").is_err());
    }
}
