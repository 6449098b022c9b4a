"""Which replicas there are, and which of them a request is served by."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from flashduet.settings import split_endpoints
from flashduet.v1.draft_pb2 import DraftServiceGetModelInfoResponse, SelfTest
from flashduet.v1.target_pb2 import TargetServiceGetModelInfoResponse
from gateway.budget import BudgetLimits
from gateway.controller import PairModel
from gateway.draft_client import DraftReplica
from gateway.settings import GatewaySettings
from gateway.target_client import TargetReplica

logger = logging.getLogger(__name__)

# Replicas come and go; what was learned about pairs that are gone is forgotten past this many.
_MOST_PAIRS = 64


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served right now, by all replicas together.

    Attributes:
        name: that clients use.
        vocab_size: token ids are below it.
        context_window: prompt and answer together, in tokens.
        max_block_length: anchor + draft tokens that every target verifies.
        drafter: its name; empty when no draft is attached to a target.
        block_length: what the drafter was trained with; 0 without one.
        created: seconds since the epoch when the gateway first saw it.
        max_top_logprobs: most likely tokens that every target tells with a chosen one.
        max_sessions: of all targets together.
    """

    name: str
    vocab_size: int
    context_window: int
    max_block_length: int
    drafter: str
    block_length: int
    created: int
    max_top_logprobs: int = 0
    max_sessions: int = 1


@dataclass(frozen=True, slots=True)
class Route:
    """The replicas of one request; without a draft `undrafted` says why."""

    target: TargetReplica
    target_instance_id: bytes
    draft: DraftReplica | None = None
    pair: PairModel | None = None
    block_length: int = 1
    undrafted: str = ""
    draft_instance_id: bytes = b""


class Router:
    """Watches all replicas, and picks the least busy target and, of its drafts, the least busy."""

    def __init__(self, settings: GatewaySettings) -> None:
        limits = BudgetLimits(
            multiple=settings.draft_budget_multiple,
            floor_s=settings.draft_budget_floor_ms / 1000,
            ceiling_s=settings.draft_budget_ceiling_ms / 1000,
        )
        poll_s = settings.poll_s
        self._targets = [TargetReplica(e, poll_s) for e in split_endpoints(settings.targets)]
        self._drafts = [DraftReplica(e, limits, poll_s) for e in split_endpoints(settings.drafts)]
        self._name = settings.name
        self._tokenizer_hash = ""
        self._created = 0
        self._refused: set[bytes] = set()
        self._pairs: dict[tuple[bytes, bytes], PairModel] = {}

    def expect_tokenizer(self, tokenizer_hash: str) -> None:
        """Serve only from targets with this tokenizer; one that hides its own is trusted."""
        self._tokenizer_hash = tokenizer_hash

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as watches:
            for target in self._targets:
                watches.create_task(target.run(), name=f"watch target {target.endpoint}")
            for draft in self._drafts:
                watches.create_task(draft.run(), name=f"watch draft {draft.endpoint}")

    def served(self) -> ServedModel | None:
        """What is served; None while no target serves."""
        infos = [info for _, info in self._serving()]
        if not infos:
            return None
        self._created = self._created or int(time.time())
        attached = {draft.instance_id for info in infos for draft in info.drafts}
        drafter = next(
            (draft.info for draft in self._drafts
             if draft.info is not None and draft.info.instance_id in attached), None
        )  # fmt: skip
        return ServedModel(
            name=self._name or infos[0].facts.name,
            vocab_size=infos[0].facts.vocab_size,
            context_window=min(info.facts.context_window for info in infos),
            max_block_length=min(info.max_block_length for info in infos),
            drafter=drafter.name if drafter is not None else "",
            block_length=drafter.block_length if drafter is not None else 0,
            created=self._created,
            max_top_logprobs=min(info.max_top_logprobs for info in infos),
            max_sessions=sum(info.max_sessions for info in infos),
        )

    def promising_pairs(self) -> list[tuple[Route, str, SelfTest]]:
        """All pairs whose drafter says what is to be seen with it: the way to each, the drafter's
        name, and what it says."""
        pairs = []
        for target, info in self._serving():
            attached = {draft.instance_id for draft in info.drafts}
            for draft in self._drafts:
                told = draft.info
                if told is None or not told.HasField("self_test"):
                    continue
                if told.instance_id in attached:
                    route = self._pair_route(target, info, draft, told)
                    pairs.append((route, told.name, told.self_test))
        return pairs

    def route(self, *, drafted: bool) -> Route | None:
        """Replicas for a request that wants to be drafted or not; None while no target serves."""
        serving = self._serving()
        if not serving:
            return None
        target, info = min(serving, key=lambda pair: pair[0].sessions)
        if not drafted:
            return Route(target, info.instance_id, undrafted="off")
        attached = {draft.instance_id for draft in info.drafts}
        drafts = [
            (draft, draft.info)
            for draft in self._drafts
            if draft.info is not None and draft.info.instance_id in attached
        ]
        if not drafts:
            return Route(target, info.instance_id, undrafted="no_draft")
        draft, draft_info = min(drafts, key=lambda pair: pair[0].sessions)
        return self._pair_route(target, info, draft, draft_info)

    def _pair_route(
        self,
        target: TargetReplica,
        info: TargetServiceGetModelInfoResponse,
        draft: DraftReplica,
        draft_info: DraftServiceGetModelInfoResponse,
    ) -> Route:
        return Route(
            target,
            info.instance_id,
            draft,
            self._pair(info, draft_info),
            draft_info.block_length,
            draft_instance_id=draft_info.instance_id,
        )

    def _serving(self) -> list[tuple[TargetReplica, TargetServiceGetModelInfoResponse]]:
        """Targets that serve the one model this gateway stands for: that of the first of them."""
        serving: list[tuple[TargetReplica, TargetServiceGetModelInfoResponse]] = []
        for target in self._targets:
            info = target.info
            if info is None:
                continue
            first = serving[0][1].facts if serving else None
            if self._fits(target.endpoint, info, first.name if first else info.facts.name):
                serving.append((target, info))
        return serving

    def _fits(self, endpoint: str, info: TargetServiceGetModelInfoResponse, name: str) -> bool:
        facts = info.facts
        problem = ""
        if facts.name != name:
            problem = (
                f"serves {facts.name!r}, the first target serves {name!r}; use one gateway each"
            )
        elif self._tokenizer_hash and facts.tokenizer_hash not in ("", self._tokenizer_hash):
            problem = (
                f"serves {facts.name!r} with another tokenizer than ours; set "
                "FLASHDUET_GATEWAY_MODEL to the target's model"
            )
        if problem and info.instance_id not in self._refused:
            self._refused.add(info.instance_id)
            logger.error("target %s is not used: it %s", endpoint, problem)
        return not problem

    def _pair(
        self, target: TargetServiceGetModelInfoResponse, draft: DraftServiceGetModelInfoResponse
    ) -> PairModel:
        key = (target.instance_id, draft.instance_id)
        pair = self._pairs.get(key)
        if pair is None:
            while len(self._pairs) >= _MOST_PAIRS:
                self._pairs.pop(next(iter(self._pairs)))
            longest = min(target.max_block_length, draft.max_block_length)
            pair = self._pairs[key] = PairModel(max(longest, 2))
        return pair
