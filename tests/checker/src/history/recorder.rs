//! Records a history while a test runs.

use std::{
    io::{self, BufWriter, Write},
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use rustix::time::{ClockId, clock_gettime};

use super::{Answer, CallId, Delivery, Event, Request, Response, Time, What};

/// Returns the time of the history.
pub type Clock = Arc<dyn Fn() -> Time + Send + Sync>;

/// Records what happens. Clones record into the same history.
#[derive(Clone)]
pub struct Recorder(Arc<Inner>);

struct Inner {
    clock: Clock,
    next_call: AtomicU64,
    sink: Mutex<Sink>,
}

enum Sink {
    Memory(Vec<Event>),
    File(BufWriter<std::fs::File>),
}

fn monotonic() -> Time {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1_000
}

impl Default for Recorder {
    fn default() -> Self {
        Self::new(Arc::new(monotonic), 0, Sink::Memory(Vec::new()))
    }
}

impl Recorder {
    fn new(clock: Clock, process: u32, sink: Sink) -> Self {
        let next_call = AtomicU64::new(u64::from(process) << 32 | 1);
        Self(Arc::new(Inner { clock, next_call, sink: Mutex::new(sink) }))
    }

    /// Returns a recorder in memory that reads the time from `clock`, for example a simulated one.
    pub fn with_clock(clock: Clock) -> Self {
        Self::new(clock, 0, Sink::Memory(Vec::new()))
    }

    /// Returns a recorder that writes to a file, one event per line. Each process has a number and a
    /// file of its own; [`read_merged`](super::read_merged) puts the files together.
    pub fn to_file(path: &Path, process: u32) -> io::Result<Self> {
        let file = BufWriter::with_capacity(1 << 16, std::fs::File::create(path)?);
        Ok(Self::new(Arc::new(monotonic), process, Sink::File(file)))
    }

    /// Returns the time of the history.
    pub fn now(&self) -> Time {
        (self.0.clock)()
    }

    /// Returns an instant of the system's clock as time of the history, for the ends of leases.
    pub fn time_of(&self, instant: SystemTime) -> Time {
        let since = |at: SystemTime| {
            at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
        };
        let (now, system) = (self.now(), since(SystemTime::now()));
        (now + since(instant)).saturating_sub(system)
    }

    /// Records an event that belongs to no call.
    pub fn mark(&self, what: What) {
        // The time is read under the lock, so that the events are in the order of their times.
        let mut sink = self.0.sink.lock().unwrap_or_else(PoisonError::into_inner);
        let event = Event { at: (self.0.clock)(), what };
        match &mut *sink {
            Sink::Memory(events) => events.push(event),
            Sink::File(file) => {
                let line = serde_json::to_vec(&event).expect("events have keys that are text");
                let written = file.write_all(&line).and_then(|()| file.write_all(b"\n"));
                written.expect("the history's file can be written");
            }
        }
    }

    /// Records the start of a call. The caller sends the request after this.
    pub fn start(&self, client: &str, broker: &str, request: Request) -> Call {
        let id = self.0.next_call.fetch_add(1, Ordering::Relaxed);
        let (client, broker) = (client.to_owned(), broker.to_owned());
        self.mark(What::Start { call: id, client, broker, request });
        Call { recorder: self.clone(), id, ended: false }
    }

    /// Returns what was recorded so far, and begins anew. Only for recorders in memory.
    pub fn take(&self) -> Vec<Event> {
        match &mut *self.0.sink.lock().unwrap_or_else(PoisonError::into_inner) {
            Sink::Memory(events) => std::mem::take(events),
            Sink::File(_) => Vec::new(),
        }
    }

    /// Writes to the file what is still in memory.
    pub fn flush(&self) -> io::Result<()> {
        match &mut *self.0.sink.lock().unwrap_or_else(PoisonError::into_inner) {
            Sink::Memory(_) => Ok(()),
            Sink::File(file) => file.flush(),
        }
    }
}

/// A call or stream under way. A call that is dropped, for example with the task that awaits its answer,
/// has an unknown outcome.
#[must_use]
pub struct Call {
    recorder: Recorder,
    id: CallId,
    ended: bool,
}

impl Call {
    /// Returns its number.
    pub fn id(&self) -> CallId {
        self.id
    }

    /// Records a message with items on a stream.
    pub fn delivered(&self, deliveries: Vec<Delivery>) {
        self.recorder.mark(What::Delivered { call: self.id, deliveries });
    }

    /// Records that a stream said that an item is no longer held.
    pub fn revoked(&self, receipt: &str) {
        self.recorder.mark(What::Revoked { call: self.id, receipt: receipt.to_owned() });
    }

    /// Records the answer.
    pub fn end(mut self, answer: Answer) {
        self.ended = true;
        self.recorder.mark(What::End { call: self.id, answer });
    }

    /// Records an answer that is no error.
    pub fn ok(self, response: Response) {
        self.end(Answer::Ok(response));
    }

    /// Records that the client closes the stream. The client closes it after this.
    pub fn closed(self) {
        self.ok(Response::Done);
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if !self.ended {
            let answer = Answer::Unknown("given up".to_owned());
            self.recorder.mark(What::End { call: self.id, answer });
        }
    }
}
