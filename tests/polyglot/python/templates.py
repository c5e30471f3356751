"""TemplateService: settings of queues that come into being by use."""

import grpc
from checking import expect, expect_error, section, unique
from google.protobuf.field_mask_pb2 import FieldMask
from sluicegate.v1.admin_service_pb2 import GetQueueRequest
from sluicegate.v1.queue_pb2 import Queue
from sluicegate.v1.template_service_pb2 import (
    CreateTemplateRequest,
    DeleteTemplateRequest,
    GetTemplateRequest,
    ListTemplatesRequest,
    QueueTemplate,
    UpdateTemplateRequest,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND


def create(broker, pattern, **settings):
    template = QueueTemplate(pattern=pattern, settings=Queue(**settings))
    return broker.templates.CreateTemplate(CreateTemplateRequest(template=template)).template


def get(broker, pattern):
    return broker.templates.GetTemplate(GetTemplateRequest(pattern=pattern)).template


def update(broker, pattern, *paths, **settings):
    template = QueueTemplate(pattern=pattern, settings=Queue(**settings))
    request = UpdateTemplateRequest(template=template, update_mask=FieldMask(paths=paths))
    return broker.templates.UpdateTemplate(request).template


def delete(broker, pattern):
    broker.templates.DeleteTemplate(DeleteTemplateRequest(pattern=pattern))


def settings_of(broker, queue):
    return broker.admin.GetQueue(GetQueueRequest(name=queue)).queue


@section("CreateTemplate")
def create_template(broker):
    prefix = unique("shop")
    pattern = f"{prefix}.*"
    created = create(broker, pattern, max_attempts=3, labels={"team": "a"})
    kept = (created.pattern, created.settings.max_attempts, dict(created.settings.labels), created.settings.name)
    expect("pattern and settings are kept", kept, (pattern, 3, {"team": "a"}, ""))
    expect("its times are told", created.create_time, created.update_time)
    expect("the same again is returned", create(broker, pattern, max_attempts=3, labels={"team": "a"}), created)
    exists = grpc.StatusCode.ALREADY_EXISTS
    expect_error("other settings", exists, lambda: create(broker, pattern), reason="TEMPLATE_EXISTS")
    queue = f"{prefix}.orders"
    broker.push(queue, b"the first item")
    expect("a queue that a push creates has the settings", settings_of(broker, queue).max_attempts, 3)
    explicit = broker.create(f"{prefix}.explicit")
    expect("one of CreateQueue has not", settings_of(broker, explicit).HasField("max_attempts"), False)
    expect_error("no pattern", INVALID, lambda: create(broker, ""), field="template.pattern")
    expect_error("a bad pattern", INVALID, lambda: create(broker, "a b"), field="template.pattern")
    named = lambda: create(broker, f"{prefix}-x", name="a")  # noqa: E731
    expect_error("a name", INVALID, named, field="template.settings.name")
    negative = lambda: create(broker, f"{prefix}-x", max_depth=-1)  # noqa: E731
    expect_error("a bad setting", INVALID, negative, field="template.settings.max_depth")
    delete(broker, pattern)


@section("UpdateTemplate, GetTemplate, DeleteTemplate")
def change_template(broker):
    prefix = unique("shop")
    pattern = f"{prefix}.*"
    created = create(broker, pattern, max_attempts=3, sequenced=True)
    changed = update(broker, pattern, "settings.max_attempts", max_attempts=4)
    expect("what the mask names changes", (changed.settings.max_attempts, changed.settings.sequenced), (4, True))
    expect("it was created once", changed.create_time, created.create_time)
    expect("GetTemplate returns the same", get(broker, pattern), changed)
    broker.push(f"{prefix}.a", b"item")
    expect("it counts at once", settings_of(broker, f"{prefix}.a").max_attempts, 4)
    plain = update(broker, pattern, "*")
    expect("* changes all", (plain.settings.HasField("max_attempts"), plain.settings.sequenced), (False, False))
    expect_error("no mask", INVALID, lambda: update(broker, pattern), field="update_mask")
    expect_error("a bad mask", INVALID, lambda: update(broker, pattern, "pattern"), field="update_mask")
    delete(broker, pattern)
    for call in (get, delete, lambda broker, pattern: update(broker, pattern, "*")):
        expect_error("one that is gone", NOT_FOUND, lambda: call(broker, pattern), reason="TEMPLATE_NOT_FOUND")
    broker.push(f"{prefix}.b", b"item")
    expect("it counts no more", settings_of(broker, f"{prefix}.b").HasField("max_attempts"), False)


@section("ListTemplates")
def list_templates(broker):
    patterns = sorted(f"{unique('list')}.*" for _ in range(3))
    for pattern in patterns:
        create(broker, pattern)
    listed, token = [], ""
    while True:
        page = broker.templates.ListTemplates(ListTemplatesRequest(page_size=2, page_token=token))
        listed += [template.pattern for template in page.templates]
        token = page.next_page_token
        if not token:
            break
    expect("pages list all by pattern", ([one for one in listed if one in patterns], sorted(listed)), (patterns, listed))
    request = ListTemplatesRequest(page_size=-1)
    expect_error("a bad page_size", INVALID, lambda: broker.templates.ListTemplates(request), field="page_size")
    for pattern in patterns:
        delete(broker, pattern)
