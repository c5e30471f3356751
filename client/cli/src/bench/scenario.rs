//! The scenarios made of producers and consumers.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use clap::{ValueEnum, builder::PossibleValue};
use indicatif::{ProgressBar, ProgressStyle};
use sluicegate_client::{
    CancellationToken, Client,
    proto::{CreateQueueRequest, DeleteQueueRequest, Queue},
    tonic::{Code, Status},
};
use tokio::task::JoinSet;

use super::{
    Args, Mode, Scenario, backlog,
    load::{self, ConsumerPlan, ProducerPlan},
    report::{Figures, Report, Window},
    room::Room,
    settings::Settings,
    simulator,
    track::{Track, Verdict},
};
use crate::{context::Context, failure::Failure};

/// Consumers that see nothing for this long have lost what is missing.
const STALLED: Duration = Duration::from_secs(45);
/// Producers or consumers that share a connection.
const PER_CONNECTION: usize = 50;

/// Connections to push and to take over, and the queues of this run.
#[derive(Clone)]
pub(super) struct Bench {
    pub(super) settings: Settings,
    pub(super) push_clients: Vec<Client>,
    take_clients: Vec<Client>,
    pub(super) queues: Vec<String>,
}

pub(super) async fn run(context: &Context, args: &Args) -> Result<Report, Failure> {
    let settings = Settings::new(args);
    let connections =
        |workers: usize| args.connections.unwrap_or(workers.div_ceil(PER_CONNECTION)).max(1);
    let take_server = args.consume_server.as_deref();
    let run = format!("{:08x}", rand::random::<u32>());
    // Backlog needs a deep and a shallow one.
    let queues = settings.queues + usize::from(args.scenario == Scenario::Backlog);
    let bench = Bench {
        push_clients: connect(context, None, connections(settings.producers)).await?,
        take_clients: connect(context, take_server, connections(settings.consumers)).await?,
        queues: (0..queues).map(|n| format!("bench-{run}-{n}")).collect(),
        settings,
    };
    for queue in &bench.queues {
        bench.create_queue(queue).await?;
    }
    let report = bench.run(args).await;
    for queue in &bench.queues {
        if let Err(status) = bench.delete_queue(queue).await
            && status.code() != Code::NotFound
        {
            eprintln!("sluice: queue {queue} stays behind: {}", status.message());
        }
    }
    report
}

async fn connect(
    context: &Context,
    server: Option<&str>,
    n: usize,
) -> Result<Vec<Client>, Failure> {
    let mut clients = Vec::new();
    for _ in 0..n {
        clients.push(context.client_of(server).await?);
    }
    Ok(clients)
}

impl Bench {
    async fn run(&self, args: &Args) -> Result<Report, Failure> {
        let name = args.scenario.to_possible_value();
        let name = name.as_ref().map(PossibleValue::get_name).unwrap_or_default();
        if args.churn > 0 {
            self.churn(args.churn).await?;
        }
        if let Some(idle) = args.idle {
            self.idle(idle).await?;
        }
        match args.scenario {
            Scenario::Push => self.push(name).await,
            Scenario::Drain => self.drain(name).await,
            Scenario::Backlog => backlog::run(self, name, args.items.unwrap_or(1_000_000)).await,
            Scenario::Simulator => simulator::run(self, name).await,
            _ => {
                let (figures, verdict) = self.load().await?;
                Ok(figures.into_report(name, verdict))
            }
        }
    }

    async fn create_queue(&self, name: &str) -> Result<(), Status> {
        let queue = Some(Queue { name: name.to_owned(), ..Default::default() });
        self.push_clients[0].admin_service().create_queue(CreateQueueRequest { queue }).await?;
        Ok(())
    }

    /// Answers how many items were left in it.
    pub(super) async fn delete_queue(&self, name: &str) -> Result<u64, Status> {
        let request = DeleteQueueRequest { name: name.to_owned(), force: true };
        let answer = self.push_clients[0].admin_service().delete_queue(request).await?;
        Ok(answer.into_inner().deleted_items as u64)
    }

