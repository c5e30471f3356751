"""Queues as seen by operators: settings, pausing, purging, stats."""

import grpc
from checking import (
    DEADLINE,
    eventually,
    expect,
    expect_error,
    expect_true,
    in_background,
    seconds,
    section,
    unique,
)
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from sluicegate.v1.admin_service_pb2 import (
    CreateQueueRequest,
    DeleteQueueRequest,
    GetQueueRequest,
    ListQueuesRequest,
    PauseQueueRequest,
    PurgeQueueRequest,
    ResumeQueueRequest,
    UpdateQueueRequest,
    WatchQueuesRequest,
)
from sluicegate.v1.queue_pb2 import Queue, RetryPolicy
from sluicegate.v1.queue_service_pb2 import MoveRequest

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
HOUR = Duration(seconds=3600)


def get_queue(broker, name):
    return broker.admin.GetQueue(GetQueueRequest(name=name)).queue


@section("CreateQueue")
def create_queue(broker):
    wanted = Queue(
        name=unique("created"),
        group=unique("group"),
        lease=Duration(seconds=45),
        max_attempts=4,
        dead_letter_queue=unique("dead"),
        retry_policy=RetryPolicy(initial_delay=Duration(seconds=1), multiplier=3, max_delay=HOUR, jitter=0.5),
        default_ttl=HOUR,
        retention=Duration(seconds=60),
        dedup_window=Duration(seconds=90),
        max_depth=1000,
        sequenced=True,
        labels={"team": "print"},
    )

    def create(queue):
        return broker.admin.CreateQueue(CreateQueueRequest(queue=queue)).queue

    created = create(wanted)
    expect_true("create_time is set", created.HasField("create_time"), created)
    kept = get_queue(broker, wanted.name)
    expect("GetQueue returns the same", kept, created)
    kept.ClearField("create_time")
    expect("every setting is kept", kept, wanted)
    expect("created again with the same settings it is returned", create(wanted), created)
    other = Queue(name=wanted.name, group=wanted.group, max_attempts=5)
    expect_error("with others", grpc.StatusCode.ALREADY_EXISTS, lambda: create(other), reason="QUEUE_EXISTS")

    plain = create(Queue(name=unique("plain")))
    expect("defaults: group, attempts, depth", (plain.group, plain.max_attempts, plain.max_depth), ("default", 0, 0))
    broker.push(auto := unique("auto"), b"x")
    made = get_queue(broker, auto)
    expect("a pushed-to queue has the same defaults", (made.group, made.max_attempts), ("default", 0))

    def refused(field, **settings):
        queue = Queue(**{"name": unique("refused"), **settings})
        expect_error(f"a bad {field}", INVALID, lambda: create(queue), field=field)

    refused("queue.name", name="no spaces")
    refused("queue.group", group="-")
    refused("queue.lease", lease=seconds(0.01))
    refused("queue.max_attempts", max_attempts=-1)
    refused("queue.dead_letter_queue", dead_letter_queue="/")
    refused("queue.retry_policy.jitter", retry_policy=RetryPolicy(jitter=1.5))
    refused("queue.retention", retention=Duration(seconds=-1))
    expect_error("no queue", INVALID, lambda: create(None), field="queue")


@section("GetQueue")
def get(broker):
    name = broker.create(unique("get"), max_attempts=7)
    expect("returns the settings", get_queue(broker, name).max_attempts, 7)
    missing = unique("missing")
    expect_error("an unknown one", NOT_FOUND, lambda: get_queue(broker, missing), reason="QUEUE_NOT_FOUND")
    expect_error("a bad name", INVALID, lambda: get_queue(broker, ""), field="name")


