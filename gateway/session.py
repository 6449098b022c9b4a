"""What one answer owns while it is made; ending it frees everything on both sides."""

from __future__ import annotations

import time
from dataclasses import dataclass

from flashduet.v1.common_pb2 import PRIORITY_BATCH, PRIORITY_INTERACTIVE
from flashduet.v1.target_pb2 import DecodeOpen
from gateway.answer import Answer
from gateway.draft_session import OpenedDraft
from gateway.drafter import Drafter
from gateway.request import Priority, ValidRequest
from gateway.tally import Tally
from gateway.target_client import TargetSession

_PRIORITIES = {
    Priority.INTERACTIVE: PRIORITY_INTERACTIVE,
    Priority.BATCH: PRIORITY_BATCH,
}


@dataclass(frozen=True, slots=True)
class Session:
    """One answer's sequence on one target and at most one draft replica.

    Attributes:
        session_id: 16 random bytes, the session's name on both.
        deadline: of the whole request, on the clock of `time.monotonic`.
    """

    session_id: bytes
    request: ValidRequest
    deadline: float
    target: TargetSession
    drafter: Drafter
    answer: Answer
    tally: Tally

    def opening(self, draft: OpenedDraft | None) -> DecodeOpen:
        """The target's opening; features go to the draft, if one took the session."""
        request = self.request
        time_left_s = max(self.deadline - time.monotonic(), 0.001)
        return DecodeOpen(
            session_id=self.session_id,
            epoch=0,
            choice=self.answer.choice,
            token_ids=request.prompt_ids,
            prompt_length=len(request.prompt_ids),
            sampling=request.sampling.to_proto(),
            draft_instance_id=draft.instance_id if draft is not None else None,
            draft_context_hit=draft.context_hit if draft is not None else 0,
            deadline_ms=min(int(time_left_s * 1000) + 1, 2**32 - 1),
            max_tokens=request.max_tokens,
            top_logprobs=request.top_logprobs,
            priority=_PRIORITIES[request.priority],
            cache_salt=request.cache_salt,
            stop_token_ids=sorted(request.stop_ids),
        )

    async def finish(self) -> None:
        """The answer is complete: free both sides and wait for the target to have done so."""
        self.drafter.close()
        await self.target.close()

    def close(self) -> None:
        """Free both sides without waiting, whatever they are doing; also after `finish`."""
        self.drafter.close()
        self.target.abandon()