    /// The same on these queues.
    pub(super) fn on(&self, queues: &[String]) -> Self {
        Self { queues: queues.to_vec(), ..self.clone() }
    }

    /// The same with these settings.
    pub(super) fn with(&self, settings: Settings) -> Self {
        Self { settings, ..self.clone() }
    }

    /// Gets items through the queues: afterwards they have a past, as they have in use.
    async fn churn(&self, items: u64) -> Result<(), Failure> {
        let (figures, verdict) = self.with(self.settings.churning(items)).load().await?;
        if figures.errors > 0 || !verdict.exactly_once() {
            return Err(io::Error::other(format!(
                "the churn before the measurement had {} errors, {} items missing, {} doubled",
                figures.errors, verdict.missing, verdict.doubled
            ))
            .into());
        }
        Ok(())
    }

    /// Consumers that wait at empty queues.
    async fn idle(&self, time: Duration) -> Result<(), Failure> {
        let (track, window, stop) =
            (Arc::new(Track::new()), Window::none(), CancellationToken::new());
        let consumers = self.consume(&track, &Room::new(None), window, &stop);
        tokio::time::sleep(time).await;
        stop.cancel();
        join(consumers, window, || {}).await?;
        Ok(())
    }

    /// Pushes, measured; then consumers that only check.
    async fn push(&self, name: &str) -> Result<Report, Failure> {
        let track = Arc::new(Track::new());
        let window = self.window();
        let bar = progress("pushed");
        let producers = self.produce(&track, &Room::new(None), window, None);
        let mut figures =
            join(producers, window, || bar.set_position(track.count_pushed())).await?;
        bar.finish_and_clear();
        figures.errors += self.check(&track).await?;
        Ok(figures.into_report(name, track.verdict()))
    }

    /// Consumers on a full queue.
    async fn drain(&self, name: &str) -> Result<Report, Failure> {
        let track = Arc::new(Track::new());
        let unmeasured = Window::none();
        let filling = self.with(self.settings.filling(self.settings.items.unwrap_or(0)));
        let bar = progress("pushed");
        let producers = filling.produce(&track, &Room::new(None), unmeasured, None);
        let filled = join(producers, unmeasured, || bar.set_position(track.count_pushed())).await?;
        bar.finish_and_clear();
        let window = Window { from: Instant::now(), to: None };
        let room = Room::new(None);
        let mut figures = self.consume_all(&track, &room, window, JoinSet::new()).await?;
        figures.errors += filled.errors;
        Ok(figures.untimed().into_report(name, track.verdict()))
    }

    /// Producers and consumers at once.
    pub(super) async fn load(&self) -> Result<(Figures, Verdict), Failure> {
        let track = Arc::new(Track::new());
        let window = self.window();
        let room = Room::new(self.settings.backlog);
        let producers = self.produce(&track, &room, window, None);
        let figures = self.consume_all(&track, &room, window, producers).await?;
        Ok((figures, track.verdict()))
    }

    /// Takes what was pushed, in the quickest way and unmeasured; answers how many errors there were.
    pub(super) async fn check(&self, track: &Arc<Track>) -> Result<u64, Failure> {
        let quick = self.with(self.settings.churning(0));
        let room = Room::new(None);
        Ok(quick.consume_all(track, &room, Window::none(), JoinSet::new()).await?.errors)
    }

    /// The time that is measured, beginning after the warm-up.
    pub(super) fn window(&self) -> Window {
        let from = Instant::now() + self.settings.warm_up;
        Window { from, to: self.settings.duration.map(|duration| from + duration) }
    }

