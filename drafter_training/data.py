"""Token shards of prompts and the target's own answers, with the features seen on the way."""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from drafter_training.prompts import Prompt, PromptSource, read_user_turns
from drafter_training.slot_decoder import SlotDecoder

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class DataSettings:
    """How the data is made; written into the manifest.

    Greedy answers are what a greedy server will decode; the sampled ones (``answer_temperature``)
    keep the drafter from depending on greedy loops. ``min_p`` drops tokens less likely than that
    share of the best one, when sampling.
    """

    target_layer_ids: list[int]
    prompt_file: str | None = None
    file_share: float = 0.25
    greedy_share: float = 0.75
    answer_temperature: float = 0.8
    user_temperatures: tuple[float, ...] = (0.7, 0.85, 1.0)
    min_p: float = 0.02
    max_answer_tokens: int = 224
    max_length: int = 480
    num_slots: int = 64
    shard_sequences: int = 64
    seed: int = 0


@dataclass
class _Sequence:
    """One slot's work: feeding forced ids, sampling the user turn, then answering."""

    token_ids: list[int]
    user_left: int
    closing: list[int]
    user_temperature: float
    answer_temperature: float
    prompt_length: int = 0
    fed: int = 0

    @property
    def temperature(self) -> float:
        return self.user_temperature if self.user_left else self.answer_temperature


def repeats_itself(token_ids: list[int], longest_period: int = 48) -> bool:
    """True if the tail is three copies of one phrase (and at least 24 tokens of it)."""
    for period in range(1, longest_period + 1):
        span = max(2 * period, 24)
        tail = token_ids[-span - period :]
        if len(tail) == span + period and tail[:-period] == tail[period:]:
            return True
    return False


def choose_tokens(logits: torch.Tensor, temperature: torch.Tensor, min_p: float) -> torch.Tensor:
    """logits float32 [S, V], temperature float32 [S] (0 is greedy) -> int64 [S]."""
    chosen = logits.argmax(-1)
    rows = temperature.nonzero()[:, 0]
    if len(rows):
        probs = torch.softmax(logits[rows] / temperature[rows, None], -1)
        probs[probs < min_p * probs.amax(-1, keepdim=True)] = 0
        cumulative = probs.cumsum(-1)
        threshold = torch.rand(len(rows), 1) * cumulative[:, -1:]
        picked = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
        chosen[rows] = picked.clamp_max(logits.shape[-1] - 1)
    return chosen


class ShardWriter:
    """Owns the output folder: shards are written whole, and only listed ones count."""

    def __init__(self, folder: Path, settings: DataSettings) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._settings = folder, settings
        self._pending: list[tuple[list[int], int, bool, torch.Tensor]] = []
        self.seen: set[bytes] = set()
        prompt_file = Path(settings.prompt_file).name if settings.prompt_file else None
        self.manifest: dict[str, Any] = {
            "settings": asdict(settings) | {"prompt_file": prompt_file},
            "next_turn": 0,
            "shards": [],
            "answer_tokens": 0,
        }
        if (folder / MANIFEST).exists():
            self.manifest = json.loads((folder / MANIFEST).read_text())
            self.seen = {bytes.fromhex(digest) for digest in self.manifest.pop("seen")}

    @property
    def answer_tokens(self) -> int:
        waiting = sum(len(ids) - prompt for ids, prompt, _, _ in self._pending)
        return int(self.manifest["answer_tokens"]) + waiting

    def add(self, ids: list[int], prompt_length: int, greedy: bool, features: torch.Tensor) -> bool:
        """Takes one sequence; False if it is a duplicate prompt or has hardly any answer."""
        digest = hashlib.blake2b(repr(ids[:prompt_length]).encode(), digest_size=8).digest()
        if digest in self.seen or len(ids) - prompt_length < 8:
            return False
        self.seen.add(digest)
        self._pending.append((ids, prompt_length, greedy, features))
        return True

    def flush(self, next_turn: int, force: bool = False) -> None:
        """Writes a shard when enough sequences wait: data first, then the manifest, atomically."""
        if len(self._pending) < (1 if force else self._settings.shard_sequences):
            return
        ids, prompts, greedy, features = zip(*self._pending, strict=True)
        self._pending = []
        name = f"{len(self.manifest['shards']):05d}.safetensors"
        tokens = {
            "tokens": torch.tensor([t for row in ids for t in row], dtype=torch.uint16),
            "lengths": torch.tensor([len(row) for row in ids], dtype=torch.int32),
            "prompt_lengths": torch.tensor(prompts, dtype=torch.int32),
            "greedy": torch.tensor(greedy, dtype=torch.uint8),
        }
        save_file(tokens, self._folder / f"tokens-{name}")
        save_file({"features": torch.cat(features)}, self._folder / f"features-{name}")
        digest = hashlib.sha256((self._folder / f"tokens-{name}").read_bytes()).hexdigest()
        self.manifest["shards"].append({"name": name, "sha256": digest, "sequences": len(ids)})
        self.manifest["answer_tokens"] += sum(map(len, ids)) - sum(prompts)
        self.manifest["next_turn"] = next_turn
        seen = sorted(digest.hex() for digest in self.seen)
        temporary = self._folder / f"{MANIFEST}.tmp"
        temporary.write_text(json.dumps(self.manifest | {"seen": seen}, indent=1))
        os.replace(temporary, self._folder / MANIFEST)


