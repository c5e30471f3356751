//! Implements the traits of a store for [`MongoStore`]. Each method calls the operation in the folder of its subject
//! and runs it to its end.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;

use crate::{
    domain::{
        Depth, IdMark, Item, ItemId, ItemState, OperationId, Outcome, Pattern, Pushed, Queue,
        QueueName, QueueTemplate, Schedule, ScheduleChange, ScheduleName, Timestamp, Totals,
    },
    metrics::Metrics,
    store::{
        Advance, BrokerReport, BrokerReportStore, Capabilities, Claim, Created, Deleted, Extension,
        FiguresPlace, FiguresStore, ItemAdmin, ItemDeleted, ItemStore, KeptFigures, Links, Move,
        Operation, OperationPlace, OperationStore, Page, Purged, Push, QueueStore, ReceiptKeyStore,
        RedriveFilter, Redriven, Reservation, Reserver, Result, Rollback, ScheduleStore, Selection,
        SettingsWatch, StatsStore, Store, StoredReceiptKey, TemplateStore,
        mongo::{
            MongoStore, admin,
            catalog::{self, settings_watch::MongoSettingsWatch},
            in_time, push,
            reserve::handle::MongoReserver,
            server, settle,
        },
    },
};

#[async_trait]
impl Store for MongoStore {
    fn describe(&self) -> String {
        self.inner.description.clone()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { shared: true, durable: true, one_order: false }
    }

    fn now(&self) -> Timestamp {
        self.inner.now()
    }

    fn broker_id(&self) -> [u8; 4] {
        self.inner.broker
    }

    fn measure(&self, metrics: &Arc<Metrics>) {
        let _ = self.inner.metrics.set(Arc::clone(metrics)); // the first one stays
    }

    async fn ping(&self) -> Result<()> {
        self.run(|inner| async move { catalog::queues::ping(&inner).await }).await
    }

    async fn close(&self) {
        // First the operations: those that are repeated until they succeed give up when the rest stops.
        self.inner.tracker.close();
        self.inner.tracker.wait().await;
        self.inner.stop.cancel();
        self.background.close();
        self.background.wait().await;
    }
}

#[async_trait]
impl ItemStore for MongoStore {
    async fn push(&self, items: Vec<Push>) -> Result<Vec<Pushed>> {
        self.inner.check_format()?;
        in_time(push::push(&self.inner, items)).await
    }

    fn choose_id(&self) -> Option<ItemId> {
        Some(self.inner.ids.next_block(self.inner.now()))
    }

    fn mark(&self) -> IdMark {
        self.inner.ids.mark()
    }

    fn reserver(&self, queue: &QueueName) -> Box<dyn Reserver> {
        Box::new(MongoReserver::new(Arc::clone(&self.inner), queue.clone()))
    }

    async fn commit(&self, items: Vec<Reservation>) -> Result<Vec<Outcome>> {
        self.run(|inner| async move { settle::commit::commit(&inner, items).await }).await
    }

    async fn rollback(&self, items: Vec<Rollback>) -> Result<Vec<Outcome>> {
        self.run(|inner| async move { settle::rollback::rollback(&inner, items).await }).await
    }

    async fn extend(&self, items: Vec<Extension>) -> Result<Vec<Outcome>> {
        self.run(|inner| async move { settle::lease::extend(&inner, items).await }).await
    }

    async fn move_items(&self, items: Vec<Move>) -> Result<Vec<Outcome>> {
        self.run(|inner| async move { settle::move_item::move_items(&inner, items).await }).await
    }

    async fn commit_and_push(
        &self,
        held: Reservation,
        items: Vec<Push>,
    ) -> Result<(Outcome, Vec<Pushed>)> {
        self.run(|inner| async move {
            settle::commit_and_push::commit_and_push(&inner, held, items).await
        })
        .await
    }

    async fn lease_ends(&self, items: Vec<Reservation>) -> Result<Vec<Option<Timestamp>>> {
        self.run(|inner| async move { settle::lease::lease_ends(&inner, items).await }).await
    }

    async fn unblocked(&self) -> Vec<QueueName> {
        self.inner.unblocked.take().await
    }
}

