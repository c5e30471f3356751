//! `sluice top`: all queues on the terminal, live.
//!
//! # Layout
//! `feed` asks the broker, `board` keeps what it says about queues, `app` is what keys change, `draw` and `draw_queue` put it
//! on the screen, which `screen` takes and gives back. All of it runs in one task and ends with it.

mod app;
mod board;
mod draw;
mod draw_queue;
mod feed;
mod screen;
mod style;

use std::{
    io::{self, IsTerminal},
    time::{Duration, Instant},
};

use crossterm::event::{Event, EventStream, KeyEventKind};
use futures_util::StreamExt;
use ratatui::DefaultTerminal;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::{mpsc, watch},
    time::{MissedTickBehavior, interval},
};

use self::{
    app::{App, Wish},
    feed::News,
};
use crate::{
    context::Context,
    failure::Failure,
    output,
    stats::{Which, list_queues},
};

const AFTER_HELP: &str = "\
Keys: arrows or j and k select, Enter opens the queue, Esc goes back, / filters by name, ? lists all keys, q quits. \
n r d v b a i o c sort by a column; the same key again reverses the order.

Rates are items per second over the last ten seconds. CONSUMERS counts those of all brokers. A queue is stuck if items have \
been ready for a minute and nobody takes them.

Without a terminal: `sluice watch` prints the figures at each change, `sluice stats` once.";

/// How often rates are reckoned and the screen is drawn again.
const TICK: Duration = Duration::from_secs(1);
/// How many messages of the broker may wait for the screen.
const WAITING: usize = 16;

/// The command line of `sluice top`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Show only queues whose names contain this text
    #[arg(long, short, value_name = "TEXT", default_value = "", hide_default_value = true)]
    filter: String,
}

pub(crate) async fn run(context: &Context, args: Args) -> Result<(), Failure> {
    if context.output.is_json() || !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        let why = "`sluice top` needs a terminal; `sluice watch` prints the same figures at each change, and `sluice stats` once";
        return Err(Failure::Usage(why.into()));
    }
    let client = context.client().await?;
    // What is wrong with the connection or the token is said before the screen is taken.
    let queues = list_queues(&client, &Which::default()).await?;
    let mut app = App::new(context.connection()?.server.join(", "), output::has_colours());
    app.filter = args.filter;
    app.hear(News::Queues(queues), Instant::now());

    let (news, heard) = mpsc::channel(WAITING);
    let (open, opened) = watch::channel(None);
    let mut signals = Signals::new()?;
    screen::with(async |terminal| {
        tokio::select! {
            ended = show(terminal, app, heard, open) => ended.map_err(Failure::from),
            failure = feed::follow(&client, &news) => Err(failure),
            () = feed::examine(&client, opened, &news) => Ok(()),
            () = signals.received() => Ok(()),
        }
    })
    .await
}

/// The signals that end a program. Ctrl-C is a key while the screen is taken.
struct Signals {
    terminate: Signal,
    hang_up: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            hang_up: signal(SignalKind::hangup())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn received(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.hang_up.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Shows what comes until somebody quits.
async fn show(
    terminal: &mut DefaultTerminal,
    mut app: App,
    mut heard: mpsc::Receiver<News>,
    open: watch::Sender<Option<String>>,
) -> io::Result<()> {
    let mut events = EventStream::new();
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        terminal.draw(|frame| draw::draw(frame, &mut app, Instant::now()))?;
        tokio::select! {
            event = events.next() => match event {
                Some(Ok(Event::Key(key))) if key.kind != KeyEventKind::Release => {
                    if app.press(key, Instant::now()) == Wish::Quit {
                        return Ok(());
                    }
                    open.send_if_modified(|open| {
                        let has_changed = *open != app.open;
                        open.clone_from(&app.open);
                        has_changed
                    });
                }
                Some(Ok(_)) => {} // of another size, for example: drawn again
                Some(Err(error)) => return Err(error),
                None => return Ok(()),
            },
            news = heard.recv() => match news {
                Some(news) => app.hear(news, Instant::now()),
                None => return Ok(()),
            },
            _ = ticks.tick() => app.board.sample(Instant::now()),
        }
    }
}
