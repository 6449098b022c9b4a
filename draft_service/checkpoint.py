"""From a drafter's folder to a network ready for serving."""

from __future__ import annotations

from pathlib import Path

import torch

from draft_service.config import DrafterConfig
from draft_service.formats import CheckpointFormat, detect_format
from draft_service.network import DFlashNetwork
from draft_service.tensor_files import TensorFiles
from flashduet.errors import CheckpointError


def load_drafter(
    folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> DFlashNetwork:
    """Read a z-lab DFlash checkpoint unchanged.

    Args:
        folder: has config.json and model.safetensors (or its shards and their index).
        dtype: of the weights; None: as stored.

    Returns:
        The network in evaluation mode, without gradients, its weights not yet fused.

    Raises:
        CheckpointError: names the file, the tensor or key, what was expected and what was found.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a drafter's folder, found none")
    files = TensorFiles(folder)
    kind = detect_format(folder, files.names)
    if kind is not CheckpointFormat.ZLAB:
        raise CheckpointError(
            f"{folder.name}: expected a {CheckpointFormat.ZLAB.value} checkpoint, found the "
            f"{kind.value} format, which this release does not read"
        )
    config = DrafterConfig.load(folder)
    # On the meta device nothing is allocated or initialized twice.
    with torch.device("meta"):
        network = DFlashNetwork(config)
    expected = {name: tuple(weight.shape) for name, weight in network.state_dict().items()}
    if extra := sorted(set(files.names) - set(expected)):
        raise CheckpointError(
            f"{files.shown(extra[0])}: expected only the {len(expected)} tensors of a "
            f"{config.num_layers}-layer drafter, found this one besides (and {len(extra) - 1} "
            "others); the checkpoint is of another architecture"
        )
    weights = {
        name: files.read(name, shape).to(device=device, dtype=dtype)
        for name, shape in expected.items()
    }
    network.load_state_dict(weights, assign=True)
    return network.eval().requires_grad_(False)
