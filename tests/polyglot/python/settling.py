"""Commit, Rollback, Extend, Move and CommitAndPush."""

import grpc
from checking import (
    DEADLINE,
    expect,
    expect_error,
    expect_true,
    outcomes,
    seconds,
    section,
    state,
    unique,
)
from google.protobuf.duration_pb2 import Duration
from sluicegate.v1.item_pb2 import NewItem, Outcome
from sluicegate.v1.queue_pb2 import RetryPolicy
from sluicegate.v1.queue_service_pb2 import (
    CommitAndPushRequest,
    CommitRequest,
    ConsumeRequest,
    ExtendRequest,
    MoveRequest,
    PushEntry,
    RollbackItem,
    RollbackRequest,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
HOUR = Duration(seconds=3600)


def reserved(broker, queue, payload=b"work", **fields):
    """Pushes an item and reserves it."""
    broker.push(queue, payload, **fields)
    return broker.reserve_one(queue, lease=HOUR)


@section("Commit")
def commit(broker):
    queue = unique("commit")
    done = reserved(broker, queue)
    expect("OK", broker.commit(done.receipt), ["OK"])
    expect("a second time GONE", broker.commit(done.receipt), ["GONE"])
    expect("the item is deleted", broker.list_items(queue), [])

    stale = reserved(broker, queue)
    expect("an item is rolled back", broker.rollback(stale.receipt), "OK")
    broker.reserve_one(queue, lease=HOUR)  # by another consumer
    held = [reserved(broker, queue), reserved(broker, queue)]
    receipts = [held[0].receipt, stale.receipt, done.receipt, held[1].receipt]
    answer = broker.queues.Commit(CommitRequest(receipts=receipts))
    expect("one result per receipt, in order", [result.receipt for result in answer.results], receipts)
    expect("each with its own outcome", outcomes(answer.results), ["OK", "LEASE_LOST", "GONE", "OK"])

    queue = broker.create(unique("retention"), retention=HOUR)
    delivery = reserved(broker, queue)
    expect("in a queue with retention OK as well", broker.commit(delivery.receipt), ["OK"])
    item = broker.get_item(queue, delivery.item.id)
    expect("and the item is kept, PROCESSED", (state(item), item.HasField("process_time")), ("PROCESSED", True))
    expect("a second time GONE there too", broker.commit(delivery.receipt), ["GONE"])

    def refused(what, field, *receipts):
        expect_error(what, INVALID, lambda: broker.commit(*receipts), field=field)

    refused("no receipts", "receipts")
    refused("a malformed receipt", "receipts[1]", delivery.receipt, "no receipt")


@section("Rollback")
def rollback(broker):
    queue = unique("rollback")
    delivery = reserved(broker, queue)
    expect("OK", broker.rollback(delivery.receipt, reason="no paper"), "OK")
    again = broker.reserve_one(queue, lease=HOUR)
    item = again.item
    expect("the next attempt knows why", (item.attempt, item.deliveries, item.last_reason), (2, 2, "no paper"))
    expect("the old receipt is LEASE_LOST", broker.rollback(delivery.receipt), "LEASE_LOST")
    expect("keep_attempt is OK", broker.rollback(again.receipt, keep_attempt=True), "OK")
    again = broker.reserve_one(queue, lease=HOUR)
    expect("and does not count", (again.item.attempt, again.item.deliveries), (2, 3))
    expect("a delay is OK", broker.rollback(again.receipt, delay=HOUR), "OK")
    expect("and the item DELAYED", state(broker.get_item(queue, item.id)), "DELAYED")
    expect("the receipt of a returned item is LEASE_LOST", broker.commit(again.receipt), ["LEASE_LOST"])
    delivery = reserved(broker, queue)
    broker.rollback(delivery.receipt, reason="x" * 2000)
    item = broker.get_item(queue, delivery.item.id)
    expect("a long reason is cut after 1,024 bytes", item.last_reason, "x" * 1024)
    gone = broker.reserve_one(queue)
    broker.commit(gone.receipt)
    expect("that of a committed one GONE", broker.rollback(gone.receipt), "GONE")

    queue = broker.create(unique("retry"), retry_policy=RetryPolicy(initial_delay=HOUR, multiplier=3))
    delivery = reserved(broker, queue)
    expect("without a delay the retry policy applies", broker.rollback(delivery.receipt, delay=None), "OK")
    item = broker.get_item(queue, delivery.item.id)
    waits = item.eligible_time.ToNanoseconds() - item.create_time.ToNanoseconds()
    expect_true("the first retry waits initial_delay", state(item) == "DELAYED" and waits >= 3600e9, item)
    delivery = reserved(broker, queue)
    expect("a delay of 0 overrides it", broker.rollback(delivery.receipt, delay=Duration()), "OK")
    expect("and the item is READY", state(broker.get_item(queue, delivery.item.id)), "READY")

    request = RollbackRequest(items=[RollbackItem(receipt="no receipt")])
    expect_error("a malformed receipt", INVALID, lambda: broker.queues.Rollback(request), field="items[0].receipt")
    request = RollbackRequest(items=[RollbackItem(receipt=delivery.receipt, delay=Duration(seconds=-1))])
    expect_error("a negative delay", INVALID, lambda: broker.queues.Rollback(request), field="items[0].delay")


@section("dead letter")
def dead_letter(broker):
    def pair(**settings):
        dead = unique("dead")
        return broker.create(unique("work"), dead_letter_queue=dead, **settings), dead

    queue, dead = pair(max_attempts=3)
    id = broker.push(queue, b"poison")[0]
    fates = [broker.rollback(broker.reserve_one(queue).receipt, reason=f"failure {n}") for n in (1, 2, 3)]
    expect("DEAD_LETTERED at exactly max_attempts", fates, ["OK", "OK", "DEAD_LETTERED"])
    delivery = broker.reserve_one(dead)
    item = delivery.item
    expect("the item, same id and payload, is in the dead-letter queue", (item.id, item.payload), (id, b"poison"))
    expect("with its origin and last reason", (item.origin_queue, item.last_reason), (queue, "failure 3"))
    expect("and nothing is left behind", broker.list_items(queue), [])

    queue = broker.create(unique("unnamed"), max_attempts=1)
    delivery = reserved(broker, queue)
    broker.rollback(delivery.receipt)
    made = broker.reserve_one(f"{queue}.dead").item
    expect("without a dead-letter queue one is created", (made.id, made.origin_queue), (delivery.item.id, queue))
    queue = broker.create(unique("dropped"), max_attempts=1, discard_failed=True)
    delivery = reserved(broker, queue)
    broker.rollback(delivery.receipt)
    expect("a queue that discards deletes an item at the limit", broker.list_items(queue), [])
    queue = broker.create(unique("kept"), max_attempts=1, discard_failed=True, retention=HOUR)
    delivery = reserved(broker, queue)
    broker.rollback(delivery.receipt)
    expect("or kept as history, with retention", state(broker.get_item(queue, delivery.item.id)), "PROCESSED")

    queue, dead = pair(max_attempts=1, lease=seconds(0.2))
    id = broker.push(queue, b"crashes its worker")[0]
    broker.reserve_one(queue)
    watcher = broker.queues.Consume(ConsumeRequest(queue=queue))  # a consumer, which notices the lapsed lease
    expect("a lapsed lease at the limit dead-letters too", broker.reserve_one(dead).item.id, id)
    watcher.cancel()

    queue, dead = pair(max_deliveries=2, lease=HOUR)
    id = broker.push(queue, b"cuts the line")[0]
    for _ in range(2):
        stream = broker.queues.Consume(ConsumeRequest(queue=queue))
        expect("a stream is handed an item", next(stream).deliveries[0].item.id, id)
        stream.cancel()
    expect("an item whose streams break is dead-lettered at max_deliveries", broker.reserve_one(dead).item.id, id)


@section("Extend")
def extend(broker):
    queue = unique("extend")
    broker.push(queue, b"long work")
    delivery = broker.reserve_one(queue, lease=seconds(5))

    def extend(*receipts, **fields):
        return broker.queues.Extend(ExtendRequest(receipts=receipts, **fields)).results

    result = extend(delivery.receipt, lease=HOUR)[0]
    expect("OK, with the same receipt", (outcomes([result]), result.receipt), (["OK"], delivery.receipt))
    longer = result.lease_expire_time.ToNanoseconds() - delivery.lease_expire_time.ToNanoseconds()
    expect_true("the lease counts from now", longer > 3590 * 10**9, longer)
    item = broker.get_item(queue, delivery.item.id)
    expect("GetItem returns the new end", item.eligible_time, result.lease_expire_time)
    shorter = extend(delivery.receipt, lease=seconds(0.2))[0]
    expect("a lease may be shortened", outcomes([shorter]), ["OK"])
    again = broker.reserve_one(queue, lease=HOUR)
    expect("and lapses then", again.item.deliveries, 2)
    gone = reserved(broker, queue)
    broker.commit(gone.receipt)
    results = extend(delivery.receipt, gone.receipt, again.receipt)
    expect("exact outcomes per receipt", outcomes(results), ["LEASE_LOST", "GONE", "OK"])
    expect("a lost lease has no end", results[0].HasField("lease_expire_time"), False)
    expect_error("a lease of 1 ms", INVALID, lambda: extend(again.receipt, lease=seconds(0.001)), field="lease")
    expect_error("a malformed receipt", INVALID, lambda: extend("-"), field="receipts[0]")


@section("Move")
def move(broker):
    source, target = unique("resize"), unique("publish")
    broker.push(source, b"raw", content_type="image/raw", headers={"a": "1", "b": "1"}, priority=2)
    first = broker.reserve_one(source)
    broker.rollback(first.receipt)
    delivery = broker.reserve_one(source)

    def move(receipt, to_queue=target, **fields):
        answer = broker.queues.Move(MoveRequest(receipt=receipt, to_queue=to_queue, **fields))
        return Outcome.Name(answer.outcome).replace("OUTCOME_", ""), answer.id

    id = delivery.item.id
    changes = {"payload": b"png", "content_type": "image/png", "headers": {"b": "2", "c": "2"}}
    expect("a stale receipt moves nothing", move(first.receipt)[0], "LEASE_LOST")
    expect("OK, the id stays", move(delivery.receipt, **changes), ("OK", id))
    expect("a second time LEASE_LOST: the item is there, in the other queue", move(delivery.receipt)[0], "LEASE_LOST")
    expect("it left its queue", broker.list_items(source), [])
    item = broker.get_item(target, id)
    expect("payload and content type are new", (item.payload, item.content_type), (b"png", "image/png"))
    expect("headers are merged", dict(item.headers), {"a": "1", "b": "2", "c": "2"})
    expect("priority stays, attempt starts again at 1", (state(item), item.priority, item.attempt), ("READY", 2, 1))
    delivery = broker.reserve_one(target)
    third = unique("archive")
    expect("with a delay and a priority", move(delivery.receipt, third, delay=HOUR, priority=0)[0], "OK")
    item = broker.get_item(third, id)
    expect("both apply, the rest stays", (state(item), item.priority, item.payload), ("DELAYED", 0, b"png"))

    delivery = reserved(broker, source)
    far = broker.create(unique("far"), group=unique("group"))
    precondition = grpc.StatusCode.FAILED_PRECONDITION
    expect_error("a move to another group", precondition, lambda: move(delivery.receipt, far), reason="DIFFERENT_GROUP")
    expect_error("a bad queue name", INVALID, lambda: move(delivery.receipt, "-"), field="to_queue")
    expect_error("priority 10", INVALID, lambda: move(delivery.receipt, priority=10), field="priority")
    expect_error("a malformed receipt", INVALID, lambda: move("-"), field="receipt")
    expect("refused moves change nothing", broker.commit(delivery.receipt), ["OK"])


@section("CommitAndPush")
def commit_and_push(broker):
    orders, bills, parcels = unique("orders"), unique("bills"), unique("parcels")
    broker.create(parcels, group=unique("group"))
    delivery = reserved(broker, orders, b"order 1")

    def commit_and_push(receipt, *pushes):
        entries = [PushEntry(queue=queue, item=item) for queue, item in pushes]
        answer = broker.queues.CommitAndPush(CommitAndPushRequest(receipt=receipt, pushes=entries))
        return Outcome.Name(answer.outcome).replace("OUTCOME_", ""), [result.id for result in answer.results]

    bill, parcel = NewItem(payload=b"bill 1"), NewItem(payload=b"parcel 1", priority=5)
    invalid = lambda: commit_and_push(delivery.receipt, (bills, bill), (parcels, NewItem(priority=10)))  # noqa: E731
    expect_error("one invalid push", INVALID, invalid, field="pushes[1].item.priority")
    expect_error("no pushes", INVALID, lambda: commit_and_push(delivery.receipt), field="pushes")
    expect("an invalid push refuses the whole call", (broker.pop(bills), broker.pop(parcels)), ([], []))
    outcome, ids = commit_and_push(delivery.receipt, (bills, bill), (parcels, parcel))
    expect("OK, one id per push, across groups", (outcome, len(set(ids))), ("OK", 2))
    expect("the item is committed", broker.commit(delivery.receipt), ["GONE"])
    outcome, ids = commit_and_push(delivery.receipt, (bills, bill))
    expect("a second time GONE", (outcome, ids), ("GONE", []))
    expect("and the pushes took effect once", broker.pop(bills, 9, wait=DEADLINE - 5), [b"bill 1"])
    expect("in each queue", broker.pop(parcels, 9, wait=DEADLINE - 5), [b"parcel 1"])
    stale = reserved(broker, orders, b"order 2")
    broker.rollback(stale.receipt)
    outcome, ids = commit_and_push(stale.receipt, (bills, bill))
    nothing = ("LEASE_LOST", [], [])
    expect("a stale receipt is LEASE_LOST and pushes nothing", (outcome, ids, broker.pop(bills)), nothing)
