//! Items as documents, the collections that hold them, and the indexes that find them.

pub(super) mod indexes;
pub(super) mod item;
pub(super) mod layout;
pub(super) mod settled;
