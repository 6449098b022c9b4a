"""The training loop: steps, schedule, checkpoints."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, TextColumn
from transformers import Qwen3Config

from draft_service.network import DFlashNetwork
from drafter_training.checkpoint import save_drafter
from drafter_training.dataset import Batch, ShardDataset
from drafter_training.objective import Objective

STATE = "state.pt"


@dataclass(frozen=True)
class TrainSettings:
    """Paper recipe (AdamW, cosine, warm-up 4%, clip 1.0); the length is set by epochs or minutes.

    With ``minutes`` the cosine follows the clock, so that a shared machine still ends it at zero.
    """

    epochs: int = 4
    minutes: float | None = None
    batch_size: int = 16
    learning_rate: float = 6e-4
    weight_decay: float = 0.01
    warmup: float = 0.04
    clip: float = 1.0
    checkpoint_seconds: float = 240.0
    held_out: int = 96
    seed: int = 0


def cosine(progress: float, warmup: float) -> float:
    """Share of the full learning rate at ``progress`` in [0, 1] of the run."""
    if progress < warmup:
        return max(progress / warmup, 1e-3)
    done = min(1.0, (progress - warmup) / (1 - warmup))
    return 0.5 * (1 + math.cos(math.pi * done))


class Trainer:
    """Owns the drafter's weights while they change, and the run folder.

    The network computes in its own dtype (bfloat16: what will be served, and several times faster
    on a CPU than mixed precision); the optimizer moves float32 masters of its parameters. All
    randomness is a function of (seed, step), so a resumed run equals an unbroken one.
    """

    def __init__(
        self,
        network: DFlashNetwork,
        config: Qwen3Config,
        objective: Objective,
        dataset: ShardDataset,
        folder: Path,
        settings: TrainSettings,
    ) -> None:
        self.network, self._config, self._objective = network, config, objective
        self._dataset, self._folder, self._settings = dataset, folder, settings
        self._masters = [p.detach().float().clone() for p in network.parameters()]
        matrices = [p for p in self._masters if p.dim() > 1]
        norms = [p for p in self._masters if p.dim() == 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": norms, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            groups,
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
        )
        self._held_out = dataset.held_out(settings.held_out)
        self._epoch, self._batches = 0, self._epoch_batches(0)
        self._steps_per_epoch = len(self._batches)
        self._total_steps = settings.epochs * self._steps_per_epoch
        self._stopping = False
        self.step, self._elapsed = 0, 0.0
        if (folder / STATE).exists():
            state = torch.load(folder / STATE, weights_only=True)
            for master, saved in zip(self._masters, state["masters"], strict=True):
                master.copy_(saved)
            self._publish()
            self._optimizer.load_state_dict(state["optimizer"])
            self.step, self._elapsed = state["step"], state["elapsed"]

    def stop(self) -> None:
        """Asks a run to save and end after the current step."""
        self._stopping = True

    def run(self, stop_after_steps: int | None = None) -> None:
        """Trains to the end of the schedule, or for ``stop_after_steps`` more steps."""
        last = self._total_steps
        if stop_after_steps is not None:
            last = min(last, self.step + stop_after_steps)
        started, saved = time.monotonic() - self._elapsed, time.monotonic()
        loss = math.nan
        columns = (*Progress.get_default_columns(), TextColumn("{task.fields[note]}"))
        with Progress(*columns) as progress:
            bar = progress.add_task("training", total=1.0, note="")
            while self.step < last and not self._stopping:
                self._elapsed = time.monotonic() - started
                done = self._progress()
                if done >= 1:
                    break
                step_loss = self._train_step(done)
                loss = step_loss if math.isnan(loss) else 0.98 * loss + 0.02 * step_loss
                progress.update(bar, completed=done, note=f"step {self.step} loss {loss:.3f}")
                if time.monotonic() - saved > self._settings.checkpoint_seconds:
                    progress.console.print(f"loss {loss:.3f}; {self._validation_note()}")
                    self.save()
                    saved = time.monotonic()
            progress.console.print(f"end; {self._validation_note()}")
        self._elapsed = time.monotonic() - started
        self.save()

    def _progress(self) -> float:
        """Share of the schedule that is done."""
        if self._settings.minutes is None:
            return self.step / self._total_steps
        return self._elapsed / (60 * self._settings.minutes)

    def _next_batch(self) -> Batch:
        epoch, index = divmod(self.step, self._steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._epoch_batches(epoch)
        return self._dataset.load(self._batches[index])

    def _epoch_batches(self, epoch: int) -> list[list[int]]:
        settings = self._settings
        return self._dataset.batches(epoch, settings.batch_size, settings.seed, self._held_out)

    def _train_step(self, progress: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * cosine(progress, self._settings.warmup)
        generator = self._generator(self.step)
        loss, _ = self._objective(self.network, self._next_batch(), generator)
        self.network.zero_grad(set_to_none=True)
        loss.backward()
        for master, parameter in zip(self._masters, self.network.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(self._masters, self._settings.clip)
        self._optimizer.step()
        self._publish()
        self.step += 1
        return float(loss.detach())

    @torch.no_grad()
    def _publish(self) -> None:
        for master, parameter in zip(self._masters, self.network.parameters(), strict=True):
            parameter.copy_(master)

    @torch.no_grad()
    def validate(self) -> tuple[float, float]:
        """Loss and teacher-forced acceptance length on sequences never trained on."""
        results = []
        for first in range(0, len(self._held_out), self._settings.batch_size):
            batch = self._dataset.load(self._held_out[first : first + self._settings.batch_size])
            results.append(self._objective(self.network, batch, self._generator(-first - 1)))
        count = max(len(results), 1)
        return sum(float(r[0]) for r in results) / count, sum(float(r[1]) for r in results) / count

    def _validation_note(self) -> str:
        loss, tau = self.validate()
        return f"step {self.step}, held out: loss {loss:.3f} tau {tau:.3f}"

    def save(self) -> None:
        """Writes the state to resume from and the drafter to serve, each by rename."""
        self._folder.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {
            "masters": self._masters,
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "elapsed": self._elapsed,
        }
        torch.save(state, self._folder / f"{STATE}.tmp")
        os.replace(self._folder / f"{STATE}.tmp", self._folder / STATE)
        save_drafter(self._folder / "drafter", self.network, self._config)

    def _generator(self, step: int) -> torch.Generator:
        return torch.Generator().manual_seed((self._settings.seed << 32) + step + (1 << 20))
