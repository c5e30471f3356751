"""ScheduleService: recurring items."""

import grpc
from checking import expect, expect_error, expect_true, section, unique
from google.protobuf.duration_pb2 import Duration
from sluicegate.v1.item_pb2 import NewItem
from sluicegate.v1.schedule_service_pb2 import (
    CreateScheduleRequest,
    DeleteScheduleRequest,
    GetScheduleRequest,
    ListSchedulesRequest,
    PauseScheduleRequest,
    ResumeScheduleRequest,
    Schedule,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
EVERY_SECOND = "* * * * * *"
ONCE_A_YEAR = "0 12 24 12 *"


def create(broker, **fields):
    return broker.schedules.CreateSchedule(CreateScheduleRequest(schedule=Schedule(**fields))).schedule


def get(broker, name):
    return broker.schedules.GetSchedule(GetScheduleRequest(name=name)).schedule


def delete(broker, name):
    broker.schedules.DeleteSchedule(DeleteScheduleRequest(name=name))


@section("CreateSchedule")
def create_schedule(broker):
    name, queue = unique("yearly"), unique("mail")
    item = NewItem(payload=b"greetings", priority=4, headers={"to": "all"}, ttl=Duration(seconds=60))
    fields = {"name": name, "queue": queue, "cron": ONCE_A_YEAR, "time_zone": "Europe/Vienna", "item": item}
    created = create(broker, **fields)
    expect("item and time zone are kept", (created.item, created.time_zone), (item, "Europe/Vienna"))
    next_time = created.next_time.ToDatetime()
    expect("the next tick is noon in Vienna", (next_time.month, next_time.day, next_time.hour), (12, 24, 11))
    expect("the next three are told", (len(created.next_times), created.next_times[0]), (3, created.next_time))
    expect("there was none yet", (created.HasField("last_time"), created.last_error), (False, ""))
    expect("the same again is returned", create(broker, **fields), created)
    exists = grpc.StatusCode.ALREADY_EXISTS
    other = {**fields, "queue": unique("other")}
    expect_error("other settings", exists, lambda: create(broker, **other), reason="SCHEDULE_EXISTS")
    expect("GetSchedule returns the same", get(broker, name), created)
    delete(broker, name)
    expect("the default time zone is UTC", create(broker, **{**fields, "time_zone": ""}).time_zone, "UTC")
    delete(broker, name)

    asleep = create(broker, **fields, paused=True)
    expect("one may be created paused", (asleep.paused, asleep.HasField("next_time")), (True, False))
    delete(broker, name)

    def refused(field, **bad):
        call = lambda: create(broker, **{**fields, "name": unique("refused"), **bad})  # noqa: E731
        expect_error(f"a bad {field}", INVALID, call, field=field)

    refused("schedule.name", name="-")
    refused("schedule.queue", queue="")
    refused("schedule.cron", cron="61 * * * *")
    refused("schedule.time_zone", time_zone="Europe/Atlantis")
    refused("schedule.item.priority", item=NewItem(priority=10))
    refused("schedule.item.dedup_id", item=NewItem(dedup_id="mine"))


@section("ticks")
def ticks(broker):
    name, queue = unique("ticks"), unique("ticked")
    made = create(broker, name=name, queue=queue, cron=EVERY_SECOND, item=NewItem(payload=b"tick"))
    items = []
    for _ in range(3):
        delivery = broker.reserve_one(queue)
        broker.commit(delivery.receipt)
        items.append(delivery.item)
    expect("three items are delivered", [item.payload for item in items], [b"tick"] * 3)
    dedup_ids = [item.dedup_id for item in items]
    expect("one per tick", len(set(dedup_ids)), 3)
    expect("named after the schedule", all(id.startswith(name) for id in dedup_ids), True)
    after = (items[2].create_time.ToNanoseconds() - made.create_time.ToNanoseconds()) / 1e9
    expect_true("and never before it: the third no sooner than after two seconds", after > 1.9, after)
    schedule = get(broker, name)
    expect_true("last_time and next_time move on", schedule.last_time.seconds < schedule.next_time.seconds, schedule)

    paused = broker.schedules.PauseSchedule(PauseScheduleRequest(name=name)).schedule
    shown = (paused.paused, paused.HasField("next_time"))
    expect("PauseSchedule: it is paused, with no next tick", shown, (True, False))
    broker.let_pass(1)  # for a tick that was under way
    stopped = get(broker, name).last_time
    broker.let_pass(2.2)
    schedule = get(broker, name)
    expect("no tick while it is paused", (schedule.paused, schedule.last_time), (True, stopped))
    broker.pop(queue, max_items=100)
    resumed = broker.schedules.ResumeSchedule(ResumeScheduleRequest(name=name)).schedule
    expect("ResumeSchedule: it continues", (resumed.paused, resumed.HasField("next_time")), (False, True))
    item = broker.reserve_one(queue).item
    expect("with its next tick", item.payload, b"tick")
    expect_true("what passed is lost", item.create_time.seconds >= stopped.seconds + 2, item)

    broker.schedules.DeleteSchedule(DeleteScheduleRequest(name=name))
    expect_error("GetSchedule of a deleted one", NOT_FOUND, lambda: get(broker, name), reason="SCHEDULE_NOT_FOUND")
    expect("DeleteSchedule: items it pushed stay", broker.get_item(queue, item.id).payload, b"tick")


@section("ListSchedules")
def list_schedules(broker):
    names = sorted(unique("list") for _ in range(3))
    for name in names:
        create(broker, name=name, queue=unique("mail"), cron=ONCE_A_YEAR, item=NewItem())
    listed, token = [], ""
    while True:
        page = broker.schedules.ListSchedules(ListSchedulesRequest(page_size=2, page_token=token))
        listed += [schedule.name for schedule in page.schedules]
        token = page.next_page_token
        if not token:
            break
    expect("pages list all by name", ([name for name in listed if name in names], sorted(listed)), (names, listed))
    request = ListSchedulesRequest(page_size=-1)
    expect_error("a bad page_size", INVALID, lambda: broker.schedules.ListSchedules(request), field="page_size")
    for name in names:
        delete(broker, name)
    expect_error("one that is gone", NOT_FOUND, lambda: get(broker, names[0]), reason="SCHEDULE_NOT_FOUND")
    for call in (delete, get):
        expect_error(f"{call.__name__} of an unknown one", NOT_FOUND, lambda: call(broker, names[0]))
    pause = lambda: broker.schedules.PauseSchedule(PauseScheduleRequest(name=names[0]))  # noqa: E731
    resume = lambda: broker.schedules.ResumeSchedule(ResumeScheduleRequest(name=names[0]))  # noqa: E731
    expect_error("pause of an unknown one", NOT_FOUND, pause, reason="SCHEDULE_NOT_FOUND")
    expect_error("resume of an unknown one", NOT_FOUND, resume, reason="SCHEDULE_NOT_FOUND")
