"""The typed Python client.

    from flashduet.client import Client

    with Client("127.0.0.1:50050") as client:
        stream = client.generate("Why is the sky blue?", max_tokens=64)
        for chunk in stream:
            print(chunk.text, end="", flush=True)
        print(stream.result().speculation.acceptance_length)

`AsyncClient` is the same with `async with`, `async for` and `await`. Errors are those of
`flashduet.errors`: `InvalidRequest` for a refused field, `Overloaded`, `Unavailable`, ...
"""

from flashduet.client.aio import AsyncClient, AsyncGenerationStream
from flashduet.client.request import (
    GenerateOptions,
    Message,
    Priority,
    Prompt,
    SpeculationMode,
)
from flashduet.client.results import (
    Choice,
    GatewayLoad,
    Generation,
    ModelCard,
    PositionLogprobs,
    SpeculationReport,
    TextChunk,
    TokenLogprob,
    TokenUsage,
)
from flashduet.client.sync import Client, GenerationStream

__all__ = [
    "AsyncClient",
    "AsyncGenerationStream",
    "Choice",
    "Client",
    "GatewayLoad",
    "GenerateOptions",
    "Generation",
    "GenerationStream",
    "Message",
    "ModelCard",
    "PositionLogprobs",
    "Priority",
    "Prompt",
    "SpeculationMode",
    "SpeculationReport",
    "TextChunk",
    "TokenLogprob",
    "TokenUsage",
]
