"""The client for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self, Unpack

import grpc
import grpc.aio

from flashduet.client.api_key import call_metadata
from flashduet.client.collector import Collector
from flashduet.client.request import DEFAULT_TIMEOUT_S, GenerateOptions, Prompt, build_request
from flashduet.client.results import (
    GatewayLoad,
    Generation,
    ModelCard,
    TextChunk,
    gateway_load,
    model_cards,
)
from flashduet.errors import Cancelled
from flashduet.rpc import from_rpc_error, open_channel
from flashduet.v1 import gateway_pb2, gateway_pb2_grpc

UNARY_TIMEOUT_S = 10.0


class AsyncGenerationStream:
    """An answer on its way: iterate it for `TextChunk`s, then `await result()`.

    Leaving it before the end (`async with`, or `cancel()`) cancels the request, which frees
    everything behind it. Owned by one task.
    """

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[gateway_pb2.GenerateRequest, gateway_pb2.GenerateResponse],
    ) -> None:
        self._call = call
        self._collector = Collector(time.perf_counter())
        self._cancelled = False
        self._chunks = self._read()

    def __aiter__(self) -> AsyncIterator[TextChunk]:
        return self._chunks

    async def result(self) -> Generation:
        """The whole answer; reads what has not been iterated.

        Raises:
            FlashduetError: its class says why, e.g. InvalidRequest or DeadlineExceeded.
        """
        async for _ in self._chunks:
            pass
        if self._cancelled:
            raise Cancelled("the request was cancelled by its caller")
        return self._collector.generation()

    def cancel(self) -> None:
        """End the request early; iterating then ends, and `result` raises Cancelled."""
        # Set before the reader can see the call's end.
        already, self._cancelled = self._cancelled, True
        self._cancelled = self._call.cancel() or already

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    async def _read(self) -> AsyncIterator[TextChunk]:
        try:
            async for message in self._call:
                chunk = self._collector.add(message, time.perf_counter())
                if chunk is not None:
                    yield chunk
        except grpc.RpcError as error:
            if not self._cancelled:
                raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            # grpc.aio raises this for cancel() as well as for our own task's cancellation.
            task = asyncio.current_task()
            if not self._cancelled or (task is not None and task.cancelling()):
                self._call.cancel()
                raise


class AsyncClient:
    """A gateway, reached over one channel. Use as `async with AsyncClient(endpoint) as client`."""

    def __init__(self, endpoint: str = "127.0.0.1:50050", *, api_key: str | None = None) -> None:
        """`api_key`: for a gateway that asks for one; see `flashduet.client.api_key`."""
        self._channel = open_channel(endpoint)
        self._metadata = call_metadata(api_key)
        self._stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGenerationStream:
        """Start an answer; see `GenerateOptions` for the keywords.

        Raises:
            TypeError: see `flashduet.client.request.build_request`.
        """
        call = self._stub.Generate(
            build_request(prompt, options),
            timeout=options.get("timeout", DEFAULT_TIMEOUT_S),
            metadata=self._metadata,
        )
        return AsyncGenerationStream(call)

    async def models(self) -> list[ModelCard]:
        """The models served."""
        try:
            answer = await self._stub.ListModels(
                gateway_pb2.ListModelsRequest(),
                timeout=UNARY_TIMEOUT_S,
                metadata=self._metadata,
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return model_cards(answer)

    async def load(self) -> GatewayLoad:
        """How busy the gateway is."""
        try:
            answer = await self._stub.GetLoad(
                gateway_pb2.GatewayServiceGetLoadRequest(),
                timeout=UNARY_TIMEOUT_S,
                metadata=self._metadata,
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return gateway_load(answer)

    async def close(self) -> None:
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
