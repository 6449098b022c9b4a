"""Asks a service, over a channel that is kept, whether it serves."""

from __future__ import annotations

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S = 2.0


async def is_serving(channel: grpc.aio.Channel, service: str) -> bool:
    """False also when nothing answers."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        answer = await stub.Check(
            health_pb2.HealthCheckRequest(service=service), timeout=_TIMEOUT_S
        )
    except grpc.RpcError:
        return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING
