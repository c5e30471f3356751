//! Histories that keep every promise, though not at first sight.

mod streams;

use sluicegate_checker::history::{
    Answer, Consume, Delivery, Figures, Listed, NewItem, Outcome, PushEntry, QueueAtRest, Request,
    Response, RollbackItem, Settings, State, What,
};

use crate::story::{
    LEASE, MS, Story, back, commit, consume, dead_letter, dedup, delivery, item, keyed, push,
    pushed, reserve,
};

#[test]
fn an_item_is_pushed_delivered_and_committed() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1)).commit("a/1", Outcome::Ok).rest().is_clean();
}

#[test]
fn a_push_of_unknown_outcome_may_have_stored_its_item() {
    let mut story = Story::default();
    let lost = story.start(push(vec![item("a"), item("b")]));
    story.at(5).unknown(lost);
    story.at(60_000).reserve(delivery("a", 1)).commit("a/1", Outcome::Ok).rest().is_clean();
}

#[test]
fn a_push_is_seen_before_it_is_answered() {
    let mut story = Story::default();
    let call = story.start(push(vec![item("a")]));
    story.at(5).reserve(delivery("a", 1)).commit("a/1", Outcome::Ok);
    story.at(9).ok(call, Response::Pushed(vec![pushed("a")])).rest().is_clean();
}

#[test]
fn a_repeated_push_names_the_first_item() {
    let mut story = Story::default();
    let lost = story.start(push(vec![dedup("a")]));
    story.at(5).unknown(lost);
    let mut result = pushed("a");
    result.deduplicated = true;
    story.call(push(vec![dedup("a")]), Response::Pushed(vec![result]));
    story.reserve(delivery("a", 1)).commit("a/1", Outcome::Ok).rest().is_clean();
}

#[test]
fn a_deduplication_id_is_free_after_its_window() {
    let mut story = Story::default();
    let settings = Settings { dedup_window: 1_000 * MS, ..Settings::default() };
    story.set("work", settings).push(dedup("a"));
    story.reserve(delivery("a", 1)).commit("a/1", Outcome::Ok);
    let again = Response::Pushed(vec![pushed("a again")]);
    story.at(1_500).call(push(vec![dedup("a")]), again);
    let second = Delivery { name: "a".to_owned(), ..delivery("a again", 1) };
    story.reserve(second).commit("a again/1", Outcome::Ok).rest().is_clean();
}

/// The first push stored its item at once and hung. Its item is delivered within the window of the second one.
#[test]
fn an_item_that_was_pushed_before_its_window_may_be_seen_late() {
    let mut story = Story::default();
    let settings = Settings { dedup_window: 1_000 * MS, ..Settings::default() };
    story.set("work", settings);
    let lost = story.start(push(vec![dedup("a")]));
    story.at(1_500).unknown(lost);
    let again = Response::Pushed(vec![pushed("a again")]);
    story.call(push(vec![dedup("a")]), again);
    story.reserve(delivery("a", 1)).commit("a/1", Outcome::Ok);
    let second = Delivery { name: "a".to_owned(), ..delivery("a again", 1) };
    story.reserve(second).commit("a again/1", Outcome::Ok).rest().is_clean();
}

/// Two pushes hang, and the second one stores another item, because a new primary has a clock by which the window is over.
#[test]
fn a_clock_that_steps_ends_a_window_early() {
    let mut story = Story::default();
    let settings = Settings { dedup_window: 10_000 * MS, ..Settings::default() };
    let second = || Delivery { name: "a".to_owned(), ..delivery("a again", 1) };
    story.set("work", settings.clone());
    let lost = [(); 2].map(|()| story.start(push(vec![dedup("a")])));
    story.reserve(delivery("a", 1)).commit("a/1", Outcome::Ok).tell(What::ClockStepped);
    story.unknown(lost[0]).at(100).unknown(lost[1]);
    story.reserve(second()).commit("a again/1", Outcome::Ok).rest().is_clean();

    // The first one is seen after the second one was answered.
    let mut story = Story::default();
    story.set("work", settings);
    let lost = story.start(push(vec![dedup("a")]));
    story.at(100).unknown(lost).tell(What::ClockStepped);
    story.call(push(vec![dedup("a")]), Response::Pushed(vec![pushed("a again")]));
    story.reserve(second()).commit("a again/1", Outcome::Ok);
    story.reserve(delivery("a", 1)).commit("a/1", Outcome::Ok).rest().is_clean();
}

