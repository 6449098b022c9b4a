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

_WARM_UP_TOKENS = 16


class Engine:
    """Runs one target. `step` belongs to one thread; `new_cache` may be called from any."""

    def __init__(self, target: LoadedTarget) -> None:
        self.features = FeatureCapture(target.decoder, target.config.num_hidden_layers)
        self._model = target.model
        self._config = target.config
        self._device = target.device
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

    def warm_up(self) -> None:
        """Run a chunk and a block of a throwaway session, so that the first request finds kernels
        chosen and memory mapped."""
        session = Session(
            session_id=bytes(16),
            epoch=0,
            choice=0,
            sampling=Sampling(temperature=1.0),
            cache=self.new_cache(2 * _WARM_UP_TOKENS),
            token_limit=2 * _WARM_UP_TOKENS,
            prompt_length=_WARM_UP_TOKENS,
            token_ids=[0] * _WARM_UP_TOKENS,
        )
        chunk = PrefillChunk(session, session.token_ids[:], base=0, last=True)
        self._raise_failure(self.step([chunk]))
        self._raise_failure(self.step([VerifyBlock(session, session.anchor_position, [0] * 7)]))

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
        logits = self._model(**arguments).logits[0, -logit_rows:]
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

    @staticmethod
    def _raise_failure(results: Sequence[StepResult | StepFailure]) -> None:
        for result in results:
            if isinstance(result, StepFailure):
                raise result.error
