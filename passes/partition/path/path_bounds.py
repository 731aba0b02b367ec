"""A lower bound on the makespan of a flush schedule, along a path of the model.

Stages that hold groups of the path wait for each other along it, there and back, and each holds an
interval of it; `beside` says what else a stage with some interval surely holds.

Is a makespan possible?  As in `bounds`, from a makespan follows which (stage, interval) may be; D
and T are the way of one microbatch down to the stage and up from it, and beyond it and back, F and
W what the stage surely computes, w its warm-up, and S all work and all transfers of one microbatch:

- D + m·(F+W);
- S + (m−1)·max(F, W) + (m−1−w)·min(F, W);
- D + q·(F+W+T) + r·(F+W), q round trips, from 2 to ⌈m/(w+1)⌉, r = m−1−(q−1)(w+1);
- S + p·(all from s to t, and transfers between them) + x·(all from s on) + (all from r on), round
  trips one after the other (`round_trips`), for all s and t at once; or, instead of x and r, all
  that a stage up to s then still has to do;
- the way down, F + W, and m gradients of a parameter that the stage shares with the first one; and
  S and all but two of these gradients, for which there are receive slots (`path_cases`).

Each of these also says how much a stage may compute besides F + W, of which some has to be
backward.  What all stages may compute together has to be all work; a stage that holds nothing of
the path computes what may lie there, and several at one place together no more.  Stages up to a
boundary compute what surely is before it, and no more than may be.

Where every stage holds a group of the path, S is all work there is.  Where some do not, what they
hold may be on no way that follows the path: `branches` says how much that can be, by where they
lie.  A way over such a stage has that stage's hops, not those from one stage with the path to the
next.  The bound is the least of both.  What is sent where the path is cut: `crossings`.

Holds for gpipe and 1f1b, and with W up to the gradients of the inputs where backward is split
(benchmarks/results/planner.md; tests hold it against brute force).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdcompile.passes.partition.bounds import bisected
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.model import Model
from pdcompile.passes.partition.path.beside import Beside, heaviest_path
from pdcompile.passes.partition.path.path_case import Case
from pdcompile.passes.partition.path.path_cases import cases_of

CLOSE = 1e-4  # relative: where the bisection ends
COARSE = 120  # groups of the path that are told apart: cuts between are looked at as one
FINE, FEW = (240, 170), 8  # and in the end; the second number on more stages than that
ALMOST = 3  # times as many: all are told apart at once
SHARES = 0.1, 0.03  # of what is open between bound and plan: where that ends too, before more
# groups are told apart and at last


def path_bound(
    model: Model,
    lower: float,
    upper: Callable[[], float],
    budget: Budget,
    offer: Callable[[tuple[int, ...]], object],
) -> float:
    """Seconds from `lower` up to `upper()` that no assignment of `model` is below.

    What is possible as far as the bound knows is offered, stages of groups, and `upper` asked
    again.  A budget that ends leaves the bound as far as it has come.
    """
    path = heaviest_path(model)
    fine = FINE[model.num_stages > FEW]
    coarse = (COARSE,) if len(path) > ALMOST * COARSE else ()
    for most in (*coarse, fine):
        beside = Beside.of(model, path, most)
        if beside is not None and lower < upper() * (1 - 1e-9) and not budget.late:
            question = _Question([*cases_of(beside)], budget)

            def found(ends: list[int], beside: Beside = beside) -> None:
                for groups in beside.assignments(ends) if ends else ():
                    offer(groups)

            limit = upper() * (1 - 1e-9)
            lower = bisected(
                question.chain, lower, limit, CLOSE, budget, found, SHARES[most == fine],
                rising=most == fine and coarse != (),
            )  # fmt: skip
    return lower


@dataclass
class _Question:
    """Whether a makespan is possible in any of the cases, in none of whose lists one denies it."""

    cases: list[list[Case]]
    budget: Budget

    def chain(self, makespan: float) -> list[int] | None:
        """The ends of intervals where every stage holds some of the path, else empty; None if it
        is not possible.  Who denies it, or allows it, is asked first the next time."""
        for n, case in enumerate(self.cases):
            ends = self._of(case, makespan)
            if ends is not None:
                self.cases.insert(0, self.cases.pop(n))
                return ends
        return None

    def _of(self, case: list[Case], makespan: float) -> list[int] | None:
        ends = left = None
        for n, one in enumerate(
            [*case, *case[:-1]]
        ):  # the first ones again, among what others left
            if n >= len(case) and one.size == case[-1].size:
                return ends
            ends = one.chain(makespan, self.budget, left)
            if ends is None:
                case.remove(one)
                case.insert(0, one)
                return None
            left = one.left
        return ends