@section("UpdateQueue")
def update_queue(broker):
    name = broker.create(unique("update"), max_attempts=3, lease=HOUR, labels={"a": "1"})

    def update(*paths, name=name, **settings):
        request = UpdateQueueRequest(queue=Queue(name=name, **settings), update_mask=FieldMask(paths=paths))
        return broker.admin.UpdateQueue(request).queue

    policy = RetryPolicy(initial_delay=HOUR, jitter=0.25)
    changed = update("max_attempts", "retry_policy.jitter", max_attempts=1, lease=seconds(1), retry_policy=policy)
    expect("fields of the mask change", (changed.max_attempts, changed.retry_policy.jitter), (1, 0.25))
    others = (changed.lease, changed.retry_policy.initial_delay, dict(changed.labels))
    expect("others stay, the broker's default policy where there was none", others, (HOUR, seconds(1), {"a": "1"}))
    expect("GetQueue returns the change", get_queue(broker, name), changed)
    broker.push(name, b"x")
    receipt = broker.reserve_one(name).receipt
    expect("the change is in force: the first failure is the last", broker.rollback(receipt), "DEAD_LETTERED")
    expect("a field of the mask that is not set is cleared", update("lease").HasField("lease"), False)
    starred = update("*", max_attempts=9)
    expect("* stands for all", (starred.max_attempts, dict(starred.labels), starred.group), (9, {}, "default"))

    expect_error("no mask", INVALID, lambda: update(max_attempts=2), field="update_mask")
    expect_error("an unknown field", INVALID, lambda: update("no_such"), field="update_mask")
    expect_error("an immutable field", INVALID, lambda: update("group", group="other"), field="update_mask")
    bad = lambda: update("max_attempts", max_attempts=-1)  # noqa: E731
    expect_error("a bad value", INVALID, bad, field="queue.max_attempts")
    missing = unique("missing")
    expect_error("an unknown queue", NOT_FOUND, lambda: update("max_attempts", name=missing), reason="QUEUE_NOT_FOUND")


@section("ListQueues")
def list_queues(broker):
    names = sorted(broker.create(unique("list")) for _ in range(5))
    listed, token, longest = [], "", 0
    while True:
        page = broker.admin.ListQueues(ListQueuesRequest(page_size=2, page_token=token))
        listed += [queue.name for queue in page.queues]
        longest, token = max(longest, len(page.queues)), page.next_page_token
        if not token:
            break
    expect("pages list every queue by name, once", (listed, len(set(listed))), (sorted(listed), len(listed)))
    expect("no page is longer than page_size", longest, 2)
    expect("ours among them", [name for name in listed if name in names], names)
    request = ListQueuesRequest(page_size=-1)
    expect_error("a negative page_size", INVALID, lambda: broker.admin.ListQueues(request), field="page_size")
    request = ListQueuesRequest(page_token="no/token")
    expect_error("a foreign page_token", INVALID, lambda: broker.admin.ListQueues(request), field="page_token")


@section("PauseQueue, ResumeQueue")
def pause_and_resume(broker):
    name = unique("pause")
    broker.push(name, b"1")
    queue = broker.admin.PauseQueue(PauseQueueRequest(name=name)).queue
    expect("the queue is paused", (queue.paused, get_queue(broker, name).paused), (True, True))
    expect("pushes continue", len(broker.push(name, b"2")), 1)
    expect("nothing is handed out", (broker.pop(name), broker.reserve(name)), ([], []))
    waiting = in_background(broker.pop, name, 2, DEADLINE - 5)
    eventually("a consumer waits", lambda: broker.stats(name).consumers, 1)
    expect("and counts among those of all brokers", broker.stats(name).consumers_of_all_brokers, 1)
    queue = broker.admin.ResumeQueue(ResumeQueueRequest(name=name)).queue
    expect("the queue is resumed", (queue.paused, get_queue(broker, name).paused), (False, False))
    expect("and the waiting consumer is served", waiting.result(DEADLINE), [b"1", b"2"])
    missing = unique("missing")
    pause = lambda: broker.admin.PauseQueue(PauseQueueRequest(name=missing))  # noqa: E731
    resume = lambda: broker.admin.ResumeQueue(ResumeQueueRequest(name=missing))  # noqa: E731
    expect_error("pause of an unknown queue", NOT_FOUND, pause, reason="QUEUE_NOT_FOUND")
    expect_error("resume of an unknown queue", NOT_FOUND, resume, reason="QUEUE_NOT_FOUND")


@section("PurgeQueue")
def purge_queue(broker):
    name = broker.create(unique("purge"), retention=HOUR)
    broker.push(name, b"done", b"held", b"ready")
    broker.push(name, b"delayed", delay=HOUR)
    done, held = broker.reserve(name, max_items=2, lease=HOUR)
    broker.commit(done.receipt)
    purged = broker.admin.PurgeQueue(PurgeQueueRequest(name=name)).purged_items
    expect("deletes all but reserved items, including history", purged, 3)
    left = [item.payload for item in broker.list_items(name)]
    expect("reserved items stay", left, [b"held"])
    expect("and can be committed", broker.commit(held.receipt), ["OK"])
    request = PurgeQueueRequest(name=unique("missing"))
    expect_error("an unknown queue", NOT_FOUND, lambda: broker.admin.PurgeQueue(request), reason="QUEUE_NOT_FOUND")


