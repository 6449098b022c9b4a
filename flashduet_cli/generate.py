"""`flashduet generate`: one answer, streamed."""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from typing import Annotated

import typer
from rich.text import Text

from flashduet.client import AsyncClient, GenerateOptions, Generation, Message, Prompt
from flashduet.models import served_name
from flashduet_cli import options
from flashduet_cli.console import err, fail, note, phase_table, print_json, run
from flashduet_cli.reach import serving, started, undrafted_if_unknown
from flashduet_cli.stack import StackConfig


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; read from standard input when absent or -.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to answer with at most.", show_default=False)
    ] = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End before this string (repeatable).", show_default=False),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="A system message.", show_default=False)
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Take the prompt as it is, without a chat template.")
    ] = False,
    block_length: Annotated[
        int | None,
        typer.Option(min=2, help="Fixed block length (anchor and drafts).", show_default=False),
    ] = None,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Decode without drafting.")] = False,
    dtype: options.Dtype = None,
    model: options.Model = None,
    drafter: options.Drafter = None,
    device: options.Device = None,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    start: Annotated[
        bool, typer.Option("--start", help="Start a stack even if one is reachable.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for the whole answer.")] = 600.0,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
) -> None:
    """Stream an answer, from the stack at --endpoint or from one started for this call."""
    if no_draft and block_length is not None:
        fail("--no-draft and --block-length exclude each other", 2)
    if raw and system is not None:
        fail("--raw takes the prompt as it is; it has no place for --system", 2)
    text = _utf8(_read_prompt(prompt), "the prompt")
    question: Prompt = text
    if system is not None:
        question = [Message("system", _utf8(system, "--system")), Message("user", text)]
    asked: GenerateOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": [_utf8(end, "--stop") for end in stop or []],
        "speculation": "off" if no_draft else None,
        "block_length": block_length,
        "raw": raw,
        "timeout": timeout,
    }
    config = StackConfig(
        model=model,
        drafter=drafter,
        draft=not no_draft,
        dtype=dtype,
        device=device,
        free_ports=True,
    )
    own = {"--dtype": dtype, "--drafter": drafter, "--device": device}
    given = [name for name, value in own.items() if value is not None]
    run(_generate(question, asked, config, endpoint, start, given, as_json, verbose))


async def _generate(
    question: Prompt,
    asked: GenerateOptions,
    config: StackConfig,
    endpoint: str,
    start: bool,
    given: list[str],
    as_json: bool,
    verbose: bool,
) -> None:
    async with AsyncExitStack() as exits:
        if not start and await serving(endpoint):
            if given:
                fail(
                    f"{' and '.join(given)} can only be chosen for a stack that this command "
                    f"starts, and one is running at {endpoint}; add --start, or give the option "
                    "to `flashduet up`",
                    2,
                )
            asked["model"] = None if config.model is None else served_name(config.model)
        else:
            if not start:
                note(f"no stack at {endpoint}; starting one for this call")
            stack = await exits.enter_async_context(
                started(undrafted_if_unknown(config), verbose=verbose)
            )
            endpoint = stack.endpoint
        client = await exits.enter_async_context(AsyncClient(endpoint))
        stream = await exits.enter_async_context(client.generate(question, **asked))
        async for chunk in stream:
            if chunk.text and not as_json:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
        generation = await stream.result()
        # Said before the stack stops, which takes a moment.
        if as_json:
            print_json(summary(generation))
        else:
            _print_summary(generation, sampled=bool(asked["temperature"]))


def _read_prompt(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        fail("give a prompt as an argument or on standard input", 2)
    # Text is UTF-8 on the wire, so it is here, whatever the terminal's locale is.
    text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape").rstrip("\r\n")
    if not text:
        fail("the prompt on standard input is empty", 2)
    return text


def _utf8(text: str, name: str) -> str:
    """The text of an argument or of standard input, whose bytes have to be UTF-8."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as error:
        fail(f"{name} is not UTF-8 ({error}); convert it, e.g. with iconv", 2)


def summary(generation: Generation) -> dict[str, object]:
    """The object that --json prints; seconds are wall-clock, phases too."""
    return {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason,
        "usage": {
            "prompt_tokens": generation.usage.prompt_tokens,
            "completion_tokens": generation.usage.completion_tokens,
            "cached_tokens": generation.usage.cached_tokens,
        },
        "rounds": generation.speculation.rounds,
        "acceptance_length": generation.speculation.acceptance_length,
        "seconds": generation.seconds,
        "tokens_per_second": generation.tokens_per_second,
        "phases": dict(generation.speculation.phases),
    }


def _print_summary(generation: Generation, sampled: bool) -> None:
    sys.stdout.write("\n")
    sys.stdout.flush()
    report = generation.speculation
    rounds = "round" if report.rounds == 1 else "rounds"
    line = (
        f"{generation.usage.completion_tokens} tokens in {generation.seconds:.2f} s "
        f"({generation.tokens_per_second:.1f} tokens/s), {report.rounds} {rounds}, "
        f"acceptance length {report.acceptance_length:.2f}, "
        f"{report.accepted_tokens} of {report.drafted_tokens} drafted tokens accepted, "
        f"finish reason {generation.finish_reason}"
    )
    if sampled:
        # Greedy answers depend on no seed.
        line += f", seed {generation.seed}"
    err.print(Text(line, style="bold"), soft_wrap=True)
    err.print(phase_table(report.phases, generation.seconds))
