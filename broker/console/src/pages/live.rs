//! Pages that follow what happens, by server-sent events. Each event is a part of the page, made anew; the script changes
//! what differs.

use std::{
    convert::Infallible,
    future::{Future, ready},
    sync::Arc,
    time::Duration,
};

use axum::{
    http::StatusCode,
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures_util::stream;
use maud::{Markup, html};
use parking_lot::Mutex;
use tokio::time::sleep;
use tonic::{Code, Status};

use crate::{board::Board, problem::Problem, visitor::Visitor};

/// The shortest time between two events. Ages are shown in seconds.
const PACE: Duration = Duration::from_secs(1);
/// How often something is sent in any case. The broker closes connections on which it sends nothing.
const ALIVE: Duration = Duration::from_secs(3);

/// Streams what `render` makes of the board whenever it differs from before. Ends when `render` returns nothing and when
/// the board has ended.
pub(super) fn stream(
    visitor: &Visitor,
    board: Arc<Board>,
    render: impl Fn(&Board) -> Option<Markup> + Send + 'static,
) -> Result<Response, Problem> {
    events(visitor, move || ready(render(&board).filter(|_| !board.has_ended())))
}

/// Streams what `render` makes of what `read` brings, whenever it differs from before. While `read` fails, what it brought
/// last is shown, and why that is not up to date. Ends when the visitor may not read any more.
pub(super) fn follow<T: Send + 'static, F>(
    visitor: &Visitor,
    read: impl Fn() -> F + Send + 'static,
    render: impl FnMut(&T) -> Markup + Send + 'static,
) -> Result<Response, Problem>
where
    F: Future<Output = Result<T, Status>> + Send + 'static,
{
    let state = Arc::new(Mutex::new((render, None)));
    events(visitor, move || {
        let (reading, state) = (read(), Arc::clone(&state));
        async move {
            let answer = reading.await;
            let mut state = state.lock();
            let (render, last) = &mut *state;
            match answer {
                Ok(fresh) => Some(render(last.insert(fresh))),
                Err(status) if is_over(&status) => None,
                Err(status) => Some(html! {
                    (not_up_to_date(&status))
                    @if let Some(last) = last { (render(last)) }
                }),
            }
        }
    })
}

/// Returns true if the visitor may not read any more, or what is read is gone.
fn is_over(status: &Status) -> bool {
    matches!(status.code(), Code::Unauthenticated | Code::PermissionDenied | Code::NotFound)
}

/// Returns the line that says why figures are old.
pub(super) fn not_up_to_date(status: &Status) -> Markup {
    html! { p.problem { "These figures are not up to date: " (status.message()) } }
}

/// Streams what `next` returns whenever it differs from before. Ends when `next` returns nothing and when the broker drains.
fn events<F>(
    visitor: &Visitor,
    next: impl FnMut() -> F + Send + 'static,
) -> Result<Response, Problem>
where
    F: Future<Output = Option<Markup>> + Send + 'static,
{
    let room = visitor.console.followers.begin(visitor.token.as_deref()).ok_or_else(|| {
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "Too many pages follow the broker just now.")
    })?;
    let shutdown = visitor.console.shutdown.clone();
    let state = (next, String::new(), room);
    let events = stream::unfold(state, move |(mut next, last, room)| {
        let shutdown = shutdown.clone();
        async move {
            loop {
                let pause = if last.is_empty() { Duration::ZERO } else { PACE };
                let part = tokio::select! {
                    part = async { sleep(pause).await; next().await } => part?.into_string(),
                    () = shutdown.cancelled() => return None,
                };
                if part != last {
                    let event = Event::default().data(&part);
                    return Some((Ok::<_, Infallible>(event), (next, part, room)));
                }
            }
        }
    });
    let events = Sse::new(events).keep_alive(KeepAlive::new().interval(ALIVE));
    Ok(events.into_response())
}
