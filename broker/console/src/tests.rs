use std::convert::Infallible;

use axum::{
    body::{self, Body as PageBody},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header},
};
use futures_util::stream;
use http_body::Frame;
use http_body_util::StreamBody;
use tonic::Status;
use tower::{ServiceExt as _, service_fn};

use super::*;

/// Returns the console of a broker that knows the token `good` and answers nothing else.
fn console(needs_token: bool) -> Router {
    let broker = service_fn(|request: Request<Body>| async move {
        let authorization = request.headers().get(header::AUTHORIZATION);
        let is_known = authorization.is_some_and(|value| value == "Bearer good");
        let is_list = request.uri().path() == "/sluicegate.v1.AdminService/ListQueues";
        let status = match (is_known, is_list) {
            (true, true) => return Ok::<_, Infallible>(empty_message()),
            (true, false) => Status::unavailable("<b>not now</b>"),
            (false, _) => Status::unauthenticated("the token is not known"),
        };
        Ok(status.into_http())
    });
    router(Options {
        broker: super::broker(broker),
        needs_token,
        rights: Arc::new(|_, _| Rights::ALL),
        peer: |_| Extensions::new(),
        history: None,
        shutdown: CancellationToken::new(),
    })
}

/// Returns an answer with an empty message, and the trailer of success.
fn empty_message() -> Response<Body> {
    let trailers = [(HeaderName::from_static("grpc-status"), HeaderValue::from_static("0"))];
    let frames = [
        Ok::<_, Status>(Frame::data(bytes::Bytes::from_static(&[0; 5]))),
        Ok(Frame::trailers(trailers.into_iter().collect())),
    ];
    let mut response = Response::new(Body::new(StreamBody::new(stream::iter(frames))));
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    page: String,
}

