"""Push and PushStream, and the details of every error."""

import time

import grpc
from checking import (
    DEADLINE,
    Failed,
    Requests,
    expect,
    expect_details,
    expect_error,
    expect_true,
    ok,
    seconds,
    section,
    state,
    unique,
)
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from sluicegate.v1.item_pb2 import NewItem
from sluicegate.v1.queue_service_pb2 import PushRequest, PushStreamRequest

INVALID = grpc.StatusCode.INVALID_ARGUMENT
HOUR = Duration(seconds=3600)


def push(broker, queue, *items, **fields):
    return broker.queues.Push(PushRequest(queue=queue, items=items, **fields)).results


@section("Push")
def push_items(broker):
    queue = unique("push")
    result = push(broker, queue, NewItem(payload=b"one"))[0]
    expect_true("a single item gets an id, in a queue that did not exist", result.id, result)
    expect("it is no duplicate and has no sequence number", (result.deduplicated, result.sequence), (False, 0))

    results = push(broker, queue, *[NewItem(payload=b"%d" % n) for n in range(1000)])
    expect("a thousand items get a thousand ids", len({result.id for result in results}), 1000)
    expected = [b"one", *[b"%d" % n for n in range(1000)]]
    taken = []
    while batch := broker.pop(queue, max_items=400):
        taken += batch
    expect("first in, first out", taken, expected)

    queue = unique("fields")
    item = NewItem(payload=b"\x00\xff", content_type="image/png", headers={"trace": "abc"}, priority=3)
    id = push(broker, queue, item, producer="camera-1")[0].id
    kept = broker.get_item(queue, id)
    expect(
        "payload, content type, headers, priority and producer are kept",
        (kept.payload, kept.content_type, dict(kept.headers), kept.priority, kept.producer),
        (b"\x00\xff", "image/png", {"trace": "abc"}, 3, "camera-1"),
    )
    expect("it starts at attempt 1 with no delivery", (state(kept), kept.attempt, kept.deliveries), ("READY", 1, 0))

    queue = unique("priority")
    for priority in (0, 9, 5, 9):
        push(broker, queue, NewItem(payload=b"%d" % priority, priority=priority))
    expect("priority 9 comes first", broker.pop(queue, max_items=4), [b"9", b"9", b"5", b"0"])


@section("Push")
def push_later(broker):
    queue = unique("delay")
    id = push(broker, queue, NewItem(payload=b"later", delay=HOUR))[0].id
    item = broker.get_item(queue, id)
    expect("an item with a delay is DELAYED", state(item), "DELAYED")
    waits = item.eligible_time.ToNanoseconds() - item.create_time.ToNanoseconds()
    expect("by exactly its delay", waits, HOUR.ToNanoseconds())
    expect("and not handed out before", broker.pop(queue), [])
    push(broker, queue, NewItem(payload=b"soon", delay=seconds(0.3)))
    expect("one is handed out when its delay is over", broker.pop(queue, wait=DEADLINE - 5), [b"soon"])

    queue = unique("eligible")
    past, future = Timestamp(seconds=1), Timestamp(seconds=int(time.time()) + 3600)
    ids = [push(broker, queue, NewItem(eligible_time=at))[0].id for at in (past, future)]
    states = [state(broker.get_item(queue, id)) for id in ids]
    expect("eligible_time in the past is READY, in the future DELAYED", states, ["READY", "DELAYED"])

    queue = unique("ttl")
    push(broker, queue, NewItem(payload=b"expires", ttl=seconds(0.2), delay=seconds(0.2)), NewItem(payload=b"stays"))
    broker.let_pass(0.5)
    expect("past its ttl an item is not delivered", broker.pop(queue, max_items=2), [b"stays"])
    queue = broker.create(unique("default-ttl"), default_ttl=HOUR)
    item = broker.get_item(queue, push(broker, queue, NewItem())[0].id)
    lives = item.expire_time.ToNanoseconds() - item.create_time.ToNanoseconds()
    expect("an item without ttl gets the queue's default_ttl", lives, HOUR.ToNanoseconds())


@section("Push")
def push_once(broker):
    queue = unique("dedup")
    first = push(broker, queue, NewItem(payload=b"1", dedup_id="order-1"))[0]
    again = push(broker, queue, NewItem(payload=b"2", dedup_id="order-1"))[0]
    expect("a dedup_id seen before stores nothing", (again.id, again.deduplicated), (first.id, True))
    batch = push(broker, queue, NewItem(dedup_id="order-2"), NewItem(dedup_id="order-2"), NewItem(dedup_id="order-1"))
    expect("nor inside one batch", [result.deduplicated for result in batch], [False, True, True])
    expect("a duplicate returns the id of the first", (batch[1].id, batch[2].id), (batch[0].id, first.id))
    expect("the first payload counts", broker.pop(queue, max_items=9), [b"1", b""])
    gone = push(broker, queue, NewItem(dedup_id="order-1"))[0]
    expect("a dedup_id outlives its item", (gone.id, gone.deduplicated), (first.id, True))
    other = push(broker, unique("dedup"), NewItem(dedup_id="order-1"))[0]
    expect("a dedup_id counts in its queue only", other.deduplicated, False)


