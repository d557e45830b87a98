"""Rounds in which each contender is measured once, in a shuffled order.

Other work on the machine then slows all of them alike, because the ratios are taken within rounds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

from benchmarks.speed.contenders import Bare, Contender
from benchmarks.speed.report import median, microseconds, p99, table

OPERATIONS = ("granted", "refused", "release")

# Seconds that an operation of a contender took, round by round.
Samples = dict[tuple[str, str], list[float]]


def measure(
    contenders: Sequence[Contender],
    task: str,
    rounds: int,
    rng: random.Random,
    in_step: Callable[[], object] = lambda: None,
) -> Samples:
    """Claim, be refused and release with each contender, once a round.

    :param in_step: called before each contender's turn
    """
    samples: Samples = {}
    warm_up = max(10, rounds // 20)
    for number in range(-warm_up, rounds):
        keep = samples if number >= 0 else {}
        for contender in rng.sample(contenders, len(contenders)):
            in_step()
            _round(contender, task, keep)
    return samples


def _round(contender: Contender, task: str, samples: Samples) -> None:
    def timed(what: str, operation: Callable[..., Any], *arguments: Any) -> Any:
        begun = time.perf_counter()
        result = operation(*arguments)
        taken = time.perf_counter() - begun
        samples.setdefault((contender.name, what), []).append(taken)
        return result

    if isinstance(contender, Bare):
        timed("SELECT 1", contender.select_one)
    held = timed("granted", contender.claim, task)
    assert held is not None, contender.name
    assert timed("refused", contender.claim_second, task) is None, contender.name
    if contender.releases:
        timed("release", contender.release, held)
    else:
        contender.release(held)


def measure_threads(
    kinds: Sequence[type[Contender]], url: str, threads: int, rounds: int, rng: random.Random
) -> Samples:
    """Measure in several threads at once, each with contenders and a task of its own.

    The threads are in step, so that no contender runs beside another one, which would slow it.
    """
    opened = [[kind(url) for kind in kinds] for _ in range(threads)]
    seed, together = rng.random(), Barrier(threads, timeout=60)
    try:
        with ThreadPoolExecutor(threads) as pool:
            measured = [
                pool.submit(
                    measure,
                    contenders,
                    f"task {number}",
                    rounds,
                    random.Random(seed),  # noqa: S311  # an order
                    together.wait,
                )
                for number, contenders in enumerate(opened)
            ]
            parts = [part.result() for part in measured]
    finally:
        for contender in (one for several in opened for one in several):
            contender.close()
    return {key: [taken for part in parts for taken in part[key]] for key in parts[0]}


def ratio(samples: Samples, key: tuple[str, str], to: tuple[str, str]) -> float:
    """Return the median of the ratios of two operations, each taken within a round."""
    return median([a / b for a, b in zip(samples[key], samples[to], strict=True)])


def comparison(samples: Samples, kinds: Sequence[type[Contender]]) -> str:
    """Return a table of medians, p99 and ratios to bare psycopg."""
    rows = []
    for kind in kinds:
        row = [kind.name]
        for what in OPERATIONS:
            if (kind.name, what) not in samples:
                row += ["-", "-", "-"]
                continue
            taken = samples[kind.name, what]
            times = ratio(samples, (kind.name, what), (Bare.name, what))
            row += [microseconds(median(taken)), microseconds(p99(taken)), f"{times:.2f}"]
        rows.append(row)
    select = samples[Bare.name, "SELECT 1"]
    rows.append(["`SELECT 1`", *["-"] * 3, microseconds(median(select)), microseconds(p99(select))])
    rows[-1] += [
        f"{ratio(samples, (Bare.name, 'SELECT 1'), (Bare.name, 'refused')):.2f}",
        *["-"] * 3,
    ]
    header = [""]
    for what in OPERATIONS:
        header += [what, "p99", "x bare"]
    return table(header, rows)
