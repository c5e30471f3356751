//! Reasons of errors, between the enum and the text that is sent.

use crate::v1::ErrorReason;

const PREFIX: &str = "ERROR_REASON_";

impl ErrorReason {
    /// Returns the `reason` of an `ErrorInfo`, for example `QUEUE_NOT_FOUND`.
    pub fn reason(self) -> &'static str {
        let name = self.as_str_name();
        name.strip_prefix(PREFIX).unwrap_or(name)
    }

    /// Returns the reason with this text; `None` for one that this version does not know.
    pub fn from_reason(reason: &str) -> Option<Self> {
        Self::from_str_name(&format!("{PREFIX}{reason}"))
    }
}