#[async_trait]
impl ItemAdmin for MongoStore {
    async fn list_items(
        &self,
        queue: &Queue,
        state: Option<ItemState>,
        cursor: Option<&str>,
        limit: usize,
    ) -> Result<Page<Item>> {
        let (queue, cursor) = (queue.clone(), cursor.map(str::to_owned));
        self.run_long(|inner| async move {
            admin::listing::list(&inner, &queue, state, cursor.as_deref(), limit).await
        })
        .await
    }

    async fn get_item(&self, queue: &Queue, id: ItemId) -> Result<Option<Item>> {
        let queue = queue.clone();
        self.run(|inner| async move { admin::items::get(&inner, &queue, id).await }).await
    }

    async fn delete_item(
        &self,
        queue: &Queue,
        id: ItemId,
        only_if: Option<ItemState>,
    ) -> Result<ItemDeleted> {
        let queue = queue.clone();
        self.run(|inner| async move { admin::items::delete(&inner, &queue, id, only_if).await })
            .await
    }

    async fn purge(&self, queue: &Queue) -> Result<u64> {
        let queue = queue.clone();
        self.run_long(|inner| async move { admin::purge::purge(&inner, &queue).await }).await
    }

    async fn purge_step(&self, queue: &Queue, created_by: Timestamp) -> Result<Purged> {
        let queue = queue.clone();
        self.run_long(
            |inner| async move { admin::purge::purge_step(&inner, &queue, created_by).await },
        )
        .await
    }

    async fn replay(&self, queue: &Queue, selection: &Selection, limit: u64) -> Result<u64> {
        let (queue, selection) = (queue.clone(), selection.clone());
        self.run_long(|inner| async move {
            admin::replay::replay(&inner, &queue, &selection, limit).await
        })
        .await
    }

    async fn origins(&self, queue: &Queue) -> Result<Vec<QueueName>> {
        let queue = queue.clone();
        self.run_long(|inner| async move { admin::redrive::origins(&inner, &queue).await }).await
    }

    async fn redrive(
        &self,
        queue: &Queue,
        to: &Arc<Queue>,
        filter: &RedriveFilter,
        cursor: Option<&str>,
        limit: u64,
    ) -> Result<Redriven> {
        let (queue, to, filter) = (queue.clone(), Arc::clone(to), filter.clone());
        let cursor = cursor.map(str::to_owned);
        self.run_long(|inner| async move {
            admin::redrive::redrive(&inner, &queue, &to, &filter, cursor.as_deref(), limit).await
        })
        .await
    }
}

#[async_trait]
impl QueueStore for MongoStore {
    async fn create_queue(&self, queue: &Queue) -> Result<Created<Queue>> {
        let queue = queue.clone();
        self.run(|inner| async move { catalog::queues::create(&inner, &queue).await }).await
    }

    async fn get_queue(&self, name: &QueueName) -> Result<Option<Queue>> {
        let name = name.clone();
        self.run(|inner| async move { catalog::queues::get(&inner, &name).await }).await
    }

    async fn get_queues(&self, names: &[QueueName]) -> Result<Vec<Queue>> {
        let names = names.to_vec();
        self.run(|inner| async move { catalog::queues::get_all(&inner, &names).await }).await
    }

    async fn list_queues(
        &self,
        prefix: &str,
        after: Option<&QueueName>,
        limit: usize,
    ) -> Result<Vec<Queue>> {
        let (prefix, after) = (prefix.to_owned(), after.cloned());
        self.run(|inner| async move {
            catalog::queues::list(&inner, &prefix, after.as_ref(), limit).await
        })
        .await
    }

    async fn update_queue(&self, queue: &Queue) -> Result<Option<Queue>> {
        let queue = queue.clone();
        self.run(|inner| async move { catalog::queues::update(&inner, &queue).await }).await
    }

    async fn links(&self) -> Result<Links> {
        self.run(|inner| async move { catalog::deletion::links(&inner).await }).await
    }

