"""The commands ``data``, ``train`` and ``eval``."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from draft_service.checkpoint import load_drafter
from draft_service.config import DrafterConfig
from draft_service.network import DFlashNetwork
from drafter_training.checkpoint import drafter_config, warm_start
from drafter_training.data import AnswerGenerator, DataSettings, ShardWriter
from drafter_training.dataset import ShardDataset
from drafter_training.evaluate import (
    chat_ids,
    decode_speculatively,
    read_prompts,
    summarize,
    walk,
)
from drafter_training.objective import Objective, ObjectiveSettings
from drafter_training.slot_decoder import SlotDecoder
from drafter_training.trainer import Trainer, TrainSettings

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


@app.command()
def data(
    target: Annotated[str, typer.Option(help="Hub id or folder of the target")],
    out: Annotated[Path, typer.Option(help="folder of the shards; resumed if it exists")],
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with `turns`")] = None,
    answer_tokens: Annotated[int, typer.Option(help="stop at this many")] = 1_000_000,
    minutes: Annotated[float, typer.Option(help="stop after this long")] = 600.0,
    layer_ids: Annotated[str, typer.Option(help="tapped target layers")] = "1,8,14,20,27",
    slots: Annotated[int, typer.Option(help="sequences decoded at once")] = 64,
    seed: int = 0,
) -> None:
    """Makes training data: prompts and the target's own answers."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    settings = DataSettings(
        target_layer_ids=[int(i) for i in layer_ids.split(",")],
        prompt_file=str(prompts) if prompts else None,
        num_slots=slots,
        seed=seed,
    )
    decoder = SlotDecoder(model, settings.target_layer_ids, slots, settings.max_length)
    AnswerGenerator(decoder, tokenizer, settings, ShardWriter(out, settings)).run(
        answer_tokens, minutes
    )


@app.command()
def train(
    target: Annotated[str, typer.Option(help="Hub id or folder of the target")],
    data: Annotated[list[Path], typer.Option(help="folder that `data` wrote; may be repeated")],
    out: Annotated[Path, typer.Option(help="run folder; resumed if it holds a checkpoint")],
    epochs: int = 4,
    minutes: Annotated[float | None, typer.Option(help="cosine by the clock")] = None,
    learning_rate: float = 1e-3,
    batch_size: int = 6,
    anchors: Annotated[int, typer.Option(help="blocks a sequence")] = 32,
    block_size: int = 8,
    mask_token_id: Annotated[int, typer.Option(help="an unused special token")] = 16,
    copied_layers: Annotated[str, typer.Option(help="target layers to start from")] = "27,28,29",
    copied_feature: Annotated[int, typer.Option(help="index of the tapped layer fc passes")] = 4,
    gamma: float = 2.5,
    distillation: float = 0.5,
    checkpoint_seconds: float = 240.0,
    held_out: Annotated[int, typer.Option(help="sequences kept for validation")] = 96,
    seed: int = 0,
) -> None:
    """Trains a drafter on that data."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    dataset = ShardDataset(data, model.config.hidden_size)
    sources = [int(i) for i in copied_layers.split(",")]
    config = drafter_config(
        model,
        layers=len(sources),
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=dataset.target_layer_ids,
    )
    network = DFlashNetwork(DrafterConfig.from_qwen3(config)).bfloat16()
    warm_start(network, model, sources, copied_feature)
    objective = Objective(
        model.get_input_embeddings().weight.detach().bfloat16(),
        model.get_output_embeddings().weight.detach().bfloat16(),
        dataset.token_counts(model.config.vocab_size),
        ObjectiveSettings(gamma, distillation, anchors),
    )
    settings = TrainSettings(
        epochs=epochs,
        minutes=minutes,
        batch_size=batch_size,
        learning_rate=learning_rate,
        checkpoint_seconds=checkpoint_seconds,
        held_out=held_out,
        seed=seed,
    )
    trainer = Trainer(network, config, objective, dataset, out, settings)
    signal.signal(signal.SIGTERM, lambda *_: trainer.stop())
    trainer.run()


@app.command(name="eval")
def evaluate(
    target: Annotated[str, typer.Option(help="Hub id or folder of the target")],
    drafter: Annotated[Path, typer.Option(help="folder of the drafter")],
    prompts: Annotated[Path, typer.Option(help="JSON lines with `category` and `turns`")],
    per_category: int = 3,
    max_tokens: int = 96,
    verify_lengths: Annotated[str, typer.Option(help="block lengths to verify")] = "8,4",
    dtype: str = "float32",
    check_plain: Annotated[bool, typer.Option(help="compare with `generate`")] = False,
) -> None:
    """Measures the acceptance length by real greedy decoding."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype)).eval()
    network = load_drafter(drafter, dtype=getattr(torch, dtype))
    stop = {int(tokenizer.eos_token_id)}
    chosen = read_prompts(prompts, per_category)
    for length in (int(text) for text in verify_lengths.split(",")):
        decoded, different = [], 0
        for category, turn in track(chosen, description=f"block {length}"):
            ids = chat_ids(tokenizer, turn)
            one = decode_speculatively(
                model, network, ids, max_tokens=max_tokens, stop=stop, verify_length=length
            )
            decoded.append((category, one))
            if check_plain:
                plain = model.generate(
                    torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False
                )
                different += plain[0, len(ids) :].tolist() != one.token_ids
        table = Table("category", "prompts", "tau", "mean of prompts", title=f"B = {length}")
        for category, result in summarize(decoded).items():
            table.add_row(
                category, str(result.prompts), f"{result.tau:.3f}", f"{result.mean_tau:.3f}"
            )
        Console().print(table)
        if check_plain:
            typer.echo(f"answers that differ from plain decoding: {different}")


@app.command(name="self-test")
def self_test(
    target: Annotated[str, typer.Option(help="Hub id or folder of the target")],
    drafter: Annotated[Path, typer.Option(help="folder of the drafter; gets flashduet.json")],
    prompt: str = "A shop sells pens at 3 dollars each. How much do 12 pens cost? Explain.",
    tokens: int = 48,
) -> None:
    """Writes the reference figure of the draft service's start-up self test."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    network = load_drafter(drafter, dtype=torch.float32)
    ids = chat_ids(tokenizer, prompt)
    continuation = decode_speculatively(
        model, network, ids, max_tokens=tokens, stop=set(), verify_length=1
    ).token_ids
    rounds = walk(model, network, ids, continuation)
    facts = {
        "prompt_token_ids": ids,
        "continuation": continuation,
        "expected_tau": round(sum(rounds) / len(rounds), 3),
        "block_length": network.config.block_length,
    }
    (drafter / "flashduet.json").write_text(json.dumps({"self_test": facts}) + "\n")
    typer.echo(f"expected_tau {facts['expected_tau']}")


@app.callback()
def _commands() -> None:
    """Data, training and evaluation of a DFlash drafter."""
