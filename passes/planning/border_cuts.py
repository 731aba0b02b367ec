"""Cuts at borders of modules: the one that a person would choose, almost as fast as the fastest.

A *unit* is one run of a module's items in the order of the model's own code (a module that is
called twice has two), if it takes no more seconds than a stage has on average: larger ones have to
be divided.  A list of modules, all of whose children are numbered, is none.  Of units inside each
other each counts, so a cut between attention and MLP divides one module, and a cut inside the
attention two.

Tried are cuts whose boundaries divide no unit, then at most one, then at most two: the dynamic
program's over positions, of which one that divides none is moved to other borders as long as steps
get shorter, updates counted.  One that is faster than what was searched is the fastest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby

import numpy as np

from pdcompile.errors import InfeasibleError
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.coarsen.items import op_seconds
from pdcompile.passes.form.module_tree import ancestors
from pdcompile.passes.partition.alternatives import seconds_of
from pdcompile.passes.partition.answer import claimed
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.chains import evenest
from pdcompile.passes.partition.model import after, between, moves, nearest, positions
from pdcompile.passes.partition.segments import Matrix, Segments
from pdcompile.passes.planning.graph_free import updated_sizes
from pdcompile.plan import Certificate
from pdcompile.plan.embedded import on_stages
from pdcompile.plan.evaluate import Evaluation
from pdcompile.problem import PartitionProblem, StageLimits
from pdcompile.units import format_bytes, format_seconds

TOLERANCE = 0.01  # where the user says nothing
KINDS = 3  # of borders: that divide no module, at most one, at most two
POSITIONS = 256  # of a kind, nearest to where the fastest plan is cut
HALF = 2.0  # the whole tolerance is worth to halve what is divided, or what is sent
EQUAL = 1e-9  # relative, of seconds

Unit = tuple[int, ...]  # items that cost something, ascending
Fits = Callable[[tuple[int, ...]], bool]
Update = Callable[[int], float]


def units(graph: OpGraph, problem: PartitionProblem, most_seconds: float) -> tuple[Unit, ...]:
    """Modules of at most so many seconds, forward and backward, that are more than one item."""
    item_of = {name: i for i, item in enumerate(problem.items) for name in item.ops}
    paths = [ancestors(op.module_path) for op in graph.ops]
    found = []
    for depth in range(max(map(len, paths), default=0)):
        at = [path[depth] if depth < len(path) else "" for path in paths]
        for path, run in groupby(range(len(at)), at.__getitem__):
            inside = [*run]
            if not path or all(_numbered(paths[i][depth + 1 :]) for i in inside):
                continue
            busy = {graph.ops[i].name: op_seconds(graph.ops[i]) for i in inside}
            items = {item_of[name] for name, seconds in busy.items() if seconds > 0}
            if len(items) > 1 and sum(busy.values()) <= most_seconds:
                found.append(tuple(sorted(items)))
    return tuple(found)


def _numbered(below: Sequence[str]) -> bool:
    return bool(below) and below[0].rpartition(".")[2].isdigit()


def divided(parts: Sequence[Unit], stage_of: Sequence[int]) -> int:
    """Number of times that cuts divide a unit: of one on three stages, twice."""
    return sum(len({stage_of[i] for i in unit}) - 1 for unit in parts)


def divided_before(parts: Sequence[Unit], num_items: int) -> list[int]:
    """Numbers of units that a cut before each item divides."""
    change = [0] * (num_items + 2)
    for unit in parts:
        change[unit[0] + 1] += 1
        change[unit[-1] + 1] -= 1
    return list(accumulate(change[: num_items + 1]))


@dataclass(frozen=True, slots=True)
class Cut:
    """An assignment that may be used, and what decides between it and others."""

    plan: Evaluation
    step: float  # seconds of the objective, with updates where these are known
    divided: int  # how often it divides a module
    sent_bytes: int  # a step


def preferred(
    found: Evaluation,
    certificate: Certificate,
    graph: OpGraph,
    tolerance: float,
    *,
    update: Update | None = None,
    fits: Fits = lambda _: True,
    seconds: float = math.inf,
) -> tuple[tuple[int, ...], Certificate, tuple[str, ...]]:
    """The assignment that a person would choose among those within `tolerance` of a search's
    answer, with its certificate, and what it saves in a note.

    The bound stays what it is; the gap is that of the preferred assignment's own objective, and
    the certificate tells how fast the fastest one is.

    Args:
        found: the search's answer, which `certificate` is of.
        graph: of the problem's ops, with their modules.
        tolerance: of the fastest assignment's step; 0: the answer as it is.
        update: seconds that a device of speed 1 needs to update so many bytes.
        fits: whether an assignment may be used, by what the evaluator does not know (ledgers).
        seconds: of wall time that it may take, about; the work is bounded without it.  Ctrl-C
            ends it with the best so far.
    """
    began, count = time.monotonic(), len(found.stages)
    unchanged = tuple(found.stage_of), certificate, ()
    if tolerance <= 0 or count < 2:
        return unchanged
    if not math.isclose(seconds_of(found), certificate.objective_seconds, rel_tol=1e-6):
        return unchanged  # what the search went by is not what is compared here
    total = sum(item.forward_seconds + item.backward_seconds for item in found.problem.items)
    with Budget(seconds) as budget:
        search = Borders(found, units(graph, found.problem, total / count), budget, update)
        own, fastest, chosen = search.choice(tolerance, fits)
    if chosen.plan is found:
        return unchanged
    known = min(own, fastest, key=lambda one: seconds_of(one.plan))
    objective, least = seconds_of(chosen.plan), seconds_of(known.plan)
    slower = objective > least * (1 + EQUAL)
    least = min(least, certificate.fastest_seconds or math.inf)
    certificate = replace(certificate, seconds=certificate.seconds + time.monotonic() - began)
    certificate = claimed(
        certificate, objective, certificate.bound_seconds, least if least < objective else None
    )
    notes = (saving(known, chosen),) if slower else ()
    return tuple(chosen.plan.stage_of), certificate, notes


def saving(fastest: Cut, chosen: Cut) -> str:
    """Costs and savings of a preferred cut, in one line."""
    objective = seconds_of(fastest.plan)
    slower = 100 * (seconds_of(chosen.plan) / objective - 1)
    parts = []
    if chosen.step < fastest.step * (1 - EQUAL):
        shorter = 100 * (1 - chosen.step / fastest.step)
        parts.append(f"a step is {shorter:.2g} % shorter once updates count")
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
        f"({format_seconds(objective)}): {'; '.join(parts)}; "
        "cut_tolerance=0 (--cut-tolerance 0) takes the fastest"
    )


@dataclass
class Borders:
    """Cuts of one plan's items at borders of modules, each evaluated once."""

    plan: Evaluation
    units: tuple[Unit, ...]
    budget: Budget
    update: Update | None = None
    seen: dict[tuple[int, ...], Cut | None] = field(default_factory=dict)

    def choice(self, tolerance: float, fits: Fits) -> tuple[Cut, Cut, Cut]:
        """The plan's own cut, the fastest one, and the preferred one.

        That one divides and sends no more than the fastest, and is slower by less than that is
        worth; of what divides no module nothing that was tried is faster, unless the fastest is.
        """
        own = self._cut(self.plan)
        simple, *_, cuts = [self._found(kind) for kind in range(KINDS)]
        faster = (one for one in cuts if one.step < own.step * (1 - EQUAL))
        fastest = next((one for one in faster if fits(tuple(one.plan.stage_of))), own)
        slower = (one.step for one in simple if one.step >= fastest.step)
        most = min(fastest.step * (1 + tolerance), next(slower, math.inf))
        least = min(seconds_of(own.plan), seconds_of(fastest.plan)) * (1 + tolerance)
        modules, sent = max(fastest.divided, 1), max(fastest.sent_bytes, 1)

        def price(one: Cut) -> float:
            share = one.divided / modules + one.sent_bytes / sent
            return one.step / fastest.step + HALF * tolerance * share

        for one in sorted((own, *cuts), key=price):
            more = one.divided > fastest.divided or one.sent_bytes > fastest.sent_bytes
            if one.step > most or more or price(one) >= price(fastest):
                continue
            within = seconds_of(one.plan) <= least
            if one is own or (within and fits(tuple(one.plan.stage_of))):
                return own, fastest, one
        return own, fastest, fastest

    def _found(self, kind: int) -> list[Cut]:
        """Every cut tried so far, with those whose boundaries divide so many units each."""
        stages, n = self.plan.stages, len(self.plan.problem.items)
        free = on_stages(self.plan.problem, len(stages))
        free = replace(free, stages=(StageLimits(),) * len(stages))
        before = divided_before(self.units, n)
        borders = [p for p in range(1, n) if before[p] <= kind]
        try:
            model = between(free, nearest(borders, self.plan.stage_of, POSITIONS))
        except InfeasibleError:
            return self._known()

        def tried(groups: tuple[int, ...] | None) -> tuple[float, tuple[int, ...]] | None:
            cut = groups and self._tried(model.items_of(groups))
            return (cut.step, groups) if cut and groups else None

        segments = Segments(model, positions(model))
        evens = [evenest(segments, table) for table in self._tables(segments, stages)]
        best = min(filter(None, map(tried, evens)), default=None)
        while best is not None and kind == 0:
            near = (after(best[1], *move) for move in moves(model.arcs, best[1], len(stages)))
            others = filter(None, map(tried, near))
            best = next((one for one in others if one[0] < best[0] * (1 - EQUAL)), None)
        return self._known()

    def _known(self) -> list[Cut]:
        return sorted(filter(None, self.seen.values()), key=lambda one: one.step)

    def _tables(self, segments: Segments, stages: Sequence[int]) -> Iterator[list[Matrix]]:
        """Seconds until each stage between two positions has updated, behind those before it and
        behind the busiest stage of the plan; and load in units of that in the plan."""
        on, owned, m = self.plan.deployment, segments.byte_tables[1], self.plan.m
        once = self.update(1 << 30) / (1 << 30) if self.update and on.flush else 0.0
        ahead = on.flush * (segments.forward + segments.backward)[0][:, None] / max(on.speeds)
        loads, own = segments.loads(on), self.plan.times.loads(m)
        last = once and m * max(own) + segments.backward[:, -1:] / max(on.speeds)
        each = [*zip(loads, stages, strict=True)]
        yield [np.maximum(ahead + m * load, last) + once * owned / on.speeds[s] for load, s in each]
        yield [load / max(own[s], 1e-12) for load, s in each]

    def _tried(self, stage_of: tuple[int, ...]) -> Cut | None:
        """None where the assignment breaks a rule, or time is over."""
        if stage_of not in self.seen:
            if self.budget.late:
                return None
            one = Evaluation(self.plan.problem, stage_of, self.plan.deployment)
            self.seen[stage_of] = None if any(one.violations()) else self._cut(one)
        return self.seen[stage_of]

    def _cut(self, plan: Evaluation) -> Cut:
        modules = divided(self.units, plan.stage_of)
        return Cut(plan, step_seconds(plan, self.update), modules, sent_bytes(plan))


def step_seconds(plan: Evaluation, update: Update | None) -> float:
    """Seconds of the objective; of a flush with a rank each stage with updates."""
    on = plan.deployment
    if not update or not update(1 << 30) or on.clips or not (on.flush and plan.times.straight):
        return seconds_of(plan)
    sizes = [sum(updated_sizes(plan.problem, plan.stage_of, s)) for s in plan.stages]
    updates = [update(size) / v for size, v in zip(sizes, on.speeds, strict=True)]
    return plan.times.makespan(plan.warmup, plan.m, updates)


def sent_bytes(plan: Evaluation) -> int:
    """Bytes that cross ranks in one step, new weights of tied parameters too; gradients that
    replicas reduce are not counted, which are equal wherever the cuts are."""
    ranks = plan.deployment.ranks
    return sum(
        one.bytes * (1 if one.kind == "final" else plan.m)
        for one in plan.messages
        if ranks[one.source] != ranks[one.target]
    )
