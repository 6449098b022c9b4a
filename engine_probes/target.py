"""The target engine in process: steps, their parts, and the model's bare linear layers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from engine_probes.linears import BareLinears
from engine_probes.serve import serve, timed
from flashduet.hardware import compute_threads
from flashduet.sampling.params import Sampling
from target_service.compiled.adoption import adopt_or_plan
from target_service.engine import Engine
from target_service.load import load_target
from target_service.packed import Span
from target_service.session import PrefillChunk, Session, StepFailure, StepResult, VerifyBlock
from target_service.settings import TargetSettings

_BLOCK_TOKENS = 16
_CHUNK = 256
# Sums of the logits that follow; positions stay far below the window of any model.
_MOST_TOKENS = 4096


class TargetProbe:
    """An engine with a store for one sequence, and the same model's linear layers on their own."""

    def __init__(self) -> None:
        self._session: Session | None = None

    def load(self, model: str, dtype: str, threads: int, layer_ids: Sequence[int]) -> int:
        """Load everything; the threads in use. `layer_ids` are captured as for a draft."""
        logging.disable(logging.INFO)
        torch.set_num_threads(compute_threads(threads))
        settings = TargetSettings.load(model=model, dtype=dtype, drafts="", device="cpu")
        self._linears = BareLinears(load_target(settings).model)
        target = load_target(settings)
        self._vocabulary: int = target.config.vocab_size
        self._engine = Engine(
            target, num_blocks=_MOST_TOKENS // _BLOCK_TOKENS, block_tokens=_BLOCK_TOKENS
        )
        self._engine.warm_up()
        adopt_or_plan(settings, target, self._engine)
        self._layer_ids = tuple(layer_ids)
        return torch.get_num_threads()

    def compile(self, tokens: int) -> dict[str, object]:
        """Get the bare linear layers ready for so many rows; says how."""
        return {"kind": self._linears.prepare(tokens), "products": self._linears.count}

    def linears(self, tokens: int, repeats: int) -> dict[str, list[float]]:
        """Seconds of all linear layers at so many rows: compiled, and packed without a compiler."""
        return {
            "compiled": timed(lambda: self._linears.run(tokens), repeats),
            "packed": timed(lambda: self._linears.run_packed(tokens), repeats),
        }

    def step(self, prompt: list[int], tokens: int, repeats: int) -> dict[str, list[float]]:
        """Seconds of a verify step of so many rows after a prompt, and of its parts."""
        session = self._prefilled(prompt, Sampling())
        drafts = [self._token(index) for index in range(tokens - 1)]
        whole, forwards, samples = [], [], []
        for _ in range(repeats):
            results: list[StepResult] = []
            whole += timed(lambda: results.append(self._verify(session, drafts)), 1)  # noqa: B023
            forwards.append(results[0].forward.duration_ns / 1e9)
            samples.append(results[0].sample.duration_ns / 1e9)
        return {"step": whole, "forward": forwards, "sample": samples}

    def forward(self, prompt: list[int], tokens: int, repeats: int) -> list[float]:
        """Seconds of the bare forward pass of a block of so many rows after a prompt."""
        session = self._prefilled(prompt, Sampling())
        block = [self._token(index) for index in range(tokens)]
        span = Span(session.table.block_ids, len(prompt), block)
        keep = torch.arange(tokens)
        with torch.inference_mode():
            return timed(
                lambda: self._engine.packed.forward(self._engine.kv, [span], keep), repeats
            )

    def sampled(
        self, text: list[int], temperature: float, top_p: float, rows: int
    ) -> dict[str, list[float]]:
        """Seconds of forward and choice of blocks all through a text that a model wrote.

        The drafts are the text itself, so that each row's logits are those of a real answer.
        """
        sampling = Sampling(temperature=temperature, top_p=top_p, seed=11)
        forwards, samples = [], []
        for start in range(rows, len(text) - rows, rows):
            session = self._prefilled(text[:start], sampling)
            result = self._verify(session, text[start : start + rows - 1])
            forwards.append(result.forward.duration_ns / 1e9)
            samples.append(result.sample.duration_ns / 1e9)
        return {"forward": forwards, "sample": samples}

    def _prefilled(self, prompt: list[int], sampling: Sampling) -> Session:
        """A session whose prompt is computed and whose anchor is the token after it."""
        held = self._session
        if held is not None and held.token_ids[:-1] == prompt and held.sampling == sampling:
            return held
        session = Session(
            session_id=bytes(16),
            epoch=0,
            choice=0,
            sampling=sampling,
            token_limit=_MOST_TOKENS,
            prompt_length=len(prompt),
            token_ids=list(prompt),
        )
        session.table.block_ids = list(range(_MOST_TOKENS // _BLOCK_TOKENS))
        for base in range(0, len(prompt), _CHUNK):
            chunk = prompt[base : base + _CHUNK]
            last = base + len(chunk) == len(prompt)
            _done(self._engine.step([PrefillChunk(session, chunk, base, last)])[0])
        self._session = session
        return session

    def _verify(self, session: Session, drafts: list[int]) -> StepResult:
        base = session.anchor_position
        result = self._engine.step([VerifyBlock(session, base, drafts, self._layer_ids)])[0]
        # As it was, for the next one.
        session.table.length = base
        del session.token_ids[base + 1 :]
        return _done(result)

    def _token(self, index: int) -> int:
        return (index + 1) * 7919 % self._vocabulary


def _done(result: StepResult | StepFailure) -> StepResult:
    if isinstance(result, StepFailure):
        raise result.error
    return result


if __name__ == "__main__":
    probe = TargetProbe()
    serve(
        {
            "load": probe.load,
            "compile": probe.compile,
            "linears": probe.linears,
            "step": probe.step,
            "forward": probe.forward,
            "sampled": probe.sampled,
        }
    )
