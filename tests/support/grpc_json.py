"""Calling Generate knowing only descriptors: requests and responses as JSON-like dicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict

SERVICE = "flashduet.v1.GatewayService"


def generate(
    channel: grpc.Channel, pool: DescriptorPool, request: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The responses to one request; `pool` has the gateway's contract and all that it needs."""
    method = pool.FindServiceByName(SERVICE).methods_by_name["Generate"]
    request_type = message_factory.GetMessageClass(method.input_type)
    response_type = message_factory.GetMessageClass(method.output_type)
    call = channel.unary_stream(
        f"/{SERVICE}/Generate",
        request_serializer=request_type.SerializeToString,
        response_deserializer=response_type.FromString,
    )
    for response in call(ParseDict(request, request_type()), timeout=240):
        yield MessageToDict(response)
