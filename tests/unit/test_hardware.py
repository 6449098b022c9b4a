"""Device, data type, cores and memory: what is chosen, and loud where it cannot be had."""

import pytest
import torch

from flashduet import hardware
from flashduet.errors import ConfigurationError

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_drafter_takes_what_the_cpu_multiplies(monkeypatch, native, expected):
    monkeypatch.setattr(hardware, "_cpu_multiplies_bfloat16", lambda: native)
    assert hardware.fastest_dtype(CPU) is expected


@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_a_drafter_takes_16_bits_on_a_gpu(monkeypatch, native, expected):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated=True: native)
    assert hardware.fastest_dtype(GPU) is expected


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("float16", torch.float16),
        (torch.bfloat16, torch.bfloat16),
        ("float32", torch.float32),
        ("float64", torch.float32),
        (None, torch.float32),
    ],
)
def test_a_target_keeps_the_type_it_is_stored_in(stored, expected):
    assert hardware.stored_dtype(stored) is expected


def test_a_type_asked_for_is_taken_and_auto_is_the_automatic_one():
    assert hardware.choose_dtype("float16", torch.bfloat16) is torch.float16
    assert hardware.choose_dtype("auto", torch.bfloat16) is torch.bfloat16


@pytest.mark.parametrize("wanted", ["cuda:63", "meta", "gpu"])
def test_a_device_that_cannot_be_had_names_the_variable_and_the_fix(wanted):
    with pytest.raises(ConfigurationError, match=r"FLASHDUET_X_DEVICE.*use"):
        hardware.choose_device(wanted, "FLASHDUET_X_DEVICE")


def test_a_containers_limits_count(tmp_path):
    everything = hardware.usable_cores(tmp_path), hardware.available_memory(tmp_path)
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert hardware.usable_cores(tmp_path) == 1
    assert hardware.available_memory(tmp_path) == 600_000
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert hardware.usable_cores(tmp_path) == everything[0]
    assert hardware.available_memory(tmp_path) > 600_000


def test_threads_are_those_asked_for_then_the_environments_then_the_cores(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert hardware.compute_threads(5) == 5
    assert hardware.compute_threads(0) == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert hardware.compute_threads(0) == hardware.usable_cores()
