//! The parts that scenarios are made of: connections, queues, producers and consumers of one run.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::BoxFuture;
use indicatif::{ProgressBar, ProgressStyle};
use sluicegate_client::{
    CancellationToken, Client,
    proto::{CreateQueueRequest, DeleteQueueRequest, Queue},
    tonic::{Code, Status},
};
use tokio::task::JoinSet;

use super::{
    args::{Args, Mode},
    measure::{
        figures::{Figures, Window},
        processor::ProcessorTime,
        report::Report,
        tracker::{Tracker, Verdict},
    },
    settings::{Defaults, Settings},
    workers::{
        backlog_limit::BacklogLimit,
        consumer::{self, ConsumerPlan},
        producer::{self, ProducerPlan},
    },
};
use crate::{context::Context, failure::Failure};

/// A run in which nothing is committed for this long is over: what is missing is lost.
const STALLED: Duration = Duration::from_secs(45);
/// How many producers or consumers share a connection.
const PER_CONNECTION: usize = 50;

/// The queues of a run, and the connections over which items are pushed and taken.
#[derive(Clone)]
pub(super) struct Bench {
    /// The name of the scenario.
    pub(super) name: String,
    pub(super) settings: Settings,
    pub(super) push_clients: Vec<Client>,
    take_clients: Vec<Client>,
    pub(super) queues: Vec<String>,
}

/// How a scenario is measured on the queues and connections of its run.
pub(super) type Measure = for<'a> fn(&'a Bench, &'a Args) -> BoxFuture<'a, Result<Report, Failure>>;

