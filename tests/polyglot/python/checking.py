"""The common part of all checks: sections, expectations, deadlines, and a connection to the broker."""

import concurrent.futures
import json
import os
import queue as fifo
import time
import uuid

import grpc
import stubs  # noqa: F401  makes sluicegate.v1 importable
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from sluicegate.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    item_pb2,
    operation_service_pb2_grpc,
    queue_pb2,
    queue_service_pb2,
    queue_service_pb2_grpc,
    schedule_service_pb2_grpc,
    template_service_pb2_grpc,
)

# No wait in these checks lasts longer than this, in seconds. It is long for the sake of busy machines:
# each wait ends with the event it waits for.
DEADLINE = 60

# Every call ends by then, whatever the broker does. Call by call it would be `stub.Push(..., timeout=60)`.
SERVICE_CONFIG = {"methodConfig": [{"name": [{}], "timeout": f"{DEADLINE}s"}]}


class Broker:
    """A connection to the broker and the services on it."""

    def __init__(self, address):
        # All limits of the client are gRPC's defaults: no message of the broker is over 4 MiB.
        self.channel = grpc.insecure_channel(
            address,
            options=[("grpc.service_config", json.dumps(SERVICE_CONFIG))],
        )
        self.queues = queue_service_pb2_grpc.QueueServiceStub(self.channel)
        self.admin = admin_service_pb2_grpc.AdminServiceStub(self.channel)
        self.schedules = schedule_service_pb2_grpc.ScheduleServiceStub(self.channel)
        self.templates = template_service_pb2_grpc.TemplateServiceStub(self.channel)
        self.operations = operation_service_pb2_grpc.OperationServiceStub(self.channel)

    # Short forms of the calls that most checks start with.

    def create(self, queue, **settings):
        """Creates a queue and returns its name."""
        self.admin.CreateQueue(admin_service_pb2.CreateQueueRequest(queue=queue_pb2.Queue(name=queue, **settings)))
        return queue

    def push(self, queue, *payloads, **fields):
        """Pushes one item per payload and returns their ids."""
        items = [item_pb2.NewItem(payload=payload, **fields) for payload in payloads]
        answer = self.queues.Push(queue_service_pb2.PushRequest(queue=queue, items=items))
        return [result.id for result in answer.results]

    def reserve(self, queue, max_items=1, wait=0, **fields):
        """Reserves up to `max_items`, waiting up to `wait` seconds for the first, and returns the deliveries."""
        request = queue_service_pb2.ReserveRequest(queue=queue, max_items=max_items, wait=seconds(wait), **fields)
        return list(self.queues.Reserve(request).deliveries)

    def reserve_one(self, queue, wait=DEADLINE - 5, **fields):
        """Reserves one item, which must be delivered before the deadline."""
        deliveries = self.reserve(queue, wait=wait, **fields)
        if len(deliveries) != 1:
            raise Failed(f"one item of {queue}", f"{len(deliveries)} within {wait} s", "1")
        return deliveries[0]

    def pop(self, queue, max_items=1, wait=0):
        """Pops up to `max_items` and returns their payloads."""
        request = queue_service_pb2.PopRequest(queue=queue, max_items=max_items, wait=seconds(wait))
        return [item.payload for item in self.queues.Pop(request).items]

    def commit(self, *receipts):
        """Commits receipts and returns the names of the outcomes."""
        answer = self.queues.Commit(queue_service_pb2.CommitRequest(receipts=receipts))
        return outcomes(answer.results)

    def rollback(self, receipt, **fields):
        """Rolls one receipt back, by default without a delay, and returns the name of the outcome."""
        fields.setdefault("delay", Duration())
        item = queue_service_pb2.RollbackItem(receipt=receipt, **fields)
        answer = self.queues.Rollback(queue_service_pb2.RollbackRequest(items=[item]))
        return outcomes(answer.results)[0]

    def get_item(self, queue, id):
        """Returns one item."""
        return self.admin.GetItem(admin_service_pb2.GetItemRequest(queue=queue, id=id)).item

    def list_items(self, queue, **fields):
        """Returns the items of a queue, the first page of them."""
        return list(self.admin.ListItems(admin_service_pb2.ListItemsRequest(queue=queue, **fields)).items)

    def reserved(self, queue):
        """Returns how many items of a queue are reserved, counted now."""
        return len(self.list_items(queue, state=item_pb2.ITEM_STATE_RESERVED))

    def stats(self, queue):
        """Returns the stats of a queue, which may be a moment old."""
        return self.admin.GetQueueStats(admin_service_pb2.GetQueueStatsRequest(queue=queue)).stats

    def let_pass(self, span):
        """Returns when `span` seconds have passed for the broker, which shows that by delivering a delayed item."""
        queue = unique("clock")
        self.push(queue, b"tick", delay=seconds(span))
        expect_quietly("a delayed item as the clock", self.pop(queue, wait=DEADLINE - 5), [b"tick"])


