//! The scenarios made of producers and consumers.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use sluicegate_client::{
    CancellationToken, Client,
    proto::{CreateQueueRequest, DeleteQueueRequest, Queue},
};
use tokio::task::JoinSet;

use super::{
    Args, Mode, Scenario,
    load::{self, ConsumerPlan, ProducerPlan},
    report::{Figures, Report, Window, round},
    track::Track,
};
use crate::{context::Context, failure::Failure};

/// Consumers that see nothing for this long have lost what is missing.
const STALLED: Duration = Duration::from_secs(45);
/// Producers or consumers that share a connection.
const PER_CONNECTION: usize = 50;

/// A scenario's defaults, overruled by what is given.
#[derive(Debug, Clone)]
struct Settings {
    producers: usize,
    consumers: usize,
    queues: usize,
    batch: u16,
    in_flight: u32,
    push: Mode,
    take: Mode,
    rate: Option<f64>,
    /// None: until all items are through.
    duration: Option<Duration>,
    items: Option<u64>,
    warm_up: Duration,
}

impl Settings {
    fn new(args: &Args) -> Self {
        use Mode::{Stream, Unary};
        let (producers, consumers, batch, in_flight, push, take) = match args.scenario {
            Scenario::Latency => (1, 1, 1, 16, Unary, Stream),
            Scenario::Fanin => (200, 2, 1, 1_000, Unary, Stream),
            Scenario::Crowd => (4, 1_000, 1, 4, Unary, Stream),
            _ => (2, 2, 500, 2_000, Stream, Stream),
        };
        let (rate, seconds) = match args.scenario {
            Scenario::Latency => (Some(100.0), 10),
            Scenario::Crowd => (Some(200.0), 20),
            _ => (None, 10),
        };
        let items = match args.scenario {
            Scenario::Drain => Some(args.items.unwrap_or(200_000)),
            _ => args.items,
        };
        Self {
            producers: args.producers.unwrap_or(producers).max(1),
            consumers: args.consumers.unwrap_or(consumers).max(1),
            queues: if args.scenario == Scenario::Crowd { 100 } else { 1 },
            batch: args.batch.unwrap_or(batch),
            in_flight: args.in_flight.unwrap_or(in_flight),
            push: args.push.unwrap_or(push),
            take: args.take.unwrap_or(take),
            rate: args.rate.or(rate),
            duration: match items {
                Some(_) => None,
                None => Some(args.duration.unwrap_or(Duration::from_secs(seconds))),
            },
            items,
            warm_up: if items.is_some() { Duration::ZERO } else { args.warm_up },
        }
    }
}

/// Connections to push and to take over, and the queues of this run.
struct Bench {
    settings: Settings,
    size: usize,
    batches_in_flight: usize,
    push_clients: Vec<Client>,
    take_clients: Vec<Client>,
    queues: Vec<String>,
}