#[test]
fn a_commit_of_unknown_outcome_may_have_taken_effect_or_not() {
    for redelivered in [false, true] {
        let mut story = Story::default();
        story.push(item("a")).reserve(delivery("a", 1));
        let lost = story.start(commit("a/1"));
        story.at(20).unknown(lost);
        if redelivered {
            story.at(LEASE + 100).reserve(delivery("a", 2)).commit("a/2", Outcome::Ok);
        } else {
            story.commit("a/1", Outcome::Gone);
        }
        story.rest().is_clean();
    }
}

#[test]
fn a_lapsed_receipt_still_settles() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1));
    story.at(3 * LEASE).commit("a/1", Outcome::Ok).rest().is_clean();
}

#[test]
fn a_lapsed_lease_and_a_rollback_are_failed_attempts() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1));
    story.at(LEASE + 100).reserve(delivery("a", 2)).commit("a/1", Outcome::LeaseLost);
    story.rollback(back("a/2"), Outcome::Ok).reserve(delivery("a", 3));
    let kept = RollbackItem { keep_attempt: true, ..back("a/3") };
    story.rollback(kept, Outcome::Ok);
    story.reserve(Delivery { attempt: 3, ..delivery("a", 4) }).commit("a/4", Outcome::Ok);
    story.rest().is_clean();
}

#[test]
fn an_extension_prolongs_and_shortens() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1));
    let extend = |ms| Request::Extend { receipts: vec!["a/1".to_owned()], lease: ms * MS };
    let until = |ms: u64| Response::Extended(vec![(Outcome::Ok, Some(ms * MS))]);
    story.at(100).call(extend(20_000), until(20_100));
    story.at(200).call(extend(500), until(701));
    story.at(800).reserve(delivery("a", 2)).commit("a/2", Outcome::Ok).rest().is_clean();
}

#[test]
fn an_extension_of_unknown_outcome_may_have_shortened_the_lease() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1));
    let call = story.start(Request::Extend { receipts: vec!["a/1".to_owned()], lease: 500 * MS });
    story.at(5).unknown(call);
    story.at(800).reserve(delivery("a", 2)).commit("a/2", Outcome::Ok).rest().is_clean();
}

#[test]
fn keys_go_one_at_a_time_and_others_beside_them() {
    let mut story = Story::default();
    let other = NewItem { ordering_key: "other".to_owned(), ..item("o") };
    story.push(keyed("a")).push(keyed("b")).push(other);
    story.reserve(delivery("a", 1)).reserve(delivery("o", 1));
    story.rollback(back("a/1"), Outcome::Ok).reserve(delivery("a", 2));
    let call = story.start(commit("a/2"));
    // Delivered after the commit has taken effect, and before it is answered.
    story.at(50).reserve(delivery("b", 1));
    story.at(60).ok(call, Response::Settled(vec![Outcome::Ok]));
    story.commit("o/1", Outcome::Ok).commit("b/1", Outcome::Ok).rest().is_clean();
}

#[test]
fn a_move_of_unknown_outcome_leaves_the_item_in_one_queue() {
    for moved in [false, true] {
        let mut story = Story::default();
        story.push(item("a")).reserve(delivery("a", 1));
        let to_queue = "next".to_owned();
        let call = story.start(Request::Move { receipt: "a/1".to_owned(), to_queue, delay: 0 });
        story.at(10).unknown(call);
        if moved {
            let there = Delivery { queue: "next".to_owned(), attempt: 1, ..delivery("a", 2) };
            story.reserve(there);
        } else {
            story.at(LEASE + 100).reserve(delivery("a", 2));
        }
        story.commit("a/2", Outcome::Ok).rest().is_clean();
    }
}

