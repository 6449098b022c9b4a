"""What a service computes with: device, data type, cores and memory."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import psutil
import torch

from flashduet.errors import ConfigurationError
from flashduet.settings import DtypeChoice

log = logging.getLogger(__name__)

# Inside a container this is its own control group (version 2).
CGROUP = Path("/sys/fs/cgroup")


def choose_device(wanted: str, variable: str) -> torch.device:
    """`auto` takes a GPU where there is one.

    Args:
        wanted: auto, cpu, cuda or cuda:N.
        variable: the environment variable that asked, for the error's text.

    Raises:
        ConfigurationError: the device asked for cannot be had.
    """
    if wanted == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigurationError(
            f"{variable}: {wanted!r} is no device; use auto, cpu or cuda:N"
        ) from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigurationError(
                f"{variable}: {wanted!r} asked for and {count} GPUs are visible to this PyTorch; "
                "use cpu or auto, or install a CUDA build of torch and a driver"
            )
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu":
        raise ConfigurationError(
            f"{variable}: {wanted!r} is not supported; use auto, cpu or cuda:N"
        )
    return device


def stored_dtype(checkpoint: object) -> torch.dtype:
    """The type that a checkpoint's config names (a torch.dtype or its name); float32 without one.

    It is what `auto` means for a target: in a narrower type its own choices would already differ.
    """
    stored = getattr(torch, checkpoint, None) if isinstance(checkpoint, str) else checkpoint
    chosen = stored if stored in (torch.float16, torch.bfloat16) else torch.float32
    assert isinstance(chosen, torch.dtype)
    return chosen


def fastest_dtype(device: torch.device) -> torch.dtype:
    """16 bits where the device computes with them, else float32.

    It is what `auto` means for a drafter, whose rounding can cost acceptance and never a token.
    """
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float16
    return torch.bfloat16 if _cpu_multiplies_bfloat16() else torch.float32


def choose_dtype(wanted: DtypeChoice, automatic: torch.dtype) -> torch.dtype:
    """The type asked for, or `automatic`, which is then said in the log."""
    if wanted != "auto":
        return getattr(torch, wanted)  # type: ignore[no-any-return]
    log.info("dtype auto: %s", str(automatic).removeprefix("torch."))
    return automatic


def _cpu_multiplies_bfloat16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process may use: its affinity, and a container's quota rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _read(cgroup / "cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores or 1, -(-int(quota[0]) // int(quota[1])))
    return max(1, cores or 1)


def compute_threads(wanted: int) -> int:
    """`wanted` threads; for 0 what OMP_NUM_THREADS says, else one for each usable core."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return wanted or (int(given) if given.isdigit() and int(given) else usable_cores())


def available_memory(cgroup: Path = CGROUP) -> int:
    """Bytes of main memory still to be had: the machine's, or a container's if that is less."""
    available = psutil.virtual_memory().available
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if limit.isdigit() and used.isdigit():
        available = min(available, max(0, int(limit) - int(used)))
    return available


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
