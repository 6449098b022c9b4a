"""From rounds to figures: acceptance length overall, by category and position, and histograms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from flashduet_cli.evaluation.loops import loops

ANSWER_BIN = 32


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer. rounds: tokens committed by each round after the prefill's token, bonus included.

    undrafted: rounds that had no proposal, by reason.
    """

    prompt_id: str
    category: str
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    rounds: tuple[int, ...]
    undrafted: Mapping[str, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Tau:
    """tau: committed tokens over rounds. mean: of the answers' own τ."""

    answers: int
    tokens: int
    rounds: int
    tau: float
    mean: float


def tau_of(rounds_of_answers: Iterable[Sequence[int]]) -> Tau:
    """Over answers with at least one round; an answer of one token has none."""
    answers = [rounds for rounds in rounds_of_answers if rounds]
    tokens = sum(sum(rounds) for rounds in answers)
    rounds = sum(len(rounds) for rounds in answers)
    means = [sum(rounds) / len(rounds) for rounds in answers]
    return Tau(
        answers=len(answers),
        tokens=tokens,
        rounds=rounds,
        tau=tokens / rounds if rounds else 0.0,
        mean=sum(means) / len(means) if means else 0.0,
    )


def by_category(answers: Sequence[Answered]) -> dict[str, Tau]:
    """In the order in which the categories first occur."""
    names = dict.fromkeys(answer.category for answer in answers)
    return {
        name: tau_of(answer.rounds for answer in answers if answer.category == name)
        for name in names
    }


def histogram(answers: Sequence[Answered]) -> dict[int, int]:
    """Rounds by how many draft tokens they accepted."""
    counts = Counter(committed - 1 for answer in answers for committed in answer.rounds)
    return {accepted: counts[accepted] for accepted in range(max(counts, default=0) + 1)}


def by_slot(answers: Sequence[Answered], slots: int) -> list[float]:
    """Share of the rounds that accepted each slot of the block, the first after the anchor first.

    The last round of an answer is left out: its end cuts what it could accept.
    """
    whole = [committed for answer in answers for committed in answer.rounds[:-1]]
    return [
        sum(committed > slot for committed in whole) / len(whole) if whole else 0.0
        for slot in range(1, slots + 1)
    ]


def by_answer_position(answers: Sequence[Answered], width: int = ANSWER_BIN) -> dict[str, Tau]:
    """τ of the rounds that begin within each stretch of the answer, in tokens from its start."""
    stretches: dict[int, list[list[int]]] = {}
    for answer in answers:
        mine: dict[int, list[int]] = {}
        place = 1
        for committed in answer.rounds:
            mine.setdefault(place // width, []).append(committed)
            place += committed
        for stretch, rounds in mine.items():
            stretches.setdefault(stretch, []).append(rounds)
    return {
        f"{stretch * width}-{(stretch + 1) * width - 1}": tau_of(stretches[stretch])
        for stretch in sorted(stretches)
    }


def figures(answers: Sequence[Answered], slots: int) -> dict[str, object]:
    """All of it for one temperature, ready for JSON."""
    undrafted: Counter[str] = Counter()
    for answer in answers:
        undrafted.update(answer.undrafted)
    steady = [answer for answer in answers if not loops(answer.token_ids)]
    return {
        "overall": asdict(tau_of(answer.rounds for answer in answers)),
        "without_loops": asdict(tau_of(answer.rounds for answer in steady)),
        "looping_answers": len(answers) - len(steady),
        "by_category": {name: asdict(tau) for name, tau in by_category(answers).items()},
        "by_slot": by_slot(answers, slots),
        "by_answer_position": {
            name: asdict(tau) for name, tau in by_answer_position(answers).items()
        },
        "accepted_histogram": histogram(answers),
        "undrafted_rounds": dict(undrafted),
    }
