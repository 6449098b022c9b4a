"""The life of one answer, from prefill to its last token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from flashduet.v1.gateway_pb2 import GenerateChunk
from gateway.session import Session
from gateway.tally import Phase

Emit = Callable[[GenerateChunk], Awaitable[None]]


async def decode(session: Session, request: Phase, emit: Emit) -> None:
    """Answer until a stop. Every token emitted is the target's own choice.

    A round proposes, verifies, accepts and emits. It starts from the anchor, the last committed
    token, whose features do not exist yet: the target reads the anchor and the draft tokens in one
    pass, agrees with the first `accepted` of them, and adds its own next token, the bonus, which is
    the next anchor. Without a proposal, for whatever reason, that is a plain step; where there will
    never be one, the target goes on by itself for a few of them.

    Raises:
        FlashduetError: the target cannot go on. Nothing about a draft is ever raised.
    """
    target, drafter, answer, tally = session.target, session.drafter, session.answer, session.tally

    with request.phase("prefill") as prefill:
        draft = await drafter.open(prefill.traceparent)
        opened = await target.open(session.opening(draft), prefill.traceparent)
        drafter.opened(opened)
        tally.count_prefill(opened)
    await emit(answer.commit([opened.first_token_id], [opened.first_logprobs]))

    while not answer.finish_reason:
        with request.group("round") as round_:
            number, base = tally.rounds + 1, answer.length - 1

            proposal = await drafter.propose(answer, round_)

            with round_.phase("verify") as verify:
                verified = await target.verify(
                    number,
                    base,
                    proposal.token_ids,
                    verify.traceparent,
                    more_steps=proposal.more_steps,
                    one_by_one=proposal.one_by_one,
                )

            with round_.phase("accept"):
                accepted = proposal.token_ids[: verified.accepted]
                committed = [*accepted, verified.bonus_token_id, *verified.more_token_ids]
                chunk = answer.commit(committed, verified.logprobs)
                drafter.learn(proposal, verified, verify.seconds)
                tally.count_round(proposal, verified, committed=len(chunk.token_ids))
                await emit(chunk)

            round_.note(
                round=number, base=base, tokens=len(proposal.token_ids), accepted=len(accepted)
            )
