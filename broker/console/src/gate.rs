//! What every request of a page passes: the host it names, where it comes from, who sends it. And the headers of every
//! answer.

use std::{net::IpAddr, sync::Arc};

use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header},
    middleware::Next,
    response::{IntoResponse, Redirect, Response},
};

use crate::{
    Console,
    pages::{self, SIGN_IN},
    problem::Problem,
    session::COOKIE,
    text,
    visitor::{Visitor, cookie},
};

/// Everything comes from the broker itself, and nothing is inline.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
     connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'";

/// Lets a request pass or refuses it, and makes a page of a problem.
pub(crate) async fn pass(
    State(console): State<Arc<Console>>,
    mut request: Request,
    next: Next,
) -> Response {
    let headers = request.headers();
    let session = cookie(headers, COOKIE).map(str::to_owned);
    let token = session.as_deref().and_then(|id| console.sessions.token(id));
    let theme = ["light", "dark"].into_iter().find(|theme| cookie(headers, "theme") == Some(theme));
    let uri = request.uri().clone();
    let visitor = Visitor {
        peer: (console.peer)(request.extensions()),
        console: Arc::clone(&console),
        token,
        theme,
        notice: pages::notice(request.uri().query().unwrap_or_default()),
    };
    let accepts = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let is_page =
        request.method() == Method::GET && accepts.is_some_and(|types| types.contains("text/html"));
    let response = match check(&console, &visitor, &request) {
        Ok(()) => {
            request.extensions_mut().insert(visitor.clone());
            next.run(request).await
        }
        Err(problem) => problem.into_response(),
    };
    show(&visitor, session.as_deref(), &uri, is_page, response)
}

fn check(console: &Console, visitor: &Visitor, request: &Request) -> Result<(), Problem> {
    let headers = request.headers();
    // Without tokens, a page elsewhere could point a name of its own at this address, and read the pages as its own.
    if !console.needs_token && !host(headers).is_some_and(is_own_host) {
        let text = "Without tokens, the console is shown under localhost or an IP address only.";
        return Err(Problem::new(StatusCode::MISDIRECTED_REQUEST, text));
    }
    let is_safe = matches!(*request.method(), Method::GET | Method::HEAD);
    if !is_safe && !is_same_origin(headers) {
        let text = "This action was asked for by a page that is not part of the console.";
        return Err(Problem::new(StatusCode::FORBIDDEN, text));
    }
    if console.needs_token && visitor.token.is_none() && request.uri().path() != SIGN_IN {
        return Err(Problem::new(StatusCode::UNAUTHORIZED, "Sign in first."));
    }
    Ok(())
}

/// Makes a page of a problem. Who is not signed in, or not any more, is asked to sign in.
fn show(
    visitor: &Visitor,
    session: Option<&str>,
    uri: &Uri,
    is_page: bool,
    mut response: Response,
) -> Response {
    let Some(problem) = response.extensions_mut().remove::<Problem>() else { return response };
    if problem.status == StatusCode::UNAUTHORIZED && visitor.console.needs_token {
        if let Some(session) = session {
            visitor.console.sessions.end(session);
        }
        if is_page {
            let target = uri.path_and_query().map_or("/queues", |target| target.as_str());
            return Redirect::to(&format!("{SIGN_IN}?next={}", text::encode(target)))
                .into_response();
        }
    }
    (problem.status, pages::problem(visitor, &problem)).into_response()
}

fn host(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::HOST)?.to_str().ok()
}

/// Returns true for `localhost` and IP addresses, with or without a port.
fn is_own_host(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.parse::<IpAddr>().is_ok() || name.eq_ignore_ascii_case("localhost")
}

/// Returns true if a browser says that the request comes from a page of this host. All browsers send one of the headers
/// with a form.
fn is_same_origin(headers: &HeaderMap) -> bool {
    let text = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    let site = text(HeaderName::from_static("sec-fetch-site"));
    if site.is_some_and(|site| site != "same-origin") {
        return false;
    }
    match text(header::ORIGIN) {
        Some(origin) => {
            let origin = origin.split_once("://").map(|(_, host)| host);
            origin.is_some_and(|origin| host(headers) == Some(origin))
        }
        None => site.is_some(),
    }
}

/// Adds the headers that every answer has.
pub(crate) async fn harden(mut response: Response) -> Response {
    let headers = response.headers_mut();
    let fixed = [
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        // With `no-referrer`, browsers send `Origin: null` with the console's own forms.
        (header::REFERRER_POLICY, "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    for (name, value) in fixed {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
        list.iter()
            .map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap()))
            .collect()
    }

    #[test]
    fn actions_are_taken_from_own_pages_only() {
        let host = ("host", "127.0.0.1:7401");
        for own in [
            vec![host, ("origin", "http://127.0.0.1:7401")],
            vec![host, ("origin", "http://127.0.0.1:7401"), ("sec-fetch-site", "same-origin")],
            vec![host, ("sec-fetch-site", "same-origin")],
        ] {
            assert!(is_same_origin(&headers(&own)), "{own:?}");
        }
        for foreign in [
            vec![host],
            vec![host, ("origin", "null")],
            vec![host, ("origin", "http://127.0.0.1:7402")],
            vec![host, ("origin", "http://evil.example")],
            vec![host, ("sec-fetch-site", "same-site"), ("origin", "http://127.0.0.1:7401")],
            vec![host, ("sec-fetch-site", "none")],
            vec![("origin", "http://127.0.0.1:7401")],
        ] {
            assert!(!is_same_origin(&headers(&foreign)), "{foreign:?}");
        }
    }

    #[test]
    fn names_of_others_are_no_own_hosts() {
        for own in
            ["localhost", "LOCALHOST:7401", "127.0.0.1:7401", "10.0.0.7", "[::1]:7401", "[::1]"]
        {
            assert!(is_own_host(own), "{own}");
        }
        for foreign in
            ["evil.example:7401", "localhost.evil.example", "", "127.0.0.1.evil.example:7401"]
        {
            assert!(!is_own_host(foreign), "{foreign}");
        }
    }
}
