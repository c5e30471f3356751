//! The error of every parser in this module.

/// A value that cannot be accepted, and the reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {description}")]
pub struct Invalid {
    /// The field as the caller named it, for example `items[3].priority`.
    pub field: String,
    /// What is wrong, and what would be valid.
    pub description: String,
}

impl Invalid {
    /// Returns the error of a field.
    pub fn new(field: impl Into<String>, description: impl Into<String>) -> Self {
        Self { field: field.into(), description: description.into() }
    }

    /// Returns the same error with a longer path: `priority` becomes `items[3].priority`.
    #[must_use]
    pub fn within(mut self, outer: &str) -> Self {
        self.field = format!("{outer}.{}", self.field);
        self
    }
}
