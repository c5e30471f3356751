//! Random choices from a seed.

use std::time::Duration;

use parking_lot::Mutex;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng, seq::SliceRandom as _};

/// A source of choices. Who draws from it alone, in a fixed order, draws the same each time.
pub(crate) struct Dice(Mutex<StdRng>);

impl Dice {
    /// Returns the source for one purpose within one cycle of a seed.
    pub(crate) fn new(seed: u64, cycle: u64, purpose: u64) -> Self {
        let mut bytes = [0; 32];
        for (place, number) in bytes.chunks_mut(8).zip([seed, cycle, purpose]) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        Self(Mutex::new(StdRng::from_seed(bytes)))
    }

    /// Returns a number from `from` to `to`, both included.
    pub(crate) fn number(&self, from: u64, to: u64) -> u64 {
        self.0.lock().random_range(from..=to)
    }

    pub(crate) fn chance(&self, probability: f64) -> bool {
        self.0.lock().random_bool(probability)
    }

    pub(crate) fn millis(&self, from: u64, to: u64) -> Duration {
        Duration::from_millis(self.number(from, to))
    }

    /// Returns one of several, of which there must be at least one.
    pub(crate) fn one_of<'a, T>(&self, choices: &'a [T]) -> &'a T {
        &choices[self.number(0, choices.len() as u64 - 1) as usize]
    }

    pub(crate) fn shuffle<T>(&self, values: &mut [T]) {
        values.shuffle(&mut *self.0.lock());
    }
}
