"""Training a drafter on folders of shards, from assembling it to its record."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from filelock import FileLock, Timeout

from drafter_training.presets import Preset
from drafter_training.run_record import RUN_FILE, machine, write_json
from drafter_training.self_test import write_self_test
from drafter_training.shards import ShardFolder
from drafter_training.trainer import DRAFTER, STATE, Progress, Trainer, TrainSettings
from drafter_training.workspace import Workspace
from flashduet.errors import ConfigurationError


@dataclass(frozen=True)
class RunReport:
    """finished: false if it was asked to stop. tau_before, tau: on held-out greedy answers, teacher
    forced, before the first step and now."""

    finished: bool
    step: int
    seconds: float
    tau_before: float
    tau: float
    drafter: Path


def _only_us(folder: Path) -> FileLock:
    """A lock on a run folder, held until this process ends.

    Raises:
        ConfigurationError: another process trains in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigurationError(f"{folder}: another process is training in it") from None
    return lock


def _decisive(key: str, fact: Any) -> object:
    """What of it decides the run's weights: not how many features are kept on disk. What the record
    of an earlier release does not name is as it is by default."""
    if key not in _DEFAULTS:
        return fact
    known = _filled(_DEFAULTS[key], fact)
    return {key: value for key, value in known.items() if key != "cache_gib"}


def _filled(defaults: dict[str, Any], fact: dict[str, Any]) -> dict[str, Any]:
    nested = {
        key: _filled(value, fact[key])
        for key, value in defaults.items()
        if isinstance(value, dict) and isinstance(fact.get(key), dict)
    }
    return defaults | fact | nested


_DEFAULTS: dict[str, dict[str, Any]] = json.loads(
    json.dumps({"preset": asdict(Preset(answer_tokens=0)), "settings": asdict(TrainSettings())})
)


class RunCommand:
    """Owns one run folder from its first step to its last."""

    def __init__(
        self,
        workspace: Workspace,
        data: list[Path],
        run_folder: Path,
        settings: TrainSettings,
        *,
        resume: bool,
        command: list[str],
        init_from: Path | None = None,
        device: str = "auto",
    ) -> None:
        """command: how it was called, for run.json.

        Raises:
            ConfigurationError: the run exists and is not to be resumed, or was made otherwise.
        """
        self._workspace, self._folder, self._settings = workspace, run_folder, settings
        self._command = command
        if device not in ("auto", "cpu"):
            raise ConfigurationError(f"--device: {device!r} given, auto or cpu expected")
        accelerator = Accelerator(cpu=device == "cpu")
        self._main = accelerator.is_main_process
        self._accelerator, self._init_from = accelerator, init_from
        if (run_folder / STATE).exists() and not resume:
            raise ConfigurationError(
                f"{run_folder} holds a run; --resume continues it, --out begins another one"
            )
        if self._main:
            self._lock = _only_us(run_folder)
        self._shards = [ShardFolder(folder) for folder in data]
        if (run_folder / STATE).exists():
            self._keep_to_begun()
        self._facts = self._describe()
        self._check_unchanged()

    def _describe(self) -> dict[str, Any]:
        """What the run is made with."""
        described: dict[str, Any] = {
            "target": self._workspace.target_hash,
            "settings": asdict(self._settings),
            "preset": asdict(self._workspace.preset),
            "init_from": str(self._init_from) if self._init_from else None,
            "processes": self._accelerator.num_processes,
            "data": [
                {
                    "folder": folder.path.name,
                    "answer_tokens": folder.answer_tokens,
                    "shards": {f"{n:05d}": folder[n].sha256 for n in folder.numbers},
                }
                for folder in self._shards
            ],
        }
        return dict(json.loads(json.dumps(described)))

    def _keep_to_begun(self) -> None:
        """The shards that the run began with; folders may have grown since."""
        begun = json.loads((self._folder / RUN_FILE).read_text())["facts"]["data"]
        if [folder.path.name for folder in self._shards] != [one["folder"] for one in begun]:
            return  # said by `_check_unchanged`
        for folder, one in zip(self._shards, begun, strict=True):
            folder.keep_only(one["shards"])

    def _check_unchanged(self) -> None:
        path = self._folder / RUN_FILE
        if not (path.exists() and (self._folder / STATE).exists()):
            return
        before = json.loads(path.read_text())["facts"]
        for key, value in self._facts.items():
            if key not in before or _decisive(key, before[key]) != _decisive(key, value):
                raise ConfigurationError(
                    f"{self._folder}: the run was begun with another {key}; give the same again, "
                    "or begin a new run with --init-from its drafter"
                )

    def run(
        self,
        report: Callable[[Progress], None] = lambda _: None,
        prepared: Callable[[int, int], None] = lambda *_: None,
        started: Callable[[Trainer, str], None] = lambda *_: None,
    ) -> RunReport:
        """Trains to the end of the schedule, or until the trainer is asked to stop.

        prepared: told (shards with features, shards in all). started: given the trainer, and what
        its weights start from.
        """
        began = time.time()
        dataset, features = self._workspace.dataset(self._shards)
        if self._main:
            features.prepare(self._shards, prepared)
        self._accelerator.wait_for_everyone()
        assembled = self._workspace.assemble(
            dataset,
            self._folder,
            self._settings,
            init_from=self._init_from,
            accelerator=self._accelerator,
        )
        trainer = assembled.trainer
        started(trainer, assembled.start)
        before = self._before(trainer)
        record: dict[str, Any] = {
            "command": self._command,
            "facts": self._facts,
            "machine": machine(),
            "began": began,
            "start": assembled.start,
            "tau_before": before,
        }
        if self._main:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_json(self._folder / RUN_FILE, record)
        finished = trainer.run(report)
        drafter = self._folder / DRAFTER
        if not trainer.history:
            # Asked to stop before the first step: nothing was written that could be gone on with.
            return RunReport(finished, trainer.step, 0.0, before, before, drafter)
        last = trainer.history[-1]
        result = RunReport(finished, trainer.step, last.seconds, before, last.tau, drafter)
        if self._main:
            write_self_test(result.drafter, trainer, dataset)
            outcome = asdict(result) | {"drafter": DRAFTER}
            write_json(self._folder / RUN_FILE, record | {"ended": time.time(), "result": outcome})
        return result

    def _before(self, trainer: Trainer) -> float:
        """τ of the untrained drafter; a resumed run looks it up."""
        path = self._folder / RUN_FILE
        if trainer.step and path.exists():
            return float(json.loads(path.read_text())["tau_before"])
        return trainer.validate()[2].value
