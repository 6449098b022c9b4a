"""A drafter that guesses at random: the worst one that fits."""

from __future__ import annotations

import shutil
from pathlib import Path

from flashduet.errors import ConfigurationError

SPREAD = 0.05


def write_random_drafter(source: Path, folder: Path, seed: int = 0) -> Path:
    """Write to `folder` a drafter with the config and shapes of `source` and random weights.

    Raises:
        ConfigurationError: `source` is no drafter folder with safetensors.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    weights = sorted(source.glob("*.safetensors"))
    if not weights or not (source / "config.json").is_file():
        raise ConfigurationError(f"{source}: config.json and *.safetensors expected")
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    for file in weights:
        tensors = {}
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                tensor = opened.get_tensor(name)
                if tensor.dim() > 1:
                    noise = torch.randn(tensor.shape, generator=generator) * SPREAD
                    tensor = noise.to(tensor.dtype)
                tensors[name] = tensor.contiguous()
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
    for file in source.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    return folder
