"""Ask Flashduet over gRPC from the generated stubs alone, as a client in any language would.

    python examples/python_client.py "Why is the sky blue?" --max-tokens 60 --choices 2

Python programs have an easier way, `flashduet.client`; this file shows what goes over the wire.
"""

from __future__ import annotations

import argparse
import json
import sys

import grpc

from flashduet.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc


def build_request(options: argparse.Namespace) -> gateway_pb2.GenerateRequest:
    request = gateway_pb2.GenerateRequest(
        max_tokens=options.max_tokens,
        n=options.choices,
        sampling=common_pb2.SamplingParams(temperature=options.temperature, seed=options.seed),
        top_logprobs=options.top_logprobs,
    )
    request.chat.messages.add(role="user", content=options.prompt)
    return request


def ask(options: argparse.Namespace) -> dict[str, object]:
    """Stream the answers to stderr as they come; returns them whole."""
    choices = [
        {"text": "", "token_ids": [], "logprobs": [], "finish_reason": ""}
        for _ in range(options.choices)
    ]
    answer: dict[str, object] = {"choices": choices}
    with grpc.insecure_channel(options.address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        # The call's deadline is the request's: past it the gateway frees all that it holds.
        for response in stub.Generate(build_request(options), timeout=options.timeout):
            kind = response.WhichOneof("message")
            if kind == "started":
                answer["seed"] = response.started.seed
            elif kind == "chunk":
                choice = choices[response.chunk.choice]
                choice["text"] += response.chunk.text
                choice["token_ids"] += response.chunk.token_ids
                choice["logprobs"] += [item.chosen.logprob for item in response.chunk.logprobs]
                print(response.chunk.text, end="", file=sys.stderr, flush=True)
            elif kind == "finished":
                reason = gateway_pb2.FinishReason.Name(response.finished.finish_reason)
                choices[response.finished.choice]["finish_reason"] = reason
            elif kind == "complete":
                answer["prompt_tokens"] = response.complete.usage.prompt_tokens
                answer["completion_tokens"] = response.complete.usage.completion_tokens
                answer["acceptance_length"] = response.complete.speculation.acceptance_length
    print(file=sys.stderr)
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:50050")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, help="without one the gateway draws it")
    parser.add_argument("--choices", type=int, default=1, help="answers to the one prompt")
    parser.add_argument("--top-logprobs", type=int)
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS")
    try:
        print(json.dumps(ask(parser.parse_args())))
    except grpc.RpcError as error:
        print(f"{error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
