"""Sampling parameters: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flashduet.errors import InvalidRequest
from flashduet.sampling import Sampling
from flashduet.v1.common_pb2 import SamplingParams

NAN, INFINITY = float("nan"), float("inf")


def test_absent_fields_get_the_documented_defaults():
    assert Sampling.from_proto(SamplingParams()) == Sampling(0.0, 1.0, 0, 0.0, 0)
    assert Sampling().greedy


def test_a_zero_that_was_sent_is_not_a_default():
    with pytest.raises(InvalidRequest, match=r"sampling\.top_p"):
        Sampling.from_proto(SamplingParams(top_p=0.0))


def test_the_wire_keeps_every_value():
    sampling = Sampling(temperature=0.8, top_p=0.95, top_k=40, min_p=0.05, seed=2**64 - 1)
    wire = SamplingParams.FromString(sampling.to_proto().SerializeToString())
    assert Sampling.from_proto(wire) == sampling
    assert not sampling.greedy
    assert Sampling.from_proto(Sampling().to_proto()) == Sampling()


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("temperature", -0.1, "must be a finite number from 0 to 100"),
        ("temperature", NAN, "must be a finite number from 0 to 100"),
        ("temperature", INFINITY, "must be a finite number from 0 to 100"),
        ("temperature", 100.5, "must be a finite number from 0 to 100"),
        ("top_p", 0.0, "must be above 0 and at most 1"),
        ("top_p", 1.0001, "must be above 0 and at most 1"),
        ("top_p", NAN, "must be above 0 and at most 1"),
        ("min_p", -0.01, "must be from 0 to 1"),
        ("min_p", 1.01, "must be from 0 to 1"),
        ("min_p", NAN, "must be from 0 to 1"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name_value_and_limit(field, value, limit):
    with pytest.raises(InvalidRequest) as caught:
        Sampling.from_proto(SamplingParams(**{field: value}), prefix="request.sampling")
    assert caught.value.message == f"request.sampling.{field}: {value!r} given, {limit}"
    assert caught.value.field == f"request.sampling.{field}"
    with pytest.raises(InvalidRequest) as caught:
        Sampling(**{field: value})
    assert caught.value.field == f"sampling.{field}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", -1),
        ("top_k", 2**32),
        ("top_k", 1.5),
        ("top_k", True),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("temperature", "0.8"),
        ("temperature", None),
        ("top_p", True),
    ],
)
def test_what_the_wire_could_not_carry_is_refused_in_python_too(field, value):
    with pytest.raises(InvalidRequest) as caught:
        Sampling(**{field: value})
    assert caught.value.field == f"sampling.{field}"


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0},
        {"temperature": 100.0, "top_p": 1e-300, "top_k": 2**32 - 1, "min_p": 1.0},
        {"temperature": 1, "top_p": 1, "min_p": 0},
        {"temperature": 5e-324},
    ],
)
def test_limits_themselves_are_accepted(fields):
    sampling = Sampling(**fields)
    assert Sampling.from_proto(sampling.to_proto()) == sampling


def test_parameters_need_no_torch():
    code = "import sys, flashduet.sampling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