@section("DeleteQueue")
def delete_queue(broker):
    def delete(name, force=False):
        return broker.admin.DeleteQueue(DeleteQueueRequest(name=name, force=force)).deleted_items

    name = broker.create(unique("delete"))
    broker.push(name, b"1", b"2", b"3")
    precondition = grpc.StatusCode.FAILED_PRECONDITION
    expect_error("one that holds items", precondition, lambda: delete(name), reason="QUEUE_NOT_EMPTY")
    expect("nothing was deleted", len(broker.list_items(name)), 3)
    expect("with force it is deleted with its items", delete(name, force=True), 3)
    expect_error("GetQueue of a deleted queue", NOT_FOUND, lambda: get_queue(broker, name), reason="QUEUE_NOT_FOUND")
    expect("an empty one needs no force", delete(broker.create(unique("empty"))), 0)
    expect_error("an unknown one", NOT_FOUND, lambda: delete(name), reason="QUEUE_NOT_FOUND")


@section("GetQueueStats")
def stats(broker):
    name = broker.create(unique("stats"), retention=HOUR, max_attempts=1, dead_letter_queue=unique("dead"))
    broker.push(name, *[b"%d" % n for n in range(6)])
    broker.push(name, b"", delay=HOUR)
    broker.push(name, b"k1", b"k2", ordering_key="k", dedup_id="")
    broker.push(name, b"d", dedup_id="d")
    broker.push(name, b"d", dedup_id="d")
    done, held, back, failed, moved = broker.reserve(name, max_items=5, lease=HOUR)
    broker.commit(done.receipt)
    broker.rollback(back.receipt, keep_attempt=True)
    broker.rollback(failed.receipt)
    broker.queues.Move(MoveRequest(receipt=moved.receipt, to_queue=unique("elsewhere")))
    broker.push(name, b"expires", ttl=seconds(0.1), delay=seconds(0.1))

    def depths():
        got = broker.stats(name)
        return {"ready": got.ready, "delayed": got.delayed, "reserved": got.reserved,
                "blocked": got.blocked, "processed": got.processed}

    expected = {"ready": 4, "delayed": 1, "reserved": 1, "blocked": 1, "processed": 1}
    eventually("depths by state", depths, expected)
    got = broker.stats(name)
    expect("the queue's name", got.queue, name)
    expect_true("the age of the first ready item", got.oldest_ready_age.ToNanoseconds() > 0, got)
    expect_true("next_eligible_time is the end of the lease", got.HasField("next_eligible_time"), got)

    def totals():
        got = broker.stats(name)
        return {"pushed": got.pushed, "delivered": got.delivered, "committed": got.committed,
                "rolled_back": got.rolled_back, "moved": got.moved, "dead_lettered": got.dead_lettered}

    expected = {"pushed": 11, "delivered": 5, "committed": 1, "rolled_back": 1, "moved": 1, "dead_lettered": 1}
    eventually("totals; neither a duplicate push nor a dead-lettered rollback counts", totals, expected)
    expect_error("an unknown queue", NOT_FOUND, lambda: broker.stats(unique("missing")), reason="QUEUE_NOT_FOUND")


@section("WatchQueues")
def watch_queues(broker):
    one, two, other = (broker.create(unique("watch")) for _ in range(3))
    stream = broker.admin.WatchQueues(WatchQueuesRequest(queues=[one, two]))
    seen = {}

    def watch_until(condition):
        while not condition():
            for stats in next(stream).stats:
                seen[stats.queue] = stats

    watch_until(lambda: len(seen) == 2)
    expect("starts with all watched queues", sorted(seen), sorted([one, two]))
    broker.push(other, b"unseen")
    broker.push(two, b"1", b"2")
    watch_until(lambda: seen[two].ready == 2)
    expect("then reports a change", (seen[two].ready, seen[two].pushed), (2, 2))
    broker.pop(two)
    watch_until(lambda: seen[two].ready == 1)
    expect("and of the next", (seen[two].ready, seen[two].delivered), (1, 1))
    expect("of watched queues only", sorted(seen), sorted([one, two]))
    stream.cancel()
    everything = broker.admin.WatchQueues(WatchQueuesRequest())
    names = set()
    while not {one, two, other} <= names:
        names |= {stats.queue for stats in next(everything).stats}
    expect_true("no names watch every queue", len(names) >= 3, names)
    everything.cancel()
    request = WatchQueuesRequest(queues=[one, "-"])
    expect_error("a bad name", INVALID, lambda: next(broker.admin.WatchQueues(request)), field="queues[1]")
