"""The standard services that every gRPC tool supports: health and reflection."""

import grpc
from checking import expect, section
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

SERVICES = [f"sluicegate.v1.{name}Service" for name in ("Queue", "Admin", "Schedule", "Template", "Operation")]
SERVING = health_pb2.HealthCheckResponse.SERVING


@section("health")
def health(broker):
    stub = health_pb2_grpc.HealthStub(broker.channel)
    for service in ["", *SERVICES]:
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service))
        expect(f"SERVING for {service!r}", answer.status, SERVING)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
    expect("a watch starts with SERVING", next(watch).status, SERVING)
    watch.cancel()
    try:
        stub.Check(health_pb2.HealthCheckRequest(service="no.such.Service"))
        code = grpc.StatusCode.OK
    except grpc.RpcError as error:
        code = error.code()
    expect("an unknown service is NOT_FOUND", code, grpc.StatusCode.NOT_FOUND)


@section("reflection")
def reflection(broker):
    database = ProtoReflectionDescriptorDatabase(broker.channel)
    listed = set(database.get_services())
    missing = [name for name in [*SERVICES, "grpc.health.v1.Health"] if name not in listed]
    expect("v1alpha lists our services and health", missing, [])
    pool = DescriptorPool(database)
    method = pool.FindServiceByName("sluicegate.v1.QueueService").methods_by_name["Push"]
    expect("v1alpha describes Push", method.input_type.full_name, "sluicegate.v1.PushRequest")
