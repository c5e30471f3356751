"""Items as an operator sees them: list, get, delete, replay, redrive."""

import grpc
from checking import expect, expect_error, expect_true, section, state, unique
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from sluicegate.v1.admin_service_pb2 import (
    DeleteItemRequest,
    ItemIds,
    ListItemsRequest,
    RedriveFilter,
    RedriveItemsRequest,
    ReplayItemsRequest,
    TimeRange,
)
from sluicegate.v1.item_pb2 import ITEM_STATE_BLOCKED, ITEM_STATE_DELAYED, ITEM_STATE_PROCESSED
from sluicegate.v1.item_pb2 import ITEM_STATE_READY, ITEM_STATE_RESERVED

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
HOUR = Duration(seconds=3600)


@section("ListItems")
def list_items(broker):
    queue = broker.create(unique("list"), retention=HOUR)
    broker.push(queue, b"processed", b"reserved", priority=9)
    processed, _ = broker.reserve(queue, max_items=2, lease=HOUR)
    broker.commit(processed.receipt)
    broker.push(queue, b"delayed", delay=Duration(seconds=7200))
    broker.push(queue, b"ready 1", b"ready 2")
    broker.push(queue, b"ready 3", b"blocked", ordering_key="k")

    def payloads(items):
        return [item.payload for item in items]

    ready = [b"ready 1", b"ready 2", b"ready 3"]
    expected = [b"reserved", *ready, b"delayed", b"blocked", b"processed"]
    items = broker.list_items(queue)
    expect("in hand-out order, then blocked ones, then history", payloads(items), expected)
    states = ["RESERVED", "READY", "READY", "READY", "DELAYED", "BLOCKED", "PROCESSED"]
    expect("states", [state(item) for item in items], states)
    for name, wanted, expected_ones in [
        ("READY", ITEM_STATE_READY, ready),
        ("DELAYED", ITEM_STATE_DELAYED, [b"delayed"]),
        ("RESERVED", ITEM_STATE_RESERVED, [b"reserved"]),
        ("BLOCKED", ITEM_STATE_BLOCKED, [b"blocked"]),
        ("PROCESSED", ITEM_STATE_PROCESSED, [b"processed"]),
    ]:
        expect(f"only items {name}", payloads(broker.list_items(queue, state=wanted)), expected_ones)

    def paged(**fields):
        pages, token = [], ""
        while True:
            request = ListItemsRequest(queue=queue, page_size=2, page_token=token, **fields)
            page = broker.admin.ListItems(request)
            pages.append(payloads(page.items))
            token = page.next_page_token
            if not token:
                return pages

    pages = paged()
    expect("pages of two list all, in the same order", sum(pages, []), expected)
    expect_true("no page is longer than two", max(map(len, pages)) == 2, pages)
    expect("pages of one state", sum(paged(state=ITEM_STATE_READY), []), ready)
    deliveries = [item.deliveries for item in broker.list_items(queue)]
    expect("listing changes nothing", deliveries, [1, 0, 0, 0, 0, 0, 1])

    heavy = unique("heavy")
    for _ in range(3):
        broker.push(heavy, bytes(3 * 1024 * 1024))
    first = broker.admin.ListItems(ListItemsRequest(queue=heavy))
    expect_true("a page ends at 4 MiB", len(first.items) < 3 and first.next_page_token, len(first.items))

    def refused(field, **fields):
        expect_error(f"a bad {field}", INVALID, lambda: broker.list_items(**{"queue": queue, **fields}), field=field)

    refused("queue", queue="-")
    refused("state", state=99)
    refused("page_size", page_size=-1)
    refused("page_token", page_token="no token")
    missing = unique("missing")
    expect_error("an unknown queue", NOT_FOUND, lambda: broker.list_items(missing), reason="QUEUE_NOT_FOUND")


@section("GetItem")
def get_item(broker):
    queue = unique("get")
    id, other = broker.push(queue, b"1", b"2")
    item = broker.get_item(queue, id)
    expect("returns the item", (item.id, item.queue, item.payload, state(item)), (id, queue, b"1", "READY"))
    expect_true("with its create_time", item.HasField("create_time"), item)
    expect("without changing it", broker.get_item(queue, id), item)
    broker.pop(queue)
    expect_error("one that is gone", NOT_FOUND, lambda: broker.get_item(queue, id), reason="ITEM_NOT_FOUND")
    elsewhere = broker.create(unique("elsewhere"))
    expect_error("one of another queue", NOT_FOUND, lambda: broker.get_item(elsewhere, other), reason="ITEM_NOT_FOUND")
    expect_error("a malformed id", INVALID, lambda: broker.get_item(queue, "no id"), field="id")


@section("DeleteItem")
def delete_item(broker):
    queue = broker.create(unique("delete"), retention=HOUR)
    ids = broker.push(queue, b"processed", b"reserved", b"ready")
    processed, reserved = broker.reserve(queue, max_items=2, lease=HOUR)
    broker.commit(processed.receipt)

    def delete(id):
        broker.admin.DeleteItem(DeleteItemRequest(queue=queue, id=id))

    for id in ids:
        delete(id)
    expect("whatever its state", broker.list_items(queue), [])
    expect("its receipt is GONE", broker.commit(reserved.receipt), ["GONE"])
    expect_error("one that is gone", NOT_FOUND, lambda: delete(ids[0]), reason="ITEM_NOT_FOUND")
    expect_error("a malformed id", INVALID, lambda: delete(""), field="id")


