"""Context found again by its tokens: what an opening answers, and what drafts it gives."""

from __future__ import annotations

import asyncio

import pytest
import torch

from flashduet.v1 import common_pb2 as pb
from flashduet.v1 import draft_pb2 as dp
from tests.unit.draft_peers import GatewayPeer, TargetPeer
from tests.unit.draft_running import Running, nack, new_id, refusal, running
from tests.unit.drafting import until

__all__ = ["running"]

pytestmark = pytest.mark.parametrize("running", [{"max_sessions": 8}], indirect=True)

PROMPT = [7 + i % 5 for i in range(40)]


async def opened(
    gateway: GatewayPeer, target: TargetPeer, token_ids: list[int], **more: object
) -> tuple[bytes, int]:
    """A new session and its context hit."""
    session = new_id()
    answer = await gateway.open(session, target, token_ids=token_ids, **more)
    return session, answer.opened.context_hit


async def prefilled(
    running: Running, gateway: GatewayPeer, target: TargetPeer, rows: torch.Tensor
) -> bytes:
    """A session whose prompt's rows are all in the store."""
    session, hit = await opened(gateway, target, PROMPT)
    chunk = await target.chunk(session, hit, rows[hit:], token_ids=PROMPT[hit : len(rows)])
    assert chunk.HasField("ack")
    assert (await gateway.propose(session, len(rows) + 1)).HasField("proposal")
    return session


@pytest.mark.parametrize("closed", [False, True])
async def test_a_session_with_a_known_prefix_drafts_as_if_it_had_been_sent(
    running: Running, closed: bool
) -> None:
    target, gateway, rows = await running.target(), running.gateway(), running.features(40)
    first = await prefilled(running, gateway, target, rows)
    if closed:
        await gateway.send(first, close=dp.ProposeClose())
        await gateway.receive()
        load = await running.emptied()
        assert load.cached_context_blocks == 2
    session, hit = await opened(gateway, target, [*PROMPT[:35], 90, 91])
    assert hit == 32
    assert nack(await target.chunk(session, 0, rows[:4])) == ("GAP", 32)
    other = torch.cat([rows[:32], running.features(5, seed=9)])
    await target.chunk(session, 32, other[32:], token_ids=[*PROMPT[32:35], 90, 91])
    answer = await gateway.propose(session, 38)
    assert list(answer.proposal.token_ids) == running.drafts(other, 5, 8)


async def test_a_prefix_is_not_found_by_another_salt_or_from_another_kind_of_target(
    running: Running,
) -> None:
    target, gateway, rows = await running.target(), running.gateway(), running.features(40)
    await prefilled(running, gateway, target, rows)
    assert (await opened(gateway, target, PROMPT, cache_salt="tenant"))[1] == 0
    facts = pb.ModelFacts()
    facts.CopyFrom(running.facts)
    facts.data_type = pb.DATA_TYPE_BFLOAT16
    other = TargetPeer(running.channel, facts)
    await other.handshake()
    assert (await opened(gateway, other, PROMPT))[1] == 0
    same = await running.target()  # another replica of the same target
    assert (await opened(gateway, same, PROMPT))[1] == 32


async def test_tokens_out_of_the_vocabulary_are_refused(running: Running) -> None:
    target, gateway = await running.target(), running.gateway()
    answer = await gateway.open(new_id(), target, token_ids=[5, 320])
    assert refusal(answer) == "BAD_REQUEST"
    assert "token_ids: 320 is not below 320" in answer.refused.detail
    session, _ = await opened(gateway, target, [])
    chunk = await target.chunk(session, 0, running.features(2), token_ids=[5, 320])
    assert nack(chunk) == ("OUT_OF_RANGE", 0)
    biased = pb.SamplingParams(logit_bias={320: 1.0})
    answer = await gateway.open(new_id(), target, sampling=biased)
    assert "sampling.logit_bias" in answer.refused.detail