class AnswerGenerator:
    """Runs the target over prompts, slot by slot, until time or tokens are up."""

    def __init__(
        self,
        decoder: SlotDecoder,
        tokenizer: PreTrainedTokenizerBase,
        settings: DataSettings,
        writer: ShardWriter,
    ) -> None:
        self._decoder, self._settings, self._writer = decoder, settings, writer
        self._end = int(tokenizer.eos_token_id)
        seed = settings.seed + 1000 * len(writer.manifest["shards"])
        self._random = random.Random(seed)
        torch.manual_seed(seed)
        turns = read_user_turns(Path(settings.prompt_file)) if settings.prompt_file else []
        self._source = PromptSource(
            tokenizer, turns, settings.file_share, seed, writer.manifest["next_turn"]
        )
        self._prompts = iter(self._source)

    def run(self, answer_tokens: int, minutes: float) -> None:
        """Generates until the folder holds ``answer_tokens`` or ``minutes`` have passed."""
        deadline = time.monotonic() + 60 * minutes
        active = [self._start(slot) for slot in range(self._decoder.num_slots)]
        with Progress() as progress:
            bar = progress.add_task("answer tokens", total=answer_tokens)
            while self._writer.answer_tokens < answer_tokens and time.monotonic() < deadline:
                self._step(active)
                progress.update(bar, completed=self._writer.answer_tokens)
                self._writer.flush(self._source.next_turn)
        self._writer.flush(self._source.next_turn, force=True)

    def _start(self, slot: int) -> _Sequence:
        settings = self._settings
        prompt = self._next_prompt()
        sequence = _Sequence(
            token_ids=list(prompt.token_ids),
            user_left=prompt.user_budget,
            closing=prompt.closing,
            user_temperature=self._random.choice(settings.user_temperatures),
            answer_temperature=(
                0.0
                if self._random.random() < settings.greedy_share
                else settings.answer_temperature
            ),
            prompt_length=0 if prompt.user_budget else len(prompt.token_ids),
        )
        logits = self._decoder.prefill(slot, sequence.token_ids)
        sequence.fed = len(sequence.token_ids)
        temperature = torch.tensor([sequence.temperature])
        self._advance(sequence, int(choose_tokens(logits[None], temperature, settings.min_p)[0]))
        return sequence

    def _next_prompt(self) -> Prompt:
        room = self._settings.max_length - self._settings.max_answer_tokens
        for prompt in self._prompts:
            if len(prompt.token_ids) + prompt.user_budget + len(prompt.closing) <= room:
                return prompt
        raise AssertionError("the prompt source is endless")

    def _step(self, active: list[_Sequence]) -> None:
        tokens = torch.tensor([sequence.token_ids[sequence.fed] for sequence in active])
        positions = torch.tensor([sequence.fed for sequence in active])
        temperatures = torch.tensor(
            [
                sequence.temperature if sequence.fed + 1 == len(sequence.token_ids) else 0.0
                for sequence in active
            ]
        )
        logits = self._decoder.step(tokens, positions)
        chosen = choose_tokens(logits, temperatures, self._settings.min_p).tolist()
        for slot, sequence in enumerate(active):
            sequence.fed += 1
            if sequence.fed == len(sequence.token_ids):
                self._advance(sequence, chosen[slot])
            if self._finished(sequence):
                length = len(sequence.token_ids)
                features = self._decoder.features[slot, :length].clone()
                features[sequence.fed :] = 0  # the last token was never fed
                self._writer.add(
                    sequence.token_ids,
                    sequence.prompt_length,
                    sequence.answer_temperature == 0,
                    features,
                )
                active[slot] = self._start(slot)

    def _advance(self, sequence: _Sequence, token: int) -> None:
        """Appends the next token, or what closes the user turn when that is due."""
        if not sequence.user_left:
            sequence.token_ids.append(token)
            return
        sequence.user_left -= 1
        if token != self._end:
            sequence.token_ids.append(token)
        if token == self._end or not sequence.user_left:
            sequence.user_left = 0
            sequence.token_ids.extend(sequence.closing)
            sequence.prompt_length = len(sequence.token_ids)

    def _finished(self, sequence: _Sequence) -> bool:
        answer = len(sequence.token_ids) - sequence.prompt_length
        if sequence.user_left or answer < 1:
            return False
        if sequence.token_ids[-1] == self._end or answer >= self._settings.max_answer_tokens:
            return True
        return answer % 8 == 0 and repeats_itself(sequence.token_ids[sequence.prompt_length :])
