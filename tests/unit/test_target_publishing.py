"""Features on their way to a draft: complete and in order, or the session goes on without."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from flashduet.errors import ConfigurationError
from flashduet.v1 import common_pb2
from target_service.service import TargetService
from target_service.settings import TargetSettings
from tests.support.rings import mappings
from tests.unit.target_server_support import (
    WAIT_S,
    IngestPeer,
    RunningTarget,
    Stream,
    eventually,
    running_peer,
    running_target,
    slowed,
)
from tests.unit.target_support import TinyTarget, hidden_rows, load_tiny, prompt

LAYERS = (0, 2, 3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    torch.set_num_threads(1)
    return load_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture
async def peer(tmp_path: Path) -> AsyncIterator[tuple[IngestPeer, str]]:
    async with running_peer(tmp_path, LAYERS) as given:
        yield given


@pytest.fixture
async def running(
    tiny: TinyTarget, peer: tuple[IngestPeer, str], tmp_path: Path
) -> AsyncIterator[RunningTarget]:
    async with running_target(tiny, tmp_path, drafts=peer[1]) as target:
        await target.attached()
        yield target


async def answer(stream: Stream, truth: list[int], count: int) -> list[bool]:
    """Rounds with one right and one wrong draft token until `count` tokens are answered; whether
    each was still drafting."""
    drafting = []
    start = len(stream.tokens) - 1
    while len(stream.tokens) - start < count:
        done = len(stream.tokens) - start
        drafts = [truth[done], (truth[done + 1] + 1) % 320]
        drafting.append((await stream.verify(drafts)).drafting)
    assert stream.tokens[start : start + count] == truth[:count]
    return drafting


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        ("auto", common_pb2.TRANSPORT_MEMFD),
        ("inline", common_pb2.TRANSPORT_INLINE),
        ("memfd", common_pb2.TRANSPORT_MEMFD),
    ],
)
async def test_the_draft_gets_every_committed_row_but_the_anchor_s(
    tiny: TinyTarget,
    peer: tuple[IngestPeer, str],
    tmp_path: Path,
    transport: str,
    expected: int,
) -> None:
    tokens, session_id = prompt(40), os.urandom(16)
    truth = tiny.generate(tokens, 24)
    async with running_target(tiny, tmp_path, drafts=peer[1], transport=transport) as running:
        (attached,) = await running.attached()
        assert attached.instance_id == peer[0].instance_id
        assert attached.transport == expected
        assert tuple(attached.target_layer_ids) == LAYERS
        stream = running.decode()
        opened = await stream.open(
            tokens, session_id=session_id, draft_instance_id=peer[0].instance_id
        )
        assert opened.drafting
        assert all(await answer(stream, truth, 20))
        committed = stream.tokens[:]

        async def arrived() -> bool:
            # The last rows follow their answer.
            return len(peer[0].token_ids[session_id]) == len(committed) - 1

        await eventually(arrived)
        await stream.close()
        await running.nothing_left()
    held = peer[0].token_ids[session_id]
    assert held == committed[:-1]
    wanted = hidden_rows(tiny.reference(committed), LAYERS, 0, len(held))
    torch.testing.assert_close(peer[0].features(session_id), wanted, atol=1e-3, rtol=1e-4)


async def test_drafted_and_undrafted_sessions_share_the_engine(
    running: RunningTarget, peer: tuple[IngestPeer, str], tiny: TinyTarget
) -> None:
    ids = [peer[0].instance_id, None, os.urandom(16), peer[0].instance_id]
    prompts = [prompt(30, seed) for seed in range(4)]
    truths = [tiny.generate(tokens, 24) for tokens in prompts]
    streams = [running.decode() for _ in ids]

    async def talk(index: int) -> bool:
        fields = {} if ids[index] is None else {"draft_instance_id": ids[index]}
        opened = await streams[index].open(prompts[index], **fields)
        drafting = await answer(streams[index], truths[index], 20)
        await streams[index].close()
        assert all(state is opened.drafting for state in drafting)
        return opened.drafting

    # A draft that is not attached costs nothing but its drafts.
    assert await asyncio.gather(*map(talk, range(4))) == [True, False, False, True]
    await running.nothing_left()


async def test_a_refused_chunk_ends_drafting_and_nothing_else(
    running: RunningTarget, peer: tuple[IngestPeer, str], tiny: TinyTarget
) -> None:
    peer[0].refuse_from = 44
    tokens = prompt(40)
    stream = running.decode()
    assert (await stream.open(tokens, draft_instance_id=peer[0].instance_id)).drafting
    drafting = await answer(stream, tiny.generate(tokens, 40), 36)
    assert drafting[0] is True
    assert drafting[-1] is False
    assert drafting == sorted(drafting, reverse=True), "drafting must not come back"
    dropped = {each.reason: each.count for each in (await running.load()).dropped_chunks}
    assert dropped["GAP"] >= 1
    peer[0].refuse_from = None
    await stream.close()
    fresh = running.decode()
    assert (await fresh.open(tokens, draft_instance_id=peer[0].instance_id)).drafting
    await fresh.close()
    await running.nothing_left()


async def test_a_silent_draft_fills_the_ring_and_the_engine_does_not_wait(
    running: RunningTarget, peer: tuple[IngestPeer, str], tiny: TinyTarget
) -> None:
    """1 MiB holds some 1,300 rows of 768 bytes: the fourth prompt of 400 finds no room."""
    peer[0].silent = True
    tokens = prompt(400)
    truth = tiny.generate(tokens, 24)
    states = []
    for _ in range(4):
        stream = running.decode()
        await stream.open(tokens, draft_instance_id=peer[0].instance_id)
        states.append((await answer(stream, truth, 20))[-1])
        await stream.close()
    assert states[0] is True
    assert states[-1] is False
    load = await running.load()
    assert {each.reason for each in load.dropped_chunks} == {"RING_FULL"}
    assert load.ring_records > 0


async def test_a_draft_that_dies_in_mid_session_costs_only_its_drafts(
    tiny: TinyTarget, tmp_path: Path
) -> None:
    tokens = prompt(40)
    truth = tiny.generate(tokens, 60)
    async with running_peer(tmp_path, LAYERS) as (peer, endpoint):
        first_id = peer.instance_id
        target = running_target(tiny, tmp_path, drafts=endpoint)
        running = await target.__aenter__()
        await running.attached()
        stream = running.decode()
        assert (await stream.open(tokens, draft_instance_id=first_id)).drafting
        assert all(await answer(stream, truth, 10))
    try:
        await running.attached(0)
        anchor = len(stream.tokens) - 41
        drafting = await answer(stream, truth[anchor:], 20)
        assert not any(drafting)
        load = await running.load()
        # Its features are not even made any more, so none is dropped either.
        assert (load.ring_records, list(load.dropped_chunks)) == (0, [])
        async with running_peer(tmp_path, LAYERS, listen=endpoint) as (peer, _):
            await running.attached()
            # The old session stays as it is; a new one is drafted again.
            assert not (await stream.verify()).drafting
            fresh = running.decode()
            assert (await fresh.open(tokens, draft_instance_id=peer.instance_id)).drafting
            await fresh.close()
            stale = running.decode()
            assert not (await stale.open(tokens, draft_instance_id=first_id)).drafting
            await stale.close()
            await stream.close()
            await running.nothing_left()
    finally:
        await target.__aexit__(None, None, None)


async def test_a_draft_for_another_target_is_named_and_left_alone(
    tiny: TinyTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running_peer(tmp_path, (0, 4)) as (peer, endpoint),
        running_target(tiny, tmp_path, drafts=endpoint) as running,
    ):

        async def complained() -> bool:
            return any("target_layer_ids [0, 4]" in text for text in caplog.messages)

        await eventually(complained)
        assert caplog.records[-1].levelno == logging.ERROR
        stream = running.decode()
        assert not (await stream.open(prompt(5), draft_instance_id=peer.instance_id)).drafting
        await stream.close()


def test_a_transport_that_cannot_be_had_is_an_error_at_start(tiny: TinyTarget) -> None:
    settings = TargetSettings(transport="cuda_ipc", drafts="127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="cuda_ipc cannot be had"):
        TargetService.start(settings, tiny.target, tiny.engine)


@pytest.mark.parametrize("phase", ["prefill", "verify"])
async def test_a_cancelled_client_leaves_no_record_in_the_ring(
    running: RunningTarget, peer: tuple[IngestPeer, str], tiny: TinyTarget, phase: str
) -> None:
    stream = running.decode()
    fields = {"draft_instance_id": peer[0].instance_id}
    if phase == "verify":
        await stream.open(prompt(5), **fields)
    with slowed(tiny, 0.1):
        if phase == "prefill":
            await stream.send_open(prompt(300), **fields)
        else:
            await stream.send_verify([1, 2])
        await asyncio.sleep(0.25)
        stream.call.cancel()
        await running.nothing_left()
    after = running.decode()
    assert (await after.open(prompt(5), **fields)).drafting
    await after.close()
    await running.nothing_left()


async def test_rings_leave_neither_mapping_nor_descriptor(tiny: TinyTarget, tmp_path: Path) -> None:
    for _ in range(2):
        async with (
            running_peer(tmp_path, LAYERS) as (peer, endpoint),
            running_target(tiny, tmp_path, drafts=endpoint) as running,
        ):
            await running.attached()
            assert _rings_mapped() == 2, "the target's and the peer's"
            stream = running.decode()
            await stream.open(prompt(20), draft_instance_id=peer.instance_id)
            await stream.close()
            await running.nothing_left()
        assert _rings_mapped() == 0
        assert not [name for name in _descriptors() if "memfd" in name]


def _rings_mapped() -> int:
    gc.collect()
    return mappings()


def _descriptors() -> list[str]:
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            names.append(os.readlink(descriptor))
    return names


async def test_a_link_that_is_closed_just_as_its_draft_ends_does_end(
    tiny: TinyTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancellation that came while the link waited for its two tasks was taken for theirs."""
    ending, may_end = asyncio.Event(), asyncio.Event()

    async def slow_to_end(call: object, stream: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await may_end.wait()

    monkeypatch.setattr("target_service.draft_link._write_chunks", slow_to_end)
    async with running_peer(tmp_path, LAYERS) as (_, endpoint):
        target = running_target(tiny, tmp_path, drafts=endpoint)
        running = await target.__aenter__()
        await running.attached()
    await asyncio.wait_for(ending.wait(), WAIT_S)
    closing = asyncio.create_task(target.__aexit__(None, None, None))
    await asyncio.sleep(0.2)
    may_end.set()
    await asyncio.wait_for(closing, WAIT_S)
