//! The one suite for all stores: whoever writes a backend runs it. It comes with the feature `conformance`.
//!
//! Each test is a plain function over an [`Env`], which knows two brokers on one empty store and a clock that tests can move.
//! [`conformance!`] makes a test of every one of them, so that no backend can leave one out (the broker's own stores are
//! tested by it, and a function that is not in its list would be dead code). In the crate of a backend, with `tokio`
//! (features `macros`, `rt-multi-thread`) among the dev-dependencies:
//!
//! ```text
//! use sluicegate_broker::{domain::Clock, store::conformance::{Env, conformance}};
//!
//! async fn open() -> Env {
//!     let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
//!     // Two brokers on the same data, or one and the same where there can be only one.
//!     let store = Arc::new(scratch.open(&clock).await);
//!     let other = Arc::new(scratch.open(&clock).await);
//!     // What the store does by itself now and then, done at once.
//!     let upkeep = { let store = store.clone(); move || { let store = store.clone(); async move { store.upkeep().await } } };
//!     Env::new(store, other, clock, upkeep, scratch)
//! }
//!
//! conformance!(open);
//! ```
//!
//! A store takes its time from the clock it is given, which the tests advance, and must not expire or sweep anything by
//! itself while they run.
// The name of a test says what it tests; all tests are `async`, and written in the words of `env`.
#![allow(missing_docs, clippy::unused_async, clippy::wildcard_imports)]

mod broker;
mod env;

pub mod admin;
pub mod dead_letter;
pub mod dedup;
pub mod deletion;
pub mod history;
pub mod keys;
pub mod large;
pub mod model;
pub mod moves;
pub mod push;
pub mod redrive;
pub mod reserve;
pub mod settings;
pub mod settle;
pub mod stats;

pub use broker::Broker;
pub use env::Env;

