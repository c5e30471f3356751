//! What operators do: settings, pauses, deletions.

use super::{
    Checker,
    key::Key,
    state::{Changes, How, Queue},
};
use crate::history::{Answer, CallId, Request};

/// Returns the changes of a queue that a request adds to.
fn changes<'a>(queue: &'a mut Queue, request: &Request) -> Vec<&'a mut Changes> {
    match request {
        Request::PurgeQueue { .. } => vec![&mut queue.purges],
        Request::DeleteQueue { force: true, .. } => vec![&mut queue.purges, &mut queue.deletions],
        Request::DeleteQueue { force: false, .. } => vec![&mut queue.deletions],
        Request::ReplayItems { .. } => vec![&mut queue.replays],
        Request::RedriveItems { .. } => vec![&mut queue.redrives],
        _ => Vec::new(),
    }
}

fn queue_of(request: &Request) -> &str {
    match request {
        Request::SetQueue { queue, .. }
        | Request::DeleteQueue { queue, .. }
        | Request::PauseQueue { queue }
        | Request::ResumeQueue { queue }
        | Request::PurgeQueue { queue }
        | Request::DeleteItem { queue, .. }
        | Request::ReplayItems { queue }
        | Request::RedriveItems { queue } => queue,
        _ => "",
    }
}

impl Checker {
    pub(super) fn start_operator(&mut self, request: &Request) {
        let key = self.queue(queue_of(request));
        let Some(queue) = self.queues.get_mut(&key) else { return };
        for changes in changes(queue, request) {
            changes.open += 1;
        }
        match request {
            Request::SetQueue { .. } => queue.settings_unsure_until = u64::MAX,
            Request::PauseQueue { .. } => queue.halted = true,
            Request::ResumeQueue { .. } => queue.paused = None,
            Request::DeleteQueue { .. } => {
                // What is pushed from now on may create the queue anew, with other settings.
                queue.settings_unsure_until = u64::MAX;
                queue.totals.unsure = true;
            }
            Request::PurgeQueue { .. } | Request::RedriveItems { .. } => {
                queue.totals.unsure = true;
            }
            Request::ReplayItems { .. } => queue.totals.unsure = true,
            Request::DeleteItem { id, .. } => self.start_deletion(Key::of(id)),
            _ => {}
        }
    }

    pub(super) fn end_operator(&mut self, id: CallId, answer: &Answer) {
        let Some(call) = self.calls.remove(&id) else { return };
        let (now, settings_take) = (self.now, self.options.settings);
        let key = self.queue(queue_of(&call.request));
        let Some(queue) = self.queues.get_mut(&key) else { return };
        if !matches!(answer, Answer::Unknown(_)) {
            for changes in changes(queue, &call.request) {
                changes.open -= 1;
                if matches!(answer, Answer::Ok(_)) {
                    changes.done = now.event;
                }
            }
        }
        match (&call.request, answer) {
            (Request::SetQueue { settings, .. }, Answer::Ok(_)) => {
                let is_new = queue.totals.pushed.sure == 0 && queue.totals.delivered == 0;
                queue.settings = settings.clone();
                queue.settings_unsure_until = if is_new { 0 } else { now.at + settings_take };
            }
            (Request::SetQueue { .. }, Answer::Refused(_)) => {
                queue.settings_unsure_until = now.at + settings_take;
            }
            (Request::PauseQueue { .. }, Answer::Ok(_)) => queue.paused = Some(now),
            (Request::ResumeQueue { .. }, Answer::Ok(_))
            | (Request::PauseQueue { .. }, Answer::Refused(_)) => {
                queue.halted = false;
                queue.excused_until = queue.excused_until.max(now.at + settings_take);
            }
            (Request::DeleteQueue { .. }, Answer::Refused(_)) if queue.deletions.done == 0 => {
                queue.settings_unsure_until = now.at + settings_take;
            }
            (Request::DeleteQueue { .. }, Answer::Ok(_)) => {
                queue.floor = (0, 0);
                queue.sequences.clear();
            }
            (Request::DeleteItem { id, .. }, Answer::Ok(_)) => {
                let id = Key::of(id);
                let number = self.items.get(&id).map_or(0, |item| item.number);
                self.remove(id, How::Deleted, number);
            }
            (Request::DeleteItem { id, .. }, Answer::Refused(_)) => {
                self.early_deletions.remove(&Key::of(id));
                if let Some(item) = self.items.get_mut(&Key::of(id)) {
                    item.maybe_deleted = false;
                }
            }
            _ => {}
        }
    }

    fn start_deletion(&mut self, id: Key) {
        let Some(item) = self.items.get_mut(&id) else {
            self.early_deletions.insert(id);
            return;
        };
        item.maybe_deleted = true;
        item.ready = None;
        if let Some(dedup) = item.dedup.and_then(|dedup| self.dedups.get_mut(&dedup)) {
            dedup.unsure = true;
        }
        if let Some(queue) = self.queues.get_mut(&item.queue) {
            queue.totals.unsure = true;
        }
    }
}