/// Returns a story in which nobody knows whether `a` was committed and `b` and `c` were pushed.
fn lost_commit_and_push() -> Story {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1));
    let entry = |name| PushEntry { queue: "work".to_owned(), item: item(name) };
    let pushes = vec![entry("b"), entry("c")];
    let call = story.start(Request::CommitAndPush { receipt: "a/1".to_owned(), pushes });
    story.at(10).unknown(call);
    story
}

#[test]
fn a_commit_and_push_of_unknown_outcome_happens_as_a_whole() {
    for happened in [false, true] {
        let mut story = lost_commit_and_push();
        if happened {
            story.reserve(delivery("b", 1)).commit("b/1", Outcome::Ok);
            story.reserve(delivery("c", 1)).commit("c/1", Outcome::Ok);
            story.commit("a/1", Outcome::Gone);
        } else {
            story.at(LEASE + 100).reserve(delivery("a", 2)).commit("a/2", Outcome::Ok);
        }
        story.rest().is_clean();
    }
}

/// An operator may delete an item by an id that nobody else was told.
#[test]
fn an_item_of_a_commit_and_push_of_unknown_outcome_may_be_deleted() {
    let mut story = lost_commit_and_push();
    let request = Request::DeleteItem { queue: "work".to_owned(), id: "c".to_owned() };
    story.call(request, Response::Done).reserve(delivery("b", 1)).commit("b/1", Outcome::Ok);
    story.commit("a/1", Outcome::Gone);
    story.rest().is_clean();
}

#[test]
fn an_item_is_dead_lettered_at_its_limit() {
    let mut story = Story::default();
    story.set("work", Settings { max_attempts: 2, ..Settings::default() });
    story.push(item("a")).reserve(delivery("a", 1)).rollback(back("a/1"), Outcome::Ok);
    story.reserve(delivery("a", 2)).rollback(back("a/2"), Outcome::DeadLettered);
    story.reserve(dead_letter("a", 3, "work", 2)).commit("a/3", Outcome::Ok).rest().is_clean();
}

/// A broker that shuts down takes back what its streams hold, and what was never sent, and counts neither.
#[test]
fn deliveries_that_a_broker_took_back_do_not_count() {
    let mut story = Story::default();
    story.set("work", Settings { max_deliveries: 2, ..Settings::default() });
    story.push(item("a"));
    let stream = story.start(Request::Consume(consume(1)));
    story.deliver(stream, delivery("a", 1)).unknown(stream);
    for number in [2, 4] {
        let kept = RollbackItem { keep_attempt: true, ..back(&format!("a/{number}")) };
        story.reserve(Delivery { attempt: 1, ..delivery("a", number) });
        if number == 2 {
            story.rollback(kept, Outcome::Ok);
            let other = story.start(Request::Consume(consume(1)));
            story.unknown(other);
        }
    }
    story.commit("a/4", Outcome::Ok).rest().is_clean();
}

/// Who lists a queue knows an item before its producer does.
#[test]
fn an_item_may_be_deleted_before_its_push_is_answered() {
    let mut story = Story::default();
    let pushing = story.start(push(vec![keyed("a")]));
    let request = Request::DeleteItem { queue: "work".to_owned(), id: "a".to_owned() };
    story.call(request, Response::Done).ok(pushing, Response::Pushed(vec![pushed("a")]));
    story.rest().is_clean();
}

/// A dead letter may be redriven and purged before anybody has it.
#[test]
fn a_dead_letter_may_be_redriven_and_purged() {
    let mut story = Story::default();
    let rejected = RollbackItem { dead_letter: true, ..back("a/1") };
    story.push(item("a")).reserve(delivery("a", 1)).rollback(rejected, Outcome::DeadLettered);
    story.call(Request::RedriveItems { queue: "work.dead".to_owned() }, Response::Done);
    story.call(Request::PurgeQueue { queue: "work".to_owned() }, Response::Done);
    story.rest().is_clean();
}

