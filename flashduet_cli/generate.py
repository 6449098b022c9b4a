"""`flashduet generate`: one answer, streamed, or those to a file of prompts."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from flashduet.client import (
    AsyncClient,
    GenerateOptions,
    Generation,
    Message,
    PositionLogprobs,
    Prompt,
    TokenLogprob,
)
from flashduet_cli import options
from flashduet_cli.batch.command import (
    DRAFTED_PROMPTS,
    BatchFiles,
    answer_file,
    environment,
    refuse_mixed,
)
from flashduet_cli.console import err, fail, phase_table, print_json, run
from flashduet_cli.reach import Where, reached
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
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End before this string (repeatable).", show_default=False),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="A system message.", show_default=False)
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            min=0, max=20, help="Tell so many likely tokens with each one.", show_default=False
        ),
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
    endpoint: options.OwnEndpoint = None,
    start: Annotated[
        bool, typer.Option("--start", help="Start a stack even if one is reachable.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for the whole answer.")] = 600.0,
    file: Annotated[
        Path | None,
        typer.Option(
            help='Answer a file: JSON lines with "prompt", "turns" or "messages", and "id".',
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where the answers to --file go; those that are there are not asked for again.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option(
            min=1,
            max=4096,
            help=f"Prompts of --file at a time; above {DRAFTED_PROMPTS} of them nothing is drafted "
            "unless --block-length says how.",
        ),
    ] = 64,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
) -> None:
    """Stream an answer, or answer a whole file of prompts.

    The stack at --endpoint is asked, or one started for this call.
    """
    if no_draft and block_length is not None:
        fail("--no-draft and --block-length exclude each other", 2)
    if raw and system is not None:
        fail("--raw takes the prompt as it is; it has no place for --system", 2)
    refuse_mixed(prompt, file, out)
    if file is not None and concurrency > DRAFTED_PROMPTS and block_length is None:
        no_draft = True
    instructions = None if system is None else _utf8(system, "--system")
    asked: GenerateOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
        "top_logprobs": logprobs,
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
        env={} if file is None else environment(concurrency),
    )
    own = {"--dtype": dtype, "--drafter": drafter, "--device": device}
    where = Where(
        endpoint=endpoint,
        start=start,
        config=config,
        own=tuple(name for name, value in own.items() if value is not None),
        verbose=verbose,
    )
    if file is not None and out is not None:
        files = BatchFiles(file, out, concurrency)
        run(answer_file(files, asked, instructions, where, as_json))
        return
    text = _utf8(_read_prompt(prompt), "the prompt")
    question: Prompt = text
    if instructions is not None:
        question = [Message("system", instructions), Message("user", text)]
    run(_generate(question, asked, where, as_json))


async def _generate(question: Prompt, asked: GenerateOptions, where: Where, as_json: bool) -> None:
    async with AsyncExitStack() as exits:
        endpoint, asked["model"] = await exits.enter_async_context(reached(where))
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
    told = [_position(position) for position in generation.logprobs]
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
        **({"logprobs": told} if told else {}),
    }


def _position(position: PositionLogprobs) -> dict[str, object]:
    return {**_token(position.chosen), "top": [_token(token) for token in position.top]}


def _token(token: TokenLogprob) -> dict[str, object]:
    return {
        "token_id": token.token_id,
        "token": token.token.decode(errors="replace"),
        "bytes": list(token.token),
        "logprob": token.logprob,
    }


def _logprob_table(positions: Sequence[PositionLogprobs]) -> Table:
    """A row a token: its probability under the raw model, and the most likely ones instead."""
    table = Table("token", "probability", "most likely", title="tokens", title_justify="left")
    table.columns[1].justify = "right"
    for position in positions:
        likely = ", ".join(f"{_shown(token)} {_percent(token)}" for token in position.top)
        table.add_row(Text(_shown(position.chosen)), _percent(position.chosen), Text(likely))
    return table


def _shown(token: TokenLogprob) -> str:
    return repr(token.token.decode(errors="backslashreplace"))


def _percent(token: TokenLogprob) -> str:
    return f"{100 * math.exp(token.logprob):.1f} %"


def _print_summary(generation: Generation, sampled: bool) -> None:
    sys.stdout.write("\n")
    sys.stdout.flush()
    if generation.logprobs:
        err.print(_logprob_table(generation.logprobs))
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
