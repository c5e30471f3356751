//! Segments: items that were pushed together, that nothing tells apart, share one document until one of them gets a fate of
//! its own. What a document costs the server goes with the number of statements, hardly with the number of items.
//!
//! # Layout
//! | file | subject |
//! |---|---|
//! | `document` | what a segment looks like |
//! | `form` | which items of a push share one |
//! | `claim` | reading items at the head of a queue, and claiming them |
//! | `settle` | committing items |
//! | `extend` | extending leases |
//! | `known` | what this broker knows of the segments of which it holds items |
//! | `detach` | giving items documents of their own |
//! | `lookup` | items by id |
//! | `listing` | items in lists |
//! | `count` | figures |
//! | `purge` | deleting all that is not reserved |
//! | `view` | items as people read them |
//!
//! # The life of a segment
//! A segment is inserted with all its items ready. From then on each of its fields changes in one direction alone:
//!
//! * `head` grows and `ready` falls: items are claimed from the front. Each claim names both as it read them, and adds a
//!   run: which items, under which lease, until when. When nothing is ready any more, `when` becomes [`CLAIMED`].
//! * bits of `done` are set and `left` falls: items leave, because they were committed or because they were detached. Whoever
//!   sets bits by a commit names the lease, and that the bits are clear.
//! * The document is deleted when nothing is left.
//!
//! Everything else that can happen to an item happens to documents of one item: the item is detached before. Detaching an
//! item gives it a document of its own, in exactly the state that the segment says, and sets its bit, in one transaction. It
//! preserves what all others can see. So it can happen at any moment, by any broker, and be repeated. Only what is never
//! told apart needs no detaching: claims of many items, and commits that leave nothing behind by the broker that claimed.
//!
//! The id of an item says which segment it may be in: see [`ItemId::block`](crate::domain::ItemId::block).
//!
//! [`CLAIMED`]: crate::store::mongo::schema::layout::CLAIMED

pub(super) mod claim;
pub(super) mod count;
pub(super) mod detach;
pub(super) mod document;
pub(super) mod extend;
pub(super) mod form;
pub(super) mod known;
pub(super) mod listing;
pub(super) mod lookup;
pub(super) mod purge;
pub(super) mod seen;
pub(super) mod settle;
pub(super) mod view;
