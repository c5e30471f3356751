//! Who looks at a page, and what the visitor's browser says besides.

use std::sync::Arc;

use axum::{
    extract::FromRequestParts,
    http::{Extensions, HeaderMap, StatusCode, header, request::Parts},
};

use crate::{Console, Rights, api::Api, board::Board, session::COOKIE};

/// Who looks at a page.
#[derive(Clone)]
pub(crate) struct Visitor {
    pub(crate) console: Arc<Console>,
    pub(crate) token: Option<String>,
    /// What accompanies the visitor's calls.
    pub(crate) peer: Extensions,
    /// `light` or `dark`, if the visitor has chosen; otherwise the system decides.
    pub(crate) theme: Option<&'static str>,
    /// What was done just before, in words.
    pub(crate) notice: Option<String>,
}

impl Visitor {
    /// Returns clients whose calls end in time for a page.
    pub(crate) fn api(&self) -> Api {
        Api::new(&self.console.broker, self.token.as_deref(), self.peer.clone(), true)
    }

    /// Returns clients whose calls take as long as they take.
    pub(crate) fn slow_api(&self) -> Api {
        Api::new(&self.console.broker, self.token.as_deref(), self.peer.clone(), false)
    }

    pub(crate) fn board(&self) -> Arc<Board> {
        self.console.boards.of(self.token.as_deref(), || self.slow_api())
    }

    pub(crate) fn rights(&self, queue: &str) -> Rights {
        (self.console.rights)(self.token.as_deref(), queue)
    }
}

impl<S: Sync> FromRequestParts<S> for Visitor {
    type Rejection = StatusCode;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, StatusCode> {
        parts.extensions.get().cloned().ok_or(StatusCode::INTERNAL_SERVER_ERROR)
    }
}

/// Ends the session of the browser that sends these headers.
pub(crate) fn end_session(visitor: &Visitor, headers: &HeaderMap) {
    if let Some(session) = cookie(headers, COOKIE) {
        visitor.console.sessions.end(session);
    }
}

/// Returns a cookie.
pub(crate) fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let cookies = headers.get_all(header::COOKIE).into_iter();
    let mut cookies =
        cookies.filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(';'));
    cookies.find_map(|cookie| cookie.trim().strip_prefix(name)?.strip_prefix('='))
}

/// Returns true if the browser reached the console over TLS, which ends in front of the broker.
pub(crate) fn is_secure(headers: &HeaderMap) -> bool {
    headers.get(header::ORIGIN).is_some_and(|origin| origin.as_bytes().starts_with(b"https://"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cookies_are_found_among_others() {
        let line = "a=b; sluicegate-session=abc; theme=dark".parse().unwrap();
        let headers = HeaderMap::from_iter([(header::COOKIE, line)]);
        assert_eq!(cookie(&headers, COOKIE), Some("abc"));
        assert_eq!(cookie(&headers, "theme"), Some("dark"));
        assert_eq!(cookie(&headers, "sluicegate"), None);
    }
}
