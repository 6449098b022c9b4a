"""Which device and data type a service computes with: one rule for target and draft."""

from __future__ import annotations

import logging

import torch

from flashduet.errors import ConfigurationError
from flashduet.settings import DtypeChoice

log = logging.getLogger(__name__)


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


def choose_dtype(
    wanted: DtypeChoice, device: torch.device, checkpoint: object = None
) -> torch.dtype:
    """`auto` on a CPU is bfloat16 where the CPU multiplies it, else float32; on a GPU it is the
    checkpoint's own type if that has 16 bits, else bfloat16, or float16 on GPUs without it.

    Args:
        checkpoint: a torch.dtype or its name, as in config.json; None where it does not matter.
    """
    if wanted != "auto":
        return getattr(torch, wanted)  # type: ignore[no-any-return]
    stored = getattr(torch, checkpoint, None) if isinstance(checkpoint, str) else checkpoint
    if device.type == "cpu":
        chosen = torch.bfloat16 if _cpu_multiplies_bfloat16() else torch.float32
    elif stored in (torch.float16, torch.bfloat16):
        chosen = torch.float16 if stored is torch.float16 else torch.bfloat16
    else:
        chosen = torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float16
    log.info("dtype auto: %s on %s", str(chosen).removeprefix("torch."), device)
    return chosen


def _cpu_multiplies_bfloat16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
