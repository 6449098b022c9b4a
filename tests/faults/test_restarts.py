"""Processes that come, go and multiply under a living stack: answers stay the target's own."""

import os
import signal
import threading
import time
from pathlib import Path

from flashduet.client import Client
from flashduet.errors import FlashduetError
from flashduet.sampling.params import Sampling
from flashduet_cli.ports import free_ports
from tests.support.pair import PATIENCE, Pair, wait_until
from tests.support.tiny import tiny_drafter, tiny_target

PROMPT = list(range(10, 60))


def generate(endpoint: str, seed: int = 21, **options):
    settings = {"speculation": "fixed", "block_length": 4, "max_tokens": 120, **options}
    with Client(endpoint) as client:
        return client.generate(
            PROMPT,
            sampling=Sampling(temperature=4.0, seed=seed),
            ignore_eos=True,
            timeout=240,
            **settings,
        ).result()


def drafts(endpoint: str) -> bool:
    try:
        return generate(endpoint, max_tokens=8).speculation.drafted_tokens > 0
    except FlashduetError:
        return False


class Load:
    """Requests one after another in a few threads until told to stop."""

    def __init__(self, endpoints: list[str]) -> None:
        self.answers: dict[int, set[tuple[int, ...]]] = {}
        self.failures: list[FlashduetError] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(endpoint, index))
            for index, endpoint in enumerate(endpoints)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(130)
            assert not thread.is_alive()

    def _run(self, endpoint: str, index: int) -> None:
        while not self._stop.is_set():
            seed = 21 + index % 2
            try:
                tokens = tuple(generate(endpoint, seed).token_ids)
            except FlashduetError as error:
                self.failures.append(error)
                time.sleep(0.1)
            else:
                self.answers.setdefault(seed, set()).add(tokens)


def test_a_draft_comes_back_with_another_drafter(own_pair: Pair, tiny_models: Path):
    plain = generate(own_pair.gateway, speculation="off").token_ids
    with Load([own_pair.gateway] * 2) as load:
        own_pair.restart("draft", drafter=str(tiny_models / "other"))
        wait_until(lambda: drafts(own_pair.gateway), "drafting with the other drafter")
    with Client(own_pair.gateway) as client:
        assert client.models()[0].drafter == "other"
    assert not load.failures
    assert load.answers[21] == {tuple(plain)}
    assert generate(own_pair.gateway).token_ids == plain
    own_pair.assert_nothing_left()


def test_a_draft_for_another_target_is_refused_and_requests_go_on(own_pair: Pair, tmp_path: Path):
    plain = generate(own_pair.gateway, speculation="off").token_ids
    other = tiny_target(tmp_path / "other_target", "llama", num_hidden_layers=6)
    drafter = tiny_drafter(tmp_path / "misfit", other)
    right = {"drafter": str(own_pair.drafter_folder)}
    own_pair.restart(
        "draft",
        drafter=str(drafter),
        env={**own_pair.environment, "FLASHDUET_DRAFT_TARGET_MODEL": str(other)},
    )
    refused = "drafter and target"
    wait_until(
        lambda: any(line.startswith("target") and refused in line for line in own_pair.logs),
        "the target to say why",
    )
    run = generate(own_pair.gateway)
    assert run.token_ids == plain
    assert run.speculation.drafted_tokens == 0

    def goes_without() -> bool:
        reasons = generate(own_pair.gateway, max_tokens=8).speculation.undrafted_rounds
        return set(reasons) <= {"no_draft", "last_token"}

    wait_until(goes_without, "the gateway to know that there is no draft")
    complaints = [line for line in own_pair.logs if refused in line and line.startswith("target")]
    time.sleep(5)
    again = [line for line in own_pair.logs if refused in line and line.startswith("target")]
    assert len(again) - len(complaints) <= 1, "said once, not at every attempt"

    own_pair.restart("draft", env=own_pair.environment, **right)
    wait_until(lambda: drafts(own_pair.gateway), "drafting with the right drafter again")
    own_pair.assert_nothing_left()


