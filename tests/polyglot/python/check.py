"""Checks every rpc of a running broker from Python.

    SLUICEGATE_ADDR=127.0.0.1:7400 python check.py

Generates its stubs from proto/ first, as any user would. Prints one line per check and stops at the
first that fails. Uses queues with a name of this run, so it can run against any broker that no one
else depends on. tests/polyglot/node/check.js makes the same checks.
"""

import os
import pathlib
import queue as fifo
import sys
import tempfile
import time

import grpc
from grpc_tools import protoc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

PROTO = pathlib.Path(__file__).resolve().parents[3] / "proto"
LIMIT = 30.0


def generate_stubs() -> None:
    """Writes sluicegate/v1/*_pb2.py into a temporary folder and makes it importable."""
    out = tempfile.mkdtemp(prefix="sluicegate-python-")
    files = [str(path.relative_to(PROTO)) for path in sorted(PROTO.glob("sluicegate/v1/*.proto"))]
    well_known = pathlib.Path(protoc.__file__).parent / "_proto"
    arguments = ["protoc", f"-I{PROTO}", f"-I{well_known}", f"--python_out={out}", f"--grpc_python_out={out}"]
    if protoc.main(arguments + files) != 0:
        sys.exit("protoc could not generate the stubs")
    sys.path.insert(0, out)


generate_stubs()
from sluicegate.v1 import (  # noqa: E402
    admin_service_pb2 as admin_pb,
    admin_service_pb2_grpc as admin_grpc,
    item_pb2 as item_pb,
    queue_pb2 as queue_pb,
    queue_service_pb2 as work_pb,
    queue_service_pb2_grpc as work_grpc,
    schedule_service_pb2 as schedule_pb,
    schedule_service_pb2_grpc as schedule_grpc,
)

OK, DEAD_LETTERED = item_pb.OUTCOME_OK, item_pb.OUTCOME_DEAD_LETTERED
LEASE_LOST, GONE = item_pb.OUTCOME_LEASE_LOST, item_pb.OUTCOME_GONE
RUN = f"py{os.getpid()}"
checks = 0


def name(suffix: str) -> str:
    return f"{RUN}.{suffix}"


def seconds(value: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(value * 1e9))
    return duration


def check(what: str, holds: bool, seen: object = "") -> None:
    global checks
    if not holds:
        sys.exit(f"FAILED {what}: {seen}")
    checks += 1
    print(f"  ok   {what}", flush=True)


def refused(what: str, code: grpc.StatusCode, call, field: str = "") -> None:
    """Checks the code, the ErrorInfo and, if given, the field that is named."""
    try:
        answer = call()
    except grpc.RpcError as error:
        details = {}
        for detail in rpc_status.from_call(error).details if rpc_status.from_call(error) else []:
            for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest):
                if detail.Is(kind.DESCRIPTOR):
                    details[kind] = kind.FromString(detail.value)
        info = details.get(error_details_pb2.ErrorInfo)
        bad = details.get(error_details_pb2.BadRequest, error_details_pb2.BadRequest())
        named = [violation.field for violation in bad.field_violations]
        holds = error.code() == code and info is not None and info.domain == "sluicegate" and info.reason.isupper()
        check(f"{what}: {code.name}", holds and (not field or field in named), (error.code(), error.details(), info, named))
    else:
        check(what, False, f"answered {answer}")


def until(what: str, ask) -> None:
    """Asks until the answer is true; for figures that are remembered for a moment."""
    end = time.monotonic() + LIMIT
    while not ask():
        if time.monotonic() > end:
            check(what, False, f"not within {LIMIT:.0f} s")
        time.sleep(0.05)
    check(what, True)


channel = grpc.insecure_channel(os.environ["SLUICEGATE_ADDR"])
grpc.channel_ready_future(channel).result(timeout=LIMIT)
work = work_grpc.QueueServiceStub(channel)
admin = admin_grpc.AdminServiceStub(channel)
schedules = schedule_grpc.ScheduleServiceStub(channel)


def push(queue: str, *payloads: str, **fields) -> list:
    items = [item_pb.NewItem(payload=payload.encode(), **fields) for payload in payloads]
    return list(work.Push(work_pb.PushRequest(queue=queue, items=items, producer=RUN), timeout=LIMIT).results)


