"""The published descriptor set is enough to call the services, and has what stubs are made of."""

from importlib.resources import files

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool

from flashduet.v1 import common_pb2, draft_pb2, gateway_pb2, target_pb2
from tests.support.grpc_json import generate
from tests.support.pair import Pair


@pytest.fixture(scope="module")
def described() -> FileDescriptorSet:
    """As it lies in the installed package."""
    return FileDescriptorSet.FromString((files("flashduet.v1") / "flashduet.v1.binpb").read_bytes())


def normal(file: FileDescriptorProto) -> FileDescriptorProto:
    """The file without the JSON names, which follow from the fields' own."""
    made = FileDescriptorProto()
    made.CopyFrom(file)
    messages = list(made.message_type)
    while messages:
        message = messages.pop()
        messages += message.nested_type
        for field in message.field:
            field.ClearField("json_name")
    return made


def test_it_holds_every_contract_and_all_that_they_import(described):
    known = {file.name for file in described.file}
    for module in (common_pb2, draft_pb2, gateway_pb2, target_pb2):
        (found,) = [file for file in described.file if file.name == module.DESCRIPTOR.name]
        stub = FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        assert normal(found).message_type == normal(stub).message_type
        assert found.service == stub.service
        assert set(found.dependency) <= known


def test_it_keeps_the_comments(described):
    (gateway,) = [file for file in described.file if file.name == "flashduet/v1/gateway.proto"]
    comments = [place.leading_comments for place in gateway.source_code_info.location]
    assert any("What clients talk to." in comment for comment in comments)


def test_generate_is_callable_from_it_alone(pair: Pair, described):
    pool = DescriptorPool()
    for file in described.file:  # buf lists what a file imports before it
        pool.Add(file)
    request = {
        "tokenIds": {"ids": [5, 9, 77]},
        "maxTokens": 8,
        "ignoreEos": True,
        "sampling": {"temperature": 4, "seed": "18446744073709551615"},
    }
    with grpc.insecure_channel(pair.gateway) as channel:
        responses = list(generate(channel, pool, request))
    assert responses[0]["started"]["seed"] == "18446744073709551615"
    ids = [one for response in responses for one in response.get("chunk", {}).get("tokenIds", [])]
    assert len(ids) == responses[-1]["complete"]["usage"]["completionTokens"] == 8
