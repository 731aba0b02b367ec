"""Enough: a memory limit under which there is a plan, found by planning under it.

The planner's own remedies keep to its formula, a lower bound of what a schedule's ledger holds.
Whoever asks for a plan needs a limit that ends in one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.conflict import Oracle
from pdcompile.passes.partition.dynamic_program import OutOfTimeError
from pdcompile.passes.partition.remedies import least_memory, with_memory
from pdcompile.problem import PartitionProblem
from pdcompile.units import three_digits

ATTEMPTS = 6
CLOSE = 0.02  # relative: how near the least limit the search goes
SECONDS = 10.0  # for all of it; a search that has begun is not broken off

#: from a problem to the most bytes that a rank of a limited stage holds, by its ledger, and
#: whether all limits are kept; raises InfeasibleError
Trial = Callable[[PartitionProblem], tuple[int, bool]]


class Enough(NamedTuple):
    """`text`: a limit, as ``20.9 MB``, that a plan keeps when every limited stage has it.

    `least`: bytes below which there is none, 0 where that is not known.
    """

    text: str
    least: int


def enough(problem: PartitionProblem, trial: Trial) -> Enough | None:
    """The least limit for which a plan was found; None where memory is not what is missing."""
    limited = [s for s, stage in enumerate(problem.stages) if stage.memory_bytes is not None]
    budget = Budget(SECONDS)

    def needed(limit: int | None) -> int | None:
        """Bytes that the plan under a limit holds; None where it does not keep the limit."""
        try:
            held, kept = trial(with_memory(problem, dict.fromkeys(limited, limit)))
        except InfeasibleError:
            return None
        return held if kept else None

    most = needed(None) if limited else None
    if most is None:
        return None
    least, low = _least(problem)
    high, text = three_digits(max(most, low))
    if needed(high) is None:
        return None
    # By the formula `low` may be enough; `high` is by the ledgers as well.
    limit, shown = three_digits(low)
    for _ in range(ATTEMPTS):
        if limit >= high or budget.late:
            break
        if needed(limit) is None:
            low = limit
        else:
            high, text = limit, shown
        if high - low <= CLOSE * high:
            break
        limit, shown = three_digits((low + high) // 2)
    return Enough(text, least)


def with_remedy(error: InfeasibleError, found: Enough) -> InfeasibleError:
    """The same refusal, with that limit in place of those of the planner's formula."""
    known = three_digits(found.least, up=False)[1]
    known = f"; with less than {known} there is none" if found.least else ""
    memory = f"{found.text} of memory on every stage (a plan was found for that{known})"
    return type(error)(
        error.message, where=error.where, remedy=", or ".join([memory, *error.others])
    )


def _least(problem: PartitionProblem) -> tuple[int, int]:
    """(bytes below which nothing fits by the formula, bytes that are enough by it)."""
    try:
        least, formula, _ = least_memory(problem, Oracle(Budget(SECONDS / 2)))
    except OutOfTimeError:
        return 0, 0
    return least, formula or least