def reserve(queue: str, max_items: int = 1, wait: float = LIMIT, lease: float = 600) -> list:
    request = work_pb.ReserveRequest(
        queue=queue, max_items=max_items, wait=seconds(wait), lease=seconds(lease), consumer=RUN
    )
    return list(work.Reserve(request, timeout=LIMIT * 2).deliveries)


def commit(*receipts: str) -> list:
    return [result.outcome for result in work.Commit(work_pb.CommitRequest(receipts=receipts), timeout=LIMIT).results]


def rollback(receipt: str, reason: str = "", **fields) -> int:
    item = work_pb.RollbackItem(receipt=receipt, reason=reason, delay=seconds(0), **fields)
    return work.Rollback(work_pb.RollbackRequest(items=[item]), timeout=LIMIT).results[0].outcome


def payloads(deliveries) -> list:
    return [delivery.item.payload.decode() for delivery in deliveries]


def create(queue: str, **settings) -> queue_pb.Queue:
    wanted = queue_pb.Queue(name=queue, **settings)
    return admin.CreateQueue(admin_pb.CreateQueueRequest(queue=wanted), timeout=LIMIT).queue


def items(queue: str, state: int = item_pb.ITEM_STATE_UNSPECIFIED) -> list:
    return list(admin.ListItems(admin_pb.ListItemsRequest(queue=queue, state=state), timeout=LIMIT).items)


def stats(queue: str) -> queue_pb.QueueStats:
    return admin.GetQueueStats(admin_pb.GetQueueStatsRequest(queue=queue), timeout=LIMIT).stats


# --- Health and reflection ---


def check_health() -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "sluicegate.v1.QueueService"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=LIMIT)
        check(f"health of '{service}' is SERVING", answer.status == health_pb2.HealthCheckResponse.SERVING, answer)


def check_reflection() -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = next(iter(stub.ServerReflectionInfo(iter([request]), timeout=LIMIT)))
    names = {service.name for service in answer.list_services_response.service}
    ours = {f"sluicegate.v1.{kind}Service" for kind in ("Queue", "Admin", "Schedule")}
    check("reflection (v1alpha) lists the services", ours <= names, names)


# --- QueueService ---


def check_push() -> None:
    queue = name("push")
    results = push(queue, "a", "b", "c", content_type="text/plain", headers={"trace": "1"})
    check("ids differ", len({result.id for result in results}) == 3, results)
    check("nothing was a duplicate", not any(result.deduplicated for result in results))
    refused("a bad queue name", grpc.StatusCode.INVALID_ARGUMENT, lambda: push("no spaces", "x"), "queue")
    refused("no items", grpc.StatusCode.INVALID_ARGUMENT, lambda: push(queue), "items")
    refused("a priority of 10", grpc.StatusCode.INVALID_ARGUMENT, lambda: push(queue, "x", priority=10), "items[0].priority")
    refused("a negative delay", grpc.StatusCode.INVALID_ARGUMENT, lambda: push(queue, "x", delay=seconds(-1)), "items[0].delay")
    push(queue, "first", priority=9)
    check("priority 9 comes first", payloads(reserve(queue, 4)) == ["first", "a", "b", "c"])
    push(queue, "later", delay=seconds(0.3))
    check("a delayed item is not there yet", reserve(queue, wait=0) == [])
    check("and comes in time", payloads(reserve(queue)) == ["later"])
    first = push(queue, "once", dedup_id="d1")[0]
    second = push(queue, "twice", dedup_id="d1")[0]
    check("a second push with the same dedup_id stores nothing", second.deduplicated and second.id == first.id, second)


def check_push_stream() -> None:
    queue = name("pushstream")
    batch = lambda number, target: work_pb.PushStreamRequest(  # noqa: E731
        batch_id=number, queue=target, items=[item_pb.NewItem(payload=str(number).encode())]
    )
    requests = [batch(1, queue), batch(2, "not a name"), batch(3, queue)]
    answers = {answer.batch_id: answer for answer in work.PushStream(iter(requests), timeout=LIMIT)}
    check("every batch is answered", sorted(answers) == [1, 2, 3], answers)
    check("a bad batch fails alone", answers[2].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0], answers[2])
    check("the others are stored", len(answers[1].results) == len(answers[3].results) == 1 and len(items(queue)) == 2)


