"""The target model as a step over a list of work items.

Items of any sessions may share a step. Behind the interface each item is one pass of the stock
Transformers model over the session's own cache; nothing here knows of gRPC.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashduet.errors import CheckpointError
from flashduet.sampling.choose import choose_tokens
from flashduet.sampling.params import Sampling
from target_service.cache import KeyValueCache
from target_service.features import FeatureCapture
from target_service.load import LoadedTarget
from target_service.session import (
    ContextRows,
    Interval,
    PrefillChunk,
    Session,
    StepFailure,
    StepResult,
    VerifyBlock,
    WorkItem,
)

# A chunk, and then a block of the usual size.
_WARM_UP_CHUNK, _WARM_UP_TOKENS = 16, 24
# Of cached logits from plain ones, by the element type's rounding; a wrong mask is far above.
_LARGEST_DIFFERENCE = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.2}


class Engine:
    """Runs one target. `step` belongs to one thread; `new_cache` may be called from any."""

    def __init__(self, target: LoadedTarget) -> None:
        self.features = FeatureCapture(target.decoder, target.config.num_hidden_layers)
        self.model = target.model
        self._config = target.config
        self._device = target.device
        self._dtype = target.dtype
        accepted = inspect.signature(target.model.forward).parameters
        # Transformers before 5.24 calls the cache past_key_values.
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self._takes_positions = "position_ids" in accepted
        self._takes_logits_to_keep = "logits_to_keep" in accepted

    def new_cache(self, max_tokens: int) -> KeyValueCache:
        """An empty cache for one session; memory is taken as it fills."""
        return KeyValueCache(self._config, max_tokens)

    @torch.inference_mode()
    def step(self, items: Sequence[WorkItem]) -> list[StepResult | StepFailure]:
        """Compute all items, one result each, in order.

        A failing item leaves its session as it was and does not touch the others.
        """
        return [self._guarded(item) for item in items]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a throwaway session, so that the first request finds kernels chosen and memory
        mapped, and compare its logits with those of one plain pass without any cache.

        Raises:
            CheckpointError: the model cannot be run in parts: it is not causal, or it does not
                read its cache as Transformers' cache interface has it.
        """
        # Any ids will do, if neighbours differ.
        tokens = [index * 7919 % self._config.vocab_size for index in range(_WARM_UP_TOKENS)]
        session = Session(
            session_id=bytes(16),
            epoch=0,
            choice=0,
            sampling=Sampling(temperature=1.0),
            cache=self.new_cache(_WARM_UP_TOKENS),
            token_limit=_WARM_UP_TOKENS,
            prompt_length=_WARM_UP_TOKENS,
        )
        try:
            head, _ = self.forward(session, 0, tokens[:_WARM_UP_CHUNK], logit_rows=_WARM_UP_CHUNK)
            rest = tokens[_WARM_UP_CHUNK:]
            tail, _ = self.forward(session, _WARM_UP_CHUNK, rest, logit_rows=len(rest))
            ids = torch.tensor([tokens], device=self._device)
            whole = self.model(input_ids=ids, use_cache=False).logits[0]
        except Exception as error:
            raise CheckpointError(
                f"model_type {self._config.model_type!r}: a pass over a cache failed: {error}"
            ) from error
        self._choose(tail, _WARM_UP_CHUNK, session)
        difference = _relative_difference(torch.cat([head, tail]), whole)
        if not difference < _LARGEST_DIFFERENCE[self._dtype]:
            raise CheckpointError(
                f"model_type {self._config.model_type!r}: logits of a pass in two parts and of one "
                f"whole pass differ by {difference:.0%}; the model is not causal, or reads its "
                "cache in a way of its own"
            )

    def _guarded(self, item: WorkItem) -> StepResult | StepFailure:
        committed = item.session.committed_length
        try:
            with self.features.recording(item.layer_ids):
                if isinstance(item, PrefillChunk):
                    return self._prefill(item)
                return self._verify(item)
        except Exception as error:
            del item.session.token_ids[committed:]
            item.session.cache.rollback(item.base)
            return StepFailure(error)

    def _prefill(self, item: PrefillChunk) -> StepResult:
        session, count = item.session, len(item.token_ids)
        logits, forward = self.forward(session, item.base, item.token_ids, logit_rows=1)
        chosen: list[int] = []
        started, clock = time.time_ns(), time.perf_counter_ns()
        if item.last:
            chosen = self._choose(logits, item.base + count, session)
        sample = Interval(started, time.perf_counter_ns() - clock)
        context = self._context(item, item.token_ids)
        session.token_ids.extend(chosen)
        return StepResult(tuple(chosen), 0, count, context, forward, sample)

    def _verify(self, item: VerifyBlock) -> StepResult:
        session, drafts = item.session, list(item.token_ids)
        block = [session.token_ids[item.base], *drafts]
        logits, forward = self.forward(session, item.base, block, logit_rows=len(block))
        started, clock = time.time_ns(), time.perf_counter_ns()
        chosen = self._choose(logits, item.base + 1, session)
        sample = Interval(started, time.perf_counter_ns() - clock)
        # Row i chose the token that follows block[i]; drafts hold as far as both agree.
        accepted = 0
        while accepted < len(drafts) and chosen[accepted] == drafts[accepted]:
            accepted += 1
        context = self._context(item, block[: accepted + 1])
        committed = tuple(chosen[: accepted + 1])
        session.cache.rollback(item.base + accepted + 1)
        session.token_ids.extend(committed)
        return StepResult(committed, accepted, len(block), context, forward, sample)

    def forward(
        self, session: Session, base: int, token_ids: Sequence[int], logit_rows: int
    ) -> tuple[Tensor, Interval]:
        """One causal pass over token_ids at positions base..; logits [logit_rows, V] of the last
        rows."""
        if session.cache.length != base:
            raise ValueError(f"the cache holds {session.cache.length} tokens, base {base} given")
        started, clock = time.time_ns(), time.perf_counter_ns()
        arguments: dict[str, Any] = {
            "input_ids": torch.tensor([list(token_ids)], device=self._device),
            "use_cache": True,
            self._cache_argument: session.cache,
        }
        if self._takes_positions:
            end = base + len(token_ids)
            arguments["position_ids"] = torch.arange(base, end, device=self._device).unsqueeze(0)
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = logit_rows
        logits = self.model(**arguments).logits[0, -logit_rows:]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return logits, Interval(started, time.perf_counter_ns() - clock)

    def _choose(self, logits: Tensor, first_position: int, session: Session) -> list[int]:
        return choose_tokens(logits, first_position, session.sampling, session.choice).tokens

    def _context(self, item: WorkItem, token_ids: Sequence[int]) -> ContextRows | None:
        if not item.layer_ids:
            return None
        features = self.features.rows(item.layer_ids, len(token_ids))
        return ContextRows(item.base, tuple(token_ids), features)


def _relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Root mean square of the difference, against that of the logits around their mean."""
    ours, theirs = ours.double(), theirs.double()
    spread = theirs - theirs.mean(dim=-1, keepdim=True)
    return float((ours - theirs).norm() / spread.norm())