/// A dead letter keeps its ordering key, and does not wait for others.
#[test]
fn dead_letters_of_one_key_are_in_no_order() {
    let mut story = Story::default();
    let reject = |receipt: &str| RollbackItem {
        receipt: receipt.to_owned(),
        dead_letter: true,
        ..RollbackItem::default()
    };
    for name in ["a", "b"] {
        let receipt = format!("{name}/1");
        story.push(keyed(name)).reserve(delivery(name, 1));
        story.rollback(reject(&receipt), Outcome::DeadLettered);
    }
    let dead = |name: &str| dead_letter(name, 2, "work", 1);
    story.reserve(dead("b")).reserve(dead("a"));
    story.commit("a/2", Outcome::Ok).commit("b/2", Outcome::Ok).rest().is_clean();
}

/// A queue that was deleted may be created anew by a push, with the settings of the broker.
#[test]
fn a_deleted_queue_loses_its_settings() {
    let mut story = Story::default();
    story.set("work", Settings { max_attempts: 1, ..Settings::default() });
    let request = Request::DeleteQueue { queue: "work".to_owned(), force: true };
    story.call(request, Response::Done);
    story.push(item("a")).reserve(delivery("a", 1)).rollback(back("a/1"), Outcome::Ok);
    story.reserve(delivery("a", 2)).commit("a/2", Outcome::Ok).rest().is_clean();
}

#[test]
fn a_lapsed_last_attempt_is_dead_lettered_without_a_word() {
    let mut story = Story::default();
    story.set("work", Settings { max_attempts: 1, ..Settings::default() });
    story.push(item("a")).reserve(delivery("a", 1));
    story.at(LEASE + 100).reserve(dead_letter("a", 2, "work", 1)).commit("a/1", Outcome::LeaseLost);
    story.commit("a/2", Outcome::Ok).rest().is_clean();
}

/// Nobody sees a dead letter that a caller takes who is gone when it comes.
#[test]
fn an_item_at_its_limit_may_be_gone_from_the_dead_letter_queue() {
    let mut story = Story::default();
    story.set("work", Settings { max_attempts: 1, ..Settings::default() });
    story.push(item("a")).reserve(delivery("a", 1)).at(LEASE + 100);
    let pop = Request::Pop { queue: "work.dead".to_owned(), max_items: 1, wait: 0 };
    let call = story.start(pop);
    story.at(10).unknown(call).commit("a/1", Outcome::Gone).rest().is_clean();
}

#[test]
fn a_pop_that_was_cut_loses_at_most_what_it_asked_for() {
    let mut story = Story::default();
    story.push(item("a")).push(item("b"));
    let call = story.start(Request::Pop { queue: "work".to_owned(), max_items: 1, wait: 0 });
    story.at(10).unknown(call);
    story.reserve(delivery("b", 1)).commit("b/1", Outcome::Ok).rest().is_clean();
}

/// The store fails, and an item lapses unseen, reserved for a stream with short leases, until it is dead-lettered.
#[test]
fn an_item_that_lapses_unseen_lets_the_next_of_its_key_go() {
    let mut story = Story::default();
    let fault = |begins| What::Disturbed { begins, fault: "the store is slow".to_owned() };
    story.set("work", Settings { max_attempts: 3, ..Settings::default() });
    let stream = story.start(Request::Consume(Consume { lease: 100 * MS, ..consume(10) }));
    story.push(keyed("a")).push(keyed("b")).tell(fault(true));
    story.at(5_000).deliver(stream, delivery("b", 1)).tell(fault(false));
    story.commit("b/1", Outcome::Ok).ok(stream, Response::Done);
    story.reserve(dead_letter("a", 4, "work", 3));
    story.commit("a/4", Outcome::Ok).rest().is_clean();
}

