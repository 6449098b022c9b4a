"""The benchmark's arithmetic and verdicts, its probes' manners, and what it says of a failure."""

from __future__ import annotations

import asyncio
import json
import math
import random

import pytest
from typer.testing import CliRunner

from flashduet.errors import ConfigurationError, Unavailable
from flashduet_cli.bench import statistics
from flashduet_cli.bench.figures import Bounds, Figure, Measured
from flashduet_cli.bench.plot import plot
from flashduet_cli.bench.probe import Probe
from flashduet_cli.bench.prompts import Prompts
from flashduet_cli.bench.report import BenchReport
from flashduet_cli.bench.run import measure
from flashduet_cli.bench.statistics import Estimate
from flashduet_cli.bench.table import ROWS, Row
from flashduet_cli.bench.workbench import BenchSettings, Workbench
from flashduet_cli.main import app
from flashduet_cli.stack_config import StackConfig

AT_LEAST = Bounds(1.6, 2.2, most=False, unit="x")
AT_MOST = Bounds(0.08, 0.03, most=True, unit="%")


def test_an_interval_holds_the_truth_as_often_as_it_says():
    source = random.Random(1)
    held = 0
    for _ in range(2000):
        found = statistics.mean([source.gauss(5, 2) for _ in range(6)])
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 5 <= found.high
    assert 0.935 < held / 2000 < 0.965


def test_ratios_are_averaged_so_that_turning_them_over_turns_the_figure_over():
    ratios = [1.0, 2.0, 8.0]
    found, turned = statistics.ratio(ratios), statistics.ratio([1 / each for each in ratios])
    assert found.value == pytest.approx(16 ** (1 / 3))
    assert turned.value == pytest.approx(1 / found.value)
    assert turned.low == pytest.approx(1 / found.high)
    assert statistics.mean([3.0]) == Estimate(3.0)


def test_a_percentile_is_one_of_the_samples():
    assert statistics.percentile([5, 1, 4, 2, 3], 50) == 3
    assert statistics.percentile(list(range(1, 101)), 99) == 99
    assert statistics.percentile([7.0], 99) == 7.0


def test_resampling_gives_an_interval_of_any_figure():
    source = random.Random(2)
    slow, quick = ([source.expovariate(rate) for _ in range(500)] for rate in (1.0, 2.0))

    def of_medians(above, below):
        return statistics.percentile(above, 50) / statistics.percentile(below, 50)

    found = statistics.bootstrap([slow, quick], of_medians)
    assert found.low < 2 < found.high
    assert found.low < found.value < found.high
    assert found == statistics.bootstrap([slow, quick], of_medians)


@pytest.mark.parametrize(
    ("bounds", "value", "verdict"),
    [
        (AT_LEAST, 1.59, "missed"),
        (AT_LEAST, 1.6, "floor"),
        (AT_LEAST, 2.2, "goal"),
        (AT_MOST, 0.081, "missed"),
        (AT_MOST, 0.08, "floor"),
        (AT_MOST, 0.03, "goal"),
        (Bounds(None, 0.1, most=True, unit="%"), 0.2, "reported"),
        (Bounds(None, 0.1, most=True, unit="%"), 0.1, "goal"),
    ],
)
def test_a_verdict_counts_the_bound_itself_as_reached(bounds, value, verdict):
    assert bounds.verdict(value) == verdict


def test_values_and_bounds_are_shown_in_their_unit():
    assert (AT_LEAST.show(1.234), AT_LEAST.show_bound(1.6)) == ("1.23", "≥ 1.6")
    assert (AT_MOST.show(0.0512), AT_MOST.show_bound(0.08)) == ("5.1 %", "≤ 8 %")
    assert Bounds(30, 15, most=True, unit="s").show(12.34) == "12.3 s"