async def test_a_prefix_on_its_way_is_promised_and_its_followers_wait_for_it(
    running: Running,
) -> None:
    target, gateway, rows = await running.target(), running.gateway(), running.features(40)
    leader, hit = await opened(gateway, target, PROMPT)
    assert hit == 0
    follower, hit = await opened(gateway, target, [*PROMPT[:36], 90])
    assert hit == 32
    # The follower's own rows may even come first.
    own = torch.cat([rows[:32], running.features(5, seed=9)])
    ack = await target.chunk(follower, 32, own[32:], token_ids=[*PROMPT[32:36], 90])
    assert ack.ack.context_end == 37
    await gateway.ask(follower, 38, round=4)
    await target.chunk(leader, 0, rows[:20], token_ids=PROMPT[:20])
    await asyncio.sleep(0.05)
    assert (await running.load()).queued_proposals == 1
    await target.chunk(leader, 20, rows[20:], token_ids=PROMPT[20:])
    answer = await gateway.receive()
    assert (answer.session_id, answer.proposal.round) == (follower, 4)
    assert list(answer.proposal.token_ids) == running.drafts(own, 5, 8)
    await target.chunk(follower, 37, running.features(2, seed=3))
    assert (await gateway.propose(follower, 40)).HasField("proposal")


async def test_a_promise_that_nobody_keeps_is_broken_and_leaves_nothing(running: Running) -> None:
    target, gateway, rows = await running.target(), running.gateway(), running.features(40)
    sessions = [await opened(gateway, target, PROMPT) for _ in range(3)]
    assert [hit for _, hit in sessions] == [0, 32, 32]
    (leader, second, third) = (session for session, _ in sessions)
    await target.chunk(leader, 0, rows[:20], token_ids=PROMPT[:20])
    assert running.service.loaded is not None
    coordinator = running.service.loaded.coordinator
    await target.chunk(second, 32, rows[32:], token_ids=PROMPT[32:])
    await until(lambda: coordinator.sessions.all()[0].context.table.length == 20)
    await gateway.send(leader, close=dp.ProposeClose())
    await gateway.receive()
    # Nobody brings it any more: both hold what there is, and say so.
    assert nack(await target.chunk(second, 40, rows[:1])) == ("GAP", 16)
    assert nack(await target.chunk(third, 32, rows[32:])) == ("GAP", 16)
    answer = await gateway.propose(second, 41, budget_s=0.05)
    assert refusal(answer) == "CONTEXT_LATE"
    for session in (second, third):
        await gateway.send(session, close=dp.ProposeClose())
        await gateway.receive()
    await running.emptied()
    assert coordinator.contexts.cached_blocks == 1


async def test_a_promise_passes_to_another_leader(running: Running) -> None:
    target, gateway, rows = await running.target(), running.gateway(), running.features(40)
    sessions = [await opened(gateway, target, PROMPT) for _ in range(2)]
    leader, follower = (session for session, _ in sessions)
    # Its tokens become known only with its rows.
    other, hit = await opened(gateway, target, PROMPT[:1])
    assert hit == 0
    await target.chunk(other, 0, rows[:20], token_ids=PROMPT[:20])
    await target.chunk(other, 20, rows[20:], token_ids=PROMPT[20:])
    await gateway.send(leader, close=dp.ProposeClose())
    await gateway.receive()
    await target.chunk(follower, 32, rows[32:], token_ids=PROMPT[32:])
    answer = await gateway.propose(follower, 41)
    assert list(answer.proposal.token_ids) == running.drafts(rows, 5, 8)


async def test_penalties_see_the_tokens_of_the_context(running: Running) -> None:
    """Whether they came with the opening, with the chunks, or with a context hit."""
    target, gateway, rows = await running.target(), running.gateway(), running.features(40)
    plain = running.drafts(rows, 5, 8)
    # Strong enough to push any token of the prompt behind all others.
    sampling = pb.SamplingParams(repetition_penalty=10.0)
    tokens = [*PROMPT[:-4], *plain[:4]]
    drafts = []
    for known in ([], tokens, tokens):
        session, hit = await opened(
            gateway, target, known, sampling=sampling, prompt_length=len(tokens)
        )
        await target.chunk(session, hit, rows[hit:], token_ids=tokens[hit:])
        drafts.append(list((await gateway.propose(session, 41)).proposal.token_ids))
    assert hit == 32
    assert drafts[0] == drafts[1] == drafts[2] != plain
    assert drafts[0][0] not in tokens


async def test_load_tells_of_blocks_and_steps(running: Running) -> None:
    target, gateway = await running.target(), running.gateway()
    session = await prefilled(running, gateway, target, running.features(40))
    await gateway.propose(session, 41)
    load = await running.load()
    assert (load.context_blocks, load.context_block_rows) == (13, 16)
    assert load.context_blocks - load.free_context_blocks == 3
    assert load.max_context_rows == 13 * 16
    sizes = {entry.max_tokens: entry for entry in load.step_times}
    assert 8 in sizes
    assert 0 < sizes[8].mean_us <= sizes[8].p99_us
