"""Plans that cut the heaviest path into intervals, some with a stage for what runs beside them.

A stage beside the path takes what spans the interval of the stage before it: both work at the same
time, backward only where that one does not read what it reads (`branches`).  Stages before the path
take what nothing of it is before.  There are as many plans as choices: what is to end by which
makespan, what counts in the sum that is least, and what may have a stage beside the path; what else
a plan costs (links of skips, tied parameters, memory) is left to its evaluation.  None is right
everywhere, so choices next to the best ones are tried first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from heapq import heappop, heappush
from itertools import product
from typing import NamedTuple

from pdcompile.passes.partition.model import Model
from pdcompile.passes.partition.path.beside import Beside, heaviest_path
from pdcompile.passes.partition.path.path_program import (
    COUNTINGS,
    KINDS,
    Kind,
    PathProgram,
    Wanted,
)

#: times the least makespan for which there is a plan; less where work beside the path is hidden
TIMES = 0.94, 0.96, 0.98, 1.0, 1.01, 1.02, 1.03, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0


class _Choice(NamedTuple):
    """Numbers of `KINDS`, `COUNTINGS`, what may be beside the path, `TIMES` and first stages."""

    kind: int
    counting: int
    beside_it: int
    times: int
    first: int


#: kind, counting, what may be beside the path and times: chosen on T5, ResNet-50, GPT-2 and Llama,
#: so that the best choice for each is near one of them
SEEDS: tuple[tuple[Kind, int, int, float], ...] = (
    ("own", 0, 2, 1.0), ("ways", 2, 2, 1.01), ("links", 1, 1, 1.03), ("links", 1, 1, 1.01),
    ("own", 1, 1, 1.02), ("links", 0, 2, 1.0),
)  # fmt: skip


def path_plans(
    model: Model, seconds: Callable[[tuple[int, ...]], float] = lambda _: 0.0
) -> Iterator[tuple[int, ...] | None]:
    """Stages of groups, some again and again, and None for a choice without a plan; `seconds` is
    asked of each before.  Those come early whose choices are next to those of the best ones."""
    beside = Beside.of(model, heaviest_path(model))
    if beside is None:
        return
    choices, known = _Choices(PathProgram(beside)), set[_Choice]()
    waiting = list[tuple[float, int, _Choice]]()

    def wait(choice: _Choice, least: float) -> None:
        if choice not in known:
            known.add(choice)
            heappush(waiting, (least, len(known), choice))

    for first, (kind, counting, beside_it, times) in product(range(choices.counts.first), SEEDS):
        seed = _Choice(KINDS.index(kind), counting, beside_it, TIMES.index(times), first)
        wait(choices.nearest(seed), 0.0)
    while waiting:
        _, _, choice = heappop(waiting)
        groups = choices.plan(choice)
        took = math.inf if groups is None else seconds(groups)
        yield groups
        for other in choices.next_to(choice):
            wait(other, took)


class _Choices:
    """All choices for a program; one microbatch has less to choose from, where all kinds and times
    are the same."""

    def __init__(self, program: PathProgram):
        self._program, self._firsts = program, program.first_stages()
        self._least, several = cache(program.least), program.microbatches > 1
        self.counts = _Choice(
            len(KINDS) if several else 1, len(COUNTINGS), len(program.beside_it),
            len(TIMES) if several else 1, len(self._firsts),
        )  # fmt: skip

    def nearest(self, choice: _Choice) -> _Choice:
        """That one, or the last one there is of each."""
        return _Choice(
            *(min(one, count - 1) for one, count in zip(choice, self.counts, strict=True))
        )

    def next_to(self, choice: _Choice) -> Iterator[_Choice]:
        """Those that differ in one thing; times by one step."""
        for step in (-1, 1):
            if 0 <= choice.times + step < self.counts.times:
                yield choice._replace(times=choice.times + step)
        for name in ("counting", "beside_it", "first", "kind"):
            for n in range(getattr(self.counts, name)):
                yield choice._replace(**{name: n})

    def plan(self, choice: _Choice) -> tuple[int, ...] | None:
        """Stages of groups; None where there is no such plan."""
        program, first = self._program, self._firsts[choice.first]
        kind, counting = KINDS[choice.kind], COUNTINGS[choice.counting]
        beside_it = program.beside_it[choice.beside_it]
        if counting.beside and not beside_it.any():
            return None
        times = TIMES[choice.times if self.counts.times > 1 else -1]  # no limit to one microbatch
        wanted = Wanted(times * self._least(first, kind), kind, beside_it, counting)
        found = program.solve(wanted, first)
        return None if found is None else program.assignment(found, first, beside_it)