def test_the_table_is_that_of_the_promises():
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names) == 16
    for row in ROWS:
        if row.bounds.floor is not None and row.bounds.goal is not None:
            assert row.bounds.verdict(row.bounds.goal) == "goal"
            better = row.bounds.goal <= row.bounds.floor
            assert better if row.bounds.most else row.bounds.goal >= row.bounds.floor


def test_a_row_that_fails_is_told_and_the_others_are_measured(tmp_path):
    async def good(bench: Workbench) -> Measured:
        return Measured(Estimate(2.0, 1.9, 2.1), [1.9, 2.1], {"why": "so"})

    async def bad(bench: Workbench) -> Measured:
        raise Unavailable("nobody is there")

    rows = [Row("bad", "a / b", AT_LEAST, bad), Row("good", "c / d", AT_LEAST, good)]
    report = BenchReport({"quick": True})
    settings = BenchSettings(StackConfig(), tmp_path, Prompts([(1, 2, 3)]), quick=True)
    asyncio.run(measure(Workbench(settings), rows, report.figures.append))
    assert [figure.verdict for figure in report.figures] == ["failed", "floor"]
    assert not report.passed
    file = tmp_path / "table.json"
    report.write(file)
    written = json.loads(file.read_text())
    assert written["rows"][0]["error"] == "nobody is there"
    assert written["rows"][0]["value"] is None
    assert written["rows"][1]["low"] == 1.9
    assert {"processor", "cores", "torch"} <= written["machine"].keys()
    with pytest.raises(ConfigurationError, match="--out"):
        report.write(tmp_path / "no" / "folder")
    del report.figures[0]
    assert report.passed


def test_the_plot_draws_every_kind_of_row(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        (AT_LEAST, Estimate(1.0, 0.001, 50.0)),
        (AT_MOST, Estimate(-0.01, -0.5, 0.5)),
        (Bounds(None, 0.1, most=True, unit="%"), Estimate(0.2)),
        (Bounds(0, 0, most=True, unit=""), Estimate(0.0)),
    ]
    report = BenchReport({})
    for number, (bounds, estimate) in enumerate(rows):
        report.figures.append(Figure(str(number), "a / b", bounds, Measured(estimate), 1.0))
    report.figures.append(Figure("f", "failed", AT_LEAST, None, 1.0, "why"))
    plot(report, tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigurationError, match="--plot"):
        plot(report, tmp_path / "no" / "table.png")


def test_prompts_are_repeated_cut_and_strung_together():
    prompts = Prompts([(1, 2, 3), (4, 5)])
    assert prompts.some(3, most_tokens=2) == [[2, 3], [4, 5], [2, 3]]
    assert prompts.text(7) == [1, 2, 3, 4, 5, 1, 2]
    assert prompts.text(3, first=1) == [4, 5, 1]


def test_a_probe_answers_fails_by_name_and_ends_with_its_owner():
    async def talk() -> None:
        probe = Probe("transport", threads=1)
        async with probe:
            await probe.ask("start", rows=64, width=720, chunk_rows=16)
            copies = await probe.ask("memcpy", repeats=3)
            sends = await probe.ask("send", repeats=3)
            assert len(copies) == len(sends) == 3
            assert all(seconds > 0 and math.isfinite(seconds) for seconds in [*copies, *sends])
            assert await probe.ask("stop") == 0
            with pytest.raises(ConfigurationError, match=r"transport, nothing: KeyError"):
                await probe.ask("nothing")
        assert probe.returncode is not None

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nothing"], "--only nothing: there are plain, batch"),
        (["--dtype", "auto"], "--dtype"),
        (["--model", "some/model"], "no drafter is known for some/model"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(arguments, said):
    result = CliRunner().invoke(app, ["bench", "engine", *arguments])
    assert result.exit_code == 2
    assert said in result.output


def test_the_rows_can_be_listed():
    result = CliRunner().invoke(app, ["bench", "engine", "--list"])
    assert result.exit_code == 0
    assert len(result.output.splitlines()) == len(ROWS)
