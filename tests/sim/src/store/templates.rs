//! Templates of queues.

use async_trait::async_trait;
use sluicegate_broker::{
    domain::{Pattern, QueueTemplate},
    store::{Created, Result, TemplateStore},
};

use super::{Link, ModelStore, world::World};

impl World {
    pub(super) fn create_template(&mut self, template: &QueueTemplate) -> Created<QueueTemplate> {
        if let Some(existing) = self.templates.get(&template.pattern) {
            return Created::Existing(existing.clone());
        }
        let new = QueueTemplate { revision: 1, ..template.clone() };
        self.templates.insert(new.pattern.clone(), new.clone());
        Created::New(new)
    }

    pub(super) fn update_template(&mut self, template: &QueueTemplate) -> Option<QueueTemplate> {
        let is_current = |there: &&mut QueueTemplate| there.revision == template.revision;
        let there = self.templates.get_mut(&template.pattern).filter(is_current)?;
        there.settings = template.settings.clone();
        there.update_time = template.update_time;
        there.revision += 1;
        Some(there.clone())
    }

    pub(super) fn delete_template(&mut self, pattern: &Pattern) -> bool {
        self.templates.remove(pattern).is_some()
    }
}

#[async_trait]
impl<L: Link> TemplateStore for ModelStore<L> {
    async fn create_template(&self, template: &QueueTemplate) -> Result<Created<QueueTemplate>> {
        self.inner.call("create_template", |world, _| world.create_template(template)).await
    }

    async fn get_template(&self, pattern: &Pattern) -> Result<Option<QueueTemplate>> {
        self.inner.call("get_template", |world, _| world.templates.get(pattern).cloned()).await
    }

    async fn list_templates(&self) -> Result<Vec<QueueTemplate>> {
        let list = |world: &mut World, _| world.templates.values().cloned().collect();
        self.inner.call("list_templates", list).await
    }

    async fn update_template(&self, template: &QueueTemplate) -> Result<Option<QueueTemplate>> {
        self.inner.call("update_template", |world, _| world.update_template(template)).await
    }

    async fn delete_template(&self, pattern: &Pattern) -> Result<bool> {
        self.inner.call("delete_template", |world, _| world.delete_template(pattern)).await
    }
}