pub(super) async fn run(context: &Context, args: &Args) -> Result<Report, Failure> {
    let settings = Settings::new(args);
    let connections =
        |workers: usize| args.connections.unwrap_or(workers.div_ceil(PER_CONNECTION)).max(1);
    let take_server = args.consume_server.as_deref();
    let run = format!("{:08x}", rand::random::<u32>());
    let bench = Bench {
        size: args.size as usize,
        batches_in_flight: args.batches_in_flight.max(1),
        push_clients: connect(context, None, connections(settings.producers)).await?,
        take_clients: connect(context, take_server, connections(settings.consumers)).await?,
        queues: (0..settings.queues).map(|n| format!("bench-{run}-{n}")).collect(),
        settings,
    };
    let extra = format!("bench-{run}-empty");
    for queue in bench.queues.iter().chain([&extra]) {
        create(&bench.push_clients[0], queue).await?;
    }
    let name =
        args.scenario.to_possible_value().map(|v| v.get_name().to_owned()).unwrap_or_default();
    let report = match args.scenario {
        Scenario::Push => bench.push(&name).await,
        Scenario::Drain => bench.drain(&name).await,
        Scenario::Backlog => bench.backlog(&name, &extra, args).await,
        _ => bench.steady(&name).await,
    };
    for queue in bench.queues.iter().chain([&extra]) {
        let request = DeleteQueueRequest { name: queue.clone(), force: true };
        if let Err(status) = bench.push_clients[0].admin_service().delete_queue(request).await {
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

pub(super) async fn create(client: &Client, queue: &str) -> Result<(), Failure> {
    let queue = Queue { name: queue.to_owned(), ..Default::default() };
    client.admin_service().create_queue(CreateQueueRequest { queue: Some(queue) }).await?;
    Ok(())
}

impl Bench {
    /// Pushes, measured; then consumers that only check.
    async fn push(&self, name: &str) -> Result<Report, Failure> {
        let track = Arc::new(Track::new());
        let window = self.window();
        let bar = progress("pushed");
        let mut figures = join(self.produce(&track, window, None), window, || {
            bar.set_position(track.pushed.load(Ordering::Relaxed));
        })
        .await?;
        // A window that ended long ago: nothing of this counts.
        let unmeasured = Window { from: window.from, to: Some(window.from) };
        let checked = self.consume_all(&track, unmeasured, JoinSet::new()).await?;
        figures.errors += checked.errors;
        Ok(figures.into_report(name, Some(track.verdict())))
    }

    /// Consumers on a full queue.
    async fn drain(&self, name: &str) -> Result<Report, Failure> {
        let track = Arc::new(Track::new());
        let unmeasured = Window { from: Instant::now(), to: Some(Instant::now()) };
        let bar = progress("pushed");
        let filled = join(self.produce(&track, unmeasured, None), unmeasured, || {
            bar.set_position(track.pushed.load(Ordering::Relaxed));
        })
        .await?;
        bar.finish_and_clear();
        let window = Window { from: Instant::now(), to: None };
        let mut figures = self.consume_all(&track, window, JoinSet::new()).await?;
        figures.errors += filled.errors;
        Ok(figures.into_report(name, Some(track.verdict())))
    }

    /// Producers and consumers at once.
    async fn steady(&self, name: &str) -> Result<Report, Failure> {
        let track = Arc::new(Track::new());
        let window = self.window();
        let producers = self.produce(&track, window, None);
        let figures = self.consume_all(&track, window, producers).await?;
        Ok(figures.into_report(name, Some(track.verdict())))
    }

    /// The rate of taking from a deep queue, against that from one which producers just keep from running dry.
    async fn backlog(&self, name: &str, empty: &str, args: &Args) -> Result<Report, Failure> {
        let depth = args.items.unwrap_or(1_000_000);
        let duration = args.duration.unwrap_or(Duration::from_secs(10));
        let mut shallow = Self { queues: vec![empty.to_owned()], ..self.clone_connections() };
        (shallow.settings.items, shallow.settings.duration) = (None, Some(duration));
        shallow.settings.warm_up = args.warm_up;
        let track = Arc::new(Track::new());
        let window = shallow.window();
        let producers = shallow.produce(&track, window, None);
        let reference = shallow.consume_all(&track, window, producers).await?.deliver_rate();

        let mut deep = self.clone_connections();
        (deep.settings.items, deep.settings.duration) = (Some(depth), None);
        let unmeasured = Window { from: Instant::now(), to: Some(Instant::now()) };
        let bar = progress("pushed before");
        for delay in [None, Some(Duration::from_hours(24))] {
            // The delayed ones are tracked apart: they do not come.
            let filled = Arc::new(Track::new());
            let producers = deep.produce(&filled, unmeasured, delay);
            join(producers, unmeasured, || bar.set_position(filled.pushed.load(Ordering::Relaxed)))
                .await?;
        }
        bar.finish_and_clear();
        (deep.settings.items, deep.settings.duration) = (None, Some(duration));
        deep.settings.warm_up = args.warm_up;
        let window = deep.window();
        // Producers keep going as before, so that both have the same load.
        let track = Arc::new(Track::new());
        let stop = CancellationToken::new();
        let consumers = deep.consume(&track, window, &stop);
        let mut figures = join(deep.produce(&track, window, None), window, || {}).await?;
        stop.cancel();
        figures.merge(&join(consumers, window, || {}).await?);
        let ratio = figures.deliver_rate() / reference.max(1e-9);
        // Two runs of numbers share the queue: whether each came once can not be told.
        let mut report = figures.into_report(name, None);
        report.put("depth", depth);
        report.put("almost_empty_deliver_per_s", round(reference, 1));
        report.put("ratio", round(ratio, 3));
        Ok(report)
    }

    fn clone_connections(&self) -> Self {
        Self {
            settings: self.settings.clone(),
            size: self.size,
            batches_in_flight: self.batches_in_flight,
            push_clients: self.push_clients.clone(),
            take_clients: self.take_clients.clone(),
            queues: self.queues.clone(),
        }
    }

    /// The time that is measured, beginning after the warm-up.
    fn window(&self) -> Window {
        let from = Instant::now() + self.settings.warm_up;
        Window { from, to: self.settings.duration.map(|duration| from + duration) }
    }

    fn produce(
        &self,
        track: &Arc<Track>,
        window: Window,
        delay: Option<Duration>,
    ) -> JoinSet<Figures> {
        let settings = &self.settings;
        let per_push = f64::from(settings.batch) * settings.producers as f64;
        let interval = settings.rate.map_or(0.0, |rate| per_push / rate.max(1e-3));
        let plan = ProducerPlan {
            track: track.clone(),
            window,
            size: self.size,
            batch: u64::from(settings.batch),
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
                    self.batches_in_flight,
                )),
            };
        }
        tasks
    }

    fn consume(
        &self,
        track: &Arc<Track>,
        window: Window,
        stop: &CancellationToken,
    ) -> JoinSet<Figures> {
        let plan = ConsumerPlan {
            track: track.clone(),
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
        window: Window,
        mut producers: JoinSet<Figures>,
    ) -> Result<Figures, Failure> {
        let stop = CancellationToken::new();
        let consumers = self.consume(track, window, &stop);
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
            let committed = track.committed.load(Ordering::Relaxed);
            bar.set_position(committed);
            if committed > last {
                (last, moved) = (committed, Instant::now());
            }
            let done = committed >= track.pushed.load(Ordering::Relaxed);
            if producers.is_empty() && (done || moved.elapsed() > STALLED) {
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
async fn join(
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
fn progress(what: &'static str) -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    if let Ok(style) =
        ProgressStyle::with_template("{spinner} {elapsed} {human_pos} {msg}, {per_sec}")
    {
        bar.set_style(style);
    }
    bar.set_message(what);
    bar
}