    async fn dead_letter_sources(&self, name: &QueueName) -> Result<Vec<Queue>> {
        let name = name.clone();
        self.run(|inner| async move { catalog::queues::dead_letter_sources(&inner, &name).await })
            .await
    }

    async fn link_queue(&self, queue: &Queue, links: Links) -> Result<Option<Queue>> {
        let queue = queue.clone();
        self.run(|inner| async move { catalog::deletion::link_queue(&inner, &queue, links).await })
            .await
    }

    async fn delete_queue(&self, queue: &Queue, force: bool, links: Links) -> Result<Deleted> {
        let queue = queue.clone();
        self.run_long(|inner| async move {
            catalog::deletion::delete_queue(&inner, &queue, force, links).await
        })
        .await
    }

    fn watch_settings(&self) -> Box<dyn SettingsWatch> {
        Box::new(MongoSettingsWatch::new(Arc::clone(&self.inner)))
    }
}

#[async_trait]
impl StatsStore for MongoStore {
    async fn depth(&self, queue: &Queue) -> Result<Depth> {
        let queue = queue.clone();
        self.run_long(|inner| async move { admin::stats::depth(&inner, &queue).await }).await
    }

    async fn add_totals(&self, changes: Vec<(QueueName, Totals)>) -> Result<()> {
        self.run(|inner| async move { admin::stats::add_totals(&inner, changes).await }).await
    }

    async fn totals(&self, queue: &QueueName) -> Result<Totals> {
        let queue = queue.clone();
        self.run(|inner| async move { admin::stats::totals(&inner, &queue).await }).await
    }

    async fn all_totals(&self) -> Result<Vec<(QueueName, Totals)>> {
        self.run(|inner| async move { admin::stats::all_totals(&inner).await }).await
    }

    async fn lead(&self, task: &'static str, lasting: Duration) -> Result<bool> {
        self.run(move |inner| async move { server::leader::lead(&inner, task, lasting).await })
            .await
    }
}

#[async_trait]
impl ScheduleStore for MongoStore {
    async fn create_schedule(&self, schedule: &Schedule) -> Result<Created<Schedule>> {
        let schedule = schedule.clone();
        self.run(|inner| async move { catalog::schedules::create(&inner, &schedule).await }).await
    }

    async fn get_schedule(&self, name: &ScheduleName) -> Result<Option<Schedule>> {
        let name = name.clone();
        self.run(|inner| async move { catalog::schedules::get(&inner, &name).await }).await
    }

    async fn list_schedules(
        &self,
        after: Option<&ScheduleName>,
        limit: usize,
        payloads: bool,
    ) -> Result<Vec<Schedule>> {
        let after = after.cloned();
        self.run(|inner| async move {
            catalog::schedules::list(&inner, after.as_ref(), limit, payloads).await
        })
        .await
    }

    async fn update_schedule(
        &self,
        name: &ScheduleName,
        change: &ScheduleChange,
    ) -> Result<Option<Schedule>> {
        let (name, change) = (name.clone(), change.clone());
        self.run(|inner| async move { catalog::schedules::update(&inner, &name, &change).await })
            .await
    }

    async fn pause_schedule(
        &self,
        name: &ScheduleName,
        paused: bool,
        done_until: Timestamp,
    ) -> Result<Option<Schedule>> {
        let name = name.clone();
        self.run(|inner| async move {
            catalog::schedules::pause(&inner, &name, paused, done_until).await
        })
        .await
    }

    async fn tick_done(&self, name: &ScheduleName, tick: Timestamp) -> Result<()> {
        let name = name.clone();
        self.run(|inner| async move { catalog::schedules::tick_done(&inner, &name, tick).await })
            .await
    }

    async fn delete_schedule(&self, name: &ScheduleName) -> Result<bool> {
        let name = name.clone();
        self.run(|inner| async move { catalog::schedules::delete(&inner, &name).await }).await
    }
}

#[async_trait]
impl TemplateStore for MongoStore {
    async fn create_template(&self, template: &QueueTemplate) -> Result<Created<QueueTemplate>> {
        let template = template.clone();
        self.run(|inner| async move { catalog::templates::create(&inner, &template).await }).await
    }

