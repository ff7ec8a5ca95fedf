# extra: judge
"""Simulated comparisons without a difference: how often does scripts/judge.py give a verdict?

python tests/extras/judge/simulated.py     prints the tables of docs/judge.md
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[3])]

from scripts.lib.judge.statistics import are_equal, judge_differences, t_quantile

COMPARISONS = 4000
SEEDS = (5, 8, 20)
MOST_SEEDS = 20  # of one who adds a seed until there is a verdict
Values = tuple[list[float], list[float]]  # of A and B, by seed


def independent(draw: Callable[[random.Random], float]) -> Callable[[random.Random, int], Values]:
    """Comparisons in which B - A is drawn for each seed."""

    def values(rng: random.Random, n: int) -> Values:
        return [0.0] * n, [draw(rng) for _ in range(n)]

    return values


def runs(draw: Callable[[random.Random], float]) -> Callable[[random.Random, int], Values]:
    """Comparisons in which both runs of each seed are drawn."""

    def values(rng: random.Random, n: int) -> Values:
        return [draw(rng) for _ in range(n)], [draw(rng) for _ in range(n)]

    return values


def normal(rng: random.Random) -> float:
    return rng.gauss(0, 1)


def lognormal(rng: random.Random) -> float:
    return math.exp(rng.gauss(0, 1)) - math.exp(0.5)


def student(rng: random.Random) -> float:
    """Student's t with three degrees of freedom."""
    squares = sum(rng.gauss(0, 1) ** 2 for _ in range(3))
    return rng.gauss(0, 1) / math.sqrt(squares / 3)


def collapsing(rng: random.Random) -> float:
    """One run in twenty is worse by ten deviations."""
    loss = rng.gauss(0, 1)
    if rng.random() < 0.05:
        loss += 10
    return loss


def surely_better(rng: random.Random) -> float:
    """One difference in ten is -0.9, the others are 0.1, with a deviation of 0.01."""
    return rng.gauss(-0.9 if rng.random() < 0.1 else 0.1, 0.01)


def accuracy(rng: random.Random) -> float:
    """On 20 held-out samples, of which each is right with probability 0.85."""
    return sum(rng.random() < 0.85 for _ in range(20)) / 20


def flipping(rng: random.Random, n: int) -> Values:
    """Accuracies on 1,000 held-out samples. A and B answer alike, but for four of them on average."""
    a, b = [], []
    for _ in range(n):
        right = rng.randrange(800, 900)
        flips = [rng.choice((-1, 1)) for _ in range(1000) if rng.random() < 0.004]
        a.append(right / 1000)
        b.append((right + sum(flips)) / 1000)
    return a, b


def seeded(rng: random.Random, n: int) -> Values:
    """A seed is easy or hard for both."""
    seeds = [rng.gauss(0, 5) for _ in range(n)]
    return [seed + normal(rng) for seed in seeds], [seed + normal(rng) for seed in seeds]


def drifting(rng: random.Random, n: int) -> Values:
    """The machine changes: each run is worse than the one before by a fifth of a deviation."""
    a, b = [], []
    for place in range(n):
        first, second = 0.4 * place + normal(rng), 0.4 * place + 0.2 + normal(rng)
        if place % 2:
            first, second = second, first
        a.append(first)
        b.append(second)
    return a, b


def rounded(rng: random.Random, n: int) -> Values:
    """One more of 20 held-out samples is right in each seed."""
    right = [rng.randrange(14, 20) for _ in range(n)]
    return [count / 20 for count in right], [(count + 1) / 20 for count in right]


def sharing(rng: random.Random, n: int) -> Values:
    """All seeds share draws, such as initial weights, whose effect is as large as that of a seed's own."""
    shared = rng.gauss(0, 1)
    return [0.0] * n, [shared + normal(rng) for _ in range(n)]


SYMMETRIC = {
    "normal": runs(normal),
    "a seed is easy or hard for both": seeded,
    "heavy tails: Student's t, 3 degrees of freedom": independent(student),
    "either side collapses in 5 % of its runs": runs(collapsing),
    "accuracy on 20 samples": runs(accuracy),
    "accuracy on 1,000 samples, 4 of them differ": flipping,
    "each run is worse than the one before": drifting,
}
ONE_SIDED = {
    "outliers on one side only: lognormal": independent(lognormal),
    "B collapses in 5 % of its runs, else it is better": independent(lambda rng: collapsing(rng) - 0.5),
    "B collapses in 10 % of its runs, else it is surely better": independent(surely_better),
}
REFUSED = {"equal but for rounding": rounded}
DEPENDENT = {"all seeds share draws; refused if these are the weights": sharing}


def before(a: list[float], b: list[float]) -> bool:
    """Whether Student's t gave a verdict, where only differences of the same bits were refused."""
    differences = [y - x for x, y in zip(a, b, strict=True)]
    n = len(differences)
    mean = math.fsum(differences) / n
    deviation = math.sqrt(math.fsum((delta - mean) ** 2 for delta in differences) / (n - 1))
    return len({*differences}) > 1 and abs(mean) > t_quantile(n - 1) * deviation / math.sqrt(n)


def now(a: list[float], b: list[float]) -> bool:
    """Whether judge.py gives a verdict."""
    differences = [y - x for x, y in zip(a, b, strict=True)]
    return not are_equal(differences, a + b) and judge_differences(differences, 1).verdict != "none"


def percent(has_verdict: Callable[..., bool], draw: Callable[..., Values], n: int) -> float:
    """The share of comparisons with a verdict. Each n has its own seed."""
    rng = random.Random(n)
    return 100 * sum(has_verdict(*draw(rng, n)) for _ in range(COMPARISONS)) / COMPARISONS


def percent_of_looks() -> float:
    """The share of comparisons with a verdict, if one looks at five seeds and adds one until there is a verdict."""
    rng = random.Random(0)
    verdicts = 0
    for _ in range(COMPARISONS):
        a, b = runs(normal)(rng, MOST_SEEDS)
        verdicts += any(now(a[:n], b[:n]) for n in range(5, MOST_SEEDS + 1))
    return 100 * verdicts / COMPARISONS


def better_by(deviations: float) -> Callable[[random.Random, int], Values]:
    return independent(lambda rng: rng.gauss(deviations, 1))


def table(head: str, rows: dict[str, Callable[..., Values]], digits: int) -> list[str]:
    """Of the share of verdicts now, and in brackets before."""
    lines = [f"| {head} | n = 5 | n = 8 | n = 20 |", "|---|---|---|---|"]
    for name, draw in rows.items():
        cells = [f"{percent(now, draw, n):.{digits}f} ({percent(before, draw, n):.{digits}f})" for n in SEEDS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def tables() -> list[str]:
    """The lines of docs/judge.md."""
    lines = table("differences without an effect", SYMMETRIC | ONE_SIDED | REFUSED | DEPENDENT, 1)
    effects = {f"{deviations}": better_by(deviations) for deviations in (1, 2)}
    return [*lines, *table("effect, in deviations", effects, 0)]


if __name__ == "__main__":
    print(*tables(), f"a seed added until there is a verdict: {percent_of_looks():.1f}", sep="\n")
