//! The choices of a simulation, all from its seed.

use std::{cell::Cell, sync::Arc, time::Duration};

use parking_lot::Mutex;

/// Returns the next state and number of SplitMix64.
pub(crate) fn split_mix(state: u64) -> (u64, u64) {
    let state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (state, mixed ^ (mixed >> 31))
}

/// Draws the choices of one part of a simulation. Clones draw from the same sequence.
#[derive(Clone)]
pub(crate) struct Dice(Arc<Mutex<Cell<u64>>>);

impl Dice {
    /// Returns the dice of a part with this number.
    pub(crate) fn new(seed: u64, part: u64) -> Self {
        let (_, state) = split_mix(seed ^ part.rotate_right(8));
        Self(Arc::new(Mutex::new(Cell::new(state))))
    }

    fn draw(&self) -> u64 {
        let cell = self.0.lock();
        let (state, number) = split_mix(cell.get());
        cell.set(state);
        number
    }

    /// Returns true with this probability.
    pub(crate) fn chance(&self, probability: f64) -> bool {
        probability > 0.0 && ((self.draw() >> 11) as f64) < probability * (1_u64 << 53) as f64
    }

    /// Returns a number from `from` to `to`, both included.
    pub(crate) fn number(&self, from: u64, to: u64) -> u64 {
        from + self.draw() % (to - from + 1)
    }

    /// Returns a time in milliseconds, from `from` to `to`.
    pub(crate) fn millis(&self, from: u64, to: u64) -> Duration {
        Duration::from_millis(self.number(from, to))
    }

    /// Returns one of these, if there are any.
    pub(crate) fn one_of<'a, T>(&self, all: &'a [T]) -> Option<&'a T> {
        let last = all.len().checked_sub(1)? as u64;
        all.get(self.number(0, last) as usize)
    }
}
