"""Pop, Reserve, Consume and ConsumeStream: how items reach a consumer."""

import grpc
from checking import (
    DEADLINE,
    Requests,
    eventually,
    expect,
    expect_error,
    expect_true,
    in_background,
    outcomes,
    seconds,
    section,
    state,
    unique,
)
from google.protobuf.duration_pb2 import Duration
from sluicegate.v1.queue_pb2 import RetryPolicy
from sluicegate.v1.queue_service_pb2 import (
    CommitRequest,
    CommitUpTo,
    ConsumeRequest,
    ConsumeStreamRequest,
    ExtendRequest,
    Flow,
    PopRequest,
    ReserveRequest,
    RollbackItem,
    RollbackRequest,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
HOUR = Duration(seconds=3600)


@section("Pop")
def pop(broker):
    queue = unique("pop")
    expect("a queue that does not exist immediately returns nothing", broker.pop(queue), [])
    expect_error("and is not created by it", grpc.StatusCode.NOT_FOUND, lambda: broker.stats(queue))
    broker.push(queue, b"1", b"2", b"3")
    item = broker.queues.Pop(PopRequest(queue=queue)).items[0]
    expect("one item by default", (item.payload, item.queue, item.deliveries), (b"1", queue, 1))
    expect("and more on request", broker.pop(queue, max_items=9), [b"2", b"3"])
    missing = lambda: broker.get_item(queue, item.id)  # noqa: E731
    expect_error("a popped item is gone: GetItem", grpc.StatusCode.NOT_FOUND, missing)

    waiting = in_background(broker.pop, queue, 1, DEADLINE - 5)
    eventually("a waiting pop counts as a consumer", lambda: broker.stats(queue).consumers, 1)
    broker.push(queue, b"wake up")
    expect("a push wakes a waiting pop", waiting.result(DEADLINE), [b"wake up"])
    broker.push(queue, b"", delay=HOUR)
    expect("a wait ends with nothing when its time has passed", broker.pop(queue, wait=0.2), [])

    def refused(field, **fields):
        request = PopRequest(**{"queue": queue, **fields})
        expect_error(f"a bad {field}", INVALID, lambda: broker.queues.Pop(request), field=field)

    refused("queue", queue="-")
    refused("max_items", max_items=1001)
    refused("wait", wait=Duration(seconds=601))


@section("Reserve")
def reserve(broker):
    queue = unique("reserve")
    id = broker.push(queue, b"work")[0]
    delivery = broker.reserve_one(queue, lease=HOUR, consumer="worker-1")
    item = delivery.item
    expect("the item is RESERVED, with a receipt", (item.id, item.payload, state(item)), (id, b"work", "RESERVED"))
    expect_true("the receipt is not empty", delivery.receipt, delivery)
    expect("attempt, deliveries, consumer", (item.attempt, item.deliveries, item.consumer), (1, 1, "worker-1"))
    expect("eligible_time is the end of the lease", item.eligible_time, delivery.lease_expire_time)
    lease = delivery.lease_expire_time.ToNanoseconds() - item.create_time.ToNanoseconds()
    expect_true("the lease is the one asked for", lease >= HOUR.ToNanoseconds(), lease)
    expect("no other consumer gets it", broker.reserve(queue), [])

    waiting = in_background(broker.reserve_one, queue)
    eventually("a waiting reserve counts as a consumer", lambda: broker.stats(queue).consumers, 1)
    broker.push(queue, b"wake up")
    expect("a push wakes a waiting reserve", waiting.result(DEADLINE).item.payload, b"wake up")

    queue = broker.create(unique("lapse"), lease=seconds(0.2))
    broker.push(queue, b"slow")
    lapsed = broker.reserve_one(queue)
    again = broker.reserve_one(queue, lease=HOUR)
    expect("a lapsed lease is a failed attempt", (again.item.attempt, again.item.deliveries), (2, 2))
    expect("its receipt is then LEASE_LOST", broker.commit(lapsed.receipt), ["LEASE_LOST"])
    expect("and changed nothing: the newer one commits", broker.commit(again.receipt), ["OK"])

    queue = unique("late")
    broker.push(queue, b"late")
    late = broker.reserve_one(queue, lease=seconds(0.1))
    broker.let_pass(0.3)
    expect("a late commit is OK while no other consumer has the item", broker.commit(late.receipt), ["OK"])

    def refused(field, **fields):
        request = ReserveRequest(**{"queue": queue, **fields})
        expect_error(f"a bad {field}", INVALID, lambda: broker.queues.Reserve(request), field=field)

    refused("queue", queue="")
    refused("max_items", max_items=-1)
    refused("lease", lease=seconds(0.01))
    refused("consumer", consumer="no spaces")


def deliveries_of(stream, count):
    """The next deliveries of a Consume stream, until there are `count`."""
    taken = []
    while len(taken) < count:
        taken += next(stream).deliveries
    return taken


@section("Consume")
def consume(broker):
    queue = unique("consume-early")
    stream = broker.queues.Consume(ConsumeRequest(queue=queue))
    early = in_background(deliveries_of, stream, 1)
    broker.push(queue, b"first")
    expect("a stream waits for its queue", early.result(DEADLINE)[0].item.payload, b"first")
    stream.cancel()

    queue = broker.create(unique("consume"))
    stream = broker.queues.Consume(ConsumeRequest(queue=queue, max_in_flight=2, lease=HOUR, consumer="py"))
    stream.initial_metadata()  # waits until the broker has opened the stream
    eventually("a stream counts as a consumer", lambda: broker.stats(queue).consumers, 1)
    ids = broker.push(queue, *[b"%d" % n for n in range(5)])
    held = deliveries_of(stream, 2)
    expect("items are delivered in order", [delivery.item.id for delivery in held], ids[:2])
    expect("only max_in_flight of them", broker.reserved(queue), 2)
    expect("a commit by an ordinary call", broker.commit(held[0].receipt), ["OK"])
    held[0] = deliveries_of(stream, 1)[0]
    expect("makes room for the next", held[0].item.id, ids[2])
    stream.cancel()
    back = []
    while len(back) < 4:
        back.append(broker.reserve_one(queue, lease=HOUR))
    attempts = {delivery.item.id: delivery.item.attempt for delivery in back}
    expect("the items of a cancelled stream are ready immediately, with no failed attempt", attempts, dict.fromkeys(ids[1:], 1))
    stale = broker.commit(held[0].receipt, held[1].receipt)
    expect("and its receipts are void", stale, ["LEASE_LOST", "LEASE_LOST"])

    queue = broker.create(unique("counted"), retry_policy=RetryPolicy())
    broker.push(queue, b"1")
    stream = broker.queues.Consume(ConsumeRequest(queue=queue, lease=HOUR, on_disconnect="ON_DISCONNECT_COUNT"))
    deliveries_of(stream, 1)
    stream.cancel()
    expect("unless it requests that this counts", broker.reserve_one(queue).item.attempt, 2)

    queue = unique("bytes")
    broker.push(queue, b"x" * 60, b"y" * 60, b"z" * 500)
    request = ConsumeRequest(queue=queue, max_in_flight_bytes=100, lease=HOUR)
    stream, sizes = broker.queues.Consume(request), []
    for _ in range(3):
        delivery = deliveries_of(stream, 1)[0]
        sizes.append((len(delivery.item.payload), broker.reserved(queue)))
        broker.commit(delivery.receipt)
    expect("max_in_flight_bytes holds, a larger item is delivered alone", sizes, [(60, 1), (60, 1), (500, 1)])
    stream.cancel()

    queue = unique("auto")
    broker.push(queue, b"1", b"2")
    stream = broker.queues.Consume(ConsumeRequest(queue=queue, auto_commit=True))
    taken = deliveries_of(stream, 2)
    received = [(delivery.item.payload, delivery.receipt) for delivery in taken]
    expect("auto_commit hands out without receipts", received, [(b"1", ""), (b"2", "")])
    stream.cancel()
    expect("and there is nothing to settle", broker.list_items(queue), [])

    queue = unique("renew")
    broker.push(queue, b"long work")
    stream = broker.queues.Consume(ConsumeRequest(queue=queue, lease=seconds(2), renew=True))
    delivery = deliveries_of(stream, 1)[0]
    broker.let_pass(3)
    expect("with renew a lease outlives itself", broker.reserve(queue), [])
    expect("and the item commits", broker.commit(delivery.receipt), ["OK"])
    stream.cancel()

    def refused(field, **fields):
        request = ConsumeRequest(**{"queue": queue, **fields})
        expect_error(f"a bad {field}", INVALID, lambda: next(broker.queues.Consume(request)), field=field)

    refused("queue", queue="-")
    refused("max_in_flight", max_in_flight=10_001)
    refused("lease", lease=Duration(seconds=-1))


@section("ConsumeStream")
def consume_stream(broker):
    queue = unique("bidi")
    ids = broker.push(queue, *[b"%d" % n for n in range(4)])
    opening = ConsumeRequest(queue=queue, max_in_flight=2, lease=HOUR, consumer="py")
    requests = Requests(ConsumeStreamRequest(open=opening))
    stream, held = broker.queues.ConsumeStream(iter(requests)), []

    def answer(event):
        """The next event of this kind; deliveries that come before it are kept in `held`."""
        while True:
            message = next(stream)
            if message.HasField("deliveries"):
                held.extend(message.deliveries.deliveries)
            if message.HasField(event):
                return getattr(message, event)

    def take():
        while not held:
            answer("deliveries")
        return held.pop(0)

    opened = answer("opened")
    expect("`opened` has lease and flow", (opened.lease, opened.max_in_flight), (HOUR, 2))
    first, second = take(), take()
    expect("deliveries are in order", [first.item.id, second.item.id], ids[:2])

    requests.send(ConsumeStreamRequest(extend=ExtendRequest(receipts=[first.receipt], lease=Duration(seconds=7200))))
    extended = answer("extended").results
    expect("extend is answered", (extended[0].receipt, outcomes(extended)), (first.receipt, ["OK"]))
    later = extended[0].lease_expire_time.ToNanoseconds() > first.lease_expire_time.ToNanoseconds()
    expect_true("with the new end of the lease", later, extended)

    requests.send(ConsumeStreamRequest(flow=Flow(max_in_flight=0)))
    expect("flow is answered", answer("flow").max_in_flight, 0)
    requests.send(ConsumeStreamRequest(commit=CommitRequest(receipts=[first.receipt])))
    giving_back = RollbackItem(receipt=second.receipt, delay=HOUR, reason="not today")
    requests.send(ConsumeStreamRequest(rollback=RollbackRequest(items=[giving_back])))
    settled = [answer("settled").results for _ in range(2)]
    receipts = [results[0].receipt for results in settled]
    expect("commit and rollback are answered in order", receipts, [first.receipt, second.receipt])
    expect("both OK", [outcomes(results) for results in settled], [["OK"], ["OK"]])
    expect("a halted stream is handed nothing", (held, broker.reserved(queue)), ([], 0))
    requests.send(ConsumeStreamRequest(flow=Flow(max_in_flight=5)))
    expect("until the flow is opened again", [take().item.id, take().item.id], ids[2:])
    requests.done()
    stream.cancel()
    back = sorted(broker.reserve_one(queue).item.id for _ in range(2))
    expect("the items of a stream that ends are ready again", back, sorted(ids[2:]))

    requests, queue = Requests(), unique("done")
    broker.push(queue, b"work")
    requests.send(ConsumeStreamRequest(open=ConsumeRequest(queue=queue, lease=HOUR)))
    stream = broker.queues.ConsumeStream(iter(requests))
    requests.send(ConsumeStreamRequest(commit=CommitRequest(receipts=[take().receipt])))
    expect("a stream settles its items", outcomes(answer("settled").results), ["OK"])
    requests.done()
    expect("and ends when the client is done", next(stream, None), None)

    requests, queue = Requests(), unique("up-to")
    broker.push(queue, *[b"%d" % n for n in range(4)])
    requests.send(ConsumeStreamRequest(open=ConsumeRequest(queue=queue, lease=HOUR)))
    stream = broker.queues.ConsumeStream(iter(requests))
    expect("deliveries are numbered", [take().delivery_tag for _ in range(4)], [1, 2, 3, 4])
    requests.send(ConsumeStreamRequest(commit_up_to=CommitUpTo(delivery_tag=3)))
    expect("one request commits all up to an item", answer("committed_up_to").committed, 3)
    requests.done()
    expect("the stream ends", next(stream, None), None)
    expect("and the items behind it are ready again", broker.reserve_one(queue).item.payload, b"3")

    late_opening = ConsumeStreamRequest(flow=Flow(max_in_flight=1))
    call = lambda *sent: next(broker.queues.ConsumeStream(iter(sent)))  # noqa: E731
    expect_error("a stream that does not start with `open`", INVALID, lambda: call(late_opening), field="open")
