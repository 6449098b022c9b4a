"""The target answers prompts, many at once; what it says becomes token shards."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from drafter_training.prompts import Prompt, PromptSource
from drafter_training.shards import FEWEST_ANSWER_TOKENS, Sequence, ShardFolder, prompt_digest
from drafter_training.slot_decoder import SlotDecoder


@dataclass(frozen=True)
class DataSettings:
    """How the data is made; written into the manifest.

    Greedy answers are what a greedy server will decode; the sampled ones (at one of
    ``answer_temperatures``) keep the drafter from depending on them. ``min_p`` drops tokens less
    likely than that share of the best one, when sampling. ``loop_tokens``: of an answer that loops,
    so many more are kept; a small target loops when it is served, too.
    """

    prompt_files: tuple[str, ...] = ()
    file_share: float = 0.2
    greedy_share: float = 0.75
    answer_temperatures: tuple[float, ...] = (0.8, 1.0)
    user_temperatures: tuple[float, ...] = (0.7, 0.85, 1.0)
    min_p: float = 0.02
    max_answer_tokens: int = 192
    max_length: int = 320
    loop_tokens: int = 48
    shard_sequences: int = 64
    seed: int = 0


@dataclass
class _Slot:
    """One slot's work: feeding forced ids, sampling the user turn, then answering."""

    shard: int
    place: int
    token_ids: list[int]
    user_left: int
    closing: list[int]
    user_temperature: float
    answer_temperature: float
    random: random.Random
    prompt_length: int = 0
    fed: int = 0
    longest: int | None = None  # of the answer, since it loops

    @property
    def temperature(self) -> float:
        return self.user_temperature if self.user_left else self.answer_temperature


@dataclass
class _OpenShard:
    """Sequences by place; a place is None while it is decoded, or if it came to nothing."""

    left: int
    sequences: dict[int, Sequence] = field(default_factory=dict)
    features: dict[int, torch.Tensor] = field(default_factory=dict)


def repeats_itself(token_ids: list[int], longest_period: int = 48) -> bool:
    """True if the tail is three copies of one phrase (and at least 24 tokens of it)."""
    for period in range(1, longest_period + 1):
        span = max(2 * period, 24)
        tail = token_ids[-span - period :]
        if len(tail) == span + period and tail[:-period] == tail[period:]:
            return True
    return False


def choose_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor, min_p: float
) -> torch.Tensor:
    """logits float32 [S, V]; temperature (0 is greedy), uniform in [0, 1): float32 [S] -> int64."""
    chosen = logits.argmax(-1)
    rows = temperature.nonzero()[:, 0]
    if len(rows):
        probs = torch.softmax(logits[rows] / temperature[rows, None], -1)
        probs[probs < min_p * probs.amax(-1, keepdim=True)] = 0
        cumulative = probs.cumsum(-1)
        threshold = uniform[rows, None] * cumulative[:, -1:]
        picked = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
        chosen[rows] = picked.clamp_max(logits.shape[-1] - 1)
    return chosen


FeatureSink = Callable[[str, torch.Tensor], object]
"""Takes (sha256 of a shard, bfloat16 rows of all its sequences)."""