class Requests:
    """The client's side of a bidirectional stream: messages are sent immediately, until `done`."""

    def __init__(self, *first):
        self._queue = fifo.Queue()
        for request in first:
            self.send(request)

    def send(self, request):
        """Sends one message."""
        self._queue.put(request)

    def done(self):
        """Half-closes the stream: no more messages from this side."""
        self._queue.put(None)

    def __iter__(self):
        return iter(self._queue.get, None)


# --- expectations ---


class Failed(Exception):
    """An expectation that did not hold."""

    def __init__(self, what, got, expected):
        super().__init__(f"{what}\n  expected: {expected}\n  got:      {got}")


SECTIONS = []
_current = ""


def section(name):
    """Registers a function as the section `name`, usually that of an rpc."""

    def register(function):
        SECTIONS.append((name, function))
        return function

    return register


def run_sections(broker):
    """Runs all sections in the order of their definitions, and stops at the first failure."""
    global _current
    for _current, function in SECTIONS:
        function(broker)


def current_section():
    """Returns the name of the running section."""
    return _current


def ok(what):
    """Reports that a check passed."""
    print(f"ok {_current}: {what}", flush=True)


def expect_quietly(what, got, expected):
    """Fails unless `got` equals `expected`."""
    if got != expected:
        raise Failed(what, repr(got), repr(expected))


def expect(what, got, expected):
    """Fails unless `got` equals `expected`, else reports that the check passed."""
    expect_quietly(what, got, expected)
    ok(what)


def expect_true(what, condition, got):
    """Fails unless `condition` holds; `got` is the value it is about."""
    if not condition:
        raise Failed(what, repr(got), "as the name of the check says")
    ok(what)


def expect_error(what, code, call, field=None, reason=None):
    """Fails unless `call()` ends with the status `code`, with its details as documented."""
    try:
        answer = call()
    except grpc.RpcError as error:
        expect_quietly(f"{what}: code ({error.details()})", error.code(), code)
        expect_details(what, rpc_status.from_call(error), field, reason)
        ok(f"{what} is {code.name}{f' naming {field}' if field else ''}")
    else:
        raise Failed(what, f"the answer {answer}".strip(), code.name)


def expect_details(what, status, field, reason=None):
    """Fails unless a google.rpc.Status holds an ErrorInfo of ours and, with `field`, a BadRequest naming it."""
    info = unpack(status, error_details_pb2.ErrorInfo)
    expect_quietly(f"{what}: domain of ErrorInfo", info and info.domain, "sluicegate")
    expect_quietly(f"{what}: reason of ErrorInfo is upper snake", info.reason.replace("_", "").isupper(), True)
    if reason is not None:
        expect_quietly(f"{what}: reason of ErrorInfo", info.reason, reason)
    if field is not None:
        bad_request = unpack(status, error_details_pb2.BadRequest)
        fields = [violation.field for violation in bad_request.field_violations] if bad_request else None
        expect_quietly(f"{what}: fields of BadRequest", fields, [field])


def unpack(status, kind):
    """Returns the first detail of this kind in a google.rpc.Status, or None."""
    for detail in status.details if status else []:
        if detail.Is(kind.DESCRIPTOR):
            message = kind()
            detail.Unpack(message)
            return message
    return None


def eventually(what, look, expected):
    """Calls `look()` until it returns `expected`; fails at the deadline."""
    end = time.monotonic() + DEADLINE
    while (got := look()) != expected:
        if time.monotonic() > end:
            raise Failed(f"{what}, within {DEADLINE} s", repr(got), repr(expected))
        time.sleep(0.02)  # between two calls
    ok(what)


# --- small things ---

_run = uuid.uuid4().hex[:8]
_threads = concurrent.futures.ThreadPoolExecutor(max_workers=16)


def unique(name):
    """Returns a name that no other run and no other check uses."""
    return f"py-{_run}-{name}-{uuid.uuid4().hex[:6]}"


def seconds(value):
    """Returns a protobuf duration."""
    duration = Duration()
    duration.FromNanoseconds(round(value * 1_000_000_000))
    return duration


def outcomes(results):
    """Returns the names of the outcomes, without their prefix."""
    return [item_pb2.Outcome.Name(result.outcome).replace("OUTCOME_", "") for result in results]


def state(item):
    """Returns the name of an item's state, without its prefix."""
    return item_pb2.ItemState.Name(item.state).replace("ITEM_STATE_", "")


def in_background(function, *args):
    """Runs a function in another thread; `.result(DEADLINE)` waits for it."""
    return _threads.submit(function, *args)


def address():
    """Returns the address of the broker."""
    return os.environ.get("SLUICEGATE_ADDR", "127.0.0.1:7400")
