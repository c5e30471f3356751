//! A store around another one, for measuring, delaying or failing its calls. All methods are listed
//! once, here.

use std::{future::Future, sync::Arc, time::Duration};

use async_trait::async_trait;

use super::{
    Advance, Appeared, BrokerReport, BrokerReportStore, Capabilities, Claim, Created, Deleted,
    Extension, FiguresPlace, FiguresStore, ItemAdmin, ItemDeleted, ItemStore, KeptFigures, Links,
    Move, Operation, OperationPlace, OperationStore, Page, Purged, Push, QueueStore,
    ReceiptKeyStore, RedriveFilter, Redriven, Reservation, Reserved, Reserver, Result, Rollback,
    ScheduleStore, Selection, SettingsChanges, SettingsWatch, StatsStore, Store, StoredReceiptKey,
    TemplateStore,
};
use crate::{
    domain::{
        Demand, Depth, IdMark, Item, ItemId, ItemState, OperationId, Outcome, Pattern, Pushed,
        Queue, QueueName, QueueTemplate, Schedule, ScheduleChange, ScheduleName, Timestamp, Totals,
    },
    metrics::Metrics,
};

/// Wraps each call of a store.
pub(crate) trait Around: Send + Sync + 'static {
    /// Makes the call. `answer` does nothing before it is awaited. `call` is the method's name.
    fn around<T: Send>(
        &self,
        call: &'static str,
        answer: impl Future<Output = Result<T>> + Send,
    ) -> impl Future<Output = Result<T>> + Send;

    /// Called with the result of each successful reserve.
    fn reserved(&self, _queue: &QueueName, _reserved: &Reserved, _now: Timestamp) {}
}

/// A store all of whose calls pass through an [`Around`].
pub(crate) struct Decorated<A> {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) around: Arc<A>,
}

struct DecoratedReserver<A> {
    reserver: Box<dyn Reserver>,
    store: Arc<dyn Store>,
    around: Arc<A>,
}

#[async_trait]
impl<A: Around> Reserver for DecoratedReserver<A> {
    async fn reserve(
        &mut self,
        queue: &Arc<Queue>,
        demands: &[Demand],
        appeared: Appeared,
    ) -> Result<Reserved> {
        let reserve = self.reserver.reserve(queue, demands, appeared);
        let reserved = self.around.around("reserve", reserve).await?;
        self.around.reserved(&queue.name, &reserved, self.store.now());
        Ok(reserved)
    }

    async fn next_eligible(
        &mut self,
        queue: &Queue,
        after: Timestamp,
    ) -> Result<Option<Timestamp>> {
        self.around.around("next_eligible", self.reserver.next_eligible(queue, after)).await
    }
}

struct DecoratedWatch<A> {
    watch: Box<dyn SettingsWatch>,
    around: Arc<A>,
}

#[async_trait]
impl<A: Around> SettingsWatch for DecoratedWatch<A> {
    async fn changes(&mut self) -> Result<SettingsChanges> {
        self.around.around("settings_changes", self.watch.changes()).await
    }
}

/// Implements traits: each listed method passes through [`Around::around`] under its name. The
/// items in brackets before the list are implemented as they are.
macro_rules! pass_through {
    ($(impl $contract:ident {
        [$($own:tt)*]
        $(async fn $call:ident(&self $(, $argument:ident: $type:ty)*) -> $answer:ty;)*
    })*) => {
        $(#[async_trait]
        impl<A: Around> $contract for Decorated<A> {
            $($own)*

            $(async fn $call(&self $(, $argument: $type)*) -> $answer {
                self.around.around(stringify!($call), self.store.$call($($argument),*)).await
            })*
        })*
    };
}