class AnswerGenerator:
    """Keeps every slot of the decoder busy with the sequences of the shards that are missing."""

    def __init__(
        self,
        decoder: SlotDecoder,
        tokenizer: PreTrainedTokenizerBase,
        settings: DataSettings,
        folder: ShardFolder,
        source: PromptSource,
        keep_features: FeatureSink | None = None,
    ) -> None:
        self._decoder, self._settings = decoder, settings
        self._folder, self._source, self._keep_features = folder, source, keep_features
        self._end = int(tokenizer.eos_token_id)
        self._seen = {
            prompt_digest(sequence.token_ids[: sequence.prompt_length])
            for number in folder.numbers
            for sequence in folder.read(number)
        }
        self._open: dict[int, _OpenShard] = {}
        self._waiting: deque[tuple[int, int]] = deque()

    def run(
        self,
        answer_tokens: int,
        seconds: float = float("inf"),
        report: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Generates until the folder holds ``answer_tokens`` or ``seconds`` have passed.

        report: told the folder's answer tokens whenever a shard is written.
        """
        deadline = time.monotonic() + seconds
        slots = [self._start(slot) for slot in range(self._decoder.num_slots)]
        while self._folder.answer_tokens < answer_tokens and time.monotonic() < deadline:
            before = len(self._folder)
            self._step(slots)
            if len(self._folder) != before:
                report(self._folder.answer_tokens)

    def _next_place(self) -> tuple[int, int]:
        if not self._waiting:
            number = self._folder.missing()
            while number in self._open or number in self._folder.numbers:
                number += 1
            count = self._settings.shard_sequences
            self._open[number] = _OpenShard(count)
            self._waiting.extend((number, place) for place in range(count))
        return self._waiting.popleft()

    def _start(self, slot: int) -> _Slot:
        settings = self._settings
        while True:
            shard, place = self._next_place()
            index = shard * settings.shard_sequences + place
            chance = random.Random(f"{settings.seed}:{index}:answer")
            prompt = self._source.prompt(index)
            if not self._fits(prompt) or (not prompt.user_budget and self._known(prompt.token_ids)):
                self._finish(shard, place, None)
                continue
            work = _Slot(
                shard,
                place,
                token_ids=list(prompt.token_ids),
                user_left=prompt.user_budget,
                closing=prompt.closing,
                user_temperature=chance.choice(settings.user_temperatures),
                answer_temperature=(
                    0.0
                    if chance.random() < settings.greedy_share
                    else chance.choice(settings.answer_temperatures)
                ),
                random=chance,
                prompt_length=0 if prompt.user_budget else len(prompt.token_ids),
            )
            logits = self._decoder.prefill(slot, work.token_ids)
            work.fed = len(work.token_ids)
            chosen = choose_tokens(
                logits[None],
                torch.tensor([work.temperature]),
                torch.tensor([chance.random()]),
                settings.min_p,
            )
            if self._advance(work, int(chosen[0])):
                return work
            self._finish(shard, place, None)

    def _fits(self, prompt: Prompt) -> bool:
        room = self._settings.max_length - self._settings.max_answer_tokens
        return len(prompt.token_ids) + prompt.user_budget + len(prompt.closing) <= room

    def _known(self, prompt_ids: list[int]) -> bool:
        """Whether the prompt was answered before; from now on it counts as answered."""
        digest = prompt_digest(prompt_ids)
        known = digest in self._seen
        self._seen.add(digest)
        return known

    def _step(self, slots: list[_Slot]) -> None:
        tokens = torch.tensor([work.token_ids[work.fed] for work in slots])
        positions = torch.tensor([work.fed for work in slots])
        last = [work.fed + 1 == len(work.token_ids) for work in slots]
        temperatures = [
            work.temperature if end else 0.0 for work, end in zip(slots, last, strict=True)
        ]
        uniform = [
            work.random.random() if t else 0.0 for work, t in zip(slots, temperatures, strict=True)
        ]
        chosen = choose_tokens(
            self._decoder.step(tokens, positions),
            torch.tensor(temperatures),
            torch.tensor(uniform),
            self._settings.min_p,
        ).tolist()
        for slot, work in enumerate(slots):
            work.fed += 1
            fresh = not last[slot] or self._advance(work, chosen[slot])
            if not fresh:
                self._finish(work.shard, work.place, None)
                slots[slot] = self._start(slot)
            elif self._finished(work):
                self._finish(work.shard, work.place, work, slot)
                slots[slot] = self._start(slot)

    def _advance(self, work: _Slot, token: int) -> bool:
        """Appends the next token, or what closes the user turn; False if the prompt is known."""
        if not work.user_left:
            work.token_ids.append(token)
            return True
        work.user_left -= 1
        if token != self._end:
            work.token_ids.append(token)
        if token == self._end or not work.user_left:
            work.user_left = 0
            work.token_ids.extend(work.closing)
            work.prompt_length = len(work.token_ids)
            return not self._known(work.token_ids)
        return True

    def _finished(self, work: _Slot) -> bool:
        answer = len(work.token_ids) - work.prompt_length
        if work.user_left or answer < 1:
            return False
        settings = self._settings
        if work.longest is None and answer % 8 == 0:
            looping = repeats_itself(work.token_ids[work.prompt_length :])
            work.longest = answer + settings.loop_tokens if looping else None
        longest = min(settings.max_answer_tokens, work.longest or settings.max_answer_tokens)
        return work.token_ids[-1] == self._end or answer >= longest

    def _finish(self, shard: int, place: int, work: _Slot | None, slot: int = 0) -> None:
        """Hands in a place of a shard; the last one writes it."""
        opened = self._open[shard]
        opened.left -= 1
        if work and len(work.token_ids) - work.prompt_length >= FEWEST_ANSWER_TOKENS:
            greedy = work.answer_temperature == 0
            opened.sequences[place] = Sequence(work.token_ids, work.prompt_length, greedy)
            if self._keep_features is not None:
                rows = self._decoder.features[slot, : len(work.token_ids)].clone()
                rows[work.fed :] = 0  # the last token was never fed
                opened.features[place] = rows
        if not opened.left:
            places = sorted(opened.sequences)
            facts = self._folder.write(shard, [opened.sequences[p] for p in places])
            if self._keep_features is not None:
                rows = torch.cat([opened.features[p] for p in places])
                self._keep_features(facts.sha256, rows)
            del self._open[shard]
