//! The test suite for all stores, to be run by every backend. It is part of the feature
//! `conformance`.
//!
//! Each test is a plain function over an [`Env`], which has two brokers on one empty store and a
//! clock that tests can advance. [`conformance!`] makes each function a test, so that no backend
//! can omit one. The broker's own stores run the suite too, so that a function missing from its
//! list would be dead code. In the crate of a backend, with `tokio` (features `macros`,
//! `rt-multi-thread`) among the dev-dependencies:
//!
//! ```text
//! use sluicegate_broker::{domain::Clock, store::conformance::{Env, conformance}};
//!
//! async fn open() -> Env {
//!     let (scratch, clock) = (Scratch::new(), Arc::new(Clock::system()));
//!     // Two brokers on the same data, or one broker twice if there can be only one.
//!     let store = Arc::new(scratch.open(&clock).await);
//!     let other = Arc::new(scratch.open(&clock).await);
//!     // The store's periodic upkeep, run immediately.
//!     let upkeep = { let store = store.clone(); move || { let store = store.clone(); async move { store.upkeep().await } } };
//!     Env::new(store, other, clock, upkeep, scratch)
//! }
//!
//! conformance!(open);
//! ```
//!
//! A store takes its time from the given clock, which the tests advance. It must not expire or
//! sweep anything on its own while they run.
//!
//! The name of a test says what it checks. All tests are `async` and use the operations of `env`.
#![allow(missing_docs, clippy::unused_async, clippy::wildcard_imports)]

mod broker;
pub(crate) mod env;

pub mod admin;
pub mod dead_letter;
pub mod dedup;
pub mod deletion;
pub mod figures;
pub mod first_lease;
pub mod history;
pub mod keys;
pub mod large;
pub mod model;
pub mod moves;
pub mod operations;
pub mod push;
pub mod redrive;
pub mod reports;
pub mod reserve;
pub mod settings;
pub mod settle;
pub mod stats;
pub mod templates;

pub use broker::Broker;
pub use env::Env;

