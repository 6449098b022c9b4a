"""Proposals and chunks: what each message gets, and what it leaves."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

from flashduet.sampling.params import Sampling
from flashduet.v1 import common_pb2 as pb
from flashduet.v1 import draft_pb2 as dp
from tests.unit.draft_peers import TargetPeer
from tests.unit.draft_running import (
    MAX_ROWS,
    MAX_SESSIONS,
    Running,
    nack,
    new_id,
    refusal,
    running,
)

__all__ = ["running"]


async def test_rounds_of_a_session_draft_from_all_its_context(running: Running) -> None:
    target, gateway, session = await running.target(), running.gateway(), new_id()
    opened = await gateway.open(session, target)
    assert opened.opened.context_hit == 0
    assert opened.opened.lease_ms == 30_000
    features = running.features(40)
    held = 0
    for round, rows in enumerate([16, 8, 1, 5, 8], start=1):
        ack = await target.chunk(session, held, features[held : held + rows])
        held += rows
        assert ack.ack.context_end == held
        answer = await gateway.propose(session, held + 1, round=round, anchor=round)
        assert answer.proposal.round == round
        assert list(answer.proposal.token_ids) == running.drafts(features[:held], round, 8)
        assert len(answer.proposal.confidence) == 7
        assert all(0 <= each <= 1 for each in answer.proposal.confidence)
    load = await running.load()
    assert (load.sessions, load.context_rows, load.proposals) == (1, 38, 5)
    await gateway.send(session, close=dp.ProposeClose())
    assert (await gateway.receive()).HasField("closed")
    await running.emptied()


async def test_sampled_drafts_depend_on_seed_and_choice_only(running: Running) -> None:
    target, gateway, features = await running.target(), running.gateway(), running.features(12)
    drafted = []
    for seed in (5, 5, 6):
        session = new_id()
        sampling = pb.SamplingParams(temperature=1.5, seed=seed)
        await gateway.open(session, target, sampling=sampling)
        await target.chunk(session, 0, features)
        drafted.append(list((await gateway.propose(session, 13)).proposal.token_ids))
    assert drafted[0] == drafted[1] != drafted[2]
    assert drafted[0] == running.drafts(features, 5, 8, Sampling(temperature=1.5, seed=5))


async def test_a_proposal_waits_for_its_context_and_holds_up_nobody(running: Running) -> None:
    target, gateway = await running.target(), running.gateway()
    early, other = new_id(), new_id()
    await gateway.open(early, target)
    await gateway.open(other, target)
    features = running.features(20)
    await target.chunk(early, 0, features[:10])
    await gateway.ask(early, 21, round=3)
    await asyncio.sleep(0.1)
    assert (await running.load()).queued_proposals == 1
    # Meanwhile another session of the same stream is answered.
    await target.chunk(other, 0, features)
    answer = await gateway.propose(other, 21, round=9)
    assert (answer.session_id, answer.proposal.round) == (other, 9)
    await target.chunk(early, 10, features[10:])
    answer = await gateway.receive()
    assert (answer.session_id, answer.proposal.round) == (early, 3)
    assert list(answer.proposal.token_ids) == running.drafts(features, 5, 8)
    assert answer.proposal.timings.context_wait_us > 50_000


@pytest.mark.parametrize("running", [{"lookup": 3}], indirect=True)
async def test_what_followed_the_last_tokens_is_proposed_and_told_as_a_copy(
    running: Running,
) -> None:
    target, gateway, session = await running.target(), running.gateway(), new_id()
    await gateway.open(session, target)
    text = [11, 12, 13, 14, 15, 11, 12]
    await target.chunk(session, 0, running.features(7), token_ids=text)
    copied = (await gateway.propose(session, 8, anchor=13, block_length=4)).proposal
    assert list(copied.token_ids) == [14, 15, 11]
    assert copied.copied_tokens == 3
    drafted = (await gateway.propose(session, 8, anchor=99, block_length=4)).proposal
    assert not drafted.copied_tokens

    alone, features = new_id(), running.features(7)
    await gateway.open(alone, target, drafter_only=True)
    await target.chunk(alone, 0, features, token_ids=text)
    drafted = (await gateway.propose(alone, 8, anchor=13, block_length=4)).proposal
    assert not drafted.copied_tokens
    assert list(drafted.token_ids) == running.drafts(features, 13, 4)


async def test_a_proposal_whose_context_does_not_come_is_refused(running: Running) -> None:
    target, gateway, session = await running.target(), running.gateway(), new_id()
    await gateway.open(session, target)
    await target.chunk(session, 0, running.features(4))
    began = time.monotonic()
    answer = await gateway.propose(session, 10, round=2, budget_s=0.15)
    assert refusal(answer) == "CONTEXT_LATE"
    assert (answer.refused.round, answer.refused.context_end) == (2, 4)
    assert time.monotonic() - began > 0.1
    # The session is as good as before.
    assert (await gateway.propose(session, 5)).HasField("proposal")
    counts = {c.reason: c.count for c in (await running.load()).refused_proposals}
    assert counts == {"CONTEXT_LATE": 1}


async def test_what_is_refused_and_why(running: Running) -> None:
    target, gateway, session = await running.target(), running.gateway(), new_id()
    await gateway.open(session, target)
    await target.chunk(session, 0, running.features(8))
    expected = {
        "BEHIND_CONTEXT": gateway.propose(session, 5),
        "WRONG_EPOCH": gateway.propose(session, 9, epoch=4),
        "UNKNOWN_SESSION": gateway.propose(new_id(), 9),
    }
    for reason, call in expected.items():
        answer = await call
        assert refusal(answer) == reason
    for wrong in ({"block_length": 1}, {"block_length": 33}, {"anchor": 320}):
        assert refusal(await gateway.propose(session, 9, **wrong)) == "BAD_REQUEST"
    assert refusal(await gateway.propose(session, 0)) == "BAD_REQUEST"
    await gateway.send(session)
    assert refusal(await gateway.receive()) == "BAD_REQUEST"
    bad = pb.SamplingParams(top_p=1.5)
    answer = await gateway.open(new_id(), target, sampling=bad)
    assert refusal(answer) == "BAD_REQUEST"
    assert "sampling.top_p" in answer.refused.detail
    assert refusal(await gateway.open(b"short", target)) == "BAD_REQUEST"
    stranger = TargetPeer(running.channel, running.facts)
    assert refusal(await gateway.open(new_id(), stranger)) == "UNKNOWN_TARGET"
    for _ in range(MAX_SESSIONS - 1):
        await gateway.open(new_id(), target)
    assert refusal(await gateway.open(new_id(), target)) == "TOO_MANY_SESSIONS"
    # After all that the session still drafts.
    assert (await gateway.propose(session, 9)).HasField("proposal")


async def test_chunks_that_do_not_fit_are_refused_counted_and_change_nothing(
    running: Running,
) -> None:
    target, gateway, session = await running.target(), running.gateway(), new_id()
    await gateway.open(session, target)
    features = running.features(30)
    await target.chunk(session, 0, features[:10])
    assert nack(await target.chunk(session, 12, features[:4])) == ("GAP", 10)
    assert nack(await target.chunk(session, 0, features[:10])) == ("GAP", 10)  # a retry
    assert nack(await target.chunk(session, 10, features[:4], epoch=1)) == ("WRONG_EPOCH", 10)
    assert nack(await target.chunk(new_id(), 0, features[:4])) == ("UNKNOWN_SESSION", 0)
    assert nack(await target.chunk(session, 10, features[:4], token_ids=[1]))[0] == "WRONG_SHAPE"
    assert nack(await target.chunk(session, 10, features[:4], token_ids=[]))[0] == "WRONG_SHAPE"
    narrow = await target.chunk(session, 10, features[:4, :-1].contiguous())
    assert nack(narrow) == ("WRONG_SHAPE", 10)
    payload = pb.TensorPayload(data_type=99, shape=[2, features.shape[1]], inline=b"xx")
    wrong = await target.chunk(session, 10, features[:2], features=payload)
    assert nack(wrong) == ("BAD_DATA_TYPE", 10)
    payload = pb.TensorPayload(data_type=pb.DATA_TYPE_FLOAT32, shape=[2, features.shape[1]])
    payload.inline = b"too few"
    wrong = await target.chunk(session, 10, features[:2], features=payload)
    assert nack(wrong) == ("WRONG_SIZE", 10)
    payload.ring.offset = 0
    wrong = await target.chunk(session, 10, features[:2], features=payload)
    assert nack(wrong) == ("WRONG_TRANSPORT", 10)
    other = await running.target()
    assert nack(await other.chunk(session, 10, features[:4])) == ("WRONG_TARGET", 0)
    counts = {c.reason: c.count for c in (await running.load()).refused_chunks}
    assert counts == {
        "BAD_DATA_TYPE": 1,
        "GAP": 2,
        "UNKNOWN_SESSION": 1,
        "WRONG_EPOCH": 1,
        "WRONG_SHAPE": 3,
        "WRONG_SIZE": 1,
        "WRONG_TARGET": 1,
        "WRONG_TRANSPORT": 1,
    }
    await target.chunk(session, 10, features[10:])
    answer = await gateway.propose(session, 31)
    assert list(answer.proposal.token_ids) == running.drafts(features, 5, 8)


async def test_a_full_context_store_refuses_chunks_and_frees_on_close(running: Running) -> None:
    target, gateway = await running.target(), running.gateway()
    first, second = new_id(), new_id()
    await gateway.open(first, target)
    await gateway.open(second, target)
    features = running.features(MAX_ROWS)
    assert (await target.chunk(first, 0, features[:150])).HasField("ack")
    assert nack(await target.chunk(second, 0, features[:60])) == ("NO_ROOM", 0)
    assert (await gateway.propose(first, 151)).HasField("proposal")
    await gateway.send(first, close=dp.ProposeClose())
    await gateway.receive()
    assert (await target.chunk(second, 0, features[:60])).HasField("ack")


async def test_rewind_cuts_the_context_and_moves_the_epoch(running: Running) -> None:
    target, gateway, session = await running.target(), running.gateway(), new_id()
    await gateway.open(session, target)
    features = running.features(30)
    await target.chunk(session, 0, features[:20])
    await gateway.send(session, rewind=dp.ProposeRewind(length=12, new_epoch=2))
    answer = await gateway.receive()
    assert (answer.epoch, answer.rewound.context_end) == (2, 12)
    assert nack(await target.chunk(session, 20, features[20:])) == ("WRONG_EPOCH", 12)
    await target.chunk(session, 12, features[12:30], epoch=2)
    answer = await gateway.propose(session, 31, epoch=2)
    assert list(answer.proposal.token_ids) == running.drafts(features, 5, 8)
    # Back by more than the last chunk, then other rows than before.
    await gateway.send(session, 2, rewind=dp.ProposeRewind(length=5, new_epoch=3))
    assert (await gateway.receive()).rewound.context_end == 5
    changed = torch.cat([features[:5], running.features(9, seed=8)])
    await target.chunk(session, 5, changed[5:], epoch=3)
    answer = await gateway.propose(session, 15, epoch=3)
    assert list(answer.proposal.token_ids) == running.drafts(changed, 5, 8)
    # Not forwards, and not into an epoch that is over.
    await gateway.send(session, 3, rewind=dp.ProposeRewind(length=99, new_epoch=4))
    assert (await gateway.receive()).rewound.context_end == 14
    await gateway.send(session, 4, rewind=dp.ProposeRewind(length=1, new_epoch=4))
    assert refusal(await gateway.receive()) == "WRONG_EPOCH"


async def test_a_rewind_ends_the_proposal_under_way(running: Running) -> None:
    target, gateway, session = await running.target(), running.gateway(), new_id()
    await gateway.open(session, target)
    features = running.features(12)
    await target.chunk(session, 0, features[:4])
    await gateway.ask(session, 9, round=1)
    await gateway.send(session, rewind=dp.ProposeRewind(length=3, new_epoch=1))
    ended, rewound = await gateway.receive(), await gateway.receive()
    assert (refusal(ended), ended.refused.round) == ("WRONG_EPOCH", 1)
    assert rewound.rewound.context_end == 3
    # Rows that come for the new epoch wake nobody from the old one.
    await target.chunk(session, 3, features[3:8], epoch=1)
    answer = await gateway.propose(session, 9, epoch=1, round=2)
    assert answer.proposal.round == 2
    assert list(answer.proposal.token_ids) == running.drafts(features[:8], 5, 8)
