"""OperationService: long work of operators."""

import time

import grpc
from checking import DEADLINE, Failed, expect, expect_error, expect_true, section, unique
from google.protobuf.duration_pb2 import Duration
from sluicegate.v1.admin_service_pb2 import ItemFilter, PurgeQueueRequest, RedriveItemsRequest, ReplayItemsRequest
from sluicegate.v1.admin_service_pb2 import TimeRange
from sluicegate.v1.item_pb2 import ITEM_STATE_READY
from sluicegate.v1.operation_service_pb2 import (
    OPERATION_STATE_CANCELLED,
    OPERATION_STATE_FAILED,
    OPERATION_STATE_RUNNING,
    OPERATION_STATE_SUCCEEDED,
    CancelOperationRequest,
    DeleteItemsRequest,
    GetOperationRequest,
    ListOperationsRequest,
    OperationWork,
    StartOperationRequest,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND


def start(broker, dry_run=False, request_id="", **work):
    request = StartOperationRequest(work=OperationWork(**work), dry_run=dry_run, request_id=request_id)
    return broker.operations.StartOperation(request).operation


def get(broker, id):
    return broker.operations.GetOperation(GetOperationRequest(id=id)).operation


def ended(broker, id):
    """Waits for the end of an operation, and returns it."""
    limit = time.monotonic() + DEADLINE
    while (operation := get(broker, id)).state == OPERATION_STATE_RUNNING:
        if time.monotonic() > limit:
            raise Failed("the operation ends", operation, "an end")
        time.sleep(0.05)
    return operation


def run(broker, **work):
    """Runs an operation to its end, and returns its state and the number of its items."""
    operation = ended(broker, start(broker, **work).id)
    return operation.state, operation.processed_items


@section("StartOperation")
def start_operation(broker):
    queue = broker.create(unique("operated"), retention=Duration(seconds=3600))
    other = broker.create(unique("other"))
    broker.push(queue, *[b"x"] * 40)
    broker.push(queue, b"delayed", delay=Duration(seconds=7200))
    purge = {"purge": PurgeQueueRequest(name=queue)}
    started = start(broker, dry_run=True, **purge)
    expect("it says what it does", (started.work.purge.name, started.dry_run), (queue, True))
    expect("and how many items there are", started.total_items, 41)
    done = ended(broker, started.id)
    expect("a dry run counts", (done.state, done.processed_items), (OPERATION_STATE_SUCCEEDED, 41))
    expect_true("by a broker", len(done.broker) == 8, done.broker)
    expect("and changes nothing", broker.stats(queue).ready, 40)

    def delete(**fields):
        return {"delete": DeleteItemsRequest(queue=queue, **fields)}

    state = OPERATION_STATE_SUCCEEDED
    few = delete(state=ITEM_STATE_READY, filter=ItemFilter(payload_contains=b"x"), max_items=3, rate=100)
    expect("items are deleted by a filter", run(broker, **few), (state, 3))
    redrive = RedriveItemsRequest(queue=queue, to_queue=other, max_items=30)
    expect("items are redriven", run(broker, redrive=redrive), (state, 30))
    expect("to the queue that is named", broker.stats(other).ready, 30)
    broker.pop(queue, max_items=7)
    replay = ReplayItemsRequest(queue=queue, process_time=TimeRange())
    expect("items are replayed", run(broker, replay=replay), (state, 7))
    expect("all others are purged", run(broker, **purge), (state, 8))

    first = start(broker, request_id="once", **purge)
    expect("the same request starts nothing", start(broker, request_id="once", **purge).id, first.id)
    exists = grpc.StatusCode.ALREADY_EXISTS
    repeat = lambda: start(broker, request_id="once", **delete())  # noqa: E731
    expect_error("other work with its id", exists, repeat, reason="OPERATION_EXISTS")

    far = broker.create(unique("far"), group=unique("group"))
    away = start(broker, redrive=RedriveItemsRequest(queue=queue, to_queue=far))
    failed = ended(broker, away.id)
    expect("what cannot be done fails", failed.state, OPERATION_STATE_FAILED)
    expect_true("and says why", "group" in failed.error, failed.error)
    missing = lambda: start(broker, purge=PurgeQueueRequest(name=unique("missing")))  # noqa: E731
    expect_error("a queue that is not there", NOT_FOUND, missing, reason="QUEUE_NOT_FOUND")
    expect_error("no work", INVALID, lambda: start(broker), field="work")
    negative = lambda: start(broker, **delete(rate=-1))  # noqa: E731
    expect_error("a negative rate", INVALID, negative, field="work.delete.rate")


@section("GetOperation")
def get_operation(broker):
    queue = broker.create(unique("operated"))
    started = start(broker, purge=PurgeQueueRequest(name=queue))
    found = get(broker, started.id)
    expect("the operation is found", (found.id, found.create_time), (started.id, started.create_time))
    nobody = lambda: get(broker, "0" * 24)  # noqa: E731
    expect_error("one that is not there", NOT_FOUND, nobody, reason="OPERATION_NOT_FOUND")
    expect_error("no id", INVALID, lambda: get(broker, "x"), field="id")


@section("ListOperations")
def list_operations(broker):
    queue = broker.create(unique("operated"))
    ids = [start(broker, purge=PurgeQueueRequest(name=queue)).id for _ in range(3)]

    def listed(**fields):
        return broker.operations.ListOperations(ListOperationsRequest(queue=queue, **fields))

    expect("all of the queue", sorted(one.id for one in listed().operations), sorted(ids))
    page = listed(page_size=2)
    rest = listed(page_size=2, page_token=page.next_page_token)
    found = [one.id for one in [*page.operations, *rest.operations]]
    expect("in pages", (sorted(found), rest.next_page_token), (sorted(ids), ""))
    expect_error("a bad token", INVALID, lambda: listed(page_token="x"), field="page_token")


@section("CancelOperation")
def cancel_operation(broker):
    queue = broker.create(unique("operated"))
    broker.push(queue, *[b"x"] * 100)

    def cancel(id):
        return broker.operations.CancelOperation(CancelOperationRequest(id=id)).operation

    slow = start(broker, delete=DeleteItemsRequest(queue=queue, rate=1))
    expect("it is cancelled", cancel(slow.id).state, OPERATION_STATE_CANCELLED)
    expect("and stays so", get(broker, slow.id).state, OPERATION_STATE_CANCELLED)
    expect("a second time changes nothing", cancel(slow.id).state, OPERATION_STATE_CANCELLED)
    expect_true("most items are still there", broker.stats(queue).ready > 80, broker.stats(queue).ready)
    done = ended(broker, start(broker, purge=PurgeQueueRequest(name=queue)).id)
    expect("one that has ended stays as it is", cancel(done.id).state, OPERATION_STATE_SUCCEEDED)
    expect_error("one that is not there", NOT_FOUND, lambda: cancel("0" * 24), reason="OPERATION_NOT_FOUND")