    pub(super) fn produce(
        &self,
        track: &Arc<Track>,
        room: &Room,
        window: Window,
        delay: Option<Duration>,
    ) -> JoinSet<Figures> {
        let settings = &self.settings;
        let per_push = f64::from(settings.batch) * settings.producers as f64;
        let interval = settings.rate.map_or(0.0, |rate| per_push / rate.max(1e-3));
        let plan = ProducerPlan {
            track: track.clone(),
            room: room.clone(),
            window,
            size: settings.size,
            batch: u32::from(settings.batch),
            limit: settings.items.unwrap_or(u64::MAX),
            until: settings.duration.and(window.to),
            interval: Duration::from_secs_f64(interval),
            delay,
        };
        let mut tasks = JoinSet::new();
        let now = Instant::now();
        for n in 0..settings.producers {
            let client = self.push_clients[n % self.push_clients.len()].clone();
            let queue = self.queues[n % self.queues.len()].clone();
            // Spread over the first interval.
            let first = now + plan.interval.mul_f64(n as f64 / settings.producers as f64);
            match settings.push {
                Mode::Unary => tasks.spawn(load::produce_unary(plan.clone(), client, queue, first)),
                Mode::Stream => tasks.spawn(load::produce_stream(
                    plan.clone(),
                    client,
                    queue,
                    first,
                    settings.batches_in_flight,
                )),
            };
        }
        tasks
    }

    pub(super) fn consume(
        &self,
        track: &Arc<Track>,
        room: &Room,
        window: Window,
        stop: &CancellationToken,
    ) -> JoinSet<Figures> {
        let plan = ConsumerPlan {
            track: track.clone(),
            room: room.clone(),
            window,
            batch: i32::from(self.settings.batch),
            in_flight: self.settings.in_flight,
            stop: stop.clone(),
        };
        let mut tasks = JoinSet::new();
        for n in 0..self.settings.consumers {
            let client = self.take_clients[n % self.take_clients.len()].clone();
            let queue = self.queues[n % self.queues.len()].clone();
            match self.settings.take {
                Mode::Unary => tasks.spawn(load::consume_unary(plan.clone(), client, queue)),
                Mode::Stream => tasks.spawn(load::consume_stream(plan.clone(), client, queue)),
            };
        }
        tasks
    }

    /// Runs consumers until the producers have ended and everything pushed is committed, or nothing moves any more.
    async fn consume_all(
        &self,
        track: &Arc<Track>,
        room: &Room,
        window: Window,
        mut producers: JoinSet<Figures>,
    ) -> Result<Figures, Failure> {
        let stop = CancellationToken::new();
        let consumers = self.consume(track, room, window, &stop);
        let bar = progress("committed");
        let mut figures = Figures::new(window);
        let (mut last, mut moved) = (0, Instant::now());
        let mut tick = tokio::time::interval(Duration::from_millis(20));
        loop {
            tokio::select! {
                Some(ended) = producers.join_next() => {
                    figures.merge(&ended.map_err(std::io::Error::other)?);
                    continue;
                }
                _ = tick.tick() => {}
            }
            let committed = track.count_committed();
            bar.set_position(committed);
            let done = committed >= track.count_pushed();
            if committed > last || done {
                (last, moved) = (committed, Instant::now());
            }
            // Producers that wait for room would wait for ever.
            if (producers.is_empty() && done) || moved.elapsed() > STALLED {
                break;
            }
        }
        bar.finish_and_clear();
        stop.cancel();
        figures.merge(&join(consumers, window, || {}).await?);
        Ok(figures)
    }
}

/// Waits for all and adds up what they counted.
pub(super) async fn join(
    mut tasks: JoinSet<Figures>,
    window: Window,
    mut progress: impl FnMut(),
) -> Result<Figures, Failure> {
    let mut figures = Figures::new(window);
    let mut tick = tokio::time::interval(Duration::from_millis(100));
    loop {
        tokio::select! {
            ended = tasks.join_next() => match ended {
                Some(ended) => figures.merge(&ended.map_err(std::io::Error::other)?),
                None => return Ok(figures),
            },
            _ = tick.tick() => progress(),
        }
    }
}

/// Shows itself on a terminal only.
pub(super) fn progress(what: &'static str) -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    if let Ok(style) =
        ProgressStyle::with_template("{spinner} {elapsed} {human_pos} {msg}, {per_sec}")
    {
        bar.set_style(style);
    }
    bar.set_message(what);
    bar
}