/// The same without a fault, before a client that does not read. Nobody sees what is discarded.
#[test]
fn an_item_that_lapses_before_a_slow_reader_lets_the_next_of_its_key_go() {
    let mut story = Story::default();
    story.set("work", Settings { discard_failed: true, max_attempts: 3, ..Settings::default() });
    let slow = Consume { lease: 100 * MS, slow: true, ..consume(10) };
    let stream = story.start(Request::Consume(slow));
    story.push(keyed("a")).push(keyed("b")).at(5_000).deliver(stream, delivery("b", 1));
    story.commit("b/1", Outcome::Ok).ok(stream, Response::Done).rest().is_clean();
}

/// Its consumer is told that it is gone before the caller of the pop has it.
#[test]
fn an_item_that_is_popped_may_be_said_to_be_gone_before() {
    let mut story = Story::default();
    story.push(item("a"));
    let stream = story.start(Request::Consume(consume(10)));
    story.deliver(stream, delivery("a", 1)).unknown(stream);
    let pop = story.start(Request::Pop { queue: "work".to_owned(), max_items: 1, wait: 0 });
    story.commit("a/1", Outcome::Gone);
    story.ok(pop, Response::Deliveries(vec![Delivery { attempt: 1, ..delivery("a", 2) }]));
    let figures =
        Figures { pushed: 1, delivered: 2, committed: 1, popped: 1, ..Figures::default() };
    let queue = "work".to_owned();
    let queue = QueueAtRest { queue, items: Vec::new(), figures: Some(figures) };
    story.tell(What::Rest { queues: vec![queue] }).is_clean();
}

/// The store took as long as the lease to answer, and the item was reserved anew before its broker had returned it.
#[test]
fn what_was_reserved_for_a_call_and_came_too_late_may_have_failed() {
    let mut story = Story::default();
    story.push(item("a"));
    let late = story.start(reserve(1, 0));
    story.at(LEASE + 10).ok(late, Response::Deliveries(Vec::new()));
    story.reserve(delivery("a", 2)).commit("a/2", Outcome::Ok).rest().is_clean();
}

/// Nobody heard of the move, nor saw the item fail where it was moved to.
#[test]
fn what_was_moved_unseen_may_be_a_dead_letter_there() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1));
    let (receipt, to_queue) = ("a/1".to_owned(), "other".to_owned());
    let moved = story.start(Request::Move { receipt, to_queue, delay: 0 });
    story.at(10).unknown(moved);
    story
        .at(500)
        .reserve(dead_letter("a", 4, "other", 2))
        .commit("a/4", Outcome::Ok)
        .rest()
        .is_clean();
}

/// Nobody saw it between the redrive and the failure that made it a dead letter again.
#[test]
fn a_dead_letter_that_was_redriven_may_be_one_again() {
    let mut story = Story::default();
    story.set("work", Settings { max_attempts: 1, ..Settings::default() });
    let rejected = RollbackItem { dead_letter: true, ..back("a/1") };
    story.push(item("a")).reserve(delivery("a", 1)).rollback(rejected, Outcome::DeadLettered);
    story.call(Request::RedriveItems { queue: "work.dead".to_owned() }, Response::Done);
    story
        .at(LEASE + 100)
        .reserve(dead_letter("a", 3, "work", 1))
        .commit("a/3", Outcome::Ok)
        .rest()
        .is_clean();
}

/// Its receipts are of no use then, wherever the items are.
#[test]
fn receipts_of_a_deleted_queue_are_gone() {
    for outcome in [Some(Outcome::Ok), None] {
        let mut story = Story::default();
        story.push(item("a")).reserve(delivery("a", 1));
        let (receipt, to_queue) = ("a/1".to_owned(), "other".to_owned());
        let moved = story.start(Request::Move { receipt, to_queue, delay: 0 });
        match outcome {
            Some(outcome) => story.ok(moved, Response::Settled(vec![outcome])),
            None => story.unknown(moved),
        };
        let delete = Request::DeleteQueue { queue: "work".to_owned(), force: true };
        story.at(10).call(delete, Response::Done).commit("a/1", Outcome::Gone);
        let other = Delivery { queue: "other".to_owned(), attempt: 1, ..delivery("a", 2) };
        story.at(100).reserve(other).commit("a/2", Outcome::Ok).rest().is_clean();
    }
}