@section("Push")
def push_in_order(broker):
    queue = unique("order")
    items = [NewItem(payload=b"a1", ordering_key="a"), NewItem(payload=b"a2", ordering_key="a")]
    results = push(broker, queue, *items, NewItem(payload=b"b1", ordering_key="b"))
    numbers = [result.sequence for result in results]
    expect_true("items with an ordering_key get growing sequence numbers", 0 < numbers[0] < numbers[1], numbers)
    expect("the second of a key is BLOCKED", state(broker.get_item(queue, results[1].id)), "BLOCKED")
    held = broker.reserve(queue, max_items=3)
    expect("one item per key is handed out", sorted(held.item.payload for held in held), [b"a1", b"b1"])
    a1 = next(delivery for delivery in held if delivery.item.payload == b"a1")
    expect("the first is rolled back", broker.rollback(a1.receipt), "OK")
    a1 = broker.reserve_one(queue)
    expect("and is delivered again before the second", a1.item.payload, b"a1")
    expect("the first is committed", broker.commit(a1.receipt), ["OK"])
    expect("then the second is delivered", broker.reserve_one(queue).item.payload, b"a2")

    queue = broker.create(unique("sequenced"), sequenced=True)
    numbers = [result.sequence for result in push(broker, queue, *[NewItem()] * 3)]
    expect("a sequenced queue counts from 1", numbers, [1, 2, 3])


@section("Push errors")
def push_errors(broker):
    queue = unique("refused")

    def refused(what, field, *items, code=INVALID, name=queue, **fields):
        expect_error(what, code, lambda: push(broker, name, *items, **fields), field=field)

    refused("no items", "items")
    refused("1,001 items", "items", *[NewItem()] * 1001)
    refused("a bad queue name", "queue", NewItem(), name="no spaces")
    refused("a bad producer name", "producer", NewItem(), producer="-")
    refused("priority 10", "items[1].priority", NewItem(), NewItem(priority=10))
    refused("a negative delay", "items[0].delay", NewItem(delay=Duration(seconds=-1)))
    refused("a ttl of 0", "items[0].ttl", NewItem(ttl=Duration()))
    refused("an empty header key", "items[0].headers", NewItem(headers={"": "x"}))
    refused("a dedup_id of 256 bytes", "items[0].dedup_id", NewItem(dedup_id="x" * 256))
    too_large = NewItem(payload=bytes(3 * 1024 * 1024 + 1))
    refused("a payload over 3 MiB", "items[0].payload", too_large, code=grpc.StatusCode.RESOURCE_EXHAUSTED)
    refused("a delay of 11 years", "items[0].delay", NewItem(delay=Duration(seconds=11 * 366 * 86400)))
    refused("65 headers", "items[0].headers", NewItem(headers={f"h{n}": "x" for n in range(65)}))
    expect("a refused call stores nothing", broker.pop(queue, max_items=9), [])
    huge = lambda: push(broker, queue, *[NewItem(payload=bytes(3 * 1024 * 1024))] * 21)  # noqa: E731
    expect_error("a request of 63 MiB", grpc.StatusCode.RESOURCE_EXHAUSTED, huge)
    largest = push(broker, queue, *[NewItem(payload=bytes(3 * 1024 * 1024))] * 2)
    expect("payloads of exactly 3 MiB are accepted", len(largest), 2)
    expect("and delivered one at a time: a message with both would be too large", len(broker.pop(queue, max_items=9)), 1)

    full = broker.create(unique("full"), max_depth=2)
    broker.push(full, b"1", b"2")
    end = time.monotonic() + DEADLINE
    try:
        while time.monotonic() < end:  # the depth may be a second old
            broker.push(full, b"too many")
            broker.let_pass(0.1)
        raise Failed("a queue at max_depth", "answers to pushes for as long as one waits", "RESOURCE_EXHAUSTED")
    except grpc.RpcError:
        pass
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
    expect_error("a queue at max_depth", exhausted, lambda: broker.push(full, b"x"), reason="QUEUE_FULL")


@section("PushStream")
def push_stream(broker):
    queue, batches = unique("stream"), 40
    requests = Requests()
    answers = broker.queues.PushStream(iter(requests))
    for batch in range(batches):  # all in flight before the first answer is read
        priority = 10 if batch == 7 else 0
        items = [NewItem(payload=b"%d/%d" % (batch, n), priority=priority) for n in range(25)]
        requests.send(PushStreamRequest(batch_id=batch, queue=queue, items=items, producer="py"))
    seen = {answer.batch_id: answer for _, answer in zip(range(batches), answers)}
    expect("every batch is answered, by its id", sorted(seen), list(range(batches)))
    refused = [batch for batch, answer in seen.items() if answer.HasField("error")]
    expect("only the invalid one is refused", refused, [7])
    expect("its error has the code of Push", seen[7].error.code, INVALID.value[0])
    expect_details("its error", seen[7].error, "items[0].priority")
    ok("its error names the field")
    ids = {result.id for answer in seen.values() for result in answer.results}
    expect("all others are stored, one result per item", len(ids), (batches - 1) * 25)

    requests.send(PushStreamRequest(batch_id=99, queue=queue, items=[NewItem(payload=b"last")]))
    expect("the stream continues after it", next(answers).batch_id, 99)
    requests.done()
    expect("the stream ends when the client is done", next(answers, None), None)
    expect("and all items are in the queue", len(broker.pop(queue, max_items=1000)), (batches - 1) * 25 + 1)
