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


def test_the_wire_keeps_penalties_and_bias():
    sampling = Sampling(
        presence_penalty=0.5,
        frequency_penalty=-1.25,
        repetition_penalty=1.1,
        logit_bias={7: 0.1, 3: -100, 2**32 - 1: 100.0},
    )
    wire = SamplingParams.FromString(sampling.to_proto().SerializeToString())
    assert Sampling.from_proto(wire) == sampling
    assert hash(Sampling.from_proto(wire)) == hash(sampling)
    assert sampling.penalized
    assert sampling.needs_history


def test_what_changes_no_logit_costs_no_history():
    assert not Sampling(temperature=1.0, top_p=0.5).penalized
    biased = Sampling(logit_bias={3: 1.0})
    assert biased.penalized
    assert not biased.needs_history
    for name, value in [
        ("presence_penalty", -0.1),
        ("frequency_penalty", 0.1),
        ("repetition_penalty", 0.9),
    ]:
        assert Sampling(**{name: value}).needs_history


def test_a_bias_cannot_be_changed_afterwards():
    given = {5: 1.0}
    sampling = Sampling(logit_bias=given)
    given[5] = 2.0
    assert dict(sampling.logit_bias) == {5: 1.0}
    with pytest.raises(TypeError):
        sampling.logit_bias[5] = 2.0


def test_a_bias_on_a_token_that_the_model_lacks_is_refused():
    sampling = Sampling(logit_bias={99: 1.0, 100: 1.0})
    sampling.check_vocabulary(101)
    with pytest.raises(InvalidRequest) as caught:
        sampling.check_vocabulary(100, "request.sampling")
    assert caught.value.message == (
        "request.sampling.logit_bias: 100 given, "
        "must have token ids below the vocabulary's size, 100"
    )


@pytest.mark.parametrize(
    ("bias", "limit"),
    [
        ({1: 100.5}, "must have values from -100 to 100; that of token 1 is 100.5"),
        ({1: NAN}, "must have values from -100 to 100; that of token 1 is nan"),
        (dict.fromkeys(range(1025), 1.0), "must have at most 1024 entries"),
        ({-1: 1.0}, "must have token ids, whole numbers from 0, as keys"),
        ({"1": 1.0}, "must have token ids, whole numbers from 0, as keys"),
        ([1, 2], "must map token ids to numbers"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_bad_bias_is_refused_by_name_and_limit(bias, limit):
    with pytest.raises(InvalidRequest) as caught:
        Sampling(logit_bias=bias)
    assert (caught.value.field, caught.value.limit) == ("sampling.logit_bias", limit)


def test_a_bad_bias_on_the_wire_is_refused_under_its_own_name():
    with pytest.raises(InvalidRequest) as caught:
        Sampling.from_proto(SamplingParams(logit_bias={4: 101.0}), prefix="request.sampling")
    assert caught.value.field == "request.sampling.logit_bias"


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
        ("presence_penalty", 2.01, "must be from -2 to 2"),
        ("presence_penalty", NAN, "must be from -2 to 2"),
        ("frequency_penalty", -2.01, "must be from -2 to 2"),
        ("frequency_penalty", INFINITY, "must be from -2 to 2"),
        ("repetition_penalty", 0.0, "must be above 0 and at most 10"),
        ("repetition_penalty", -1.0, "must be above 0 and at most 10"),
        ("repetition_penalty", 10.01, "must be above 0 and at most 10"),
        ("repetition_penalty", NAN, "must be above 0 and at most 10"),
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
        {"presence_penalty": 2, "frequency_penalty": -2.0, "repetition_penalty": 10},
        {"repetition_penalty": 5e-324, "logit_bias": dict.fromkeys(range(1024), -100)},
    ],
)
def test_limits_themselves_are_accepted(fields):
    sampling = Sampling(**fields)
    assert Sampling.from_proto(sampling.to_proto()) == sampling


def test_parameters_need_no_torch():
    code = "import sys, flashduet.sampling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
