"""Long runs: resumed exactly, killed at any moment, on several processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draft_service.checkpoint import load_drafter
from draft_service.shortlist import write_shortlist
from drafter_training.checkpoint import save_drafter
from drafter_training.drafter import drafter_config
from drafter_training.optimizer import cosine
from drafter_training.run_record import plot_history
from drafter_training.trainer import Progress
from tests.unit.training_support import (
    BLOCK,
    TAPS,
    make_dataset,
    make_network,
    make_trainer,
    tiny_llama,
)

# Each loads torch, on a machine that may be busy.
WAIT_S = 600

KILLED_RUN = """
import sys, time
from pathlib import Path
from tests.unit.training_support import make_dataset, make_trainer, tiny_llama

root, name, pause = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
target = tiny_llama()
dataset = make_dataset(root, target)
trainer = make_trainer(dataset, target, root / name, epochs=10, checkpoint_seconds=0.0)

def slowly(progress):
    print(progress.step, flush=True)
    time.sleep(pause)

trainer.run(slowly)
print("finished", flush=True)
"""


REPLICA_RUN = """
import json, sys, time
from pathlib import Path
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from tests.unit.training_support import make_dataset, make_trainer, tiny_llama

root = Path(sys.argv[1])
target = tiny_llama()
# They meet at a file: a port that was free may be another's by the time that it is used.
meeting = InitProcessGroupKwargs(init_method=f"file://{root}/meeting")
accelerator = Accelerator(cpu=True, kwargs_handlers=[meeting])
assert accelerator.num_processes == 2
settings = json.loads(sys.argv[2])
trainer = make_trainer(
    make_dataset(root, target), target, root / "replicas", accelerator=accelerator, **settings
)
# Their clocks are apart.
time.sleep(0.7 * accelerator.process_index)
assert trainer.run()
print(trainer.step, len(trainer.history))
accelerator.end_training()
"""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state = torch.load(folder / "state.pt", weights_only=True)
    return {str(index): master for index, master in enumerate(state["masters"])}


def test_resumed_run_equals_unbroken_run(tmp_path: Path) -> None:
    target = tiny_llama()
    dataset = make_dataset(tmp_path, target)
    unbroken = make_trainer(dataset, target, tmp_path / "unbroken")
    assert unbroken.run()

    first = make_trainer(dataset, target, tmp_path / "resumed")
    assert not first.run(lambda progress: first.stop() if progress.step == 4 else None)
    resumed = make_trainer(dataset, target, tmp_path / "resumed")
    assert resumed.step == 4
    assert resumed.run()

    assert resumed.step == unbroken.step == resumed.total_steps == 9
    ours, theirs = weights(tmp_path / "resumed"), weights(tmp_path / "unbroken")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    start = make_network(target).state_dict()
    assert not torch.equal(start["fc.weight"], unbroken.network.state_dict()["fc.weight"])


@pytest.mark.slow
def test_a_run_killed_three_times_ends_with_the_unbroken_runs_weights(tmp_path: Path) -> None:
    make_dataset(tmp_path, tiny_llama())

    def start(name: str, pause: float) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", KILLED_RUN, str(tmp_path), name, str(pause)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
        )

    def read(process: subprocess.Popen[str]) -> list[str]:
        assert process.stdout is not None
        return process.stdout.read().split()

    unbroken = start("unbroken", 0.0)
    reached = []
    for steps, delay in ((2, 0.0), (3, 0.013), (1, 0.007)):
        process = start("killed", 0.05)
        assert process.stdout is not None
        seen = [process.stdout.readline().strip() for _ in range(steps)]
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        seen += read(process)
        assert process.wait(WAIT_S) == -signal.SIGKILL
        reached.append(int(seen[-1]))
    assert reached == sorted(reached)
    final = start("killed", 0.0)
    assert read(final)[-1] == "finished"
    assert read(unbroken)[-1] == "finished"
    assert final.wait(WAIT_S) == unbroken.wait(WAIT_S) == 0

    ours, theirs = weights(tmp_path / "killed"), weights(tmp_path / "unbroken")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for name, weight in load_file(tmp_path / "killed/drafter/model.safetensors").items():
        expected = load_file(tmp_path / "unbroken/drafter/model.safetensors")[name]
        assert torch.equal(weight, expected), name


def test_accumulated_passes_are_one_step(tmp_path: Path) -> None:
    target = tiny_llama()
    dataset = make_dataset(tmp_path, target)
    trainer = make_trainer(dataset, target, tmp_path / "run", accumulation=2, steps=3)
    seen: list[Progress] = []
    assert trainer.run(seen.append)
    assert [progress.step for progress in seen] == [1, 2, 3, 3]
    adamw = torch.load(tmp_path / "run/state.pt", weights_only=True)["adamw"]
    assert {int(entry["step"]) for entry in adamw["state"].values()} == {3}


@pytest.mark.slow
def test_two_processes_take_the_steps_of_two_accumulated_passes(tmp_path: Path) -> None:
    target = tiny_llama()
    dataset = make_dataset(tmp_path, target)
    alone = make_trainer(dataset, target, tmp_path / "alone", accumulation=2, steps=4)
    assert alone.run()
    replicas(tmp_path, {"steps": 4})
    ours, theirs = weights(tmp_path / "replicas"), weights(tmp_path / "alone")
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_processes_whose_clocks_differ_end_and_save_at_the_same_step(tmp_path: Path) -> None:
    make_dataset(tmp_path, tiny_llama())
    first, second = replicas(tmp_path, {"minutes": 0.04, "checkpoint_seconds": 0.2})
    assert first == second
    assert int(first.split()[1]) >= 1


def replicas(root: Path, settings: dict[str, float]) -> list[str]:
    """Trains on two processes; what each printed."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", REPLICA_RUN, str(root), json.dumps(settings)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=WAIT_S)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait(WAIT_S)
    return printed


