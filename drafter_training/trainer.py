"""The training loop: steps, schedule, checkpoints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import Qwen3Config

from drafter_training.acceptance import Tau, walk_tau
from drafter_training.blocks import BlockRule
from drafter_training.checkpoint import save_drafter
from drafter_training.dataset import ShardDataset
from drafter_training.objective import Objective, TargetHead
from drafter_training.optimizer import MasterOptimizer, cosine
from drafter_training.run_record import Measured, plot_history, write_history
from flashduet.models_cache import put_in_place

STATE = "state.pt"
DRAFTER = "drafter"


@dataclass(frozen=True)
class TrainSettings:
    """Paper recipe (AdamW, cosine, warm-up 4%, clip 1.0).

    The length is set by ``minutes``, else ``steps``, else ``epochs``. With ``minutes`` the cosine
    follows the clock, so that a shared machine still ends it at zero; such a run is not repeatable.
    A step is ``accumulation`` batches of ``batch_size`` sequences on each process.
    held_out_share: of the sequences, never trained on; held_out: of those, how many a checkpoint
    measures.
    """

    epochs: float = 6.0
    steps: int | None = None
    minutes: float | None = None
    batch_size: int = 4
    accumulation: int = 1
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup: float = 0.04
    clip: float = 1.0
    checkpoint_seconds: float = 240.0
    held_out_share: float = 1 / 32
    held_out: int = 32
    seed: int = 0


@dataclass(frozen=True)
class Progress:
    """What a run tells while it works. done: share of the schedule. note: after a checkpoint."""

    step: int
    total_steps: int
    done: float
    loss: float
    measured: Measured | None = None


class Trainer:
    """Owns the drafter's weights while they change, and the run folder.

    All randomness is a function of (seed, pass), so a resumed run equals an unbroken one.
    """

    def __init__(
        self,
        objective: Objective,
        config: Qwen3Config,
        dataset: ShardDataset,
        folder: Path,
        settings: TrainSettings,
        accelerator: Accelerator | None = None,
    ) -> None:
        self._accelerator = accelerator or Accelerator(cpu=True)
        self._objective, self._config, self._dataset = objective, config, dataset
        self.network = objective.network
        self._optimizer = MasterOptimizer(self.network, settings.weight_decay)
        # Gradients of replicas are averaged by the wrapper; alone there is nothing to wrap.
        alone = self._accelerator.num_processes == 1
        self._replica = objective if alone else self._accelerator.prepare(objective)
        self._folder, self.settings = folder, settings
        self._held_out = dataset.held_out(settings.held_out_share)
        self._epoch, self._batches = 0, self._epoch_batches(0)
        group = settings.accumulation * self._accelerator.num_processes
        self._steps_per_epoch = max(1, len(self._batches) // group)
        by_epochs = max(1, round(settings.epochs * self._steps_per_epoch))
        self.total_steps = settings.steps or by_epochs
        self._stopping = False
        self.step, self._elapsed = 0, 0.0
        self.history: list[Measured] = []
        if (folder / STATE).exists():
            self._restore(torch.load(folder / STATE, weights_only=True))

    @property
    def held_out(self) -> list[int]:
        """Sequences never trained on; the first ``settings.held_out`` of them are measured."""
        return self._held_out

    @property
    def target(self) -> TargetHead:
        return self._objective.target

    @property
    def blocks(self) -> BlockRule:
        return self._objective.settings.blocks

    def stop(self) -> None:
        """Asks a run to save and end after the current step."""
        self._stopping = True

    def run(self, report: Callable[[Progress], None] = lambda _: None) -> bool:
        """Trains to the end of the schedule; False if it was asked to stop before."""
        started, saved = time.monotonic() - self._elapsed, time.monotonic()
        losses: list[float] = []
        while True:
            done, due, stopping = self._agree(
                time.monotonic() - saved > self.settings.checkpoint_seconds
            )
            if done >= 1 or stopping:
                break
            measured = None
            if due and losses:
                measured, losses = self._checkpoint(losses), []
                saved = time.monotonic()
            losses.append(self._train_step(done))
            self._elapsed = time.monotonic() - started
            report(Progress(self.step, self.total_steps, self._done(), losses[-1], measured))
        finished = done >= 1
        if losses:
            measured = self._checkpoint(losses)
            report(Progress(self.step, self.total_steps, done, measured.loss, measured))
        if finished and self._accelerator.is_main_process:
            plot_history(self._folder, self.history)
        return finished

    def _done(self) -> float:
        """Share of the schedule that is done."""
        if self.settings.minutes is None:
            return self.step / self.total_steps
        return self._elapsed / (60 * self.settings.minutes)

    def _agree(self, due: bool) -> tuple[float, bool, bool]:
        """What all processes go by: share of the schedule that is done, whether a checkpoint is
        due, whether to stop. Clocks differ, so the first one's counts; any may ask to stop."""
        if self._accelerator.num_processes == 1:
            return self._done(), due, self._stopping
        mine = torch.tensor(
            [[self._done(), due, self._stopping]],
            dtype=torch.float64,
            device=self._accelerator.device,
        )
        told = self._accelerator.gather(mine)
        return float(told[0, 0]), bool(told[0, 1]), bool(told[:, 2].any())

    def _train_step(self, done: float) -> float:
        settings, accelerator = self.settings, self._accelerator
        epoch, index = divmod(self.step, self._steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._epoch_batches(epoch)
        total = 0.0
        for part in range(settings.accumulation):
            micro = index * settings.accumulation + part
            place = micro * accelerator.num_processes + accelerator.process_index
            batch = self._dataset.load(self._batches[place % len(self._batches)])
            # By its place among all passes: a pass is the same on whatever process it runs.
            passes = self.step * settings.accumulation + part
            generator = self._generator(
                passes * accelerator.num_processes + accelerator.process_index
            )
            last = part == settings.accumulation - 1
            alone = accelerator.num_processes == 1
            later = contextlib.nullcontext() if last or alone else self._replica.no_sync()
            with later:
                rule = self.blocks.drawn(generator)
                loss = self._replica(batch, generator, rule).loss / settings.accumulation
                accelerator.backward(loss)
            total += float(loss.detach())
        rate = settings.learning_rate * cosine(done, settings.warmup)
        self._optimizer.step(rate, settings.clip)
        self.step += 1
        return total

    def _epoch_batches(self, epoch: int) -> list[list[int]]:
        settings = self.settings
        return self._dataset.batches(epoch, settings.batch_size, settings.seed, self._held_out)

    def _checkpoint(self, losses: list[float]) -> Measured:
        loss, block_tau, tau = self.validate()
        measured = Measured(
            self.step, self._elapsed, sum(losses) / len(losses), loss, block_tau, tau.value
        )
        self.history.append(measured)
        if self._accelerator.is_main_process:
            self._save()
        self._accelerator.wait_for_everyone()
        return measured

    @torch.no_grad()
    def validate(self) -> tuple[float, float, Tau]:
        """On sequences never trained on: loss, τ at random anchors, τ of greedy decoding."""
        chosen = self._held_out[: self.settings.held_out]
        # Sampled answers are not what greedy decoding says; they serve only if there are no others.
        walkable = {i for i in chosen if self._dataset[i].greedy} or set(chosen)
        losses, taus, walked = [], [], Tau()
        for first in range(0, len(chosen), self.settings.batch_size):
            indices = chosen[first : first + self.settings.batch_size]
            batch = self._dataset.load(indices)
            outcome = self._objective(batch, self._generator(-first - 1))
            losses.append(float(outcome.loss))
            taus.append(float(outcome.tau))
            results = walk_tau(self.network, batch, self.target, self.blocks)
            for index, result in zip(indices, results, strict=True):
                if index in walkable:
                    walked = walked + result
        count = max(len(losses), 1)
        return sum(losses) / count, sum(taus) / count, walked

    def _save(self) -> None:
        """Writes the state to resume from and the drafter to serve, each by rename."""
        self._folder.mkdir(parents=True, exist_ok=True)
        state = self._optimizer.state() | {
            "step": self.step,
            "elapsed": self._elapsed,
            "history": [asdict(measured) for measured in self.history],
        }
        torch.save(state, self._folder / f"{STATE}.tmp")
        put_in_place(self._folder / f"{STATE}.tmp", self._folder / STATE)
        save_drafter(self._folder / DRAFTER, self.network, self._config)
        write_history(self._folder, self.history)

    def _restore(self, state: dict[str, Any]) -> None:
        self._optimizer.restore(state)
        self.step, self._elapsed = state["step"], state["elapsed"]
        self.history = [Measured(**measured) for measured in state["history"]]

    def _generator(self, number: int) -> torch.Generator:
        """Randomness of one pass; negative numbers are those of validation."""
        return torch.Generator().manual_seed((self.settings.seed << 40) + number + (1 << 20))
