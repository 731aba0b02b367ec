"""Among plans that are almost as fast as the fastest found: the one that a person would choose.

Within a tolerance of the fastest plan's objective, and sending no more bytes a step, that plan is
preferred which divides the fewest modules (see `module_borders`); of these the one that sends the
least, in steps of 1 % of what the fastest sends; of these the fastest.  A plan that halves neither
of the two may only cost a part of the tolerance (`worth`).  It is never slower than a simple cut,
of equally many blocks, seconds or parameters a stage, that may be used as well, updates counted,
nor than one that others make of these; where one of those is faster than what was searched, it is
the fastest.

Candidates are simple cuts, and those at borders that divide no module, one, or two: the cut whose
stages end nearest to where those of the fastest plan do, with single boundaries at the next border
as long as that helps, by the one evaluator.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

import numpy as np

from pdcompile.ir.graph import OpGraph
from pdcompile.passes.partition.alternatives import seconds_of
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.planning.graph_free import updated_sizes
from pdcompile.passes.planning.module_borders import (
    Unit,
    divided,
    divided_before,
    simple_cuts,
    units,
)
from pdcompile.plan import Certificate
from pdcompile.plan.evaluate import Evaluation
from pdcompile.plan.makespan import makespan
from pdcompile.problem import PartitionProblem
from pdcompile.units import format_bytes, format_seconds

TOLERANCE = 0.01  # where the user says nothing
STEPS = 100  # of bytes sent, in which savings count
WORK = 4_000_000  # items, values and instructions that are evaluated, in all
REBALANCED = 100  # cuts between blocks
DIVIDED = 3  # kinds of borders: that divide no module, at most one, at most two
EACH = 2.5e-3  # seconds an item, of what is evaluated
LONGEST = 4.0  # seconds
PREFERRING = (0.05, 0.2)  # of the time, at least and at most
EQUAL = 1e-9  # relative, of seconds
ROUNDING = 1e-6  # of a step with updates

Fits = Callable[[tuple[int, ...]], bool]
Update = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Choice:
    """An assignment that may be used, and what decides between it and others."""

    stage_of: tuple[int, ...]
    seconds: float  # the objective
    divided: int  # how often cuts divide a module
    sent_bytes: int  # a step


@dataclass(frozen=True, slots=True)
class Preference:
    """The fastest plan that was found, and the one that is preferred.

    `shorter`: the share by which a step of the latter is, once updates count; 0: it is not.
    """

    fastest: Choice
    chosen: Choice
    shorter: float = 0.0


def preferred(
    found: Evaluation,
    certificate: Certificate,
    graph: OpGraph,
    tolerance: float,
    *,
    update: Update,
    fits: Fits,
    seconds: float,
) -> tuple[tuple[int, ...], Certificate, tuple[str, ...]]:
    """The assignment that a person would choose among those within `tolerance` of a search's
    answer, with its certificate, and what it saves in a note.

    The bound stays what it is; the gap is that of the preferred assignment's own objective, and
    the certificate tells how fast the fastest one is.

    Args:
        found: the search's answer, which `certificate` is of.
        tolerance: of the fastest assignment's objective; 0: the answer as it is.
        update, fits, seconds: as for `preference`.
    """
    own, objective = tuple(found.stage_of), certificate.objective_seconds
    began = time.monotonic()
    if tolerance <= 0 or len(found.stages) < 2:
        return own, certificate, ()
    if not math.isclose(seconds_of(found), objective, rel_tol=1e-6):
        return own, certificate, ()  # what the search went by is not what is compared here
    best = preference(found, graph, tolerance, update=update, fits=fits, seconds=seconds)
    chosen, notes = best.chosen, tuple[str, ...]()
    if chosen.stage_of == own:
        return own, certificate, ()
    fastest = certificate.fastest_seconds or math.inf
    if chosen.seconds > best.fastest.seconds * (1 + EQUAL):
        fastest, notes = min(fastest, best.fastest.seconds), (saving(best),)
    certificate = replace(
        certificate,
        objective_seconds=chosen.seconds,
        bound_seconds=min(certificate.bound_seconds, chosen.seconds),
        fastest_seconds=fastest if fastest < chosen.seconds else None,
        seconds=certificate.seconds + time.monotonic() - began,
    )
    certificate = replace(certificate, status="optimal" if certificate.gap == 0 else "feasible")
    return chosen.stage_of, certificate, notes


def saving(found: Preference) -> str:
    """Costs and savings of a preferred plan, in one line."""
    fastest, chosen = found.fastest, found.chosen
    slower = 100 * (chosen.seconds / fastest.seconds - 1)
    parts = []
    if found.shorter > 0:
        parts.append(f"a step is {100 * found.shorter:.2g} % shorter once updates count")
    if chosen.divided < fastest.divided:
        modules = "module" if chosen.divided == 1 else "modules"
        where = f"cuts divide {chosen.divided} {modules} instead of {fastest.divided}"
        parts.append(where if chosen.divided else "cuts lie at borders of modules")
    if chosen.sent_bytes < fastest.sent_bytes:
        sent, more = format_bytes(chosen.sent_bytes), format_bytes(fastest.sent_bytes)
        same = "a little less than" if sent == more else f"{sent} instead of"
        parts.append(f"sends {same} {more} a step")
    return (
        f"{slower:.2g} % slower than the fastest plan found "
        f"({format_seconds(fastest.seconds)}): {'; '.join(parts)}; "
        "cut_tolerance=0 (--cut-tolerance 0) takes the fastest"
    )


def preference(
    plan: Evaluation,
    graph: OpGraph,
    tolerance: float = TOLERANCE,
    *,
    update: Update | None = None,
    fits: Fits = lambda _: True,
    seconds: float = math.inf,
) -> Preference:
    """The preferred assignment of the plan's items to its stages; the plan's own if none is better.

    Args:
        graph: of the problem's ops, with their modules.
        update: seconds that a device of speed 1 needs to update so many bytes.
        fits: whether an assignment may be used, by what the evaluator does not know (ledgers).
        seconds: of wall time that it may take, about; the work is bounded without it.  Ctrl-C
            ends it with the best so far.
    """
    total = sum(item.forward_seconds + item.backward_seconds for item in plan.problem.items)
    used = len(set(plan.stage_of))
    with Budget(seconds) as budget:
        search = Search(plan, units(graph, plan.problem, total / used), budget, update)
        own = search.choice(tuple(plan.stage_of))
        if own is None or used < 2 or tolerance <= 0:
            own = own or Choice(tuple(plan.stage_of), seconds_of(plan), 0, 0)
            return Preference(own, own)
        search.most = max(search.step(plan), own.seconds * (1 + tolerance))
        return search.run(own, tolerance, fits)


@dataclass(slots=True)
class Search:
    """Assignments of one plan's items, each evaluated once."""

    plan: Evaluation
    units: tuple[Unit, ...]
    budget: Budget
    update: Update | None
    most: float = math.inf  # seconds of what is worth to be evaluated
    seen: dict[tuple[int, ...], Choice | None] = field(default_factory=dict)

    def run(self, own: Choice, tolerance: float, fits: Fits) -> Preference:
        """See `preference`."""
        problem, used = self.plan.problem, sorted(set(self.plan.stage_of))
        most = min(REBALANCED, _evaluations(self.plan))
        cuts = simple_cuts(self.units, problem, len(used), most)
        simple = [one for cut in cuts if (one := self.choice(self._assigned(cut)))]
        before, kept = divided_before(self.units, len(problem.items)), _kept_together(problem)
        for kind in range(DIVIDED):
            borders = [p for p in range(1, len(problem.items)) if before[p] <= kind]
            self._climb([p for p in borders if p not in kept])
        fastest = self._fastest(own, fits)
        slower = [one.seconds for one in simple if one.seconds >= fastest.seconds]
        limit = min([fastest.seconds * (1 + tolerance), *slower])

        def rank(one: Choice) -> tuple[int, int, float]:
            sent = -(-one.sent_bytes * STEPS // max(1, fastest.sent_bytes))
            return one.divided, sent, one.seconds

        may = [
            one
            for one in self.seen.values()
            if one is not None
            and one.seconds <= limit
            and one.sent_bytes <= fastest.sent_bytes
            and rank(one)[:2] < rank(fastest)[:2]
            and one.seconds <= fastest.seconds * (1 + tolerance * worth(fastest, one))
        ]
        chosen = next((one for one in sorted(may, key=rank) if fits(one.stage_of)), fastest)
        return self._with_updates(Preference(fastest, chosen), simple, fits)

    def _with_updates(self, found: Preference, simple: list[Choice], fits: Fits) -> Preference:
        """The preference, or a simple cut in place of what is preferred where its step is shorter.

        It is asked of the few simple cuts that were evaluated, also when time is over: no plan may
        be slower than these.
        """
        if self.budget.stopped:
            return found
        least = self.step(self.plan.of(found.chosen.stage_of))
        for one in sorted(dict.fromkeys(simple), key=lambda one: one.seconds):
            if one.seconds >= least:
                break
            step = self.step(self.plan.of(one.stage_of))
            if step < least * (1 - ROUNDING) and fits(one.stage_of):
                least, found = step, replace(found, chosen=one)
        before = self.step(self.plan.of(found.fastest.stage_of)) if least else 0.0
        return replace(found, shorter=max(0.0, 1 - least / before) if before else 0.0)

    def step(self, plan: Evaluation) -> float:
        """Seconds of the objective with updates, of a flush with a rank each stage; else 0."""
        on, times = plan.deployment, plan.times
        if self.update is None or not (on.flush and times.straight) or on.clips:
            return 0.0
        problem, stage_of = plan.problem, plan.stage_of
        sizes = [sum(updated_sizes(problem, stage_of, s)) for s in plan.stages]
        updates = [self.update(size) / v for size, v in zip(sizes, on.speeds, strict=True)]
        return makespan(times.timing, plan.warmup, plan.m, on.schedule, updates)

    def choice(self, stage_of: tuple[int, ...]) -> Choice | None:
        """None where the assignment breaks a rule, its busiest stage alone takes too long, or time
        is over."""
        if stage_of not in self.seen:
            if self.budget.late:
                return None
            same = stage_of == tuple(self.plan.stage_of)
            one = self.plan if same else self.plan.of(stage_of)
            dropped = busiest(one) > self.most or any(one.violations())
            self.seen[stage_of] = None if dropped else Choice(
                stage_of, seconds_of(one), divided(self.units, stage_of), sent_bytes(one)
            )  # fmt: skip
        return self.seen[stage_of]

    def _fastest(self, now: Choice, fits: Fits) -> Choice:
        """The fastest that was seen and may be used."""
        faster = (
            one
            for one in self.seen.values()
            if one is not None and one.seconds < now.seconds * (1 - EQUAL)
        )
        for one in sorted(faster, key=lambda one: one.seconds):
            if fits(one.stage_of):
                return one
        return now

    def _climb(self, borders: Sequence[int]) -> None:
        """Evaluate the cut at these borders that is nearest to the plan, and better ones."""
        seconds = [item.forward_seconds + item.backward_seconds for item in self.plan.problem.items]
        sums = np.concatenate(([0.0], np.cumsum(seconds)))
        own = np.array(self.plan.stage_of)
        ends = [float(np.array(seconds)[own <= s].sum()) for s in sorted(set(self.plan.stage_of))]
        if len(borders) < len(ends) - 1:
            return
        at, cut = sums[list(borders)], list[int]()  # of each boundary its number in `borders`
        for n, end in enumerate(ends[:-1]):
            near = int(np.abs(at - end).argmin())
            low, high = (cut[-1] + 1 if cut else 0), len(borders) - len(ends) + 1 + n
            cut.append(min(max(near, low), high))
        best, moved = self.choice(self._assigned([borders[i] for i in cut])), True
        while moved and not self.budget.late and len(self.seen) < _evaluations(self.plan):
            moved = False
            for n, step in product(range(len(cut)), (-1, 1)):
                other = [i + step * (k == n) for k, i in enumerate(cut)]
                ordered = all(a < b for a, b in pairwise((-1, *other, len(borders))))
                one = self.choice(self._assigned([borders[i] for i in other])) if ordered else None
                if one is not None and (best is None or one.seconds < best.seconds * (1 - EQUAL)):
                    best, cut, moved = one, other, True

    def _assigned(self, boundaries: Sequence[int]) -> tuple[int, ...]:
        """The stage of every item where stages begin at these positions, from the second on."""
        used, n = sorted(set(self.plan.stage_of)), len(self.plan.problem.items)
        runs = pairwise((0, *boundaries, n))
        return tuple(s for s, (a, b) in zip(used, runs, strict=True) for _ in range(a, b))


def _kept_together(problem: PartitionProblem) -> set[int]:
    """Positions where a cut would divide what is to stay together."""
    return {p for group in problem.together for p in range(min(group) + 1, max(group) + 1)}


def searching(problem: PartitionProblem, seconds: float) -> float:
    """Seconds that the choice takes, about, of so many that there are."""
    least, most = (share * seconds for share in PREFERRING)
    return min(most, max(least, min(LONGEST, EACH * len(problem.items))))


def worth(fastest: Choice, other: Choice) -> float:
    """The share of the tolerance that the other may cost: all of it where it halves something."""
    pairs = (
        (other.divided, fastest.divided),
        (other.sent_bytes, fastest.sent_bytes),
    )
    return min(1.0, 2 * max(1 - now / before if before else 0.0 for now, before in pairs))


def busiest(plan: Evaluation) -> float:
    """Seconds of the objective that one stage is busy at least."""
    times, on = plan.times, plan.deployment
    busy = (f + w for f, w in zip(times.forward, times.backward, strict=True))
    per = max(one / len(ranks) for one, ranks in zip(busy, on.ranks, strict=True))
    return per * plan.m * (1 - EQUAL) if on.flush else per * (1 - EQUAL)


def sent_bytes(plan: Evaluation) -> int:
    """Bytes that cross ranks in one step, new weights of tied parameters too; gradients that
    replicas reduce are not counted, which are equal wherever the cuts are."""
    ranks = plan.deployment.ranks
    return sum(
        one.bytes * (1 if one.kind == "final" else plan.m)
        for one in plan.messages
        if ranks[one.source] != ranks[one.target]
    )


def _evaluations(plan: Evaluation) -> int:
    """Number of evaluations that the work allows: the answer must not depend on the clock."""
    size = len(plan.problem.items) + len(plan.problem.traffic)
    size += 4 * plan.m * len(plan.stages)
    if not plan.deployment.flush and not plan.times.straight:  # simulated
        size += 40 * plan.m * sum(map(len, plan.deployment.ranks))
    return max(4, WORK // size)
