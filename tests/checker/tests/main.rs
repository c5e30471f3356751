//! The checker is checked: histories that are right and histories that are wrong.

mod faults;
mod files;
mod promises;
mod schedules;
mod speed;
mod story;
