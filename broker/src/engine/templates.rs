//! Operator calls about templates of queues. `created_by_use` uses them.

use super::{
    Engine, EngineError, Result,
    admin::{UPDATE_TRIES, pause_before},
};
use crate::{
    domain::{Invalid, Pattern, Queue, QueueTemplate, limits::MAX_TEMPLATES},
    store::Created,
};

impl Engine {
    /// Creates a template. If a template with the same pattern and settings exists, that template is returned.
    pub(crate) async fn create_template(
        &self,
        pattern: Pattern,
        settings: Queue,
    ) -> Result<QueueTemplate> {
        self.check_open()?;
        self.check_template(&settings)?;
        let now = self.now();
        let wanted =
            QueueTemplate { pattern, settings, create_time: now, update_time: now, revision: 0 };
        let _turn = self.turn_to_add().await?;
        let all = self.store.list_templates().await?;
        if all.len() >= MAX_TEMPLATES && all.iter().all(|one| one.pattern != wanted.pattern) {
            return Err(EngineError::TooManyTemplates(MAX_TEMPLATES));
        }
        match self.store.create_template(&wanted).await? {
            Created::New(template) => Ok(template),
            Created::Existing(there) if there.settings == wanted.settings => Ok(there),
            Created::Existing(there) => Err(EngineError::TemplateExists(there.pattern)),
        }
    }

    /// Returns a template.
    pub(crate) async fn get_template(&self, pattern: &Pattern) -> Result<QueueTemplate> {
        let template = self.store.get_template(pattern).await?;
        template.ok_or_else(|| EngineError::TemplateNotFound(pattern.clone()))
    }

    /// Returns all templates in the order of their patterns.
    pub(crate) async fn list_templates(&self) -> Result<Vec<QueueTemplate>> {
        Ok(self.store.list_templates().await?)
    }

    /// Changes a template's settings.
    pub(crate) async fn update_template(
        &self,
        pattern: &Pattern,
        change: &(dyn Fn(&mut Queue) -> Result<(), Invalid> + Send + Sync),
    ) -> Result<QueueTemplate> {
        self.check_open()?;
        for tries in 0..UPDATE_TRIES {
            pause_before(tries).await;
            let before = self.get_template(pattern).await?;
            // A change of a part of the retry policy begins with the policy in force.
            let defaults = self.limits.failure_defaults.clone();
            let mut settings = Queue { defaults, ..before.settings.clone() };
            change(&mut settings)?;
            settings.defaults = before.settings.defaults.clone();
            if settings == before.settings {
                return Ok(before);
            }
            self.check_template(&settings)?;
            let wanted = QueueTemplate { settings, update_time: self.now(), ..before };
            if let Some(template) = self.store.update_template(&wanted).await? {
                return Ok(template);
            }
        }
        Err(EngineError::TemplateConflict(pattern.clone()))
    }

    /// Deletes a template.
    pub(crate) async fn delete_template(&self, pattern: &Pattern) -> Result<()> {
        self.check_open()?;
        if self.store.delete_template(pattern).await? {
            return Ok(());
        }
        Err(EngineError::TemplateNotFound(pattern.clone()))
    }

    fn check_template(&self, settings: &Queue) -> Result<(), Invalid> {
        self.check_settings(settings).map_err(|e| e.within("template.settings"))
    }
}
