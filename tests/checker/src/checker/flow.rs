//! How many items a stream may hold, which its client changes by `Flow`.

use std::collections::VecDeque;

use super::{Checker, key::Key};
use crate::{
    history::{Answer, CallId, Request},
    rules::Rule,
};

/// The flow of a stream.
#[derive(Default)]
pub(super) struct Flow {
    /// What is in force for certain, unless a later one is by now.
    answered: u32,
    /// The event that says so.
    since: u64,
    /// Those that are not answered. Each is in force from some time between its start and its answer on.
    open: VecDeque<(CallId, u32)>,
}

impl Flow {
    /// Returns the flow of a consumer that begins.
    pub(super) fn of(request: &Request) -> Self {
        let answered = match request {
            Request::Consume(consume) => consume.max_in_flight,
            _ => 0,
        };
        Self { answered, ..Self::default() }
    }

    fn all(&self) -> impl Iterator<Item = u32> {
        self.open.iter().map(|(_, flow)| *flow).chain([self.answered])
    }

    /// Returns the highest flow that may be in force.
    pub(super) fn most(&self) -> u32 {
        self.all().fold(0, u32::max)
    }

    /// Returns the lowest flow that may be in force.
    pub(super) fn least(&self) -> u32 {
        self.all().fold(u32::MAX, u32::min)
    }
}

impl Checker {
    /// A client is about to change the flow of its stream.
    pub(super) fn start_flow(&mut self, id: CallId, stream: CallId, flow: u32) {
        self.flow_changes(stream);
        if let Some(call) = self.calls.get_mut(&stream) {
            call.flow.open.push_back((id, flow));
        }
    }

    /// A change of flow is answered. If it is not, its stream has ended.
    pub(super) fn end_flow(&mut self, id: CallId, stream: CallId, answer: &Answer) {
        if !matches!(answer, Answer::Ok(_)) {
            return;
        }
        self.flow_changes(stream);
        let now = self.now.event;
        let Some(call) = self.calls.get_mut(&stream) else { return };
        let Some(at) = call.flow.open.iter().position(|(open, _)| *open == id) else { return };
        // Changes take effect, and are answered, in the order in which they were sent.
        if let Some((_, flow)) = call.flow.open.drain(..=at).next_back() {
            (call.flow.answered, call.flow.since) = (flow, now);
        }
    }

    /// The room of a stream is another one from now on.
    fn flow_changes(&mut self, stream: CallId) {
        let now = self.now;
        let Some(call) = self.calls.get(&stream) else { return };
        let Request::Consume(consume) = &call.request else { return };
        let queue = consume.queue.clone();
        if let Some(of) = self.queues.get_mut(&Key::of(&queue)) {
            of.flow_changed = now;
        }
        self.waited_in_vain(stream, &queue);
        if let Some(call) = self.calls.get_mut(&stream) {
            call.idle = now;
        }
    }

    /// A stream is sent an item: it is not halted.
    pub(super) fn check_halted(&mut self, id: CallId) {
        let Some(call) = self.calls.get(&id).filter(|call| call.flow.most() == 0) else { return };
        let Request::Consume(consume) = &call.request else { return };
        let (queue, events) = (consume.queue.clone(), [call.start.event, call.flow.since]);
        let explanation = format!("stream {id} is sent an item after the answer to a flow of 0");
        self.violate(Rule::Limits, None, &queue, explanation, &events);
    }
}
