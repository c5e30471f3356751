"""ExternalScaler, called as KEDA calls it to scale the consumers of a queue."""

import grpc
from checking import eventually, expect, expect_error, expect_true, seconds, section, unique
from externalscaler.externalscaler_pb2 import GetMetricsRequest, MetricSpec, ScaledObjectRef
from externalscaler.externalscaler_pb2_grpc import ExternalScalerStub

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def scaled_object(queue, **metadata):
    """Returns what KEDA sends: the name of the ScaledObject, and all metadata of its trigger."""
    metadata = {"scalerAddress": "sluicegate:7400", "queue": queue, "targetReady": "5"} | metadata
    return ScaledObjectRef(name="worker", namespace="shop", scalerMetadata=metadata)


def figure(scaler, of, name):
    """Returns one figure, which KEDA asks for by name and without the prefix that it puts before it."""
    [value] = scaler.GetMetrics(GetMetricsRequest(scaledObjectRef=of, metricName=name)).metricValues
    return value.metricValueFloat


@section("GetMetricSpec")
def get_metric_spec(broker):
    scaler = ExternalScalerStub(broker.channel)
    queue = unique("scaled")
    specs = list(scaler.GetMetricSpec(scaled_object(queue)).metricSpecs)
    ready = MetricSpec(metricName="ready", targetSize=5, targetSizeFloat=5)
    expect("the target of ready items", specs, [ready])
    specs = list(scaler.GetMetricSpec(scaled_object(queue, targetAgeSeconds="90")).metricSpecs)
    expect("and of their age", specs, [ready, MetricSpec(metricName="age_seconds", targetSize=90, targetSizeFloat=90)])
    none = ScaledObjectRef(name="worker", namespace="shop")
    expect_error("no queue", INVALID, lambda: scaler.GetMetricSpec(none), field="scalerMetadata.queue")
    bad = scaled_object(queue, targetReady="many")
    expect_error("no number", INVALID, lambda: scaler.GetMetricSpec(bad), field="scalerMetadata.targetReady")


@section("IsActive, GetMetrics")
def is_active(broker):
    scaler = ExternalScalerStub(broker.channel)
    of = scaled_object(unique("scaled"))
    queue = of.scalerMetadata["queue"]
    expect("a queue that is not there needs no consumers", scaler.IsActive(of).result, False)
    expect("and has no items", figure(scaler, of, "ready"), 0)
    broker.push(queue, b"later", delay=seconds(3600))
    expect("nor does one whose next item is due in an hour", scaler.IsActive(of).result, False)
    broker.push(queue, b"soon", delay=seconds(20))
    expect("one whose next item is due in 20 s does", scaler.IsActive(of).result, True)
    broker.push(queue, b"1", b"2", b"3")
    delivery = broker.reserve_one(queue)
    expect("ready and reserved items are counted", figure(scaler, of, "ready"), 3)
    age = figure(scaler, of, "age_seconds")
    expect_true("the age is that of the oldest ready item", 0 <= age < 60, age)
    broker.commit(delivery.receipt)
    expect("a settled item is not", figure(scaler, of, "ready"), 2)
    expect_error("an unknown figure", INVALID, lambda: figure(scaler, of, "s0-ready"), field="metricName")


@section("StreamIsActive")
def stream_is_active(broker):
    scaler = ExternalScalerStub(broker.channel)
    of = scaled_object(unique("scaled"))
    queue = of.scalerMetadata["queue"]
    stream = scaler.StreamIsActive(of)
    expect("no consumers are needed at first", next(stream).result, False)
    broker.push(queue, b"1")
    expect("an item arrives: they are needed", next(stream).result, True)
    expect("the item is popped", broker.pop(queue), [b"1"])
    expect("they are needed no more", next(stream).result, False)
    stream.cancel()
    eventually("the queue agrees", lambda: broker.stats(queue).ready, 0)
