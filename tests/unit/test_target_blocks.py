"""A target with few blocks: what it plans, what it refuses, and that it fails nobody it took."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from flashduet.errors import ConfigurationError, InvalidRequest
from flashduet.rpc import from_rpc_error
from target_service.engine import Engine
from target_service.load import load_target
from target_service.memory import plan_memory
from target_service.settings import TargetSettings
from tests.support.tiny import tiny_target
from tests.unit.target_server_support import RunningTarget, running_target
from tests.unit.target_support import TinyTarget, prompt

BLOCKS, SIZE = 12, 16


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    torch.set_num_threads(1)
    folder = tiny_target(tmp_path_factory.mktemp("llama"))
    target = load_target(TargetSettings(model=str(folder), device="cpu", dtype="float32"))
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return TinyTarget(folder, target, Engine(target, BLOCKS, SIZE), stock)


async def test_sessions_that_need_more_blocks_than_there_are_all_get_their_answers(
    small: TinyTarget, tmp_path: Path
) -> None:
    prompts = [prompt(40, seed) for seed in range(5)]
    truths = [small.generate(tokens, 60) for tokens in prompts]
    async with running_target(small, tmp_path, max_sessions=5) as running:

        async def talk(index: int) -> list[int]:
            stream = running.decode()
            await stream.open(prompts[index], max_tokens=60)
            while len(stream.tokens) < 100:
                done = len(stream.tokens) - 40
                await stream.verify(truths[index][done : done + index][: 99 - len(stream.tokens)])
            await stream.close()
            return stream.tokens[40:100]

        assert await asyncio.gather(*map(talk, range(5))) == truths
        load = await running.load()
        assert load.preemptions > 0, "5 sessions of 7 blocks do not fit into 12"
        assert (load.free_kv_blocks, load.sessions) == (BLOCKS, 0)


async def test_the_context_window_is_what_there_are_blocks_for(
    small: TinyTarget, tmp_path: Path
) -> None:
    async with running_target(small, tmp_path) as running:
        info = await running.info()
        assert info.facts.context_window == BLOCKS * SIZE
        assert (info.numerics, info.max_top_logprobs) == ("fast", 20)
        await _refused(running, BLOCKS * SIZE, "open.token_ids")
        stream = running.decode()
        opened = await stream.open(prompt(BLOCKS * SIZE - 1))
        assert opened.prefill_chunks == 12
        await stream.close()
        await running.nothing_left()


async def _refused(running: RunningTarget, tokens: int, field: str) -> None:
    stream = running.decode()
    await stream.send_open(prompt(tokens))
    error = from_rpc_error(await stream.failure())
    assert isinstance(error, InvalidRequest)
    assert [violation.field for violation in error.violations] == [field]


def test_the_plan_counts_whole_blocks(small: TinyTarget) -> None:
    settings = TargetSettings(max_kv_tokens=1000, block_tokens=16, drafts="a:1,b:2", ring_mib=3)
    plan = plan_memory(settings, small.target)
    assert (plan.num_blocks, plan.block_tokens, plan.kv_tokens) == (62, 16, 992)
    assert (plan.rings, plan.ring_bytes) == (2, 3 * 2**20)
    # Keys and values of 4 layers with 2 heads of 16 numbers of 4 bytes.
    assert plan.kv_bytes_per_token == 2 * 4 * 2 * 16 * 4


def test_without_a_setting_all_sessions_have_room_for_their_whole_window(
    small: TinyTarget,
) -> None:
    plan = plan_memory(TargetSettings(max_sessions=3), small.target)
    assert plan.kv_tokens == 3 * small.target.facts.context_window


def test_no_room_for_one_session_is_an_error_that_names_the_setting(small: TinyTarget) -> None:
    with pytest.raises(ConfigurationError, match="FLASHDUET_TARGET_MAX_KV_TOKENS"):
        plan_memory(TargetSettings(max_kv_tokens=1), small.target)