def test_the_rate_warms_up_and_falls_to_nothing() -> None:
    assert cosine(0.0, 0.04) == pytest.approx(1e-3)
    assert cosine(0.02, 0.04) == pytest.approx(0.5)
    assert cosine(0.04, 0.04) == pytest.approx(1.0)
    assert cosine(0.52, 0.04) == pytest.approx(0.5)
    assert cosine(1.0, 0.04) == pytest.approx(0.0)


def test_a_run_leaves_history_and_plot(tmp_path: Path) -> None:
    target = tiny_llama()
    trainer = make_trainer(make_dataset(tmp_path, target), target, tmp_path / "run")
    trainer.run()
    history = json.loads((tmp_path / "run/history.json").read_text())
    assert history[-1]["step"] == 9
    assert set(history[-1]) == {"step", "seconds", "loss", "held_out_loss", "block_tau", "tau"}
    if plot_history(tmp_path / "run", trainer.history):
        assert (tmp_path / "run/training.png").read_bytes().startswith(b"\x89PNG")


def test_held_out_sequences_stay_so_as_data_grow(tmp_path: Path) -> None:
    target = tiny_llama()
    few = make_dataset(tmp_path / "few", target, sequences=20)
    many = make_dataset(tmp_path / "many", target, sequences=60)
    kept = [few[i].token_ids for i in few.held_out(0.2)]
    still = [many[i].token_ids for i in many.held_out(0.2)]
    assert 0 < len(kept) < 20
    assert [ids for ids in still if ids in kept] == kept
    drawn = {i for batch in many.batches(0, 4, 0, many.held_out(0.2)) for i in batch}
    assert drawn.isdisjoint(many.held_out(0.2))


def test_saved_keys_are_exactly_the_zlab_set(tmp_path: Path) -> None:
    target = tiny_llama()
    config = drafter_config(
        target, layers=2, block_size=BLOCK, mask_token_id=3, target_layer_ids=TAPS
    )
    save_drafter(tmp_path, make_network(target), config)
    parts = [f"self_attn.{p}_proj" for p in "qkvo"] + ["self_attn.q_norm", "self_attn.k_norm"]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    parts += ["input_layernorm", "post_attention_layernorm"]
    expected = {f"layers.{i}.{part}.weight" for i in range(2) for part in parts}
    expected |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == expected
    assert {w.dtype for w in saved.values()} == {torch.bfloat16}
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["DFlashDraftModel"]
    assert written["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": TAPS}
    assert load_drafter(tmp_path).config.block_length == BLOCK


def test_what_is_saved_can_be_read_by_whoever_may_read_other_files(tmp_path: Path) -> None:
    """A service may run as another user than the one who trained."""
    target = tiny_llama()
    config = drafter_config(
        target, layers=2, block_size=BLOCK, mask_token_id=3, target_layer_ids=TAPS
    )
    save_drafter(tmp_path, make_network(target), config)
    write_shortlist(tmp_path, torch.tensor([1, 2]))
    (tmp_path / "plain").touch()
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {
        (tmp_path / "plain").stat().st_mode
    }