def check_pop() -> None:
    queue = name("pop")
    push(queue, "a", "b")
    popped = work.Pop(work_pb.PopRequest(queue=queue, max_items=5, wait=seconds(LIMIT)), timeout=LIMIT * 2).items
    check("pop takes what is there", [item.payload for item in popped] == [b"a", b"b"], popped)
    check("for good", not work.Pop(work_pb.PopRequest(queue=queue), timeout=LIMIT).items)


def check_reserve() -> None:
    queue = name("reserve")
    push(queue, "a")
    delivery = reserve(queue)[0]
    check("state and counts", (delivery.item.state, delivery.item.attempt, delivery.item.deliveries) == (item_pb.ITEM_STATE_RESERVED, 1, 1), delivery)
    check("names of producer and consumer", (delivery.item.producer, delivery.item.consumer) == (RUN, RUN), delivery)
    check("a lease in the future", delivery.lease_expire_time.ToSeconds() > time.time() + 500, delivery)
    check("nobody else gets it", reserve(queue, wait=0) == [])
    refused("1,001 items", grpc.StatusCode.INVALID_ARGUMENT, lambda: reserve(queue, 1001), "max_items")


def check_commit() -> None:
    queue = name("commit")
    push(queue, "a", "b")
    first = reserve(queue, lease=0.2)[0]
    check("a commit is answered OK", commit(reserve(queue)[0].receipt) == [OK])
    again = reserve(queue)[0]
    check("a lapsed item comes again", (again.item.payload, again.item.attempt, again.item.deliveries) == (b"a", 2, 2), again)
    check("its old receipt: LEASE_LOST", commit(first.receipt) == [LEASE_LOST])
    check("its new receipt: OK", commit(again.receipt) == [OK])
    check("repeated: GONE", commit(again.receipt, first.receipt) == [GONE, GONE])
    refused("a malformed receipt", grpc.StatusCode.INVALID_ARGUMENT, lambda: commit("nonsense"), "receipts[0]")


def check_rollback() -> None:
    queue, dead = name("rollback"), name("rollback.dead")
    create(queue, max_attempts=2, dead_letter_queue=dead)
    push(queue, "a")
    check("given back", rollback(reserve(queue)[0].receipt, "no luck") == OK)
    delivery = reserve(queue)[0]
    check("with its reason", (delivery.item.attempt, delivery.item.last_reason) == (2, "no luck"), delivery)
    check("keep_attempt spares it", rollback(delivery.receipt, "spared", keep_attempt=True) == OK)
    delivery = reserve(queue)[0]
    check("attempt stays, deliveries grow", (delivery.item.attempt, delivery.item.deliveries) == (2, 3), delivery)
    check("the last attempt dead-letters", rollback(delivery.receipt, "the end") == DEAD_LETTERED)
    letter = reserve(dead)[0].item
    check("with reason and origin", (letter.last_reason, letter.origin_queue) == ("the end", queue), letter)


def check_extend() -> None:
    queue = name("extend")
    push(queue, "a")
    delivery = reserve(queue, lease=5)[0]
    request = work_pb.ExtendRequest(receipts=[delivery.receipt], lease=seconds(600))
    result = work.Extend(request, timeout=LIMIT).results[0]
    check("extended", result.outcome == OK and result.lease_expire_time.ToSeconds() > time.time() + 500, result)
    check("same receipt", commit(delivery.receipt) == [OK])
    check("gone: GONE", work.Extend(request, timeout=LIMIT).results[0].outcome == GONE)


def check_consume() -> None:
    queue = name("consume")
    stream = work.Consume(work_pb.ConsumeRequest(queue=queue, max_in_flight=2, lease=seconds(600)), timeout=LIMIT * 2)
    until("the consumer is counted", lambda: queue_exists(queue) and stats(queue).consumers == 1)
    push(queue, "a", "b", "c")
    held = []
    while len(held) < 2:
        held += next(stream).deliveries
    check("two at a time", payloads(held) == ["a", "b"], payloads(held))
    check("a commit makes room", commit(held[0].receipt) == [OK])
    check("for the next", payloads(next(stream).deliveries) == ["c"])
    stream.cancel()
    back = []
    while len(back) < 2:
        back += reserve(queue, 2)
    check("an ended stream gives back at once", sorted(payloads(back)) == ["b", "c"], back)