    async fn get_template(&self, pattern: &Pattern) -> Result<Option<QueueTemplate>> {
        let pattern = pattern.clone();
        self.run(|inner| async move { catalog::templates::get(&inner, &pattern).await }).await
    }

    async fn list_templates(&self) -> Result<Vec<QueueTemplate>> {
        self.run(|inner| async move { catalog::templates::list(&inner).await }).await
    }

    async fn update_template(&self, template: &QueueTemplate) -> Result<Option<QueueTemplate>> {
        let template = template.clone();
        self.run(|inner| async move { catalog::templates::update(&inner, &template).await }).await
    }

    async fn delete_template(&self, pattern: &Pattern) -> Result<bool> {
        let pattern = pattern.clone();
        self.run(|inner| async move { catalog::templates::delete(&inner, &pattern).await }).await
    }
}

#[async_trait]
impl ReceiptKeyStore for MongoStore {
    async fn receipt_keys(&self) -> Result<Vec<StoredReceiptKey>> {
        self.run(|inner| async move { catalog::receipt_keys::list(&inner).await }).await
    }

    async fn add_receipt_key(&self, key: &StoredReceiptKey) -> Result<()> {
        let key = key.clone();
        self.run(|inner| async move { catalog::receipt_keys::add(&inner, &key).await }).await
    }
}

#[async_trait]
impl BrokerReportStore for MongoStore {
    async fn report_broker(&self, report: &BrokerReport, lasting: Duration) -> Result<()> {
        let report = report.clone();
        self.run(|inner| async move { catalog::reports::replace(&inner, &report, lasting).await })
            .await
    }

    async fn broker_reports(&self) -> Result<Vec<BrokerReport>> {
        self.run(|inner| async move { catalog::reports::list(&inner).await }).await
    }
}

#[async_trait]
impl OperationStore for MongoStore {
    async fn create_operation(&self, operation: &Operation) -> Result<Created<Operation>> {
        let operation = operation.clone();
        self.run(|inner| async move { catalog::operations::create(&inner, &operation).await }).await
    }

    async fn get_operation(&self, id: OperationId) -> Result<Option<Operation>> {
        self.run(move |inner| async move { catalog::operations::get(&inner, id).await }).await
    }

    async fn list_operations(
        &self,
        after: Option<OperationPlace>,
        limit: usize,
    ) -> Result<Vec<Operation>> {
        self.run(move |inner| async move { catalog::operations::list(&inner, after, limit).await })
            .await
    }

    async fn running_operations(&self) -> Result<u64> {
        self.run(|inner| async move { catalog::operations::running(&inner).await }).await
    }

    async fn claim_operation(&self, claim: Claim, lasting: Duration) -> Result<Option<Operation>> {
        self.run(
            move |inner| async move { catalog::operations::claim(&inner, claim, lasting).await },
        )
        .await
    }

    async fn advance_operation(
        &self,
        id: OperationId,
        claim: Claim,
        advance: &Advance,
        lasting: Duration,
    ) -> Result<Option<Operation>> {
        let advance = advance.clone();
        self.run(move |inner| async move {
            catalog::operations::advance(&inner, id, claim, &advance, lasting).await
        })
        .await
    }

    async fn cancel_operation(&self, id: OperationId) -> Result<Option<Operation>> {
        self.run(move |inner| async move { catalog::operations::cancel(&inner, id).await }).await
    }

    async fn delete_operations(&self, ended_before: Timestamp, keep: usize) -> Result<()> {
        self.run(move |inner| async move {
            catalog::operations::delete(&inner, ended_before, keep).await
        })
        .await
    }
}

#[async_trait]
impl FiguresStore for MongoStore {
    async fn keep_figures(&self, figures: &KeptFigures, lasting: Duration) -> Result<()> {
        let kept = figures.clone();
        self.run(|inner| async move { catalog::figures::keep(&inner, &kept, lasting).await }).await
    }

    async fn kept_figures(
        &self,
        after: Option<FiguresPlace>,
        limit: usize,
    ) -> Result<Vec<KeptFigures>> {
        self.run(|inner| async move { catalog::figures::list(&inner, after, limit).await }).await
    }
}
