//! Settings of queues, remembered. What is remembered is at most a second old: a task compares the
//! store's settings version twice a second, and signals make it quicker.

use std::{collections::HashMap, sync::Arc};

use parking_lot::{Mutex, RwLock};

use crate::{
    domain::{Queue, QueueName},
    store::{Created, SettingsVersion, Store},
};

use super::{EngineError, Result};

pub(super) struct Queues {
    store: Arc<dyn Store>,
    auto_create: bool,
    known: RwLock<Known>,
    version: Mutex<Option<SettingsVersion>>,
}

#[derive(Default)]
struct Known {
    queues: HashMap<QueueName, Arc<Queue>>,
    /// Grows whenever something is forgotten: a read begun before must not be remembered after.
    generation: u64,
}

impl Queues {
    pub(super) fn new(store: Arc<dyn Store>, auto_create: bool) -> Self {
        Self { store, auto_create, known: RwLock::default(), version: Mutex::default() }
    }

    /// The queue's settings; `QueueNotFound` if it is not there.
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

    /// The queue's settings; makes it if it is not there and that is allowed. True if it is new.
    pub(super) async fn get_or_create(&self, name: &QueueName) -> Result<(Arc<Queue>, bool)> {
        match self.get(name).await {
            Err(EngineError::QueueNotFound(_)) if self.auto_create => {
                let wanted = Queue::with_defaults(name.clone(), self.store.now());
                let generation = self.known.read().generation;
                Ok(match self.store.create_queue(&wanted).await? {
                    Created::New(queue) => (self.remember(queue, generation), true),
                    Created::Existing(queue) => (self.remember(queue, generation), false),
                })
            }
            other => other.map(|queue| (queue, false)),
        }
    }

    /// The queue's settings if they are remembered.
    pub(super) fn known(&self, name: &QueueName) -> Option<Arc<Queue>> {
        self.known.read().queues.get(name).cloned()
    }

    fn remember(&self, queue: Queue, generation: u64) -> Arc<Queue> {
        let queue = Arc::new(queue);
        let mut known = self.known.write();
        if known.generation == generation {
            known.queues.insert(queue.name.clone(), Arc::clone(&queue));
        }
        queue
    }

    /// Puts in what this broker itself just wrote.
    pub(super) fn replace(&self, queue: Queue) {
        let mut known = self.known.write();
        known.generation += 1;
        known.queues.insert(queue.name.clone(), Arc::new(queue));
    }

    pub(super) fn forget(&self, name: &QueueName) {
        let mut known = self.known.write();
        known.generation += 1;
        known.queues.remove(name);
    }

    pub(super) fn forget_all(&self) {
        let mut known = self.known.write();
        known.generation += 1;
        known.queues.clear();
    }

    /// Forgets what is remembered if anything may have changed in the store since the last call; true
    /// if so.
    pub(super) async fn refresh(&self) -> Result<bool> {
        let version = self.store.settings_version().await?;
        let before = self.version.lock().replace(version);
        // What was remembered before the first call may be older than the version it found.
        let changed = before != Some(version);
        if changed {
            self.forget_all();
        }
        Ok(changed)
    }
}

impl super::Engine {
    /// Notices settings that other brokers changed, should their signals be lost.
    pub async fn refresh_settings(&self) -> Result<()> {
        if self.queues.refresh().await? {
            self.overview.names_changed();
            for dispatcher in self.all_dispatchers() {
                dispatcher.inserted(None, self.now());
            }
        }
        Ok(())
    }
}
