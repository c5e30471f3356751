//! ScheduleService: recurring items.

use std::sync::Arc;

use sluicegate_proto::v1::{self as pb, schedule_service_server::ScheduleService};
use tonic::{Request, Response, Status};

use super::{Api, caller, convert, may_create, pages, parse};
use crate::{
    access::Caller,
    domain::{Action::Manage, Schedule, ScheduleName},
    engine::{Engine, EngineError},
};

/// How many schedules a page has if the caller does not say.
const SCHEDULES_PER_PAGE: usize = 100;
/// Number of schedules read from the store at a time. Each may hold a payload.
const SCHEDULES_PER_READ: usize = 20;

#[tonic::async_trait]
impl ScheduleService for Api {
    async fn create_schedule(
        &self,
        request: Request<pb::CreateScheduleRequest>,
    ) -> Result<Response<pb::CreateScheduleResponse>, Status> {
        let caller = caller(&request)?;
        if let Some(schedule) = &request.get_ref().schedule {
            caller.may(Manage, &schedule.queue)?;
        }
        let schedule = parse::schedule(request.into_inner().schedule, &self.rules())?;
        let create = |engine: Arc<Engine>| async move {
            let may_create = may_create(&caller);
            let _place = engine.place_by_use(Some(&schedule.queue), &may_create).await?;
            engine.create_schedule(schedule).await
        };
        let schedule = self.run(create).await?;
        let schedule = Some(self.shown(schedule));
        Ok(Response::new(pb::CreateScheduleResponse { schedule }))
    }

    async fn get_schedule(
        &self,
        request: Request<pb::GetScheduleRequest>,
    ) -> Result<Response<pb::GetScheduleResponse>, Status> {
        let caller = caller(&request)?;
        let schedule = self.schedule_of(&caller, &request.get_ref().name).await?;
        let schedule = Some(self.shown(schedule));
        Ok(Response::new(pb::GetScheduleResponse { schedule }))
    }

    async fn list_schedules(
        &self,
        request: Request<pb::ListSchedulesRequest>,
    ) -> Result<Response<pb::ListSchedulesResponse>, Status> {
        let caller = caller(&request)?;
        let pb::ListSchedulesRequest { page_size, page_token } = request.into_inner();
        let keys = self.engine.receipt_keys();
        let page = pages::request(&keys, page_size, page_token, SCHEDULES_PER_PAGE)?;
        let after = page.after(ScheduleName::parse)?;
        let read = |after: Option<ScheduleName>, step| {
            self.run(move |engine| async move { engine.list_schedules(after.as_ref(), step).await })
        };
        let shown = |schedule: Schedule| {
            let is_visible = caller.allows(Manage, schedule.queue.as_str());
            is_visible.then(|| self.shown(schedule))
        };
        let name = |schedule: &Schedule| schedule.name.clone();
        let (schedules, next_page_token) =
            pages::list(&keys, &page, after, SCHEDULES_PER_READ, read, name, shown).await?;
        Ok(Response::new(pb::ListSchedulesResponse { schedules, next_page_token }))
    }

    async fn update_schedule(
        &self,
        request: Request<pb::UpdateScheduleRequest>,
    ) -> Result<Response<pb::UpdateScheduleResponse>, Status> {
        let caller = caller(&request)?;
        let pb::UpdateScheduleRequest { schedule, update_mask } = request.into_inner();
        let name = schedule.as_ref().map(|schedule| schedule.name.clone()).unwrap_or_default();
        self.schedule_of(&caller, &name).await?;
        let (name, change) = parse::schedule_change(schedule, update_mask, &self.rules())?;
        if let Some(queue) = &change.queue {
            caller.may(Manage, queue.as_str())?;
        }
        let update = |engine: Arc<Engine>| async move {
            let to = change.queue.clone();
            let _place = engine.place_by_use(to.as_ref(), &may_create(&caller)).await?;
            engine.update_schedule(&name, change).await
        };
        let schedule = Some(self.shown(self.run(update).await?));
        Ok(Response::new(pb::UpdateScheduleResponse { schedule }))
    }

    async fn trigger_schedule(
        &self,
        request: Request<pb::TriggerScheduleRequest>,
    ) -> Result<Response<pb::TriggerScheduleResponse>, Status> {
        let caller = caller(&request)?;
        let pb::TriggerScheduleRequest { name, request_id } = request.into_inner();
        parse::request_id(&request_id)?;
        let name = self.schedule_of(&caller, &name).await?.name;
        let push =
            |engine: Arc<Engine>| async move { engine.trigger_schedule(&name, &request_id).await };
        let result = convert::pushed(vec![self.run(push).await?]).pop();
        Ok(Response::new(pb::TriggerScheduleResponse { result }))
    }

    async fn delete_schedule(
        &self,
        request: Request<pb::DeleteScheduleRequest>,
    ) -> Result<Response<pb::DeleteScheduleResponse>, Status> {
        let caller = caller(&request)?;
        let name = self.schedule_of(&caller, &request.get_ref().name).await?.name;
        self.run(|engine| async move { engine.delete_schedule(&name).await }).await?;
        Ok(Response::new(pb::DeleteScheduleResponse {}))
    }

    async fn pause_schedule(
        &self,
        request: Request<pb::PauseScheduleRequest>,
    ) -> Result<Response<pb::PauseScheduleResponse>, Status> {
        let schedule =
            Some(self.set_schedule_paused(&request, &request.get_ref().name, true).await?);
        Ok(Response::new(pb::PauseScheduleResponse { schedule }))
    }

    async fn resume_schedule(
        &self,
        request: Request<pb::ResumeScheduleRequest>,
    ) -> Result<Response<pb::ResumeScheduleResponse>, Status> {
        let schedule =
            Some(self.set_schedule_paused(&request, &request.get_ref().name, false).await?);
        Ok(Response::new(pb::ResumeScheduleResponse { schedule }))
    }
}

impl Api {
    fn shown(&self, schedule: Schedule) -> pb::Schedule {
        let next = self.engine.next_ticks(&schedule);
        let error = self.engine.tick_error(&schedule).unwrap_or_default();
        convert::schedule(schedule, next, error)
    }

    /// Returns a schedule, if the caller may manage its queue. For others it is not there: the request names no queue, and
    /// a refusal would tell them which one it is. The answer holds until somebody deletes the schedule and makes one of the
    /// same name for another queue.
    async fn schedule_of(&self, caller: &Caller, name: &str) -> Result<Schedule, Status> {
        let name = ScheduleName::parse("name", name)?;
        let schedule = self.run(|engine| async move { engine.get_schedule(&name).await }).await?;
        if caller.may(Manage, schedule.queue.as_str()).is_err() {
            return Err(EngineError::ScheduleNotFound(schedule.name).into());
        }
        Ok(schedule)
    }

    async fn set_schedule_paused<T>(
        &self,
        request: &Request<T>,
        name: &str,
        paused: bool,
    ) -> Result<pb::Schedule, Status> {
        let name = self.schedule_of(&caller(request)?, name).await?.name;
        let schedule =
            self.run(|engine| async move { engine.pause_schedule(&name, paused).await }).await?;
        Ok(self.shown(schedule))
    }
}