/// Makes a test of every function of the suite; see [`store::conformance`](crate::store::conformance).
#[macro_export]
macro_rules! conformance {
    ($open:path) => {
        $crate::conformance! { @tests $open;
            admin {
                lists_are_in_order_and_of_the_state_asked_for
                pages_add_up_to_the_list
                a_cursor_survives_changes_in_between
                an_invented_cursor_is_refused
                depth_counts_every_state
                depth_counts_deep_queues_too
                the_oldest_ready_item_is_the_first_in_hand_out_order
                items_are_of_their_queue
                items_of_every_state_can_be_deleted
                an_item_in_another_state_than_asked_for_is_not_deleted
                a_purge_spares_what_is_reserved
                a_purge_of_thousands_is_complete
            }
            dead_letter {
                lapsed_leases_lead_there_at_exactly_the_limit
                rollbacks_and_lapses_count_alike
                a_lapsed_last_attempt_still_commits
                a_buried_item_is_as_it_was
                a_queue_that_discards_drops_items_at_the_limit
                dropped_items_become_history_where_that_is_kept
                zero_attempts_means_no_limit
                the_dead_do_not_hide_the_living
                items_at_a_limit_stay_while_it_is_unknown_where_they_go
                a_limit_with_nowhere_to_go_has_no_effect
                an_item_handed_out_as_often_as_allowed_is_dead_lettered
                deliveries_are_counted_from_an_items_arrival
            }
            dedup {
                a_repeated_push_answers_with_the_first
                ids_are_of_their_queue
                duplicates_within_one_batch_count
                racing_pushes_store_one
                an_id_outlives_its_item
                an_id_in_history_is_known
                an_id_survives_move_and_dead_letter
                an_id_survives_its_items_expiry
                an_id_is_forgotten_when_its_window_ends
                a_tombstone_is_forgotten_when_its_window_ends
                a_push_can_have_a_window_of_its_own
                a_deleted_item_takes_its_id_along
                duplicates_take_no_sequence_number_and_block_nobody
            }
            deletion {
                an_answered_push_is_never_lost_beside_deletions
                a_queue_that_holds_items_is_deleted_only_by_force
                links_change_one_at_a_time
                a_push_that_lands_after_the_deletion_brings_its_queue_back
            }
            stats {
                totals_add_up_over_brokers
                all_totals_are_read_at_once
                a_task_has_one_leader_at_a_time
                a_queue_may_come_twice_in_a_change_of_totals
                the_store_lives_and_says_where
                a_sound_queue_needs_no_upkeep
                an_abandoned_call_harms_nobody
            }
            history {
                committed_items_are_kept_as_long_as_asked
                replay_by_id_makes_items_ready_again
                replay_by_time_takes_the_oldest_first
                a_long_history_is_replayed_in_full
            }
            keys {
                one_at_a_time_in_order
                keys_do_not_wait_for_each_other
                the_same_key_in_two_queues_is_two_keys
                a_thousand_blocked_items_come_in_order
                a_retry_keeps_its_key_waiting
                a_dead_letter_passes_the_turn_on
                a_settled_dead_letter_gives_no_turn_away
                a_dropped_item_passes_the_turn_on
                a_deleted_item_passes_the_turn_on
                an_expired_item_passes_the_turn_on
                an_item_that_expires_under_its_lease_passes_the_turn_on
                an_item_unblocked_waits_for_its_own_time
                priority_does_not_break_the_order_of_a_key
                a_replayed_item_waits_for_its_turn
                a_moved_item_passes_the_turn_on_and_takes_its_place
                racing_pushes_of_one_key_leave_one_ready
            }
            large {
                large_items_at_the_head_do_not_hide_those_behind_them
                a_page_of_large_items_says_that_there_are_more
                schedules_with_large_items_are_all_listed
                a_thousand_items_with_large_headers_are_told_apart
            }
            model {
                random_sequences_agree_with_the_model
            }
            moves {
                a_moved_item_keeps_what_it_is
                a_move_may_change_the_content
                an_empty_payload_is_a_new_payload
                move_results_are_exact_in_a_mixed_batch
                a_move_to_its_own_queue_starts_anew
                a_move_takes_the_numbers_of_its_new_queue
                a_lease_that_lapses_after_a_move_fails_in_the_new_queue
                a_commit_and_its_pushes_are_one_step
                a_commit_and_push_keeps_history_and_passes_the_turn_on
            }
            push {
                a_pushed_item_is_stored_as_it_was_given
                an_empty_item_is_an_item
                an_empty_call_is_no_error
                queues_and_groups_share_a_call
                answered_pushes_are_seen_by_the_other_broker
                concurrent_pushes_each_get_their_own_answer
                calls_that_one_task_starts_are_stored_in_that_order
                calls_that_one_task_starts_become_visible_in_that_order
                nothing_is_delivered_before_its_time
                an_eligible_time_that_is_past_means_now
                nothing_is_delivered_after_its_end
                a_receipt_of_an_expired_item_is_gone
                sequences_grow_in_the_order_of_answers
            }
            redrive {
                dead_letters_go_home
                all_conditions_of_a_filter_hold
                a_limit_takes_the_head
                only_ready_items_are_redriven
                thousands_are_redriven_in_order
                a_key_is_in_force_again
                what_fails_again_meanwhile_is_not_redriven_again
            }
            reserve {
                items_are_handed_out_in_the_order_of_their_pushes
                priority_comes_before_age
                a_delayed_urgent_item_holds_up_nobody
                delayed_items_queue_by_eligible_time
                a_delivery_says_all_about_its_lease
                a_reserved_item_tells_since_when_it_was_due
                whoever_consumes_next_needs_no_hint
                wants_share_and_keep_their_bounds
                bytes_are_bounded_but_a_large_item_gets_through
                more_is_true_while_there_is_more
                small_reserves_in_a_row_miss_nothing
                nothing_wanted_nothing_reserved
                two_valid_leases_never_overlap
                a_lapsed_lease_is_a_failed_attempt
                expired_items_met_on_the_way_are_told
                many_expired_items_are_removed_in_large_steps
                many_lapsed_leases_come_back_in_order
                thousands_of_lapsed_leases_come_back_in_order
                the_next_eligible_time_is_that_of_delays_and_leases
            }
            settings {
                a_queue_is_as_it_was_created
                racing_creations_make_one_queue
                queues_are_listed_by_name
                updates_are_fenced_by_the_revision
                settings_that_change_are_told_once
                a_deleted_queue_leaves_nothing_behind
                schedules_are_kept
                ticks_are_noted_once_and_in_order
            }
            settle {
                a_committed_item_is_gone_for_good
                the_other_broker_settles_as_well
                a_lapsed_lease_still_settles
                a_stale_receipt_changes_nothing
                a_receipt_given_back_is_lost
                results_are_exact_in_a_mixed_batch
                rollback_results_are_exact_in_a_mixed_batch
                receipts_crossed_over_settle_nothing
                a_stale_receipt_beside_good_ones_settles_nothing
                an_invented_receipt_settles_nothing
                a_receipt_named_twice_in_a_call_settles_once
                a_rollback_says_when_and_why
                what_was_never_sent_goes_back_to_its_place
                an_extended_lease_ends_when_it_says
                racing_commits_win_once
            }
        }
    };
    (@tests $open:path; $($subject:ident { $($test:ident)* })*) => {
        $(mod $subject {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                $crate::store::conformance::$subject::$test(&$open().await).await;
            })*
        })*
    };
}
pub use crate::conformance;
