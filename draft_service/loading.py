"""From settings to an engine: which folders, device and dtype, and what memory it will take."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from draft_service.checkpoint import load_checkpoint
from draft_service.context import ContextPlan
from draft_service.draft_vocabulary import assemble
from draft_service.engine import Engine
from draft_service.pairing import check_drafter
from draft_service.self_test import SelfTest, read_self_test
from draft_service.settings import DraftSettings
from draft_service.shortlist import read_shortlist
from draft_service.target_tensors import load_target_tensors, ties_head
from flashduet import models
from flashduet.hardware import choose_device, choose_dtype, compute_threads, fastest_dtype
from flashduet.models_default import shipped_drafter
from flashduet.transport.tensors import DATA_TYPES
from flashduet.v1 import common_pb2 as pb

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """An engine that has been warmed up, the drafter's name, its target's facts, and what its
    checkpoint says is to be seen with it."""

    engine: Engine
    name: str
    target_facts: pb.ModelFacts
    self_test: SelfTest | None = None


def load(settings: DraftSettings) -> LoadedDrafter:
    """Load drafter and target tensors, check that they fit, and warm up. Takes seconds.

    Raises:
        ConfigurationError, CheckpointError, Incompatible: with the fix.
    """
    device = choose_device(settings.device, "FLASHDUET_DRAFT_DEVICE")
    dtype = choose_dtype(settings.dtype, fastest_dtype(device))
    torch.set_num_threads(compute_threads(settings.threads))
    folder = _drafter_folder(settings.model)
    target_folder = models.resolve_model(settings.target_model)
    target_config = models.load_config(target_folder)
    facts = models.model_facts(
        target_folder,
        settings.target_name or models.served_name(settings.target_model),
        DATA_TYPES[dtype],
    )
    checkpoint = load_checkpoint(folder, device=device, dtype=dtype)
    self_test = read_self_test(folder)
    config = checkpoint.network.config
    tied = ties_head(target_config)
    tensors = load_target_tensors(target_folder, tied=tied, device=device, dtype=dtype)
    shortlist = read_shortlist(folder, tensors.embedding.shape[0])
    if settings.vocabulary == "full":
        shortlist = None
    vocabulary = assemble(tensors, checkpoint.own, shortlist)
    check_drafter(config, vocabulary, facts)
    plan = ContextPlan(
        settings.max_context_rows,
        settings.context_block_rows,
        settings.max_block_length,
        settings.context_dtype,
    )
    engine = Engine(checkpoint.network, vocabulary, plan, settings.lookup)
    engine.warm_up(max(2, min(config.block_length, settings.max_block_length)))
    log.info(
        "drafter %s: %s format, head over %d of %d tokens",
        folder.name,
        checkpoint.kind.value,
        vocabulary.head.shape[0],
        vocabulary.vocab_size,
    )
    _log_plan(engine, folder.name)
    return LoadedDrafter(engine, folder.name, facts, self_test)


def _drafter_folder(reference: str) -> Path:
    return shipped_drafter() if reference == "default" else models.resolve_model(reference)


def _log_plan(engine: Engine, name: str) -> None:
    mib = 1024 * 1024
    log.info(
        "drafter %s on %s in %s: weights %.1f MiB, context %.1f MiB (%d blocks of %d rows of %d "
        "bytes)",
        name,
        engine.device,
        str(engine.dtype).removeprefix("torch."),
        engine.weight_bytes / mib,
        engine.store.nbytes / mib,
        engine.plan.num_blocks,
        engine.plan.block_rows,
        engine.store.row_bytes,
    )
