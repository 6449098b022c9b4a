"""How close packed passes come to Transformers' own, family by family.

`python -m tests.support.families [--compiled] [family ...]` prints the table of docs/families.md.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashduet.errors import ConfigurationError
from target_service.batching import Span
from target_service.compiled.build import compile_pass
from target_service.compiled.model import CompiledModel
from target_service.load import load_target
from target_service.session import StepResult, VerifyBlock
from target_service.settings import TargetSettings
from tests.unit.target_support import TinyTarget, hidden_rows, load_tiny, prefill, prompt

# Past the sliding windows of 24 tokens and, twice over, the 128 positions that rope tables are
# first made for.
LENGTH = 300
_STEPS = (60, 1, 8, 1, 64, 5, 90, 1, 1, 16, 53)

# Configs beyond each family's plain one: what else a checkpoint of it may ask for.
_ROPE: dict[str, Any] = {"max_position_embeddings": 128}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True, slots=True)
class Case:
    """A family of tests.support.tiny, and what its config adds to the tiny one."""

    family: str
    config: str
    overrides: dict[str, Any]


CASES = [
    Case("llama", "grouped heads, tied head", _ROPE),
    Case("llama", "rope llama3 scaling", {**_ROPE, "rope_parameters": _LLAMA3}),
    Case("qwen2", "query and key biases", _ROPE),
    Case(
        "qwen2",
        "sliding window 24 in upper layers",
        {**_ROPE, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    ),
    Case("qwen3", "query and key norms", _ROPE),
    Case("qwen3", "rope yarn scaling", {**_ROPE, "rope_parameters": _YARN}),
    Case("gemma2", "softcap 50 and 30, alternating window 24", _ROPE),
    Case("gemma3", "window 24 but every third layer, two ropes", _ROPE),
    Case("mistral", "window 24 in all layers", _ROPE),
    Case("gpt_oss", "sinks, alternating window 24, experts, rope yarn", {}),
    Case("mixtral", "experts, 2 of 4", _ROPE),
    Case("qwen3_moe", "experts, 2 of 4", _ROPE),
    Case("llama4", "chunks of 32 but every fourth layer, experts", {}),
    Case("gpt2", "learned positions, Conv1D layers", {}),
    Case("gpt_neox", "parallel residual, partial rope", {}),
]


@dataclass(frozen=True, slots=True)
class FamilyResult:
    """What was found.

    Attributes:
        logits, features: largest difference from one plain pass over the whole sequence.
        lossless: whether greedy answers with drafts, right and wrong ones, are `generate`'s.
    """

    logits: float
    features: float
    lossless: bool


@torch.inference_mode()
def measure(case: Case, folder: Path, *, compiled: bool = False) -> FamilyResult:
    """Run a random tiny model of the family in every way that the service runs one.

    Raises:
        ConfigurationError: it cannot be compiled.
    """
    tiny = load_tiny(folder, case.family, **case.overrides)
    if compiled:
        compile_tiny(tiny)
    tokens, other = prompt(LENGTH), prompt(LENGTH, seed=5)
    depth = tiny.target.config.num_hidden_layers
    layers = (depth - 1, 0, depth // 2)
    long = tiny.table(LENGTH + 16)
    neighbour = tiny.table(LENGTH, scattered=True)
    expected, beside = tiny.reference(tokens), tiny.reference(other).logits[0]
    logits = features = 0.0
    base = at = 0
    for rows in _STEPS:
        # A block whose tokens are all rejected, then the real ones, next to another sequence.
        wrong = Span(long.block_ids, base, prompt(4, seed=base))
        right = Span(long.block_ids, base, tokens[base : base + rows])
        side = Span(neighbour.block_ids, at, other[at : at + 7])
        tiny.engine.packed.forward(tiny.engine.kv, [wrong], torch.arange(4))
        with tiny.engine.features.recording(layers):
            every = torch.arange(rows + 7)
            got = tiny.engine.packed.forward(tiny.engine.kv, [right, side], every)
            states = tiny.engine.features.rows(layers, 0, rows)
        own, end = got[:rows], base + rows
        logits = max(logits, _largest(own, expected.logits[0, base:end]))
        logits = max(logits, _largest(got[rows:], beside[at : at + 7]))
        features = max(features, _largest(states, hidden_rows(expected, layers, base, end)))
        base, at = end, at + 7
    assert base == LENGTH
    return FamilyResult(logits, features, _lossless(tiny))


def compile_tiny(tiny: TinyTarget) -> None:
    """Let the engine run compiled passes, in float32, which the service itself does not compile."""
    package = tiny.folder / "compiled"
    settings = TargetSettings(model=str(tiny.folder), device="cpu", dtype="float32")
    compile_pass(load_target(settings), package)
    tiny.engine.offer(CompiledModel(package, tiny.engine.packed.layers))
    tiny.engine.step([])


def _largest(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max())


def _lossless(tiny: TinyTarget) -> bool:
    """Greedy with drafts of 0 to 6 tokens, wrong from some place on, against `generate`."""
    tokens = prompt(40, seed=1)
    answer = tokens + tiny.generate(tokens, 48)
    if len(set(answer[40:])) < 4:
        return False  # an answer of one repeated token would hide mistakes
    session = tiny.session(tokens)
    prefill(tiny.engine, session, chunk=16)
    rounds = accepted = 0
    while session.committed_length < len(answer):
        anchor = session.anchor_position
        drafts = answer[anchor + 1 : anchor + 1 + rounds % 7]
        if drafts and rounds % 2:
            drafts[-1] = (drafts[-1] + 1) % 320
        [result] = tiny.engine.step([VerifyBlock(session, anchor, drafts)])
        if not isinstance(result, StepResult):
            return False
        accepted += result.accepted
        rounds += 1
    return session.token_ids[: len(answer)] == answer and accepted > 10


def main() -> None:
    wanted = sys.argv[1:]
    compiled = "--compiled" in wanted
    families = [name for name in wanted if not name.startswith("--")]
    print("| family | config | max logit difference | max feature difference | lossless |")
    print("|---|---|---|---|---|")
    for case in (case for case in CASES if not families or case.family in families):
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = measure(case, Path(folder), compiled=compiled)
            except ConfigurationError as error:
                print(f"| {case.family} | {case.config} | {error.message} | | |", flush=True)
                continue
        lossless = "yes" if found.lossless else "no"
        print(
            f"| {case.family} | {case.config} | {found.logits:.1e} | {found.features:.1e} "
            f"| {lossless} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
