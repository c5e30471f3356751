//! Why a page cannot be shown or an action was not done, in plain words.

use std::str::FromStr;

use axum::{
    http::StatusCode,
    response::{IntoResponse, Response},
};
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use crate::text;

/// What went wrong. The gate makes a page of it, in the visitor's theme.
#[derive(Debug, Clone)]
pub(crate) struct Problem {
    pub(crate) status: StatusCode,
    pub(crate) text: String,
    /// The fields of a form with what is wrong with them.
    pub(crate) fields: Vec<(String, String)>,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, text: impl Into<String>) -> Self {
        Self { status, text: text.into(), fields: Vec::new() }
    }

    /// Returns the problem of one field of a form.
    pub(crate) fn field(name: &str, text: impl Into<String>) -> Self {
        let text = text.into();
        let fields = vec![(name.to_owned(), text.clone())];
        Self { status: StatusCode::UNPROCESSABLE_ENTITY, text: format!("{name}: {text}"), fields }
    }
}

/// Reads a number from a field of a form; `None` if the field is empty.
pub(crate) fn number<N: FromStr>(field: &str, text: &str) -> Result<Option<N>, Problem> {
    let text = text.trim();
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| Problem::field(field, "is no number"))
}

/// Reads a duration from a field of a form; `None` if the field is empty.
pub(crate) fn duration(field: &str, text: &str) -> Result<Option<prost_types::Duration>, Problem> {
    text::parse_setting(text).map_err(|why| Problem::field(field, why))
}

impl From<Status> for Problem {
    fn from(status: Status) -> Self {
        let code = match status.code() {
            Code::NotFound => StatusCode::NOT_FOUND,
            Code::PermissionDenied => StatusCode::FORBIDDEN,
            Code::Unauthenticated => StatusCode::UNAUTHORIZED,
            Code::InvalidArgument | Code::OutOfRange => StatusCode::UNPROCESSABLE_ENTITY,
            Code::AlreadyExists | Code::FailedPrecondition | Code::Aborted => StatusCode::CONFLICT,
            Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            Code::Unavailable | Code::Cancelled => StatusCode::SERVICE_UNAVAILABLE,
            Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let violations = status.get_details_bad_request().map(|details| details.field_violations);
        let fields = violations
            .into_iter()
            .flatten()
            .map(|field| (field.field, field.description))
            .collect();
        Self { status: code, text: status.message().to_owned(), fields }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}
