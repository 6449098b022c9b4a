"""What a step and a round cost beside the arithmetic in them, measured in process."""

from __future__ import annotations

import statistics as plain

from flashduet.client import GenerateOptions
from flashduet_cli.bench import statistics
from flashduet_cli.bench.figures import Measured
from flashduet_cli.bench.workbench import Workbench

_ROWS = 16
_CONTEXT = 256
_TEMPERATURE, _TOP_P = 0.8, 0.95


async def step_cost(bench: Workbench) -> Measured:
    """A verify step of 16 tokens, against the model's linear layers alone."""
    engine, settings = await bench.target_engine(), bench.settings
    prompt = settings.prompts.text(_CONTEXT)
    how = await engine.ask("compile", tokens=_ROWS)
    repeats = settings.count(12, 3)
    await engine.ask("step", prompt=prompt, tokens=_ROWS, repeats=3)
    steps, compiled, packed, forwards = [], [], [], []
    for _ in range(settings.count(10, 2)):
        parts = await engine.ask("step", prompt=prompt, tokens=_ROWS, repeats=repeats)
        bare = await engine.ask("linears", tokens=_ROWS, repeats=repeats)
        steps.append(plain.median(parts["step"]))
        forwards.append(plain.median(parts["forward"]))
        compiled.append(plain.median(bare["compiled"]))
        packed.append(plain.median(bare["packed"]))
    ratios = [step / bare for step, bare in zip(steps, compiled, strict=True)]
    return Measured(
        statistics.ratio(ratios),
        ratios,
        {
            "step_ms": _ms(steps),
            "forward_ms": _ms(forwards),
            "linears_ms": _ms(compiled),
            "linears_are": how["kind"],
            "packed_linears_ms": _ms(packed),
            "step_to_packed_linears": plain.fmean(steps) / plain.fmean(packed),
        },
    )


async def round_overhead(bench: Workbench) -> Measured:
    """What a round takes beyond the target's and the draft's forward passes, one session."""
    running, settings = await bench.stack("fast"), bench.settings
    target, draft = await bench.target_engine(), await bench.draft_engine()
    block = int((await bench.drafter_facts())["block_length"])
    tokens, repeats = settings.count(128, 24), settings.count(8, 2)
    prompts = settings.prompts.some(settings.count(12, 2), most_tokens=256)
    # A round with copied drafts has no pass of the drafter to be told apart.
    asked: GenerateOptions = {
        "speculation": "fixed",
        "drafter_only": True,
        "max_tokens": tokens,
    }
    await running.ask(prompts[0], **asked)
    shares, rounds, targets, drafts, served = [], [], [], [], []
    for prompt in prompts:
        answer = await running.ask(prompt, **asked)
        report = answer.speculation
        seconds = (answer.seconds - answer.first_token_seconds) / report.rounds
        # At the middle of the answer, which is what an average round sees.
        context = settings.prompts.text(len(prompt) + tokens // 2)
        forward = plain.median(
            await target.ask("forward", prompt=context, tokens=block, repeats=repeats)
        )
        drafted = plain.median(
            await draft.ask("forward", context=len(context), block_length=block, repeats=repeats)
        )
        rounds.append(seconds)
        targets.append(forward)
        drafts.append(drafted * report.drafted_rounds / report.rounds)
        shares.append((seconds - forward - drafts[-1]) / seconds)
        inside = report.phases.get("verify.forward", 0) + report.phases.get("propose.forward", 0)
        served.append(1 - inside / report.rounds / seconds)
    return Measured(
        statistics.mean(shares),
        shares,
        {
            "block_length": block,
            "round_ms": _ms(rounds),
            "target_forward_ms": _ms(targets),
            "draft_forward_ms": _ms(drafts),
            "share_by_the_services_own_clocks": served,
        },
    )


async def sampling_cost(bench: Workbench) -> Measured:
    """Choosing the tokens of a verify at temperature 0.8 and top-p 0.95, against its forward."""
    running, engine = await bench.stack("fast"), await bench.target_engine()
    settings = bench.settings
    shares, forwards, samples = [], [], []
    prompts = settings.prompts.some(settings.count(8, 2), most_tokens=128)
    for number, prompt in enumerate(prompts):
        answer = await running.ask(
            prompt,
            max_tokens=settings.count(160, 64),
            sampling=None,
            temperature=_TEMPERATURE,
            top_p=_TOP_P,
            seed=number,
        )
        parts = await engine.ask(
            "sampled",
            text=[*prompt, *answer.token_ids],
            temperature=_TEMPERATURE,
            top_p=_TOP_P,
            rows=_ROWS,
        )
        forwards += parts["forward"]
        samples += parts["sample"]
        shares.append(sum(parts["sample"]) / sum(parts["forward"]))
    return Measured(
        statistics.mean(shares),
        shares,
        {"verify_forward_ms": _ms(forwards), "sample_ms": _ms(samples)},
    )


def _ms(seconds: list[float]) -> list[float]:
    return [round(value * 1e3, 4) for value in seconds]
