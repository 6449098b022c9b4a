"""GatewayService over gRPC: translates, nothing else.

Errors reach the caller through `flashduet.rpc.Server`.
"""

from __future__ import annotations

import grpc.aio

from flashduet.errors import Cancelled
from flashduet.v1 import gateway_pb2 as pb
from flashduet.v1.gateway_pb2_grpc import GatewayServiceServicer
from gateway.gateway import Gateway

SERVICE = "flashduet.v1.GatewayService"


class GatewayServicer(GatewayServiceServicer):
    """Generate, ListModels and GetLoad."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        async def emit(response: pb.GenerateResponse) -> None:
            try:
                await context.write(response)
            except grpc.aio.BaseError as error:
                # gRPC may learn of a caller's end by a write that fails, before it cancels us.
                raise Cancelled("the caller is gone") from error

        metadata = dict(context.invocation_metadata() or ())
        traceparent = metadata.get("traceparent", "")
        await self._gateway.answer(
            request,
            emit,
            traceparent=traceparent if isinstance(traceparent, str) else "",
            time_left_s=context.time_remaining(),
        )

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        served = self._gateway.served()
        if served is None:
            return pb.ListModelsResponse()
        model = pb.ServedModel(
            id=served.name,
            context_window=served.context_window,
            max_tokens=self._gateway.most_tokens(served),
            drafter=served.drafter,
            block_length=served.block_length,
            created=served.created,
        )
        return pb.ListModelsResponse(models=[model])

    async def GetLoad(
        self, request: pb.GatewayServiceGetLoadRequest, context: grpc.aio.ServicerContext
    ) -> pb.GatewayServiceGetLoadResponse:
        counts, served = self._gateway.counts, self._gateway.served()
        return pb.GatewayServiceGetLoadResponse(
            active_requests=counts.active,
            max_requests=self._gateway.max_requests,
            completed_requests=counts.completed,
            failed_requests=counts.failed,
            cancelled_requests=counts.cancelled,
            draft_available=served is not None and bool(served.drafter),
        )