def queue_exists(queue: str) -> bool:
    return any(found.name == queue for found in admin.ListQueues(admin_pb.ListQueuesRequest(page_size=1000), timeout=LIMIT).queues)


def check_consume_stream() -> None:
    queue = name("consumestream")
    push(queue, "a", "b", "c")
    requests = fifo.Queue()
    send = lambda **action: requests.put(work_pb.ConsumeStreamRequest(**action))  # noqa: E731
    stream = work.ConsumeStream(iter(requests.get, None), timeout=LIMIT * 2)
    send(open=work_pb.ConsumeRequest(queue=queue, max_in_flight=1, lease=seconds(600)))
    opened = next(stream)
    check("opened", opened.opened.max_in_flight == 1 and opened.opened.lease.seconds == 600, opened)
    first = next(stream).deliveries.deliveries[0]
    check("one delivery", first.item.payload == b"a", first)
    send(extend=work_pb.ExtendRequest(receipts=[first.receipt], lease=seconds(900)))
    check("extended", next(stream).extended.results[0].outcome == OK)
    send(commit=work_pb.CommitRequest(receipts=[first.receipt]))
    answers = [next(stream), next(stream)]
    settled = [answer.settled for answer in answers if answer.HasField("settled")]
    second = [answer.deliveries.deliveries[0] for answer in answers if answer.HasField("deliveries")]
    check("settled, and the next delivery", len(settled) == 1 and settled[0].results[0].outcome == OK and payloads(second) == ["b"], answers)
    send(flow=work_pb.Flow(max_in_flight=0))
    check("flow is answered", next(stream).flow.max_in_flight == 0)
    send(rollback=work_pb.RollbackRequest(items=[work_pb.RollbackItem(receipt=second[0].receipt, delay=seconds(0))]))
    check("rolled back", next(stream).settled.results[0].outcome == OK)
    requests.put(None)
    check("the stream ends when the client is done", list(stream) == [])
    until("and nothing stays leased", lambda: stats(queue).reserved == 0 and stats(queue).ready == 2)


def check_move() -> None:
    queue, target = name("move"), name("move.next")
    create(name("elsewhere"), group=name("othergroup"))
    pushed = push(queue, "a", headers={"kept": "1"})[0]
    receipt = reserve(queue)[0].receipt
    request = work_pb.MoveRequest(receipt=receipt, to_queue=name("elsewhere"))
    refused("a move to another group", grpc.StatusCode.FAILED_PRECONDITION, lambda: work.Move(request, timeout=LIMIT))
    request = work_pb.MoveRequest(receipt=receipt, to_queue=target, payload=b"b", headers={"new": "2"}, priority=5)
    answer = work.Move(request, timeout=LIMIT)
    check("moved with its id", (answer.outcome, answer.id) == (OK, pushed.id), answer)
    moved = reserve(target)[0].item
    seen = (moved.id, moved.payload, dict(moved.headers), moved.priority, moved.attempt)
    check("payload, headers, priority", seen == (pushed.id, b"b", {"kept": "1", "new": "2"}, 5, 1), seen)
    check("moved twice: the receipt is stale", work.Move(request, timeout=LIMIT).outcome in (LEASE_LOST, GONE))


def check_commit_and_push() -> None:
    queue, one, two = name("fork"), name("fork.one"), name("fork.two")
    create(two, group=name("forkgroup"))
    push(queue, "a")
    receipt = reserve(queue)[0].receipt
    entry = lambda target: work_pb.PushEntry(queue=target, item=item_pb.NewItem(payload=target.encode()))  # noqa: E731
    request = work_pb.CommitAndPushRequest(receipt=receipt, pushes=[entry(one), entry(two)])
    answer = work.CommitAndPush(request, timeout=LIMIT)
    check("one commit, two pushes", answer.outcome == OK and len(answer.results) == 2, answer)
    check("both are there", payloads(reserve(one) + reserve(two)) == [one, two])
    answer = work.CommitAndPush(request, timeout=LIMIT)
    check("repeated: GONE, nothing pushed", answer.outcome == GONE and reserve(one, wait=0) == [], answer)


