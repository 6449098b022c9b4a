"""From a drafter's folder, in whatever public format, to a network ready for serving."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from draft_service.config import DrafterConfig
from draft_service.formats import CheckpointFormat, detect_format
from draft_service.network import DFlashNetwork
from draft_service.own_vocabulary import OwnVocabulary, read_own_vocabulary
from draft_service.stored_tensors import StoredTensors
from draft_service.tensor_files import TensorFiles
from flashduet.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class DrafterCheckpoint:
    """A drafter as stored: its network, in evaluation mode and not fused, and what it brings of its
    own where DFlash borrows from the target."""

    kind: CheckpointFormat
    network: DFlashNetwork
    own: OwnVocabulary


def load_checkpoint(
    folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> DrafterCheckpoint:
    """Read a DFlash drafter unchanged: z-lab's format, DFlash 2, speculators or SpecForge.

    Args:
        folder: has config.json and model.safetensors (or its shards and their index).
        dtype: of the weights; None: as stored.

    Raises:
        CheckpointError: names the file, the tensor or key, what was expected and what was found.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a drafter's folder, found none")
    files = TensorFiles(folder)
    kind = detect_format(folder, files.names)
    own_mask = any("mask_embedding" in name for name in files.names)
    config = DrafterConfig.load(folder, own_mask=own_mask)
    # On the meta device nothing is allocated or initialized twice.
    with torch.device("meta"):
        network = DFlashNetwork(config)
    stored = StoredTensors(files, config)
    expected = {name: tuple(weight.shape) for name, weight in network.state_dict().items()}
    weights = {
        name: stored.read(name, shape).to(device=device, dtype=dtype)
        for name, shape in expected.items()
    }
    own = read_own_vocabulary(stored, config)
    stored.refuse_others(len(expected), config.num_layers)
    network.load_state_dict(weights, assign=True)
    return DrafterCheckpoint(kind, network.eval().requires_grad_(False), own)


def load_drafter(
    folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> DFlashNetwork:
    """The network of a checkpoint that borrows embedding and head from the target.

    Args as for `load_checkpoint`.

    Raises:
        CheckpointError: as `load_checkpoint`, or it brings its own.
    """
    checkpoint = load_checkpoint(folder, device=device, dtype=dtype)
    if not checkpoint.own.empty:
        raise CheckpointError(
            f"{folder.name}: expected a drafter that uses its target's embedding and head, found a "
            f"{checkpoint.kind.value} checkpoint with its own"
        )
    return checkpoint.network
