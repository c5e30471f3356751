//! The pages.

mod actions;
mod dead_letters;
mod frame;
mod items;
mod live;
mod payload;
mod queue;
mod queues;
mod schedules;
mod settings;
mod sign_in;

use std::sync::Arc;

use axum::{
    Router,
    response::{Html, IntoResponse, Redirect, Response},
    routing::{get, post},
};
use maud::{Markup, html};

use crate::{Console, gate::Visitor, problem::Problem, text};

use self::frame::{Section, page};
pub(crate) use self::{frame::notice, sign_in::SIGN_IN};

/// What handlers return.
type Answer = Result<Response, Problem>;

pub(crate) fn routes() -> Router<Arc<Console>> {
    let queue = Router::new()
        .route("/", get(queue::show))
        .route("/events", get(queue::events))
        .route("/series", get(queue::series))
        .route("/settings", get(settings::show).post(settings::save))
        .route("/push", get(actions::push_form).post(actions::push))
        .route("/pause", get(actions::pause_form).post(actions::pause))
        .route("/resume", get(actions::resume_form).post(actions::resume))
        .route("/purge", get(actions::purge_form).post(actions::purge))
        .route("/delete", get(actions::delete_form).post(actions::delete))
        .route("/redrive", get(actions::redrive_form).post(actions::redrive))
        .route("/replay", get(actions::replay_form).post(actions::replay))
        .route("/items/{id}", get(items::show))
        .route("/items/{id}/payload", get(items::download))
        .route("/items/{id}/delete", get(items::delete_form).post(items::delete));
    Router::new()
        .route(SIGN_IN, get(sign_in::form).post(sign_in::sign_in))
        .route("/sign-out", post(sign_in::sign_out))
        .route("/queues", get(queues::show).post(queues::create))
        .route("/new-queue", get(queues::create_form))
        .route("/queue-events", get(queues::events))
        .nest("/queues/{queue}", queue)
        .route("/operations/{id}", get(actions::progress))
        .route("/operations/{id}/stop", post(actions::stop))
        .route("/dead-letters", get(dead_letters::show))
        .route("/dead-letters/redrive", get(dead_letters::form).post(dead_letters::redrive))
        .route("/schedules", get(schedules::show).post(schedules::create))
        .route("/new-schedule", get(schedules::create_form))
        .route("/schedules/{schedule}/{action}", get(schedules::form).post(schedules::act))
        .fallback(missing)
}

async fn missing() -> Problem {
    Problem::new(axum::http::StatusCode::NOT_FOUND, "There is no such page.")
}

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

fn shown(page: Markup) -> Response {
    Html(page.into_string()).into_response()
}

/// Returns the address of a queue's page.
fn queue_address(queue: &str) -> String {
    format!("/queues/{}", text::encode(queue))
}

/// Leads the browser to a page that says what was done.
fn done(back: &str, notice: &str, items: i64) -> Response {
    let separator = if back.contains('?') { '&' } else { '?' };
    Redirect::to(&format!("{back}{separator}notice={notice}.{items}")).into_response()
}

/// Returns a form again, with what is wrong with it.
fn rejected(problem: &Problem, page: Markup) -> Response {
    (problem.status, Html(page.into_string())).into_response()
}