impl Answer {
    fn header(&self, name: header::HeaderName) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

async fn ask(
    console: &Router,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
    form: &str,
) -> Answer {
    let mut request = Request::builder().method(method).uri(path);
    request = request.header("content-type", "application/x-www-form-urlencoded");
    if !headers.iter().any(|(name, _)| *name == "host") {
        request = request.header("host", "127.0.0.1:7401");
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(PageBody::from(form.to_owned())).unwrap();
    let response = console.clone().oneshot(request).await.unwrap();
    let (parts, body) = response.into_parts();
    let page = body::to_bytes(body, 1 << 20).await.unwrap();
    Answer {
        status: parts.status,
        headers: parts.headers,
        page: String::from_utf8(page.to_vec()).unwrap(),
    }
}

const HTML: (&str, &str) = ("accept", "text/html,*/*");
const OWN: (&str, &str) = ("origin", "http://127.0.0.1:7401");

#[tokio::test]
async fn every_answer_has_the_headers_that_keep_others_out() {
    let open = console(false);
    let closed = console(true);
    for (console, path) in [
        (&open, "/queues/a"),
        (&open, "/dead-letters"),
        (&open, "/schedules"),
        (&open, "/templates"),
        (&open, "/consumers"),
        (&open, "/brokers"),
        (&open, "/there-is-none"),
        (&open, "/assets/console.js"),
        (&open, "/assets/none"),
        (&closed, "/sign-in"),
        (&closed, "/queues"),
    ] {
        let answer = ask(console, Method::GET, path, &[HTML], "").await;
        let policy = answer.header(header::CONTENT_SECURITY_POLICY);
        assert!(policy.starts_with("default-src 'none'; script-src 'self'"), "{path}: {policy}");
        assert_eq!(answer.header(header::X_CONTENT_TYPE_OPTIONS), "nosniff", "{path}");
        assert_eq!(answer.header(header::REFERRER_POLICY), "same-origin", "{path}");
        assert!(!answer.page.contains("style=") && !answer.page.contains("onclick"), "{path}");
    }
}

#[tokio::test]
async fn errors_of_the_broker_are_text() {
    let answer = ask(&console(true), Method::GET, "/queues/a", &[HTML], "").await;
    assert_eq!(answer.status, StatusCode::SEE_OTHER);
    let console = console(false);
    let answer = ask(&console, Method::GET, "/queues/a", &[HTML], "").await;
    assert_eq!(answer.status, StatusCode::UNAUTHORIZED, "{}", answer.page);
    let hostile = ask(
        &console,
        Method::GET,
        "/queues/%3Cscript%3Ealert(1)%3C%2Fscript%3E/push?notice=%3Cscript%3E.1",
        &[HTML],
        "",
    )
    .await;
    assert!(!hostile.page.contains("<script>alert"), "{}", hostile.page);
}

#[tokio::test]
async fn actions_from_elsewhere_are_refused() {
    let console = console(false);
    let foreign: [&[(&str, &str)]; 4] = [
        &[],
        &[("origin", "http://evil.example")],
        &[("origin", "null")],
        &[OWN, ("sec-fetch-site", "cross-site")],
    ];
    for headers in foreign {
        let answer = ask(&console, Method::POST, "/queues/a/purge", headers, "").await;
        assert_eq!(answer.status, StatusCode::FORBIDDEN, "{headers:?}");
        assert!(answer.page.contains("not part of the console"), "{}", answer.page);
    }
}

/// A name that someone else owns may lead to this machine: DNS rebinding.
#[tokio::test]
async fn without_tokens_pages_are_shown_under_addresses_of_the_machine_only() {
    let elsewhere = [("host", "evil.example:7401"), ("origin", "http://evil.example:7401"), HTML];
    let answer = ask(&console(false), Method::GET, "/queues", &elsewhere, "").await;
    assert_eq!(answer.status, StatusCode::MISDIRECTED_REQUEST);
    let answer = ask(&console(true), Method::GET, "/sign-in", &elsewhere, "").await;
    assert_eq!(answer.status, StatusCode::OK, "with tokens a name is as good as an address");
}

#[tokio::test]
async fn tokens_stay_in_the_broker_and_sessions_end() {
    let console = console(true);
    let answer = ask(&console, Method::GET, "/queues?search=a%26b", &[HTML], "").await;
    assert_eq!(answer.header(header::LOCATION), "/sign-in?next=%2Fqueues%3Fsearch%3Da%2526b");
    let answer = ask(&console, Method::GET, "/queue-events", &[], "").await;
    assert_eq!(answer.status, StatusCode::UNAUTHORIZED);
    let answer = ask(&console, Method::POST, "/sign-in", &[OWN], "token=bad&next=").await;
    assert_eq!((answer.status, answer.header(header::SET_COOKIE)), (StatusCode::FORBIDDEN, ""));
    assert!(answer.page.contains("not known"), "{}", answer.page);

    let secure = [("host", "queues.example"), ("origin", "https://queues.example")];
    for (headers, end) in [(&[OWN][..], "SameSite=Strict"), (&secure, "SameSite=Strict; Secure")] {
        let answer =
            ask(&console, Method::POST, "/sign-in", headers, "token=good&next=//evil.example")
                .await;
        assert_eq!(
            (answer.status, answer.header(header::LOCATION)),
            (StatusCode::SEE_OTHER, "/queues")
        );
        let cookie = answer.header(header::SET_COOKIE);
        assert!(cookie.contains("Path=/; HttpOnly; ") && cookie.ends_with(end), "{cookie}");
        assert!(!cookie.contains("good"));
    }

    let answer = ask(&console, Method::POST, "/sign-in", &[OWN], "token=good").await;
    let cookie = answer.header(header::SET_COOKIE).split(';').next().unwrap().to_owned();
    let cookie = ("cookie", cookie.as_str());
    let answer = ask(&console, Method::GET, "/queues/a", &[HTML, cookie], "").await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(answer.page.contains("&lt;b&gt;not now&lt;/b&gt;"), "{}", answer.page);
    ask(&console, Method::POST, "/sign-out", &[OWN, cookie], "").await;
    let answer = ask(&console, Method::GET, "/queues/a", &[HTML, cookie], "").await;
    assert_eq!(answer.status, StatusCode::SEE_OTHER, "signed out");
}
