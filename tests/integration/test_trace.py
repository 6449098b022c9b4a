"""One request is one trace across three processes, with every phase in it."""

import json
import time
from collections import Counter
from pathlib import Path

from flashduet.client import Client
from flashduet.sampling.params import Sampling
from tests.support.pair import Pair, wait_until

# Longer than an exporter keeps a batch.
LATE_S = 6
# span → its parent
PARENTS = {
    "admit": "flashduet.request",
    "prefill": "flashduet.request",
    "round": "flashduet.request",
    "propose": "round",
    "verify": "round",
    "accept": "round",
    "target.prefill": "prefill",
    "target.verify": "verify",
    "draft.propose": "propose",
    "draft.queue": "draft.propose",
    "draft.forward": "draft.propose",
    "draft.sample": "draft.propose",
}
# These have one parent in prefill and another in verify.
EITHER = {"target.queue", "target.forward", "target.sample", "target.publish", "draft.ingest"}


def spans_of(folder: Path, trace_id: str) -> list[dict]:
    spans = []
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            for resource in json.loads(line)["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    spans += [span for span in scope["spans"] if span["traceId"] == trace_id]
    return spans


def wait_for_spans(folder: Path, trace_id: str, expected: Counter[str]) -> list[dict]:
    """Exporters write in batches: wait for at least so many of each, and for more to come."""

    def there() -> bool:
        return Counter(span["name"] for span in spans_of(folder, trace_id)) >= expected

    wait_until(there, f"the spans {dict(expected)}")
    time.sleep(LATE_S)
    return spans_of(folder, trace_id)


def test_a_request_is_one_trace_with_every_phase(pair: Pair):
    with Client(pair.gateway) as client:
        stream = client.generate(
            list(range(4, 60)),
            max_tokens=12,
            sampling=Sampling(temperature=4.0, seed=5),
            ignore_eos=True,
            speculation="fixed",
            block_length=4,
        )
        run = stream.result()
    assert run.trace_id
    rounds, drafted = run.speculation.rounds, run.speculation.drafted_rounds
    each = dict.fromkeys(("round", "verify", "accept", "target.verify"), rounds)
    each |= dict.fromkeys(("propose", "draft.propose"), drafted)
    # How often the others come depends on which steps a chunk or a block had for itself.
    expected = dict.fromkeys({"flashduet.request", *PARENTS, *EITHER}, 1) | each
    spans = wait_for_spans(pair.trace_dir, run.trace_id, Counter(expected))
    count = Counter(span["name"] for span in spans)
    assert count.keys() == expected.keys()
    assert {name: count[name] for name in each} == each
    assert count["flashduet.request"] == count["admit"] == count["prefill"] == 1

    by_id = {span["spanId"]: span for span in spans}
    for span in spans:
        parent = by_id.get(span.get("parentSpanId", ""))
        if span["name"] == "flashduet.request":
            assert parent is None
            continue
        assert parent is not None, f"{span['name']} has no parent in the trace"
        if span["name"] in EITHER:
            assert parent["name"] in ("target.prefill", "target.verify")
        else:
            assert parent["name"] == PARENTS[span["name"]]
        assert int(span["endTimeUnixNano"]) >= int(span["startTimeUnixNano"])


def test_an_undrafted_request_has_no_draft_spans(pair: Pair):
    with Client(pair.gateway) as client:
        run = client.generate([5, 6, 7], max_tokens=4, ignore_eos=True, speculation="off").result()
    expected = Counter({"flashduet.request", "target.verify", "accept", "admit"})
    names = {span["name"] for span in wait_for_spans(pair.trace_dir, run.trace_id, expected)}
    assert not {name for name in names if name.startswith("draft.propose")}
    assert "propose" not in names
