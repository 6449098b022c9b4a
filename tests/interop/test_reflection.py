"""A client that knows only the address: descriptors by reflection, then Generate."""

import grpc
import pytest
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.support.pair import Pair


def reflected_pool(channel: grpc.Channel, symbol: str) -> DescriptorPool:
    """All files that `symbol` needs, fetched from the server."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    pool, seen = DescriptorPool(), set()

    def ask(**request) -> list[descriptor_pb2.FileDescriptorProto]:
        message = reflection_pb2.ServerReflectionRequest(**request)
        (response,) = stub.ServerReflectionInfo(iter([message]), timeout=10)
        return [
            descriptor_pb2.FileDescriptorProto.FromString(raw)
            for raw in response.file_descriptor_response.file_descriptor_proto
        ]

    def add(file: descriptor_pb2.FileDescriptorProto) -> None:
        if file.name in seen:
            return
        seen.add(file.name)
        for dependency in file.dependency:
            for needed in ask(file_by_filename=dependency):
                add(needed)
        pool.Add(file)

    for file in ask(file_containing_symbol=symbol):
        add(file)
    return pool


@pytest.mark.parametrize("service", ["GatewayService"])
def test_generate_is_callable_from_reflection_alone(pair: Pair, service):
    with grpc.insecure_channel(pair.gateway) as channel:
        pool = reflected_pool(channel, f"flashduet.v1.{service}")
        method = pool.FindServiceByName(f"flashduet.v1.{service}").methods_by_name["Generate"]
        request_type = message_factory.GetMessageClass(method.input_type)
        response_type = message_factory.GetMessageClass(method.output_type)
        call = channel.unary_stream(
            f"/flashduet.v1.{service}/Generate",
            request_serializer=request_type.SerializeToString,
            response_deserializer=response_type.FromString,
        )
        request = ParseDict(
            {"chat": {"messages": [{"role": "user", "content": "hi"}]}, "maxTokens": 8},
            request_type(),
        )
        kinds = [response.WhichOneof("message") for response in call(request, timeout=60)]
    assert kinds[0] == "started"
    assert kinds[-1] == "complete"
    assert set(kinds[1:-1]) == {"chunk"}
