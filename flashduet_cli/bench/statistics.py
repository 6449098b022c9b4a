"""Means with 95% intervals, of ratios taken pair by pair in one run."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Two-sided 95% quantiles of Student's t for 1, 2, ... degrees of freedom.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95% interval; the ends are None where one value is all there is."""

    value: float
    low: float | None = None
    high: float | None = None


def mean(samples: Sequence[float]) -> Estimate:
    """Arithmetic mean, with Student's interval."""
    centre = statistics.fmean(samples)
    if len(samples) < 2:
        return Estimate(centre)
    half = _t95(len(samples) - 1) * statistics.stdev(samples) / math.sqrt(len(samples))
    return Estimate(centre, centre - half, centre + half)


def ratio(samples: Sequence[float]) -> Estimate:
    """Geometric mean of ratios, with Student's interval of their logarithms."""
    logs = mean([math.log(sample) for sample in samples])
    return Estimate(
        math.exp(logs.value),
        None if logs.low is None else math.exp(logs.low),
        None if logs.high is None else math.exp(logs.high),
    )


def bootstrap(groups: Sequence[Sequence[float]], figure: Callable[..., float]) -> Estimate:
    """`figure` of groups of samples; the interval is that of resampling each group.

    For figures that are no means, such as ratios of percentiles. The same groups give the same
    interval.
    """
    source = random.Random(0)
    resampled = sorted(
        figure(*(source.choices(group, k=len(group)) for group in groups))
        for _ in range(_RESAMPLES)
    )
    cut = round(_RESAMPLES * 0.025)
    return Estimate(figure(*groups), resampled[cut], resampled[-1 - cut])


def percentile(samples: Sequence[float], percent: float) -> float:
    """The least sample that so many percent of them do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _t95(freedom: int) -> float:
    return _T95[freedom - 1] if freedom <= len(_T95) else 1.96 + 2.5 / freedom
