//! Pages that follow what happens, by server-sent events. Each event is a part of the page, made anew; the script changes
//! what differs.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    http::StatusCode,
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures_util::stream;
use maud::Markup;
use tokio::time::sleep;

use crate::{board::Board, problem::Problem, visitor::Visitor};

/// The shortest time between two events. Ages are shown in seconds.
const PACE: Duration = Duration::from_secs(1);
/// How often something is sent in any case. The broker closes connections on which it sends nothing.
const ALIVE: Duration = Duration::from_secs(3);

/// Streams what `render` makes whenever it differs from before. Ends when `render` returns nothing, when the session ends
/// and when the broker drains.
pub(super) fn stream(
    visitor: &Visitor,
    board: Arc<Board>,
    render: impl Fn(&Board) -> Option<Markup> + Send + 'static,
) -> Result<Response, Problem> {
    let room = Arc::clone(&visitor.console.streams).try_acquire_owned();
    let room = room.map_err(|_| {
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "Too many pages follow the broker just now.")
    })?;
    let shutdown = visitor.console.shutdown.clone();
    let state = (board, render, String::new(), room);
    let events = stream::unfold(state, move |(board, render, last, room)| {
        let shutdown = shutdown.clone();
        async move {
            loop {
                if !last.is_empty() {
                    tokio::select! {
                        () = sleep(PACE) => {}
                        () = shutdown.cancelled() => return None,
                    }
                }
                let part = render(&board).filter(|_| !board.has_ended())?.into_string();
                if part != last {
                    let event = Event::default().data(&part);
                    return Some((Ok::<_, Infallible>(event), (board, render, part, room)));
                }
            }
        }
    });
    let events = Sse::new(events).keep_alive(KeepAlive::new().interval(ALIVE));
    Ok(events.into_response())
}
