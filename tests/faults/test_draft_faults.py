"""A draft is never load-bearing: killed, frozen or absent, the same tokens come out."""

import os
import signal
import threading
import time

import pytest

from flashduet.client import Client
from flashduet.sampling.params import Sampling
from tests.support.pair import WAIT_S, Pair, wait_until

PROMPT = list(range(10, 60))
SAMPLING = Sampling(temperature=4.0, seed=21)
LENGTH = 300


def generate(pair: Pair, during=None, **options):
    """Generate LENGTH tokens; `during()` is called once some have arrived."""
    settings = {"speculation": "fixed", "block_length": 4} | options
    with Client(pair.gateway) as client:
        stream = client.generate(
            PROMPT, max_tokens=LENGTH, sampling=SAMPLING, ignore_eos=True, timeout=240, **settings
        )
        received = 0
        for chunk in stream:
            received += len(chunk.token_ids)
            if during is not None and received > 20:
                during()
                during = None
        return stream.result()


def drafts_again(pair: Pair) -> bool:
    with Client(pair.gateway) as client:
        run = client.generate(
            PROMPT, max_tokens=8, sampling=SAMPLING, speculation="fixed", block_length=4
        ).result()
    return run.speculation.drafted_tokens > 0


def test_killing_the_draft_changes_no_token_and_drafting_comes_back(own_pair: Pair):
    plain = generate(own_pair, speculation="off").token_ids
    before = own_pair.descriptors()
    drafted = generate(own_pair)
    assert drafted.token_ids == plain
    assert drafted.speculation.drafted_tokens > 0

    killed = generate(own_pair, during=lambda: own_pair.kill("draft"))
    assert killed.token_ids == plain
    assert killed.speculation.undrafted_rounds, "some rounds must have gone on without a draft"

    wait_until(lambda: drafts_again(own_pair), "drafting after the restart")
    assert generate(own_pair).token_ids == plain
    own_pair.assert_nothing_left()
    own_pair.assert_closed(before)


def test_a_frozen_draft_is_waited_for_within_a_budget_only(brisk_pair: Pair):
    plain = generate(brisk_pair, speculation="off").token_ids
    pid = brisk_pair.pid("draft")

    def freeze() -> None:
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(3.0, os.kill, (pid, signal.SIGCONT)).start()

    run = generate(brisk_pair, during=freeze)
    assert run.token_ids == plain
    assert run.speculation.undrafted_rounds, "some rounds must have gone on without a draft"
    wait_until(lambda: drafts_again(brisk_pair), "drafting after the thaw")
    brisk_pair.assert_nothing_left()


@pytest.mark.parametrize("name", ["draft", "gateway", "target"])
def test_killing_any_process_leaves_nothing_in_the_others(own_pair: Pair, name):
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            try:
                generate(own_pair)
            except Exception:
                time.sleep(0.2)

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: own_pair.target_load().sessions == 3, "requests to be under way")
    own_pair.kill(name)
    time.sleep(1)
    stop.set()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    own_pair.assert_nothing_left(without={name})


def test_a_cancelled_client_frees_everything_at_each_moment(own_pair: Pair):
    generate(own_pair)
    before = own_pair.descriptors()
    for delay_ms in (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 200):
        with Client(own_pair.gateway) as client:
            stream = client.generate(PROMPT * 4, max_tokens=200, sampling=SAMPLING, ignore_eos=True)
            timer = threading.Timer(delay_ms / 1000, stream.cancel)
            timer.start()
            for _ in stream:
                pass
            timer.join()
    own_pair.assert_nothing_left(within_s=5)
    own_pair.assert_closed(before, more=2)


def test_a_passed_deadline_frees_everything(own_pair: Pair):
    from flashduet.errors import DeadlineExceeded

    for timeout in (0.001, 0.02, 0.05, 0.1):
        with (
            Client(own_pair.gateway) as client,
            pytest.raises(DeadlineExceeded),
        ):
            client.generate(
                PROMPT * 4, max_tokens=300, sampling=SAMPLING, ignore_eos=True, timeout=timeout
            ).result()
    own_pair.assert_nothing_left(within_s=5)
