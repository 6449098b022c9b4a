"""What choosing tokens costs on one core: python benchmarks/sampling.py [--rows n]

Rows imitate a language model's: a few likely tokens over a bell-shaped rest; `flat` rows have
thousands of near-equal ones, the worst case of a nucleus. Prints the median and the best time of a
call, in milliseconds, beside plain torch doing the obvious thing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from flashduet.sampling.choose import choose_drafts, choose_tokens
from flashduet.sampling.params import Sampling

RULES = {
    "greedy": Sampling(),
    "T=0.8 top_p=0.95": Sampling(temperature=0.8, top_p=0.95, seed=7),
    "T=1": Sampling(temperature=1.0, seed=7),
    "T=0.8 top_k=50": Sampling(temperature=0.8, top_k=50, seed=7),
    "T=0.8 top_k=50 top_p=0.95": Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=7),
    "T=1 min_p=0.05": Sampling(temperature=1.0, min_p=0.05, seed=7),
    "T=1 top_p=0.1": Sampling(temperature=1.0, top_p=0.1, seed=7),
}


def peaked(rows: int, vocabulary: int) -> torch.Tensor:
    """Logits [rows, vocabulary]: a bell of width 2.5 and a tail of 200 likelier tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocabulary, generator=generator) * 2.5
    for row in logits:
        likely = torch.randperm(vocabulary, generator=generator)[:200]
        row[likely] = 20 - 2.2 * torch.arange(1, len(likely) + 1).log2() + row[likely] * 0.4
    return logits


def flat(rows: int, vocabulary: int) -> torch.Tensor:
    """Logits [rows, vocabulary] of an undecided model: a nucleus of many thousand tokens."""
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))


def obvious(logits: torch.Tensor, sampling: Sampling) -> list[int]:
    """Full sort, cumulative softmax, multinomial: what most servers do."""
    ordered, ids = (logits / sampling.temperature).sort(dim=-1, descending=True)
    p = ordered.softmax(-1)
    p[p.cumsum(-1) - p >= sampling.top_p] = 0
    return ids.gather(1, p.multinomial(1)).flatten().tolist()


def measure(call: Callable[[int], object], repeats: int) -> tuple[float, float]:
    """Median and least milliseconds; the argument varies so that no call repeats a position."""
    times = []
    for i in range(repeats):
        start = time.perf_counter()
        call(i)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times), min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.rows} rows, vocabulary {options.vocabulary}, {options.threads} thread(s), ms")
    print(f"{'logits':8} {'rule':28} {'median':>8} {'best':>8} {'drafts':>8}")
    for name, make in (("peaked", peaked), ("flat", flat)):
        logits = make(options.rows, options.vocabulary)
        for rule, sampling in RULES.items():
            tokens = measure(
                lambda i, x=logits, s=sampling: choose_tokens(x, i * len(x), s), options.repeats
            )
            drafts = measure(
                lambda i, x=logits, s=sampling: choose_drafts(x, i * len(x), s), options.repeats
            )
            print(f"{name:8} {rule:28} {tokens[0]:8.2f} {tokens[1]:8.2f} {drafts[0]:8.2f}")
        sampling = RULES["T=0.8 top_p=0.95"]
        plain = measure(
            lambda i, x=logits, s=sampling: obvious(x, s), max(5, options.repeats // 10)
        )
        print(f"{name:8} {'T=0.8 top_p=0.95, sort':28} {plain[0]:8.2f} {plain[1]:8.2f}")


if __name__ == "__main__":
    main()
