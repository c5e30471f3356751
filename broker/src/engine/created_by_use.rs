//! Queues that come into being by use: by a push, or by the first of the dead letters of another queue. The template that decides about
//! their names has their settings; without one they have the defaults. They go again when nobody uses them.
//!
//! The templates are read whenever such a queue is created, which is seldom. So a change of a template counts at once, on all
//! brokers.

use std::{sync::Arc, time::Duration};

use super::{Engine, EngineError, Result, dead_letter_links};
use crate::{
    domain::{GroupName, Queue, QueueName, QueueTemplate},
    store::Created,
};

/// How often a link is tried when others change links at the same time.
const LINK_TRIES: u32 = 100;
/// The longest pause between two tries.
const LINK_PAUSE: Duration = Duration::from_millis(10);

impl Engine {
    /// Creates a queue that did not exist a moment ago, as a push does.
    pub(super) async fn create_by_use(&self, name: &QueueName) -> Result<Arc<Queue>> {
        match self.create_for_push(name).await {
            // A queue that decides the group was created meanwhile.
            Err(EngineError::DeadLetterGroup { .. }) => self.create_for_push(name).await,
            created => created,
        }
    }

    async fn create_for_push(&self, name: &QueueName) -> Result<Arc<Queue>> {
        let templates = self.store.list_templates().await?;
        let sources = dead_letter_links::sources(&*self.store, name).await?;
        let (name, now) = (name.clone(), self.now());
        let wanted = match sources.first() {
            Some(source) => QueueTemplate::dead_letter_queue(&templates, name, source, now),
            None => QueueTemplate::queue_by_use(&templates, name, now),
        };
        match wanted.dead_letter_queue.clone() {
            Some(target) => self.create_with_link(wanted, &target).await,
            None => self.create_unlinked(wanted).await,
        }
    }

    /// Creates a dead-letter queue if it does not exist. Returns the group of the queue.
    pub(super) async fn make_dead_letter_queue(
        &self,
        name: &QueueName,
        source: &Queue,
    ) -> Result<GroupName> {
        if let Some(there) = self.store.get_queue(name).await? {
            return Ok(there.group);
        }
        let templates = self.store.list_templates().await?;
        let wanted = QueueTemplate::dead_letter_queue(&templates, name.clone(), source, self.now());
        let generation = self.queues.generation();
        Ok(match self.store.create_queue(&wanted).await? {
            Created::New(made) => {
                let group = made.group.clone();
                // A new queue changes no cached settings: what was read meanwhile may be cached.
                self.queues.remember(made, generation);
                self.overview.created(name);
                self.notify_settings(name);
                tracing::info!(queue = %name, of = %source.name, "made a dead-letter queue");
                group
            }
            Created::Existing(there) => there.group,
        })
    }

    /// Creates a queue that names no dead-letter queue.
    async fn create_unlinked(&self, wanted: Queue) -> Result<Arc<Queue>> {
        dead_letter_links::check_target_group(&*self.store, &wanted).await?;
        let generation = self.queues.generation();
        match self.store.create_queue(&wanted).await? {
            Created::New(queue) => self.created(queue, generation).await,
            Created::Existing(queue) => Ok(self.queues.remember(queue, generation)),
        }
    }

    /// Creates a queue and the dead-letter queue that it names.
    ///
    /// No ring comes of it. Nothing leads to a queue that does not exist, unless its name ends with `.dead`: whoever names a
    /// dead-letter queue creates it first. Whoever does so at the same time is told by the links that they have changed. So the
    /// time in which nobody else may change them is short, and many such queues can come into being at once.
    async fn create_with_link(&self, wanted: Queue, target: &QueueName) -> Result<Arc<Queue>> {
        self.ensure_dead_letter_queue(&wanted).await?;
        let _turn = self.turn_to_link().await;
        for _ in 0..LINK_TRIES {
            if let Some(queue) = self.queues.known(&wanted.name) {
                return Ok(queue);
            }
            let generation = self.queues.generation();
            let links = self.store.links().await?;
            // A deletion changes the links: what is there from now on is there when the link is made.
            if self.store.get_queue(target).await?.is_none() {
                self.ensure_dead_letter_queue(&wanted).await?;
                continue;
            }
            if let Some(queue) = self.store.link_queue(&wanted, links).await? {
                return self.created(queue, generation).await;
            }
            if let Some(there) = self.store.get_queue(&wanted.name).await? {
                return Ok(self.queues.remember(there, generation));
            }
            tokio::time::sleep(LINK_PAUSE.mul_f64(rand::random())).await;
        }
        Err(EngineError::Conflict(wanted.name))
    }

    /// Notes a queue that is new.
    async fn created(&self, queue: Queue, generation: u64) -> Result<Arc<Queue>> {
        dead_letter_links::confirm_group(&*self.store, &queue).await?;
        let queue = self.queues.remember(queue, generation);
        self.overview.created(&queue.name);
        self.notify_settings(&queue.name);
        Ok(queue)
    }
}