# --- AdminService ---


def check_create_queue() -> None:
    queue = name("create")
    made = create(queue, max_attempts=3, labels={"team": "py"})
    check("created", (made.name, made.group, made.max_attempts) == (queue, "default", 3), made)
    check("the same again is answered", create(queue, max_attempts=3, labels={"team": "py"}) == made)
    refused("other settings", grpc.StatusCode.ALREADY_EXISTS, lambda: create(queue, max_attempts=4))
    refused("a bad name", grpc.StatusCode.INVALID_ARGUMENT, lambda: create("no spaces"), "queue.name")


def check_get_queue() -> None:
    queue = name("create")
    found = admin.GetQueue(admin_pb.GetQueueRequest(name=queue), timeout=LIMIT).queue
    check("its settings", (found.name, found.max_attempts) == (queue, 3), found)
    request = admin_pb.GetQueueRequest(name=name("missing"))
    refused("one that is not there", grpc.StatusCode.NOT_FOUND, lambda: admin.GetQueue(request, timeout=LIMIT))


def check_update_queue() -> None:
    queue = name("create")
    change = queue_pb.Queue(name=queue, max_attempts=7, labels={"ignored": "1"})
    request = admin_pb.UpdateQueueRequest(queue=change, update_mask=FieldMask(paths=["max_attempts"]))
    changed = admin.UpdateQueue(request, timeout=LIMIT).queue
    check("only what the mask names", (changed.max_attempts, dict(changed.labels)) == (7, {"team": "py"}), changed)
    request.update_mask.paths[:] = ["no_such_field"]
    refused("an unknown field", grpc.StatusCode.INVALID_ARGUMENT, lambda: admin.UpdateQueue(request, timeout=LIMIT), "update_mask")


def check_list_queues() -> None:
    seen, token = [], ""
    while True:
        page = admin.ListQueues(admin_pb.ListQueuesRequest(page_size=2, page_token=token), timeout=LIMIT)
        check("a page has at most two", len(page.queues) <= 2) if not token else None
        seen += [queue.name for queue in page.queues]
        token = page.next_page_token
        if not token:
            break
    check("by name, each once", seen == sorted(set(seen)) and name("create") in seen, seen)
    request = admin_pb.ListQueuesRequest(page_size=-1)
    refused("a negative page size", grpc.StatusCode.INVALID_ARGUMENT, lambda: admin.ListQueues(request, timeout=LIMIT), "page_size")


def check_pause_and_resume_queue() -> None:
    queue = name("pause")
    create(queue)
    check("paused", admin.PauseQueue(admin_pb.PauseQueueRequest(name=queue), timeout=LIMIT).queue.paused)
    push(queue, "a")
    check("pushes go on, deliveries do not", reserve(queue, wait=0.2) == [])
    check("resumed", not admin.ResumeQueue(admin_pb.ResumeQueueRequest(name=queue), timeout=LIMIT).queue.paused)
    check("and delivered", payloads(reserve(queue)) == ["a"])


def check_purge_queue() -> None:
    queue = name("purge")
    push(queue, "a", "b", "c")
    held = reserve(queue)[0]
    answer = admin.PurgeQueue(admin_pb.PurgeQueueRequest(name=queue), timeout=LIMIT)
    check("all but the reserved one", answer.purged_items == 2, answer)
    check("which still settles", commit(held.receipt) == [OK])


def check_delete_queue() -> None:
    queue = name("delete")
    push(queue, "a")
    request = admin_pb.DeleteQueueRequest(name=queue)
    refused("a queue with items", grpc.StatusCode.FAILED_PRECONDITION, lambda: admin.DeleteQueue(request, timeout=LIMIT))
    request.force = True
    check("by force", admin.DeleteQueue(request, timeout=LIMIT).deleted_items == 1)
    refused("twice", grpc.StatusCode.NOT_FOUND, lambda: admin.DeleteQueue(request, timeout=LIMIT))