/// The answer was held up, and what it holds was taken long before.
#[test]
fn an_item_that_is_popped_may_come_long_after_it_is_said_to_be_gone() {
    let mut story = Story::default();
    story.push(item("a"));
    let stream = story.start(Request::Consume(consume(10)));
    story.deliver(stream, delivery("a", 1)).unknown(stream);
    let pop = story.start(Request::Pop { queue: "work".to_owned(), max_items: 1, wait: 0 });
    story.commit("a/1", Outcome::Gone).at(LEASE);
    story.ok(pop, Response::Deliveries(vec![Delivery { attempt: 1, ..delivery("a", 2) }]));
    story.rest().is_clean();
}

#[test]
fn expired_items_go_and_delayed_items_wait() {
    let mut story = Story::default();
    story.push(NewItem { ttl: Some(100 * MS), ..item("a") });
    story.push(NewItem { delay: 100 * MS, ..item("b") });
    story.at(200).reserve(delivery("b", 1)).commit("b/1", Outcome::Ok).rest().is_clean();
}

#[test]
fn history_is_replayed() {
    let mut story = Story::default();
    story.set("work", Settings { retention: true, ..Settings::default() });
    story.push(item("a")).reserve(delivery("a", 1)).commit("a/1", Outcome::Ok);
    story.call(Request::ReplayItems { queue: "work".to_owned() }, Response::Done);
    story.reserve(Delivery { attempt: 1, ..delivery("a", 2) }).commit("a/2", Outcome::Ok);
    story.rest().is_clean();
}

#[test]
fn deleted_items_are_gone() {
    let mut story = Story::default();
    story.push(item("a")).push(item("b")).reserve(delivery("a", 1));
    let delete = Request::DeleteItem { queue: "work".to_owned(), id: "a".to_owned() };
    story.call(delete, Response::Done).commit("a/1", Outcome::Gone);
    story.call(Request::PurgeQueue { queue: "work".to_owned() }, Response::Done).rest().is_clean();
}

#[test]
fn what_is_listed_is_not_lost() {
    let mut story = Story::default();
    story.push(item("a")).push(item("b")).reserve(delivery("a", 1));
    let listed = |name: &str, state| Listed { id: name.to_owned(), name: name.to_owned(), state };
    let items = vec![listed("a", State::Reserved), listed("b", State::Ready)];
    let figures = Figures { ready: 1, reserved: 1, pushed: 2, delivered: 1, ..Figures::default() };
    let queue = QueueAtRest { queue: "work".to_owned(), items, figures: Some(figures) };
    story.tell(What::Rest { queues: vec![queue] }).commit("a/1", Outcome::Ok).is_clean();
}

#[test]
fn nobody_is_woken_during_a_fault_or_a_pause() {
    let mut story = Story::default();
    let fault = |begins| What::Disturbed { begins, fault: "the store is stopped".to_owned() };
    let stream = story.start(Request::Consume(consume(10)));
    story.push(item("a")).tell(fault(true));
    story.at(100_000).tell(fault(false)).at(101_000).deliver(stream, delivery("a", 1));
    story.commit("a/1", Outcome::Ok);
    story.call(Request::PauseQueue { queue: "work".to_owned() }, Response::Done).push(item("b"));
    story.at(200_000).call(Request::ResumeQueue { queue: "work".to_owned() }, Response::Done);
    story.deliver(stream, delivery("b", 1)).commit("b/1", Outcome::Ok).rest().is_clean();
}

