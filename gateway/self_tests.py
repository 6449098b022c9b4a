"""Does a new pair reach the acceptance length that its drafter is known for?

A drafter that is paired with another quantization of its target, or reads the layers next to those
that it was trained for, fits in every number that a handshake compares; it only guesses badly. So
each pair is asked once for the greedy answer that the drafter's checkpoint names, when nobody else
asks for anything, and a collapse is told in the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from flashduet.errors import FlashduetError
from flashduet.v1 import gateway_pb2 as pb
from flashduet.v1.common_pb2 import PRIORITY_BATCH, SamplingParams
from flashduet.v1.draft_pb2 import SelfTest
from gateway.gateway import Gateway
from gateway.router import Route, Router

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_LOOK_S = 0.05
# So long has to be quiet before a test, and a test has so long.
_QUIET_S = 5.0
_TIME_S = 120.0
# What is expected is of all tokens that the checkpoint names: its first ones may be harder. Beyond
# this a test would take too long.
_MOST_TOKENS = 256
_ATTEMPTS = 3
_MOST_PAIRS = 64
# A test counts if so many of its rounds were drafted; a busy machine's drafts come too late.
_DRAFTED_SHARE = 0.8


class SelfTests:
    """Tests each pair of a target's and a draft's process once.

    Args:
        quiet_s: seconds without a request before a test is begun; four times as many before it is
            tried anew.
    """

    def __init__(self, gateway: Gateway, router: Router, quiet_s: float = _QUIET_S) -> None:
        self._gateway, self._router = gateway, router
        self._quiet_s = quiet_s
        self._attempts: dict[bytes, int] = {}
        self._idle_s = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_POLL_S)
            self._idle_s = self._idle_s + _POLL_S if self._idle else 0.0
            due = self._due() if self._idle else None
            if due is None:
                continue
            route, name, test = due
            pair = _pair(route)
            if not await self._unless_asked(self._tested(route, name, test, pair)):
                logger.debug("self test of drafter %s gives way to a request", name)
            self._idle_s = 0.0

    @property
    def _idle(self) -> bool:
        return self._gateway.counts.active == 0

    def _due(self) -> tuple[Route, str, SelfTest] | None:
        for route, name, test in self._router.promising_pairs():
            attempts = self._attempts.get(_pair(route), 0)
            if attempts < _ATTEMPTS and self._idle_s >= self._quiet_s * 4**attempts:
                return route, name, test
        return None

    async def _unless_asked(self, test: Coroutine[Any, Any, None]) -> bool:
        """Let the test run until somebody asks for something; whether it came to its end."""
        task = asyncio.create_task(test, name="self test")
        try:
            while not task.done():
                if not self._idle:
                    return False
                await asyncio.wait((task,), timeout=_LOOK_S)
            return True
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _tested(self, route: Route, drafter: str, test: SelfTest, pair: bytes) -> None:
        """Run a test and log its result, or count one more attempt."""
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=test.prompt_token_ids),
            max_tokens=min(test.tokens, _MOST_TOKENS),
            sampling=SamplingParams(temperature=0),
            ignore_eos=True,
            priority=PRIORITY_BATCH,
            speculation=pb.Speculation(
                mode=pb.SPECULATION_MODE_FIXED,
                block_length=test.block_length,
                drafter_only=True,
            ),
        )
        # Pairs that are gone do not come back under the same id.
        while len(self._attempts) >= _MOST_PAIRS:
            self._attempts.pop(next(iter(self._attempts)))
        try:
            answer = await self._gateway.ask_itself(request, route, _TIME_S)
        except (FlashduetError, TimeoutError) as error:
            logger.info("self test of drafter %s was not finished: %s", drafter, error)
        except Exception:
            logger.exception("self test of drafter %s failed", drafter)
        else:
            if _told(drafter, test, answer.speculation):
                self._attempts[pair] = _ATTEMPTS
                return
        self._attempts[pair] = self._attempts.get(pair, 0) + 1


def _pair(route: Route) -> bytes:
    return route.target_instance_id + route.draft_instance_id


def _told(drafter: str, test: SelfTest, report: pb.SpeculationStats) -> bool:
    """Log what a test found; false if it says nothing."""
    if report.drafted_rounds < _DRAFTED_SHARE * report.rounds:
        logger.info("self test of drafter %s says nothing: drafts came too late", drafter)
        return False
    found, expected = report.acceptance_length, test.acceptance_length
    if found < least(expected):
        logger.warning(
            "self test: drafter %s has an acceptance length of %.2f on its own prompt, where %.2f "
            "is expected; it may have been trained for another target, another quantization of it, "
            "or other layers (flashduet models inspect)",
            drafter,
            found,
            expected,
        )
    else:
        logger.info(
            "self test: drafter %s has an acceptance length of %.2f, expected %.2f",
            drafter,
            found,
            expected,
        )
    return True


def least(expected: float) -> float:
    """Below this an acceptance length has collapsed: half of what drafts are worth is gone."""
    return 1 + (expected - 1) / 2
