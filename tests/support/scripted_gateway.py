"""A gateway that is real gRPC and answers from a script, for tests of what talks to one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flashduet import errors
from flashduet.rpc import Server, abort
from flashduet.v1 import gateway_pb2 as pb
from flashduet.v1 import gateway_pb2_grpc


class ScriptedGateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Answers "héllo" in two chunks; the prompt's text chooses what goes wrong."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        # An answer to "slow" has said its first words; one was cancelled after them.
        self.waiting, self.cancelled = threading.Event(), threading.Event()

    async def Generate(self, request, context):
        self.requests.append(request)
        prompt = request.text or "".join(message.content for message in request.chat.messages)
        if prompt == "bad":
            await abort(context, errors.InvalidRequest("temperature", -1, "must be >= 0"))
        if prompt == "busy":
            await abort(context, errors.Overloaded("all sessions are taken", 2.5))
        yield pb.GenerateResponse(
            started=pb.GenerateStarted(
                request_id="r1", model="tiny", prompt_tokens=3, trace_id="ab" * 16, seed=2**63 + 1
            )
        )
        try:
            yield pb.GenerateResponse(chunk=pb.GenerateChunk(text="hé", token_ids=[4, 5]))
            if prompt == "slow":
                self.waiting.set()
                await asyncio.sleep(3600)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise
        yield pb.GenerateResponse(chunk=pb.GenerateChunk(text="", token_ids=[6]))
        yield pb.GenerateResponse(chunk=pb.GenerateChunk(text="llo", token_ids=[7]))
        if prompt == "cut":
            return
        yield pb.GenerateResponse(
            finished=pb.GenerateFinished(
                finish_reason=pb.FINISH_REASON_STOP, stop_token_id=7, completion_tokens=4
            )
        )
        yield pb.GenerateResponse(
            complete=pb.GenerateComplete(
                finish_reason=pb.FINISH_REASON_STOP,
                usage=pb.Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=1),
                speculation=pb.SpeculationStats(
                    rounds=2,
                    drafted_rounds=1,
                    drafted_tokens=7,
                    accepted_tokens=2,
                    acceptance_length=1.5,
                    phases=[
                        pb.PhaseSeconds(phase="prefill", seconds=0.5),
                        pb.PhaseSeconds(phase="verify.forward", seconds=0.25),
                    ],
                    undrafted_rounds=[{"reason": "CONTEXT_LATE", "count": 1}],
                ),
                stop_token_id=7,
            )
        )

    async def ListModels(self, request, context):
        model = pb.ServedModel(id="tiny", context_window=512, max_tokens=256, block_length=8)
        return pb.ListModelsResponse(models=[model])

    async def GetLoad(self, request, context):
        return pb.GatewayServiceGetLoadResponse(
            active_requests=1, max_requests=8, draft_available=True
        )


@contextmanager
def scripted_gateway(
    servicer: ScriptedGateway | None = None,
) -> Iterator[tuple[str, ScriptedGateway]]:
    """A serving gateway on its own loop and thread: its endpoint and its servicer."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    servicer = servicer or ScriptedGateway()

    async def start() -> Server:
        server = Server(["flashduet.v1.GatewayService"])
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, server.grpc)
        await server.start("127.0.0.1:0")
        await server.serving()
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield f"127.0.0.1:{server.port}", servicer
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
