"""Ask a service whether it serves: `python -m flashduet.healthcheck HOST:PORT`.

The exit status is 0 when it does, so that containers and scripts can wait on it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from enum import Enum

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flashduet.rpc import open_channel


class Health(Enum):
    """What an endpoint said about itself."""

    SERVING = "serving"
    # It answers, and is loading or shutting down.
    NOT_SERVING = "not serving"
    # Nothing that speaks the health protocol answered in time.
    UNREACHABLE = "unreachable"


async def probe(endpoint: str, timeout_s: float = 2.0) -> Health:
    """One health check of `host:port` (or `unix:path`), answered within `timeout_s` seconds."""
    async with open_channel(endpoint) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return Health.UNREACHABLE
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return Health.SERVING
    return Health.NOT_SERVING


def main() -> int:
    parser = argparse.ArgumentParser(prog="flashduet.healthcheck", description=__doc__)
    parser.add_argument("endpoint", help="host:port or unix:path")
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds to wait for an answer")
    arguments = parser.parse_args()
    health = asyncio.run(probe(arguments.endpoint, arguments.timeout))
    print(f"{arguments.endpoint}: {health.value}")
    return 0 if health is Health.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
