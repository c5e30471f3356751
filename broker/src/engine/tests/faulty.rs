//! A store whose calls can be delayed and made to fail, before or after they take effect.

use std::{collections::HashMap, time::Duration};

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::store::{Result, StoreError, decorator::Around};

/// What happens to the calls of one method.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Fault {
    #[default]
    None,
    /// Calls take effect, but return only when the fault is gone.
    HeldAfter,
    /// Calls do not take effect before the fault is gone.
    HeldBefore,
    /// Calls fail without effect.
    Fails,
    /// They take effect, and their answers are lost.
    AnswerLost,
    /// They panic.
    Panics,
}

/// The faults to apply, and the calls seen.
#[derive(Default)]
pub(super) struct Faults {
    wanted: watch::Sender<HashMap<&'static str, Fault>>,
    /// For each method, the number of calls that have begun and the number that have taken effect.
    calls: Mutex<HashMap<&'static str, (usize, usize)>>,
    seen: watch::Sender<()>,
}

impl Faults {
    /// Sets the fault for all following calls of a method.
    pub(super) fn set(&self, call: &'static str, fault: Fault) {
        self.wanted.send_modify(|faults| _ = faults.insert(call, fault));
    }

    /// Returns how many calls of a method have begun.
    pub(super) fn begun(&self, call: &'static str) -> usize {
        self.calls.lock().get(call).map_or(0, |calls| calls.0)
    }

    /// Returns how many calls of a method have taken effect.
    pub(super) fn done(&self, call: &'static str) -> usize {
        self.calls.lock().get(call).map_or(0, |calls| calls.1)
    }

    /// Waits until `count` calls of a method have begun.
    pub(super) async fn until_begun(&self, call: &'static str, count: usize) {
        self.until(|| self.begun(call) >= count).await;
    }

    /// Waits until `count` calls of a method have taken effect.
    pub(super) async fn until_done(&self, call: &'static str, count: usize) {
        self.until(|| self.done(call) >= count).await;
    }

    async fn until(&self, is_so: impl Fn() -> bool) {
        let mut seen = self.seen.subscribe();
        let waiting = async {
            while !is_so() {
                seen.changed().await.unwrap();
            }
        };
        tokio::time::timeout(Duration::from_mins(1), waiting).await.expect("the call comes");
    }

    fn fault(&self, call: &'static str) -> Fault {
        self.wanted.borrow().get(call).copied().unwrap_or_default()
    }

    async fn gone(&self, call: &'static str, fault: Fault) {
        let mut faults = self.wanted.subscribe();
        let is_gone = |faults: &HashMap<_, _>| faults.get(call).copied() != Some(fault);
        faults.wait_for(is_gone).await.unwrap();
    }
}

impl Around for Faults {
    async fn around<T: Send>(
        &self,
        call: &'static str,
        answer: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        self.calls.lock().entry(call).or_default().0 += 1;
        self.seen.send_replace(());
        self.gone(call, Fault::HeldBefore).await;
        let failed = || StoreError::Unavailable { reason: "as the test asks".into(), source: None };
        match self.fault(call) {
            Fault::Fails => return Err(failed()),
            Fault::Panics => panic!("{call} panics"),
            _ => {}
        }
        let answer = answer.await;
        self.calls.lock().entry(call).or_default().1 += 1;
        self.seen.send_replace(());
        self.gone(call, Fault::HeldAfter).await;
        if self.fault(call) == Fault::AnswerLost { Err(failed()) } else { answer }
    }
}
