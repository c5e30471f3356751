//! Cached settings of queues, at most a second old: a task asks the store twice a second which
//! settings have changed, and signals make that faster.

use std::{collections::HashMap, sync::Arc};

use parking_lot::RwLock;
use tokio::sync::Mutex;

use crate::{
    domain::{AtLimit, FailureDefaults, Queue, QueueName},
    engine::{EngineError, Result, dead_letter_links},
    store::{SettingsChanges, SettingsWatch, Store},
};

pub(super) struct Queues {
    store: Arc<dyn Store>,
    defaults: FailureDefaults,
    known: RwLock<Known>,
    watch: Mutex<Box<dyn SettingsWatch>>,
}

#[derive(Default)]
struct Known {
    queues: HashMap<QueueName, Arc<Queue>>,
    /// Increases whenever settings are dropped. The result of a read that began before is not
    /// cached.
    generation: u64,
}

impl Queues {
    pub(super) fn new(store: Arc<dyn Store>, defaults: FailureDefaults) -> Self {
        let watch = Mutex::new(store.watch_settings());
        Self { store, defaults, known: RwLock::default(), watch }
    }

    /// Returns the queue's settings, or `QueueNotFound`.
    pub(super) async fn get(&self, name: &QueueName) -> Result<Arc<Queue>> {
        let generation = {
            let known = self.known.read();
            if let Some(queue) = known.queues.get(name) {
                return Ok(Arc::clone(queue));
            }
            known.generation
        };
        match self.store.get_queue(name).await? {
            Some(queue) => Ok(self.remember(queue, generation)),
            None => Err(EngineError::QueueNotFound(name.clone())),
        }
    }

    /// Returns the settings of those of the queues that exist. Those that are not cached are read at once.
    pub(super) async fn get_all(
        &self,
        names: &[QueueName],
    ) -> Result<HashMap<QueueName, Arc<Queue>>> {
        let (mut found, mut unknown) = (HashMap::new(), Vec::new());
        let generation = {
            let known = self.known.read();
            for name in names {
                match known.queues.get(name) {
                    Some(queue) => drop(found.insert(name.clone(), Arc::clone(queue))),
                    None => unknown.push(name.clone()),
                }
            }
            known.generation
        };
        if !unknown.is_empty() {
            for queue in self.store.get_queues(&unknown).await? {
                found.insert(queue.name.clone(), self.remember(queue, generation));
            }
        }
        Ok(found)
    }

    /// Returns the queue's settings if they are cached.
    pub(super) fn known(&self, name: &QueueName) -> Option<Arc<Queue>> {
        self.known.read().queues.get(name).cloned()
    }

    /// Caches settings that were read, unless any have changed since `generation`.
    pub(super) fn remember(&self, queue: Queue, generation: u64) -> Arc<Queue> {
        let queue = Arc::new(queue.in_force(&self.defaults));
        let mut known = self.known.write();
        if known.generation == generation {
            known.queues.insert(queue.name.clone(), Arc::clone(&queue));
        }
        queue
    }

    /// Caches settings that this broker itself has just written.
    pub(super) fn replace(&self, queue: Queue) {
        let mut known = self.known.write();
        known.generation += 1;
        known.queues.insert(queue.name.clone(), Arc::new(queue.in_force(&self.defaults)));
    }

    /// Returns a number that changes whenever settings are dropped.
    pub(super) fn generation(&self) -> u64 {
        self.known.read().generation
    }

    /// Caches where items at a limit go, unless any settings have changed since `generation`.
    pub(super) fn note_limit(
        &self,
        queue: &Arc<Queue>,
        at_limit: AtLimit,
        generation: u64,
    ) -> Arc<Queue> {
        let noted = Arc::new(Queue { at_limit, ..(**queue).clone() });
        let mut known = self.known.write();
        if known.generation == generation
            && let Some(known) = known.queues.get_mut(&queue.name)
            && Arc::ptr_eq(known, queue)
        {
            *known = Arc::clone(&noted);
        }
        noted
    }

    /// Drops the settings of a queue. The queue may have been deleted, so it is no longer known as
    /// the dead-letter queue of others either.
    pub(super) fn forget(&self, name: &QueueName) {
        let mut known = self.known.write();
        known.generation += 1;
        known.queues.remove(name);
        let leads_there = |queue: &Queue| match &queue.at_limit {
            AtLimit::DeadLetter(to) => to == name,
            AtLimit::Nowhere => dead_letter_links::target(queue).as_ref() == Some(name),
            AtLimit::Unknown | AtLimit::Discard => false,
        };
        known.queues.retain(|_, queue| !leads_there(queue));
    }

    pub(super) fn forget_all(&self) {
        let mut known = self.known.write();
        known.generation += 1;
        known.queues.clear();
    }

    /// Drops the settings that have changed in the store since the last call. Returns the changes.
    pub(super) async fn refresh(&self) -> Result<SettingsChanges> {
        let changes = self.watch.lock().await.changes().await?;
        match &changes {
            SettingsChanges::Unknown => self.forget_all(),
            SettingsChanges::Of(queues) => {
                for name in queues {
                    self.forget(name);
                }
            }
        }
        Ok(changes)
    }
}

impl crate::engine::Engine {
    /// Drops settings that other brokers changed, in case their signals were lost.
    pub(crate) async fn refresh_settings(&self) -> Result<()> {
        let changes = self.queues.refresh().await?;
        if !matches!(&changes, SettingsChanges::Of(queues) if queues.is_empty()) {
            self.overview.names_changed();
        }
        let dispatchers = match changes {
            SettingsChanges::Unknown => self.all_dispatchers(),
            SettingsChanges::Of(queues) => {
                queues.iter().filter_map(|name| self.dispatcher(name)).collect()
            }
        };
        for dispatcher in dispatchers {
            dispatcher.inserted(None, self.now());
        }
        Ok(())
    }
}