def check_get_queue_stats() -> None:
    queue = name("stats")
    push(queue, "a", "b", "c")
    push(queue, "later", delay=seconds(600))
    commit(reserve(queue)[0].receipt)
    reserve(queue)
    wanted = (1, 1, 1, 4, 2, 1)

    def seen():
        now = stats(queue)
        return (now.ready, now.delayed, now.reserved, now.pushed, now.delivered, now.committed)

    until("depths and totals", lambda: seen() == wanted)


def check_watch_queues() -> None:
    queue = name("watch")
    create(queue)
    stream = admin.WatchQueues(admin_pb.WatchQueuesRequest(queues=[queue]), timeout=LIMIT * 2)
    first = next(stream).stats
    check("the watched queue at first", [entry.queue for entry in first] == [queue], first)
    push(queue, "a")
    for message in stream:
        if any(entry.queue == queue and entry.ready == 1 for entry in message.stats):
            break
    check("then its changes", True)
    stream.cancel()


def check_list_items() -> None:
    queue = name("items")
    push(queue, "a", "b", "c")
    reserve(queue)
    check("all", len(items(queue)) == 3)
    check("by state", [item.payload for item in items(queue, item_pb.ITEM_STATE_READY)] == [b"b", b"c"])
    page = admin.ListItems(admin_pb.ListItemsRequest(queue=queue, page_size=2), timeout=LIMIT)
    rest = admin.ListItems(admin_pb.ListItemsRequest(queue=queue, page_size=2, page_token=page.next_page_token), timeout=LIMIT)
    check("paged", (len(page.items), len(rest.items), rest.next_page_token) == (2, 1, ""), rest)


def check_get_item() -> None:
    queue = name("items")
    pushed = push(queue, "one", content_type="text/plain")[0]
    found = admin.GetItem(admin_pb.GetItemRequest(queue=queue, id=pushed.id), timeout=LIMIT).item
    check("found", (found.payload, found.content_type, found.queue) == (b"one", "text/plain", queue), found)
    request = admin_pb.GetItemRequest(queue=name("create"), id=pushed.id)
    refused("in another queue", grpc.StatusCode.NOT_FOUND, lambda: admin.GetItem(request, timeout=LIMIT))


def check_delete_item() -> None:
    queue = name("deleteitem")
    pushed = push(queue, "a")[0]
    receipt = reserve(queue)[0].receipt
    request = admin_pb.DeleteItemRequest(queue=queue, id=pushed.id)
    admin.DeleteItem(request, timeout=LIMIT)
    check("its receipt answers GONE", commit(receipt) == [GONE])
    refused("twice", grpc.StatusCode.NOT_FOUND, lambda: admin.DeleteItem(request, timeout=LIMIT))


def check_replay_items() -> None:
    queue = name("history")
    create(queue, retention=seconds(600))
    ids = [result.id for result in push(queue, "a", "b")]
    commit(*[delivery.receipt for delivery in reserve(queue, 2)])
    check("kept as history", {item.id for item in items(queue, item_pb.ITEM_STATE_PROCESSED)} == set(ids))
    request = admin_pb.ReplayItemsRequest(queue=queue, ids=admin_pb.ItemIds(ids=ids[:1]))
    check("by id", admin.ReplayItems(request, timeout=LIMIT).replayed_items == 1)
    check("comes again", payloads(reserve(queue)) == ["a"])
    start = Timestamp()
    start.FromSeconds(int(time.time()) - 600)
    request = admin_pb.ReplayItemsRequest(queue=queue, process_time=admin_pb.TimeRange(start_time=start))
    check("by time", admin.ReplayItems(request, timeout=LIMIT).replayed_items == 1)
    check("comes again too", payloads(reserve(queue)) == ["b"])
    request = admin_pb.ReplayItemsRequest(queue=queue)
    refused("no selection", grpc.StatusCode.INVALID_ARGUMENT, lambda: admin.ReplayItems(request, timeout=LIMIT), "selection")


