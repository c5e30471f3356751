//! TemplateService: settings of queues that come into being by use.

use std::sync::Arc;

use sluicegate_proto::v1::{self as pb, template_service_server::TemplateService};
use tonic::{Request, Response, Status};

use super::{Api, admin_service::may_lead_to, caller, convert, may_create, pages, parse};
use crate::{
    domain::{
        Action::{Manage, View},
        Pattern, QueueName, QueueTemplate,
    },
    engine::Engine,
};

/// How many templates a page has if the caller does not say.
const TEMPLATES_PER_PAGE: usize = 100;

#[tonic::async_trait]
impl TemplateService for Api {
    async fn create_template(
        &self,
        request: Request<pb::CreateTemplateRequest>,
    ) -> Result<Response<pb::CreateTemplateResponse>, Status> {
        let caller = caller(&request)?;
        if let Some(template) = &request.get_ref().template {
            caller.may(Manage, &template.pattern)?;
            let to = template.settings.as_ref().map(|settings| settings.dead_letter_queue.as_str());
            may_lead_to(&caller, to.unwrap_or_default())?;
        }
        let template = request.into_inner().template;
        let (pattern, settings) = parse::template(template, &self.rules())?;
        let to = settings.dead_letter_queue.clone();
        let create = |engine: Arc<Engine>| async move {
            // The first push to a queue of the template creates it.
            let _place = engine.place_by_use(to.as_ref(), &may_create(&caller)).await?;
            engine.create_template(pattern, settings).await
        };
        let template = Some(convert::template(&self.run(create).await?));
        Ok(Response::new(pb::CreateTemplateResponse { template }))
    }

    async fn get_template(
        &self,
        request: Request<pb::GetTemplateRequest>,
    ) -> Result<Response<pb::GetTemplateResponse>, Status> {
        caller(&request)?.may(View, &request.get_ref().pattern)?;
        let pattern = parse::pattern("pattern", &request.get_ref().pattern)?;
        let template =
            self.run(|engine| async move { engine.get_template(&pattern).await }).await?;
        let template = Some(convert::template(&template));
        Ok(Response::new(pb::GetTemplateResponse { template }))
    }

    async fn list_templates(
        &self,
        request: Request<pb::ListTemplatesRequest>,
    ) -> Result<Response<pb::ListTemplatesResponse>, Status> {
        let caller = caller(&request)?;
        let pb::ListTemplatesRequest { page_size, page_token } = request.into_inner();
        let keys = self.engine.receipt_keys();
        let page = pages::request(&keys, page_size, page_token, TEMPLATES_PER_PAGE)?;
        let after = page.after(parse::pattern)?;
        // There are so few that they are read at once.
        let all = self.run(|engine| async move { engine.list_templates().await }).await?;
        let read = |after: Option<Pattern>, _| {
            let is_behind = |one: &&QueueTemplate| Some(&one.pattern) > after.as_ref();
            let behind = all.iter().filter(is_behind).cloned().collect();
            std::future::ready(Ok(behind))
        };
        let shown = |template: QueueTemplate| {
            let is_visible = caller.allows(View, template.pattern.as_str());
            is_visible.then(|| convert::template(&template))
        };
        let name = |template: &QueueTemplate| template.pattern.clone();
        let (templates, next_page_token) =
            pages::list(&keys, &page, after, usize::MAX, read, name, shown).await?;
        Ok(Response::new(pb::ListTemplatesResponse { templates, next_page_token }))
    }

    async fn update_template(
        &self,
        request: Request<pb::UpdateTemplateRequest>,
    ) -> Result<Response<pb::UpdateTemplateResponse>, Status> {
        let caller = caller(&request)?;
        let pb::UpdateTemplateRequest { template, update_mask } = request.into_inner();
        let pattern = template.as_ref().map(|template| template.pattern.as_str());
        caller.may(Manage, pattern.unwrap_or_default())?;
        let change = parse::template_change(template, update_mask, &self.rules())?;
        may_lead_to(&caller, change.dead_letter_queue.as_deref().unwrap_or_default())?;
        let to = change.dead_letter_queue.as_deref();
        let to = to.and_then(|to| QueueName::parse("dead_letter_queue", to).ok());
        let update = |engine: Arc<Engine>| async move {
            let _place = engine.place_by_use(to.as_ref(), &may_create(&caller)).await?;
            engine.update_template(&change.pattern, &change.settings).await
        };
        let template = Some(convert::template(&self.run(update).await?));
        Ok(Response::new(pb::UpdateTemplateResponse { template }))
    }

    async fn delete_template(
        &self,
        request: Request<pb::DeleteTemplateRequest>,
    ) -> Result<Response<pb::DeleteTemplateResponse>, Status> {
        caller(&request)?.may(Manage, &request.get_ref().pattern)?;
        let pattern = parse::pattern("pattern", &request.get_ref().pattern)?;
        self.run(|engine| async move { engine.delete_template(&pattern).await }).await?;
        Ok(Response::new(pb::DeleteTemplateResponse {}))
    }
}
