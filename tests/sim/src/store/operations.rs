//! Operations.

use std::{cmp::Reverse, collections::HashMap, time::Duration};

use sluicegate_broker::{
    domain::{OperationId, Timestamp},
    store::{Advance, Claim, Created, Operation, OperationPlace, OperationState},
};

/// All operations, each with the end of its claim.
#[derive(Debug, Default)]
pub(super) struct Operations(HashMap<OperationId, (Operation, Timestamp)>);

impl Operations {
    pub(super) fn create(&mut self, operation: &Operation) -> Created<Operation> {
        if let Some((there, _)) = self.0.get(&operation.id) {
            return Created::Existing(there.clone());
        }
        let new = Operation { claim: None, ..operation.clone() };
        self.0.insert(new.id, (new.clone(), Timestamp(0)));
        Created::New(new)
    }

    pub(super) fn get(&self, id: OperationId) -> Option<Operation> {
        self.0.get(&id).map(|(operation, _)| operation.clone())
    }

    pub(super) fn list(&self, after: Option<OperationPlace>, limit: usize) -> Vec<Operation> {
        let mut all: Vec<Operation> = self.0.values().map(|(one, _)| one.clone()).collect();
        all.sort_unstable_by_key(|one| Reverse(one.place()));
        let is_behind = |one: &Operation| after.is_none_or(|after| one.place() < after);
        all.into_iter().filter(is_behind).take(limit).collect()
    }

    pub(super) fn running(&self) -> u64 {
        self.0.values().filter(|(one, _)| one.state == OperationState::Running).count() as u64
    }

    pub(super) fn claim(
        &mut self,
        claim: Claim,
        lasting: Duration,
        now: Timestamp,
    ) -> Option<Operation> {
        let is_free = |(one, until): &&mut (Operation, Timestamp)| {
            one.state == OperationState::Running && *until <= now
        };
        let free = self.0.values_mut().filter(is_free);
        let (operation, until) = free.min_by_key(|(one, _)| one.place())?;
        operation.claim = Some(claim);
        *until = now + lasting;
        Some(operation.clone())
    }

    pub(super) fn advance(
        &mut self,
        id: OperationId,
        claim: Claim,
        advance: &Advance,
        lasting: Duration,
        now: Timestamp,
    ) -> Option<Operation> {
        let is_its = |(one, _): &&mut (Operation, Timestamp)| one.claim == Some(claim);
        let (operation, until) = self.0.get_mut(&id).filter(is_its)?;
        operation.processed = operation.processed.max(advance.processed);
        operation.update_time = now;
        *until = now + lasting;
        if operation.state == OperationState::Running {
            operation.state = advance.state;
            operation.error.clone_from(&advance.error);
        }
        Some(operation.clone())
    }

    pub(super) fn cancel(&mut self, id: OperationId, now: Timestamp) -> Option<Operation> {
        let (operation, _) = self.0.get_mut(&id)?;
        if operation.state == OperationState::Running {
            operation.state = OperationState::Cancelled;
            operation.update_time = now;
        }
        Some(operation.clone())
    }

    pub(super) fn delete(&mut self, ended_before: Timestamp, keep: usize) {
        let ended = |one: &Operation| one.state != OperationState::Running;
        self.0.retain(|_, (one, _)| !ended(one) || one.update_time >= ended_before);
        let mut all: Vec<_> = self
            .0
            .values()
            .filter(|(one, _)| ended(one))
            .map(|(one, _)| (Reverse(one.update_time), Reverse(one.place())))
            .collect();
        all.sort_unstable();
        for (_, Reverse(place)) in all.into_iter().skip(keep) {
            self.0.remove(&place.id);
        }
    }
}