def check_redrive_items() -> None:
    queue, dead = name("redrive"), name("redrive.dead")
    create(queue, max_attempts=1, dead_letter_queue=dead)
    push(queue, "a", "b")
    for delivery in reserve(queue, 2):
        rollback(delivery.receipt, f"bad {delivery.item.payload.decode()}")
    filtered = admin_pb.RedriveItemsRequest(queue=dead, filter=admin_pb.RedriveFilter(reason_contains="bad b"))
    check("by reason", admin.RedriveItems(filtered, timeout=LIMIT).redriven_items == 1)
    again = reserve(queue)[0].item
    check("back where it came from, attempt 1", (again.payload, again.attempt) == (b"b", 1), again)
    check("the rest", admin.RedriveItems(admin_pb.RedriveItemsRequest(queue=dead), timeout=LIMIT).redriven_items == 1)
    check("is back too", payloads(reserve(queue)) == ["a"])


# --- ScheduleService ---


def check_schedules() -> None:
    queue, every = name("ticks"), name("every-second")
    wanted = schedule_pb.Schedule(
        name=every, queue=queue, cron="* * * * * *", time_zone="Europe/Vienna", item=item_pb.NewItem(payload=b"tick")
    )
    made = schedules.CreateSchedule(schedule_pb.CreateScheduleRequest(schedule=wanted), timeout=LIMIT).schedule
    check("CreateSchedule", (made.name, made.time_zone) == (every, "Europe/Vienna") and made.HasField("next_time"), made)
    check("it ticks", payloads(reserve(queue)) == ["tick"])
    found = schedules.GetSchedule(schedule_pb.GetScheduleRequest(name=every), timeout=LIMIT).schedule
    check("GetSchedule", found.cron == "* * * * * *", found)
    listed = schedules.ListSchedules(schedule_pb.ListSchedulesRequest(), timeout=LIMIT).schedules
    check("ListSchedules", every in [schedule.name for schedule in listed], listed)
    paused = schedules.PauseSchedule(schedule_pb.PauseScheduleRequest(name=every), timeout=LIMIT).schedule
    check("PauseSchedule", paused.paused and not paused.HasField("next_time"), paused)
    resumed = schedules.ResumeSchedule(schedule_pb.ResumeScheduleRequest(name=every), timeout=LIMIT).schedule
    check("ResumeSchedule", not resumed.paused and resumed.HasField("next_time"), resumed)
    schedules.DeleteSchedule(schedule_pb.DeleteScheduleRequest(name=every), timeout=LIMIT)
    refused(
        "DeleteSchedule, then GetSchedule", grpc.StatusCode.NOT_FOUND,
        lambda: schedules.GetSchedule(schedule_pb.GetScheduleRequest(name=every), timeout=LIMIT),
    )
    wanted.cron = "every now and then"
    refused(
        "a bad cron expression", grpc.StatusCode.INVALID_ARGUMENT,
        lambda: schedules.CreateSchedule(schedule_pb.CreateScheduleRequest(schedule=wanted), timeout=LIMIT), "schedule.cron",
    )


SECTIONS = [
    ("health", check_health), ("reflection", check_reflection),
    ("Push", check_push), ("PushStream", check_push_stream), ("Pop", check_pop), ("Reserve", check_reserve),
    ("Consume", check_consume), ("ConsumeStream", check_consume_stream), ("Commit", check_commit),
    ("Rollback", check_rollback), ("Extend", check_extend), ("Move", check_move), ("CommitAndPush", check_commit_and_push),
    ("CreateQueue", check_create_queue), ("GetQueue", check_get_queue), ("UpdateQueue", check_update_queue),
    ("ListQueues", check_list_queues), ("PauseQueue, ResumeQueue", check_pause_and_resume_queue),
    ("PurgeQueue", check_purge_queue), ("DeleteQueue", check_delete_queue), ("GetQueueStats", check_get_queue_stats),
    ("WatchQueues", check_watch_queues), ("ListItems", check_list_items), ("GetItem", check_get_item),
    ("DeleteItem", check_delete_item), ("ReplayItems", check_replay_items), ("RedriveItems", check_redrive_items),
    ("schedules", check_schedules),
]

for title, section in SECTIONS:
    print(title, flush=True)
    try:
        section()
    except grpc.RpcError as error:
        sys.exit(f"FAILED {title}: {error.code()}: {error.details()}")
print(f"{checks} checks passed from Python")
