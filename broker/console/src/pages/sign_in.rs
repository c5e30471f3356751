//! Signing in with a token, and out.

use axum::{
    Form as Body,
    extract::Query as Address,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Redirect},
};
use maud::{Markup, html};
use serde::Deserialize;
use sluicegate_proto::v1::ListQueuesRequest;
use tonic::Code;

use super::{
    answer::{Answer, rejected, shown},
    frame::{Section, page},
};
use crate::{
    problem::Problem,
    session::COOKIE,
    visitor::{self, Visitor},
};

/// The address of the form.
pub(crate) const SIGN_IN: &str = "/sign-in";

/// Where to go afterwards.
#[derive(Debug, Deserialize)]
pub(super) struct Next {
    #[serde(default)]
    next: String,
}

/// What the form sends.
#[derive(Deserialize)]
pub(super) struct Credentials {
    token: String,
    #[serde(default)]
    next: String,
}

pub(super) async fn form(visitor: Visitor, Address(Next { next }): Address<Next>) -> Answer {
    if visitor.token.is_some() || !visitor.console.needs_token {
        return Ok(Redirect::to("/queues").into_response());
    }
    Ok(shown(form_page(&visitor, &next, None)))
}

fn form_page(visitor: &Visitor, next: &str, problem: Option<&str>) -> Markup {
    let body = html! {
        form.asks.sign-in method="post" action=(SIGN_IN) {
            h1 { "Sign in" }
            @if let Some(problem) = problem { p.problem role="alert" { (problem) } }
            input type="hidden" name="next" value=(next);
            div.field {
                label for="token" { "Token" }
                input #token type="password" name="token" autocomplete="current-password" required autofocus
                    aria-describedby="token-hint";
                small #token-hint { "The one that programs send to this broker. It stays in the broker's memory; the browser gets a session." }
            }
            div.buttons { button.primary type="submit" { "Sign in" } }
        }
    };
    page(visitor, "Sign in", Section::None, &body)
}

pub(super) async fn sign_in(
    mut visitor: Visitor,
    headers: HeaderMap,
    Body(credentials): Body<Credentials>,
) -> Answer {
    let Credentials { token, next } = credentials;
    visitor.token = Some(token.trim().to_owned());
    let request = ListQueuesRequest { page_size: 1, ..Default::default() };
    let answer = visitor.api().admin.list_queues(request).await;
    let token = visitor.token.take().unwrap_or_default();
    if let Err(status) = answer {
        let text = match status.code() {
            Code::Unauthenticated => "This token is not known, or it has expired.",
            Code::PermissionDenied => {
                "This token may not view any queue: it lacks the permission `view`."
            }
            _ => return Err(status.into()),
        };
        let problem = Problem::new(StatusCode::FORBIDDEN, text);
        return Ok(rejected(&problem, form_page(&visitor, &next, Some(text))));
    }
    let id = visitor.console.sessions.begin(token);
    let secure = if visitor::is_secure(&headers) { "; Secure" } else { "" };
    let cookie = format!("{COOKIE}={id}; Path=/; HttpOnly; SameSite=Strict{secure}");
    Ok(([(header::SET_COOKIE, cookie)], Redirect::to(target(&next))).into_response())
}

/// Returns a page of the console, never an address elsewhere.
fn target(next: &str) -> &str {
    let is_own = next.starts_with("/queues")
        || next.starts_with("/dead-letters")
        || next.starts_with("/schedules")
        || next.starts_with("/templates");
    if is_own && !next.contains(['\\', '\r', '\n']) { next } else { "/queues" }
}

pub(super) async fn sign_out(visitor: Visitor, headers: HeaderMap) -> Answer {
    visitor::end_session(&visitor, &headers);
    let cookie = format!("{COOKIE}=; Path=/; HttpOnly; SameSite=Strict; Max-Age=0");
    Ok(([(header::SET_COOKIE, cookie)], Redirect::to(SIGN_IN)).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_led_elsewhere() {
        assert_eq!(target("/queues/a?state=ready"), "/queues/a?state=ready");
        for elsewhere in [
            "//evil.example",
            "https://evil.example",
            "/\\evil.example",
            "",
            "/sign-out",
            "/queues\r\nX: y",
        ] {
            assert_eq!(target(elsewhere), "/queues", "{elsewhere}");
        }
    }
}
