"""A client that knows only the address: descriptors by reflection, then Generate."""

import grpc
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.support.grpc_json import SERVICE, generate
from tests.support.pair import Pair


def reflected_pool(channel: grpc.Channel, symbol: str) -> DescriptorPool:
    """All files that `symbol` needs, fetched from the server."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    pool, seen = DescriptorPool(), set()

    def ask(**request) -> list[descriptor_pb2.FileDescriptorProto]:
        message = reflection_pb2.ServerReflectionRequest(**request)
        (response,) = stub.ServerReflectionInfo(iter([message]), timeout=60)
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


def test_generate_is_callable_from_reflection_alone(pair: Pair):
    request = {"chat": {"messages": [{"role": "user", "content": "hi"}]}, "maxTokens": 8}
    with grpc.insecure_channel(pair.gateway) as channel:
        responses = list(generate(channel, reflected_pool(channel, SERVICE), request))
    kinds = [kind for response in responses for kind in response]
    assert kinds[0] == "started"
    assert kinds[-1] == "complete"
    assert "chunk" in kinds[1:-1]
