"""A small slice of the fuzz campaign, which `make fuzz` runs at length."""

from tests.fuzz.campaign import run_campaign
from tests.fuzz.report import table
from tests.support.pair import Pair

REQUESTS = 1000


def test_nothing_that_a_client_sends_is_answered_as_our_mistake_or_leaves_anything(pair: Pair):
    parts = run_campaign(pair, REQUESTS, seed=1, at_once=8)
    report = table(parts)
    print(report)
    assert not any(part.failed for part in parts), report
    assert sum(part.requests for part in parts) >= REQUESTS * 98 // 100
    # Each part gets past the first check with some of what it sends.
    for part in parts[:-1]:
        assert len(part.statuses) > 1 or part.name == "grpc frames", report