def test_a_target_is_restarted_under_a_living_gateway_and_draft(own_pair: Pair):
    plain = generate(own_pair.gateway).token_ids
    before = own_pair.descriptors()
    with Load([own_pair.gateway] * 3) as load:
        wait_until(lambda: own_pair.target_load().sessions == 3, "requests to be under way")
        own_pair.kill("target")
        time.sleep(1)
        own_pair.restart("target")
        wait_until(lambda: drafts(own_pair.gateway), "drafting after the restart")
    assert load.failures
    for failure in load.failures:
        assert failure.grpc_status == "UNAVAILABLE", failure
    assert load.answers.get(21, {tuple(plain)}) == {tuple(plain)}
    own_pair.assert_nothing_left()
    assert own_pair.draft_load().rings == 1
    own_pair.assert_closed(before, names=("draft", "gateway"))


def test_two_gateways_share_a_pair_and_one_is_killed(own_pair: Pair):
    second = own_pair.add("gateway-2", "gateway")
    wait_until(lambda: drafts(second), "drafting by the second gateway")
    plain = generate(own_pair.gateway, speculation="off").token_ids
    with Load([own_pair.gateway, second] * 2) as load:
        wait_until(lambda: load.answers.keys() == {21, 22}, "both to answer")
        own_pair.kill("gateway")
        survivor = generate(second)
    assert survivor.token_ids == plain
    assert all(len(tokens) == 1 for tokens in load.answers.values())
    own_pair.assert_nothing_left(without={"gateway"})


def test_two_drafts_share_the_sessions_of_one_target_and_one_is_killed(
    tiny_models: Path, tmp_path: Path
):
    (port,) = free_ports(1)
    second = f"127.0.0.1:{port}"
    pair = Pair(tiny_models / "target", tiny_models / "drafter", tmp_path / "traces", **PATIENCE)
    try:
        both = f"{pair.draft},{second}"
        settings = {"FLASHDUET_TARGET_DRAFTS": both, "FLASHDUET_GATEWAY_DRAFTS": both}
        with_both = {**pair.environment, **settings}
        plain = generate(pair.gateway, speculation="off").token_ids
        other = str(tiny_models / "other")
        pair.add("draft-2", "draft", LISTEN=second, FLASHDUET_DRAFT_MODEL=other)
        pair.restart("target", env=with_both)
        pair.restart("gateway", env=with_both)
        wait_until(lambda: len(pair.target_info().drafts) == 2, "both drafts to attach")
        wait_until(lambda: drafts(pair.gateway), "drafting")
        with Load([pair.gateway] * 6) as load:
            wait_until(lambda: load.answers.keys() == {21, 22}, "answers")
            assert pair.draft_load().proposals > 0
            assert pair.draft_load(second).proposals > 0
            pair.kill("draft")
            time.sleep(2)
        assert not load.failures
        assert load.answers[21] == {tuple(plain)}
        wait_until(lambda: drafts(pair.gateway), "drafting")
        pair.assert_nothing_left(within_s=30)
        wait_until(lambda: not pair.draft_load(second).sessions, "the second draft's sessions")
        assert not pair.draft_load(second).context_rows
    finally:
        pair.stop()


def test_a_draft_that_is_frozen_for_long_is_given_up_and_taken_up_again(brisk_pair: Pair):
    plain = generate(brisk_pair.gateway, speculation="off").token_ids
    pid = brisk_pair.pid("draft")
    with Load([brisk_pair.gateway] * 3) as load:
        time.sleep(1)
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(20)  # past the streams' keepalive
            assert generate(brisk_pair.gateway).token_ids == plain
            wait_until(lambda: brisk_pair.target_load().sessions <= 3, "sessions to be freed")
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: drafts(brisk_pair.gateway), "drafting after the thaw")
    assert not load.failures
    assert load.answers[21] == {tuple(plain)}
    brisk_pair.assert_nothing_left()
    assert brisk_pair.pid("draft") == pid
