"""The blocking client: the same methods, on gRPC's own threads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self, Unpack

import grpc

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
from flashduet.rpc import CHANNEL_OPTIONS, from_rpc_error
from flashduet.v1 import gateway_pb2, gateway_pb2_grpc

UNARY_TIMEOUT_S = 10.0


class GenerationStream:
    """An answer on its way: iterate it for `TextChunk`s, then call `result()`.

    Leaving it before the end (`with`, or `cancel()`) cancels the request.
    """

    def __init__(self, call: grpc.CallIterator[gateway_pb2.GenerateResponse]) -> None:
        self._call = call
        self._collector = Collector(time.perf_counter())
        self._cancelled = False
        self._chunks = self._read()

    def __iter__(self) -> Iterator[TextChunk]:
        return self._chunks

    def result(self) -> Generation:
        """The whole answer; reads what has not been iterated.

        Raises:
            FlashduetError: its class says why, e.g. InvalidRequest or DeadlineExceeded.
        """
        for _ in self._chunks:
            pass
        if self._cancelled:
            raise Cancelled("the request was cancelled by its caller")
        return self._collector.generation()

    def cancel(self) -> None:
        """End the request, from any thread; iterating then ends, `result` raises Cancelled."""
        # Set before the reader can see the call's end.
        already, self._cancelled = self._cancelled, True
        self._cancelled = self._call.cancel() or already

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def _read(self) -> Iterator[TextChunk]:
        try:
            for message in self._call:
                chunk = self._collector.add(message, time.perf_counter())
                if chunk is not None:
                    yield chunk
        except grpc.RpcError as error:
            if not self._cancelled:
                raise from_rpc_error(error) from error


class Client:
    """A gateway, reached over one channel. Use as `with Client(endpoint) as client`."""

    def __init__(self, endpoint: str = "127.0.0.1:50050", *, api_key: str | None = None) -> None:
        """`api_key`: for a gateway that asks for one; see `flashduet.client.api_key`."""
        self._metadata = call_metadata(api_key)
        self._channel = grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        self._stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerationStream:
        """Start an answer; see `GenerateOptions` for the keywords.

        Raises:
            TypeError: see `flashduet.client.request.build_request`.
        """
        call = self._stub.Generate(
            build_request(prompt, options),
            timeout=options.get("timeout", DEFAULT_TIMEOUT_S),
            metadata=self._metadata,
        )
        return GenerationStream(call)

    def models(self) -> list[ModelCard]:
        """The models served."""
        try:
            answer = self._stub.ListModels(
                gateway_pb2.ListModelsRequest(), timeout=UNARY_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return model_cards(answer)

    def load(self) -> GatewayLoad:
        """How busy the gateway is."""
        try:
            answer = self._stub.GetLoad(
                gateway_pb2.GatewayServiceGetLoadRequest(),
                timeout=UNARY_TIMEOUT_S,
                metadata=self._metadata,
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return gateway_load(answer)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