#[test]
fn a_clock_that_steps_ends_leases_early() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1)).tell(What::ClockStepped);
    story.at(100).reserve(delivery("a", 2)).commit("a/2", Outcome::Ok).rest().is_clean();
}

/// One broker has followed, and another one, which reserves, not yet.
#[test]
fn no_times_are_judged_while_clocks_follow_one_that_was_stepped() {
    let mut story = Story::default();
    story.tell(What::ClocksFollow { begins: true }).push(item("a")).reserve(delivery("a", 1));
    story.at(100).reserve(delivery("a", 2)).tell(What::ClocksFollow { begins: false });
    story.at(200).reserve(delivery("a", 3)).commit("a/3", Outcome::Ok).rest().is_clean();
}

/// A broker that has followed takes the item for expired, and one that is back does not.
#[test]
fn a_clock_that_is_set_back_brings_an_expired_item_back() {
    let gone = |story: &mut Story| {
        story.push(NewItem { ttl: Some(150 * MS), ..item("a") }).reserve(delivery("a", 1));
        story.tell(What::ClocksFollow { begins: true }).at(200).commit("a/1", Outcome::Gone);
        story.tell(What::ClocksFollow { begins: false });
    };
    let mut story = Story::default();
    gone(&mut story);
    story.at(210).commit("a/1", Outcome::Ok).rest().is_clean();
    let mut story = Story::default();
    gone(&mut story);
    story.at(210).reserve(delivery("a", 2)).commit("a/2", Outcome::Ok).rest().is_clean();
    let mut story = Story::default();
    gone(&mut story);
    story.at(210).reserve(delivery("a", 2)).rest().is_clean(); // and expires after all
}

#[test]
fn a_slow_clock_lengthens_the_time_to_live() {
    let mut story = Story::default();
    story.tell(What::ClockSlow { begins: true });
    story.push(NewItem { ttl: Some(5_000 * MS), ..item("a") });
    story.at(9_000).reserve(delivery("a", 1)).commit("a/1", Outcome::Ok).rest().is_clean();
}

/// The broker has not heard yet that one of them has gone, and takes back what it assigned to it.
#[test]
fn what_was_assigned_to_a_consumer_that_left_comes_later() {
    let mut story = Story::default();
    let streams = [(); 2].map(|()| story.start(Request::Consume(consume(10))));
    story.ok(streams[0], Response::Done).at(100).push(item("a")).push(item("b"));
    story.deliver(streams[1], delivery("b", 1)).deliver(streams[1], delivery("a", 1));
    story.commit("a/1", Outcome::Ok).commit("b/1", Outcome::Ok).rest().is_clean();
}

#[test]
fn a_clock_that_steps_ends_the_time_to_live_early_wherever_the_item_is() {
    let mut story = Story::default();
    story.push(NewItem { ttl: Some(5_000 * MS), ..item("a") }).reserve(delivery("a", 1));
    let rejected = RollbackItem { dead_letter: true, ..back("a/1") };
    story.tell(What::ClockStepped).rollback(rejected, Outcome::DeadLettered);
    story.reserve(dead_letter("a", 2, "work", 1));
    story.at(4_000).commit("a/2", Outcome::Gone).rest().is_clean();
}

#[test]
fn several_consumers_receive_in_any_order() {
    let mut story = Story::default();
    let streams = [(); 2].map(|()| story.start(Request::Consume(consume(10))));
    story.push(item("a")).push(item("b"));
    story.deliver(streams[0], delivery("b", 1)).deliver(streams[1], delivery("a", 1));
    story.commit("a/1", Outcome::Ok).commit("b/1", Outcome::Ok).rest().is_clean();
}

#[test]
fn a_call_that_does_not_end_may_have_any_effect() {
    let mut story = Story::default();
    story.push(item("a")).reserve(delivery("a", 1));
    let waiting = story.start(reserve(10, 60_000));
    story.start(commit("a/1"));
    story.end(waiting, Answer::from_code("Cancelled")).rest().is_clean();
}