@section("ReplayItems")
def replay_items(broker):
    queue = broker.create(unique("replay"), retention=HOUR)
    broker.push(queue, *[b"%d" % n for n in range(4)])
    ids = []
    for _ in range(4):
        delivery = broker.reserve_one(queue)
        broker.commit(delivery.receipt)
        ids.append(delivery.item.id)
        broker.let_pass(0.01)  # so that no two have the same process_time

    def replay(**fields):
        return broker.admin.ReplayItems(ReplayItemsRequest(queue=queue, **fields)).replayed_items

    expect("two by id", replay(ids=ItemIds(ids=[ids[0], ids[2]])), 2)
    item = broker.get_item(queue, ids[0])
    expect("they are READY at attempt 1", (state(item), item.attempt), ("READY", 1))
    expect("and no longer have a process_time", item.HasField("process_time"), False)
    expect("ids that are not processed do not count", replay(ids=ItemIds(ids=[ids[0]])), 0)
    expect("they are delivered again", broker.pop(queue, max_items=9), [b"0", b"2"])

    times = sorted(broker.get_item(queue, id).process_time.ToNanoseconds() for id in ids)
    start, end = Timestamp(), Timestamp()
    start.FromNanoseconds(times[0])
    end.FromNanoseconds(times[1])
    expect("by a span, its end excluded", replay(process_time=TimeRange(start_time=start, end_time=end)), 1)
    expect("that is the one committed first", broker.pop(queue, max_items=9), [b"1"])
    expect("at most max_items of an open span", replay(process_time=TimeRange(), max_items=3), 3)
    expect("and the rest", replay(process_time=TimeRange()), 1)
    expect("all are ready again", len(broker.list_items(queue, state=ITEM_STATE_READY)), 4)

    expect_error("no selection", INVALID, replay, field="selection")
    expect_error("no ids", INVALID, lambda: replay(ids=ItemIds()), field="ids.ids")
    backwards = lambda: replay(process_time=TimeRange(start_time=end, end_time=start))  # noqa: E731
    expect_error("a span that ends first", INVALID, backwards, field="process_time.end_time")
    spans = {"process_time": TimeRange(), "max_items": -1}
    expect_error("a negative max_items", INVALID, lambda: replay(**spans), field="max_items")


@section("RedriveItems")
def redrive_items(broker):
    dead = broker.create(unique("dead"))
    sources = [broker.create(unique("work"), max_attempts=1, dead_letter_queue=dead) for _ in range(2)]
    ids = {}
    for queue in sources:
        for reason in ("timeout: disk", "no paper", "timeout: network"):
            id = broker.push(queue, reason.encode())[0]
            fate = broker.rollback(broker.reserve_one(queue).receipt, reason=reason)
            expect(f"{reason!r} goes to the dead-letter queue", fate, "DEAD_LETTERED")
            ids[queue, reason] = id

    def redrive(to_queue="", max_items=0, rate=0, **conditions):
        fields = {"filter": RedriveFilter(**conditions)} if conditions else {}
        request = RedriveItemsRequest(queue=dead, to_queue=to_queue, max_items=max_items, rate=rate, **fields)
        return broker.admin.RedriveItems(request).redriven_items

    def payloads(queue):
        return sorted(item.payload for item in broker.list_items(queue))

    one, two = sources
    expect("by reason and origin", redrive(reason_contains="timeout", origin_queue=one), 2)
    expect("each to the queue it came from", payloads(one), [b"timeout: disk", b"timeout: network"])
    item = broker.get_item(one, ids[one, "timeout: disk"])
    expect("at attempt 1, its id kept", (state(item), item.attempt), ("READY", 1))
    other = broker.create(unique("other"))
    chosen = ids[two, "no paper"]
    expect("by id, to a named queue", redrive(to_queue=other, ids=[chosen]), 1)
    expect("the item is there", payloads(other), [b"no paper"])
    expect("nothing that does not match", redrive(reason_contains="no such reason"), 0)
    expect("nothing of a part of a reason", redrive(reason="pape"), 0)
    expect("nothing without a reason", redrive(reason=""), 0)
    past = TimeRange(end_time=Timestamp(seconds=1))
    expect("nothing of earlier items", redrive(create_time=past), 0)
    expect("at most max_items, at a rate", redrive(max_items=1, rate=100), 1)
    expect("all the rest", redrive(), 2)
    expect("the dead-letter queue is empty", payloads(dead), [])
    expect("and nothing was lost", len(payloads(one)) + len(payloads(two)) + len(payloads(other)), 6)

    far = broker.create(unique("far"), group=unique("group"))
    broker.push(dead, b"stays")
    expect("an item without an origin stays", (redrive(), payloads(dead)), (0, [b"stays"]))
    precondition = grpc.StatusCode.FAILED_PRECONDITION
    expect_error("to another group", precondition, lambda: redrive(to_queue=far), reason="DIFFERENT_GROUP")
    expect_error("a bad queue name", INVALID, lambda: redrive(to_queue="-"), field="to_queue")
    expect_error("a negative rate", INVALID, lambda: redrive(rate=-1), field="rate")
