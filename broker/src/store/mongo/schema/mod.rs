//! What an item looks like as a document, in which collections documents lie, and by which indexes they are found.

pub(super) mod item;
pub(super) mod layout;
pub(super) mod settled;
