//! The pages.

mod actions;
mod answer;
mod brokers;
mod consumers;
mod dead_letters;
mod frame;
mod items;
mod live;
mod operations;
mod payload;
mod queue;
mod queues;
mod schedules;
mod settings;
mod sign_in;
mod templates;

use std::sync::Arc;

use axum::{
    Router,
    routing::{get, post},
};

use crate::{Console, problem::Problem};

pub(crate) use self::{answer::problem, frame::notice, sign_in::SIGN_IN};

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
        .route("/operations/{id}", get(operations::progress))
        .route("/operations/{id}/stop", post(operations::stop))
        .route("/dead-letters", get(dead_letters::show))
        .route("/dead-letters/redrive", get(dead_letters::form).post(dead_letters::redrive))
        .route("/consumers", get(consumers::show))
        .route("/consumer-events", get(consumers::events))
        .route("/brokers", get(brokers::show))
        .route("/broker-events", get(brokers::events))
        .route("/schedules", get(schedules::show).post(schedules::create))
        .route("/templates", get(templates::show).post(templates::create))
        .route("/new-template", get(templates::create_form))
        .route("/templates/{pattern}/edit", get(templates::edit_form).post(templates::edit))
        .route("/templates/{pattern}/delete", get(templates::delete_form).post(templates::delete))
        .route("/new-schedule", get(schedules::create_form))
        .route("/schedules/{schedule}/{action}", get(schedules::form).post(schedules::act))
        .fallback(missing)
}

async fn missing() -> Problem {
    Problem::new(axum::http::StatusCode::NOT_FOUND, "There is no such page.")
}
