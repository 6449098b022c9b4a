"""Asks a service, over a channel that is kept, whether it serves."""

from __future__ import annotations

from enum import Enum, auto

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S = 2.0


class Health(Enum):
    """What a service said, or how it failed to."""

    SERVING = auto()
    # It says that it does not serve, or nothing is there.
    DOWN = auto()
    # No answer in time: busy or stuck.
    SILENT = auto()


async def ask_health(channel: grpc.aio.Channel, service: str) -> Health:
    """The answer within a bound; never raises."""
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        answer = await stub.Check(request, timeout=_TIMEOUT_S)
    except grpc.RpcError as error:
        late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        return Health.SILENT if late else Health.DOWN
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return Health.SERVING if serving else Health.DOWN