pass_through! {
    impl Store {
        [
            fn describe(&self) -> String {
                self.store.describe()
            }

            fn capabilities(&self) -> Capabilities {
                self.store.capabilities()
            }

            fn now(&self) -> Timestamp {
                self.store.now()
            }

            fn broker_id(&self) -> [u8; 4] {
                self.store.broker_id()
            }

            fn measure(&self, metrics: &Arc<Metrics>) {
                self.store.measure(metrics);
            }

            async fn close(&self) {
                self.store.close().await;
            }
        ]
        async fn ping(&self) -> Result<()>;
    }

    impl ItemStore {
        [
            fn reserver(&self, queue: &QueueName) -> Box<dyn Reserver> {
                Box::new(DecoratedReserver {
                    reserver: self.store.reserver(queue),
                    store: Arc::clone(&self.store),
                    around: Arc::clone(&self.around),
                })
            }

            fn choose_id(&self) -> Option<ItemId> {
                self.store.choose_id()
            }

            fn mark(&self) -> IdMark {
                self.store.mark()
            }

            /// This is not a call with an end: it waits for something to happen.
            async fn unblocked(&self) -> Vec<QueueName> {
                self.store.unblocked().await
            }
        ]
        async fn push(&self, items: Vec<Push>) -> Result<Vec<Pushed>>;
        async fn commit(&self, items: Vec<Reservation>) -> Result<Vec<Outcome>>;
        async fn rollback(&self, items: Vec<Rollback>) -> Result<Vec<Outcome>>;
        async fn extend(&self, items: Vec<Extension>) -> Result<Vec<Outcome>>;
        async fn move_items(&self, items: Vec<Move>) -> Result<Vec<Outcome>>;
        async fn commit_and_push(
            &self,
            held: Reservation,
            items: Vec<Push>
        ) -> Result<(Outcome, Vec<Pushed>)>;
        async fn lease_ends(&self, items: Vec<Reservation>) -> Result<Vec<Option<Timestamp>>>;
    }

    impl ItemAdmin {
        []
        async fn list_items(
            &self,
            queue: &Queue,
            state: Option<ItemState>,
            cursor: Option<&str>,
            limit: usize
        ) -> Result<Page<Item>>;
        async fn get_item(&self, queue: &Queue, id: ItemId) -> Result<Option<Item>>;
        async fn delete_item(
            &self,
            queue: &Queue,
            id: ItemId,
            only_if: Option<ItemState>
        ) -> Result<ItemDeleted>;
        async fn purge(&self, queue: &Queue) -> Result<u64>;
        async fn purge_step(&self, queue: &Queue, created_by: Timestamp) -> Result<Purged>;
        async fn replay(&self, queue: &Queue, selection: &Selection, limit: u64) -> Result<u64>;
        async fn origins(&self, queue: &Queue) -> Result<Vec<QueueName>>;
        async fn redrive(
            &self,
            queue: &Queue,
            to: &Arc<Queue>,
            filter: &RedriveFilter,
            cursor: Option<&str>,
            limit: u64
        ) -> Result<Redriven>;
    }

    impl QueueStore {
        [
            fn watch_settings(&self) -> Box<dyn SettingsWatch> {
                Box::new(DecoratedWatch {
                    watch: self.store.watch_settings(),
                    around: Arc::clone(&self.around),
                })
            }
        ]
        async fn create_queue(&self, queue: &Queue) -> Result<Created<Queue>>;
        async fn get_queue(&self, name: &QueueName) -> Result<Option<Queue>>;
        async fn get_queues(&self, names: &[QueueName]) -> Result<Vec<Queue>>;
        async fn list_queues(
            &self,
            prefix: &str,
            after: Option<&QueueName>,
            limit: usize
        ) -> Result<Vec<Queue>>;
        async fn update_queue(&self, queue: &Queue) -> Result<Option<Queue>>;
        async fn links(&self) -> Result<Links>;
        async fn dead_letter_sources(&self, name: &QueueName) -> Result<Vec<Queue>>;
        async fn link_queue(&self, queue: &Queue, links: Links) -> Result<Option<Queue>>;
        async fn delete_queue(&self, queue: &Queue, force: bool, links: Links) -> Result<Deleted>;
    }

    impl StatsStore {
        []
        async fn depth(&self, queue: &Queue) -> Result<Depth>;
        async fn add_totals(&self, changes: Vec<(QueueName, Totals)>) -> Result<()>;
        async fn totals(&self, queue: &QueueName) -> Result<Totals>;
        async fn all_totals(&self) -> Result<Vec<(QueueName, Totals)>>;
        async fn lead(&self, task: &'static str, lasting: Duration) -> Result<bool>;
    }

    impl ScheduleStore {
        []
        async fn create_schedule(&self, schedule: &Schedule) -> Result<Created<Schedule>>;
        async fn get_schedule(&self, name: &ScheduleName) -> Result<Option<Schedule>>;
        async fn list_schedules(
            &self,
            after: Option<&ScheduleName>,
            limit: usize,
            payloads: bool
        ) -> Result<Vec<Schedule>>;
        async fn update_schedule(
            &self,
            name: &ScheduleName,
            change: &ScheduleChange
        ) -> Result<Option<Schedule>>;
        async fn pause_schedule(
            &self,
            name: &ScheduleName,
            paused: bool,
            done_until: Timestamp
        ) -> Result<Option<Schedule>>;
        async fn tick_done(&self, name: &ScheduleName, tick: Timestamp) -> Result<()>;
        async fn delete_schedule(&self, name: &ScheduleName) -> Result<bool>;
    }

    impl TemplateStore {
        []
        async fn create_template(&self, template: &QueueTemplate) -> Result<Created<QueueTemplate>>;
        async fn get_template(&self, pattern: &Pattern) -> Result<Option<QueueTemplate>>;
        async fn list_templates(&self) -> Result<Vec<QueueTemplate>>;
        async fn update_template(&self, template: &QueueTemplate) -> Result<Option<QueueTemplate>>;
        async fn delete_template(&self, pattern: &Pattern) -> Result<bool>;
    }

    impl ReceiptKeyStore {
        []
        async fn receipt_keys(&self) -> Result<Vec<StoredReceiptKey>>;
        async fn add_receipt_key(&self, key: &StoredReceiptKey) -> Result<()>;
    }

    impl BrokerReportStore {
        []
        async fn report_broker(&self, report: &BrokerReport, lasting: Duration) -> Result<()>;
        async fn broker_reports(&self) -> Result<Vec<BrokerReport>>;
    }

    impl OperationStore {
        []
        async fn create_operation(&self, operation: &Operation) -> Result<Created<Operation>>;
        async fn get_operation(&self, id: OperationId) -> Result<Option<Operation>>;
        async fn list_operations(
            &self,
            after: Option<OperationPlace>,
            limit: usize
        ) -> Result<Vec<Operation>>;
        async fn running_operations(&self) -> Result<u64>;
        async fn claim_operation(
            &self,
            claim: Claim,
            lasting: Duration
        ) -> Result<Option<Operation>>;
        async fn advance_operation(
            &self,
            id: OperationId,
            claim: Claim,
            advance: &Advance,
            lasting: Duration
        ) -> Result<Option<Operation>>;
        async fn cancel_operation(&self, id: OperationId) -> Result<Option<Operation>>;
        async fn delete_operations(&self, ended_before: Timestamp, keep: usize) -> Result<()>;
    }

    impl FiguresStore {
        []
        async fn keep_figures(&self, figures: &KeptFigures, lasting: Duration) -> Result<()>;
        async fn kept_figures(
            &self,
            after: Option<FiguresPlace>,
            limit: usize
        ) -> Result<Vec<KeptFigures>>;
    }
}
