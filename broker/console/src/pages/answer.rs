//! What handlers return: pages, and ways to other pages.

use axum::response::{Html, IntoResponse, Redirect, Response};
use maud::{Markup, html};

use super::frame::{Section, page};
use crate::{problem::Problem, text, visitor::Visitor};

/// What handlers return.
pub(super) type Answer = Result<Response, Problem>;

/// Returns the page that says what went wrong.
pub(crate) fn problem(visitor: &Visitor, problem: &Problem) -> Response {
    let title = match problem.status.as_u16() {
        404 => "Not found",
        403 => "Not allowed",
        401 => "Not signed in",
        503 | 504 => "The broker does not answer",
        _ => "That did not work",
    };
    let body = html! {
        h1 { (title) }
        p.problem role="alert" { (problem.text) }
        p { a href="/queues" { "All queues" } }
    };
    shown(page(visitor, title, Section::None, &body))
}

pub(super) fn shown(page: Markup) -> Response {
    Html(page.into_string()).into_response()
}

/// Returns the address of a queue's page.
pub(super) fn queue_address(queue: &str) -> String {
    format!("/queues/{}", text::encode(queue))
}

/// Leads the browser to a page that says what was done.
pub(super) fn done(back: &str, notice: &str, items: i64) -> Response {
    let separator = if back.contains('?') { '&' } else { '?' };
    Redirect::to(&format!("{back}{separator}notice={notice}.{items}")).into_response()
}

/// Returns a form again, with what is wrong with it.
pub(super) fn rejected(problem: &Problem, page: Markup) -> Response {
    (problem.status, Html(page.into_string())).into_response()
}