/// Connects, creates the queues, measures, and deletes the queues.
pub(super) async fn run(
    context: &Context,
    args: &Args,
    defaults: &Defaults,
    measure: Measure,
) -> Result<Report, Failure> {
    let settings = Settings::new(args, defaults);
    let connections =
        |workers: usize| args.connections.unwrap_or(workers.div_ceil(PER_CONNECTION)).max(1);
    let take_server = args.consume_server.as_deref();
    let run = format!("{:08x}", rand::random::<u32>());
    let queues = settings.queues + settings.spare_queues;
    let bench = Bench {
        name: args.scenario.name(),
        push_clients: connect(context, None, connections(settings.producers)).await?,
        take_clients: connect(context, take_server, connections(settings.consumers)).await?,
        queues: (0..queues).map(|n| format!("bench-{run}-{n}")).collect(),
        settings,
    };
    for queue in &bench.queues {
        bench.create_queue(queue).await?;
    }
    let report = bench.prepare_and(args, measure).await;
    for queue in &bench.queues {
        if let Err(status) = bench.delete_queue(queue).await
            && status.code() != Code::NotFound
        {
            eprintln!("sluice: queue {queue} could not be deleted: {}", status.message());
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
    async fn prepare_and(&self, args: &Args, measure: Measure) -> Result<Report, Failure> {
        if args.churn > 0 {
            self.churn(args.churn).await?;
        }
        if let Some(idle) = args.idle {
            self.idle(idle).await?;
        }
        measure(self, args).await
    }

    async fn create_queue(&self, name: &str) -> Result<(), Status> {
        let queue = Some(Queue { name: name.to_owned(), ..Default::default() });
        self.push_clients[0].admin_service().create_queue(CreateQueueRequest { queue }).await?;
        Ok(())
    }

    /// Deletes a queue and returns how many items were left in it.
    pub(super) async fn delete_queue(&self, name: &str) -> Result<u64, Status> {
        let request = DeleteQueueRequest { name: name.to_owned(), force: true };
        let answer = self.push_clients[0].admin_service().delete_queue(request).await?;
        Ok(answer.into_inner().deleted_items as u64)
    }

    /// Returns the same run on these queues.
    pub(super) fn on(&self, queues: &[String]) -> Self {
        Self { queues: queues.to_vec(), ..self.clone() }
    }

    /// Returns the same run with these settings.
    pub(super) fn with(&self, settings: Settings) -> Self {
        Self { settings, ..self.clone() }
    }

    /// Pushes items through the queues, so that the queues have a history as they have in use.
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

    /// Lets consumers wait at empty queues for `time`.
    async fn idle(&self, time: Duration) -> Result<(), Failure> {
        let (tracker, window, stop) =
            (Arc::new(Tracker::new()), Window::none(), CancellationToken::new());
        let consumers = self.consume(&tracker, &BacklogLimit::new(None), window, &stop);
        tokio::time::sleep(time).await;
        stop.cancel();
        join(consumers, window, || {}).await?;
        Ok(())
    }

    /// Runs producers and consumers at the same time.
    pub(super) async fn load(&self) -> Result<(Figures, Verdict), Failure> {
        let tracker = Arc::new(Tracker::new());
        let window = self.window();
        let backlog = BacklogLimit::new(self.settings.backlog);
        let servers = self.processor_time(window);
        let producers = self.produce(&tracker, &backlog, window, None);
        let mut figures = self.consume_all(&tracker, &backlog, window, producers).await?;
        figures.server_seconds = servers.finish().await;
        Ok((figures, tracker.verdict()))
    }

    /// Takes what was pushed, in the quickest way and unmeasured. Returns how many errors there were.
    pub(super) async fn check(&self, tracker: &Arc<Tracker>) -> Result<u64, Failure> {
        let quick = self.with(self.settings.churning(0));
        let backlog = BacklogLimit::new(None);
        Ok(quick.consume_all(tracker, &backlog, Window::none(), JoinSet::new()).await?.errors)
    }

    /// Returns the span of time that is measured, which begins after the warm-up.
    pub(super) fn window(&self) -> Window {
        let from = Instant::now() + self.settings.warm_up;
        Window { from, to: self.settings.duration.map(|duration| from + duration) }
    }

    /// Begins to measure the processor time that the servers use inside the window.
    pub(super) fn processor_time(&self, window: Window) -> ProcessorTime {
        ProcessorTime::start(&self.settings.servers, window)
    }

    pub(super) fn produce(
        &self,
        tracker: &Arc<Tracker>,
        backlog: &BacklogLimit,
        window: Window,
        delay: Option<Duration>,
    ) -> JoinSet<Figures> {
        let settings = &self.settings;
        let per_push = f64::from(settings.batch) * settings.producers as f64;
        let interval = settings.rate.map_or(0.0, |rate| per_push / rate.max(1e-3));
        let plan = ProducerPlan {
            tracker: tracker.clone(),
            backlog: backlog.clone(),
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
                Mode::Unary => {
                    tasks.spawn(producer::produce_unary(plan.clone(), client, queue, first))
                }
                Mode::Stream => tasks.spawn(producer::produce_stream(
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
        tracker: &Arc<Tracker>,
        backlog: &BacklogLimit,
        window: Window,
        stop: &CancellationToken,
    ) -> JoinSet<Figures> {
        let plan = ConsumerPlan {
            tracker: tracker.clone(),
            backlog: backlog.clone(),
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
                Mode::Unary => tasks.spawn(consumer::consume_unary(plan.clone(), client, queue)),
                Mode::Stream => tasks.spawn(consumer::consume_stream(plan.clone(), client, queue)),
            };
        }
        tasks
    }

    /// Runs consumers until the producers have ended and everything pushed is committed, or nothing moves any more.
    pub(super) async fn consume_all(
        &self,
        tracker: &Arc<Tracker>,
        backlog: &BacklogLimit,
        window: Window,
        mut producers: JoinSet<Figures>,
    ) -> Result<Figures, Failure> {
        let stop = CancellationToken::new();
        let consumers = self.consume(tracker, backlog, window, &stop);
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
            let committed = tracker.count_committed();
            bar.set_position(committed);
            let done = committed >= tracker.count_pushed();
            if committed > last || done {
                (last, moved) = (committed, Instant::now());
            }
            // Producers that wait for capacity would wait forever.
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

/// Waits for all tasks and adds up what they counted.
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

/// Returns a progress bar, which is shown on terminals only.
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
