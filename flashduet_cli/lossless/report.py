"""What a check found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from flashduet.client import Generation
from flashduet_cli.lossless.modes import BASE, TRANSFORMERS
from flashduet_cli.lossless.near_tie import Judgement


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's answer in one mode; `stats` is None where nothing was drafted by us."""

    token_ids: tuple[int, ...]
    rounds: int = 0
    drafted_tokens: int = 0
    acceptance_length: float = 0.0

    @classmethod
    def of(cls, generation: Generation) -> Answer:
        report = generation.speculation
        return cls(
            tuple(generation.token_ids),
            report.rounds,
            report.drafted_tokens,
            report.acceptance_length,
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a mode's answer leaves the base's: at `position` of the answer, and why it may.

    A token is None where that answer ended before.
    """

    prompt_id: str
    mode: str
    position: int
    base_token: int | None
    mode_token: int | None
    judgement: Judgement


@dataclass
class Report:
    """Answers by mode and prompt, and the differences found in them; grows while the check runs."""

    settings: Mapping[str, object]
    prompts: int
    modes: Sequence[str]
    answers: dict[str, dict[str, Answer]] = field(default_factory=dict)
    near_ties: list[Difference] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False

    @property
    def identical(self) -> int:
        """Prompts whose answers are the same in all modes."""
        base = self.answers.get(BASE, {})
        return sum(
            all(
                prompt_id in self.answers.get(mode, {})
                and self.answers[mode][prompt_id].token_ids == answer.token_ids
                for mode in self.modes
            )
            for prompt_id, answer in base.items()
        )

    def undrafted_modes(self) -> list[str]:
        """Modes that were to draft and never did: their identity would show nothing."""
        return [
            mode
            for mode, answers in self.answers.items()
            if mode not in (BASE, TRANSFORMERS)
            and answers
            and not any(answer.drafted_tokens for answer in answers.values())
        ]

    @property
    def passed(self) -> bool:
        return self.complete and not self.differences and not self.undrafted_modes()

    def as_dict(self) -> dict[str, object]:
        """The object that --json prints."""
        drafted = self.mode_figures("draft")
        return {
            "passed": self.passed,
            "complete": self.complete,
            "prompts": self.prompts,
            "identical": self.identical,
            "near_ties": [_flat(item) for item in self.near_ties],
            "differences": [_flat(item) for item in self.differences],
            "undrafted_modes": self.undrafted_modes(),
            "acceptance_length": drafted["acceptance_length"],
            "acceptance_length_mean": drafted["acceptance_length_mean"],
            "modes": {mode: self.mode_figures(mode) for mode in self.modes},
            "settings": dict(self.settings),
            "seconds": round(self.seconds, 1),
        }

    def mode_figures(self, mode: str) -> dict[str, float | int]:
        """Both means of τ: over all rounds, and over requests that had a round."""
        answers = list(self.answers.get(mode, {}).values())
        rounds = sum(answer.rounds for answer in answers)
        # The prefill's token belongs to no round.
        tokens = sum(len(answer.token_ids) - 1 for answer in answers if answer.rounds)
        each = [answer.acceptance_length for answer in answers if answer.rounds]
        return {
            "prompts": len(answers),
            "tokens": sum(len(answer.token_ids) for answer in answers),
            "rounds": rounds,
            "drafted_tokens": sum(answer.drafted_tokens for answer in answers),
            "acceptance_length": round(tokens / rounds, 4) if rounds else 0.0,
            "acceptance_length_mean": round(sum(each) / len(each), 4) if each else 0.0,
        }


def first_difference(base: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token at which two answers part; None when they are the same."""
    for index, (left, right) in enumerate(zip(base, other, strict=False)):
        if left != right:
            return index
    return None if len(base) == len(other) else min(len(base), len(other))


def _flat(difference: Difference) -> dict[str, object]:
    flat = asdict(difference)
    judgement = flat.pop("judgement")
    return flat | {key: judgement[key] for key in ("quantity", "gap", "bound")}