/// Makes each function of the suite a test. See [`store::conformance`](crate::store::conformance).
#[macro_export]
macro_rules! conformance {
    ($open:path) => {
        $crate::conformance! { @tests $open;
            admin {
                lists_are_in_order_and_of_the_requested_state
                pages_add_up_to_the_list
                a_cursor_survives_changes_in_between
                an_invented_cursor_is_refused
                depth_counts_every_state
                depth_counts_deep_queues_too
                the_oldest_ready_item_is_the_first_in_hand_out_order
                items_are_of_their_queue
                items_of_every_state_can_be_deleted
                an_item_in_another_state_than_requested_is_not_deleted
                a_purge_spares_reserved_items
                a_purge_of_thousands_is_complete
                a_purge_in_steps_takes_what_was_there_when_it_began
            }
            dead_letter {
                lapsed_leases_dead_letter_at_exactly_the_limit
                rollbacks_and_lapses_count_alike
                a_lapsed_last_attempt_still_commits
                a_dead_letter_keeps_its_content
                a_queue_that_discards_drops_items_at_the_limit
                discarded_items_become_history_if_it_is_kept
                zero_attempts_means_no_limit
                items_at_a_limit_do_not_hide_others
                items_at_a_limit_stay_while_their_destination_is_unknown
                a_limit_without_a_destination_has_no_effect
                an_item_handed_out_as_often_as_allowed_is_dead_lettered
                deliveries_are_counted_from_an_items_arrival
            }
            dedup {
                a_repeated_push_returns_the_first_item
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
                a_deleted_item_releases_its_dedup_id
                duplicates_take_no_sequence_number_and_block_nothing
            }
            deletion {
                a_successful_push_is_never_lost_to_a_concurrent_deletion
                a_queue_that_holds_items_is_deleted_only_by_force
                a_queue_whose_use_is_noted_meanwhile_is_not_deleted
                links_change_one_at_a_time
                a_push_that_takes_effect_after_the_deletion_restores_its_queue
                a_dead_letter_restores_its_deleted_queue
            }
            figures {
                figures_of_several_brokers_stand_side_by_side
                figures_are_read_in_pages
                figures_end_when_their_time_is_over
            }
            first_lease {
                an_item_stored_as_reserved_is_as_after_a_reserve
                an_item_stored_as_reserved_settles_in_every_way
                a_first_lease_lapses_like_any_other
                a_first_lease_lapses_on_another_broker_too
                an_item_stored_as_reserved_returns_to_its_place
                reserved_and_ready_items_share_a_call
                items_under_different_leases_share_a_call
                items_stored_as_reserved_together_settle_one_by_one
                items_stored_as_reserved_together_are_committed_together
                duplicates_among_items_stored_as_reserved_get_no_lease
                a_duplicate_gets_no_lease
                history_takes_items_that_were_stored_as_reserved
            }
            reports {
                each_broker_has_one_report_that_ends
                a_report_of_thousands_of_consumers_is_whole
            }
            stats {
                totals_add_up_over_brokers
                all_totals_are_read_at_once
                a_task_has_one_leader_at_a_time
                a_queue_may_come_twice_in_a_change_of_totals
                the_store_responds_and_describes_itself
                a_sound_queue_needs_no_upkeep
                an_abandoned_call_does_no_harm
            }
            history {
                committed_items_are_kept_for_the_retention
                replay_by_id_makes_items_ready_again
                replay_by_time_takes_the_oldest_first
                a_long_history_is_replayed_in_full
            }
            keys {
                one_at_a_time_in_order
                keys_do_not_wait_for_each_other
                the_same_key_in_two_queues_is_two_keys
                a_thousand_blocked_items_are_delivered_in_order
                a_retry_keeps_its_key_blocked
                a_dead_letter_unblocks_the_next_item
                a_dead_letter_through_another_broker_unblocks_the_next_item
                a_settled_dead_letter_unblocks_nothing
                a_discarded_item_unblocks_the_next_item
                a_deleted_item_unblocks_the_next_item
                an_expired_item_unblocks_the_next_item
                a_reserve_that_removes_an_expired_item_asks_for_another_reserve
                an_item_that_expires_under_its_lease_unblocks_the_next_item
                an_unblocked_item_waits_for_its_own_eligible_time
                priority_does_not_break_the_order_of_a_key
                a_replayed_item_is_blocked_by_its_key
                a_moved_item_unblocks_the_next_item_and_is_last_in_its_new_queue
                racing_pushes_of_one_key_leave_one_ready
            }
            large {
                large_items_at_the_head_do_not_hide_those_behind_them
                a_page_of_large_items_says_that_there_are_more
                schedules_with_large_items_are_all_listed
                outcomes_of_a_thousand_items_with_large_headers_are_exact
            }
            model {
                random_sequences_agree_with_the_model
            }
            moves {
                a_moved_item_keeps_its_content
                a_move_may_change_the_content
                a_move_changes_nothing_but_what_it_names
                an_empty_payload_is_a_new_payload
                move_results_are_exact_in_a_mixed_batch
                racing_moves_win_once
                a_move_to_its_own_queue_takes_a_new_sequence_number
                a_moved_item_gets_a_sequence_number_of_its_new_queue
                a_lease_that_lapses_after_a_move_fails_in_the_new_queue
                a_commit_and_its_pushes_are_one_step
                a_commit_and_push_keeps_history_and_unblocks_the_next_item
            }
            operations {
                operations_are_kept_as_they_were_started
                operations_of_the_same_moment_are_all_listed
                one_broker_runs_an_operation
                racing_brokers_claim_an_operation_once
                a_broker_that_lost_its_claim_changes_nothing
                an_operation_that_has_ended_is_not_run_again
                a_cancelled_operation_keeps_what_its_broker_did_before_it_knew
                operations_that_ended_long_ago_are_deleted
            }
            push {
                a_pushed_item_is_stored_unchanged
                a_mark_stands_between_what_was_pushed_here_and_what_will_be
                an_empty_item_is_an_item
                an_empty_call_is_no_error
                concurrent_pushes_into_queues_of_several_groups
                successful_pushes_are_visible_to_the_other_broker
                concurrent_pushes_each_get_their_own_result
                calls_that_one_task_starts_are_stored_in_that_order
                calls_that_one_task_starts_become_visible_in_that_order
                nothing_is_delivered_before_its_time
                a_past_eligible_time_means_now
                nothing_is_delivered_after_its_expiry
                a_receipt_of_an_expired_item_is_gone
                sequence_numbers_grow_in_the_order_of_results
            }
            redrive {
                dead_letters_return_to_their_origin
                all_conditions_of_a_filter_hold
                a_limited_redrive_takes_the_head
                only_ready_items_are_redriven
                thousands_are_redriven_in_order
                an_ordering_key_applies_again
                items_that_fail_again_are_not_redriven_twice
                a_redrive_in_steps_continues_behind_its_cursor
                a_redrive_by_ids_takes_these_in_hand_out_order
            }
            reserve {
                items_are_handed_out_in_the_order_of_their_pushes
                priority_comes_before_age
                a_delayed_urgent_item_does_not_block_others
                delayed_items_queue_by_eligible_time
                a_delivery_describes_its_lease
                a_reserved_item_keeps_its_due_time
                the_next_consumer_needs_no_hint
                demands_share_items_within_their_limits
                items_of_one_reserve_are_stored_under_the_names_of_their_consumers
                bytes_are_bounded_but_a_large_item_gets_through
                more_is_true_while_there_is_more
                small_reserves_in_a_row_miss_nothing
                an_empty_demand_reserves_nothing
                two_valid_leases_never_overlap
                a_lapsed_lease_is_a_failed_attempt
                expired_items_found_by_a_reserve_are_reported
                items_beside_expired_ones_are_handed_out_before_those_behind_them
                many_expired_items_are_removed_in_large_steps
                many_lapsed_items_are_handed_out_in_order
                thousands_of_lapsed_items_are_handed_out_in_order
                the_next_eligible_time_is_that_of_delays_and_leases
            }
            settings {
                a_queue_has_the_settings_of_its_creation
                racing_creations_make_one_queue
                queues_are_listed_by_name
                queues_are_listed_by_prefix_and_read_by_name
                receipt_keys_are_shared_and_the_newest_are_kept
                updates_are_fenced_by_the_revision
                changed_settings_are_reported_once
                a_deleted_queue_leaves_nothing_behind
                schedules_are_kept
                ticks_are_recorded_once_and_in_order
                a_schedule_changes_by_setting
            }
            settle {
                a_committed_item_is_gone_for_good
                another_broker_can_settle
                a_lapsed_lease_still_settles
                a_stale_receipt_changes_nothing
                a_receipt_is_void_after_its_rollback
                results_are_exact_in_a_mixed_batch
                a_commit_leaves_the_items_between_those_that_it_names
                an_expired_and_a_keyed_item_are_settled_by_themselves_among_others
                rollback_results_are_exact_in_a_mixed_batch
                crossed_receipts_settle_nothing
                a_stale_receipt_among_valid_ones_settles_nothing
                an_invented_receipt_settles_nothing
                a_receipt_named_twice_in_a_call_settles_once
                a_rollback_sets_the_time_and_the_reason
                an_undelivered_item_returns_to_its_lapsed_lease
                an_undelivered_item_returns_to_its_place
                an_extended_lease_ends_at_its_new_end
                a_renewal_shortens_no_lease
                racing_commits_win_once
            }
            templates {
                a_template_has_the_settings_of_its_creation
                racing_creations_make_one_template
                templates_are_listed_by_pattern
                updates_of_templates_are_fenced_by_the_revision
                a_deleted_template_is_gone
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
