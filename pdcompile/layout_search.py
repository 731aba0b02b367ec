"""The search over layouts of parts: each gets a plan, unless all of its work takes longer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from pdcompile.batch import BatchLayout
from pdcompile.errors import (
    ClusterError,
    ConfigError,
    InfeasibleError,
    LaunchError,
    NotFoundError,
    PdcompileError,
)
from pdcompile.ir.graph import Capture
from pdcompile.options import Options
from pdcompile.options.configuration import Configuration
from pdcompile.options.layouts import named
from pdcompile.pass_runner import Listener
from pdcompile.passes.partition.answer import DEFAULT_SECONDS
from pdcompile.passes.planning.search.trials import Sketched
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Alternative, Plan
from pdcompile.problem.space import Candidate
from pdcompile.units import format_seconds

CLOSE = 1.02  # times the best plan's seconds: a sketch of a layout that is still searched
SKETCH = 3.0  # seconds of search that a sketch may take at least
SKETCHING = 0.75  # of the time, until layouts are sketched
NOT_HERE = (ClusterError, ConfigError, InfeasibleError, LaunchError)  # of one layout among others


class Planned(NamedTuple):
    """A plan for one layout, and what it was made of; `whole`: the capture of whole stages."""

    options: Options
    layout: BatchLayout
    chosen: Configuration
    whole: Capture
    captured: Capture
    plan: Plan


@dataclass
class LayoutSearch:
    """Sketches of the layouts that were tried, and the plan of the best one.

    `several`: one of them may be impossible.  `whole`: the capture of whole stages, once there is
    one.  `best_seconds`: of a step, by a sketch or the plan's forecast.  `sketches`: of the present
    layout no plan is to be made.  `ideal`: its parts are to count as one device, as fast and large
    as all of them.
    """

    several: bool
    listener: Listener
    whole: Capture | None = None
    best: Planned | None = None
    best_seconds: float = inf
    sketches: bool = False
    ideal: bool = False

    def __post_init__(self) -> None:
        self._steps: dict[str, float] = {}  # seconds in each layout that has a sketch or plan
        self._bounds: dict[str, float] = {}  # of those in each that was not impossible
        self._starts: dict[str, Candidate | None] = {}  # the best candidates of sketches
        self._name = ""  # of the present layout
        self._of_split: dict[str, float] = {}  # seconds in the layout with each split before
        self._ideal = (0.0, 0.0)  # least seconds of ideal parts, and those of their best plan
        self._passed = 0  # layouts without a sketch
        self._first: PdcompileError | None = None
        self._time_limit: float | None = None
        self._spent, self._began = 0.0, inf  # seconds but for capture; when a layout began
        self._least = 0.0  # seconds that no step of the present layout can take less than
        self._making = False  # it is the best one, whose plan is to be made

    def turns(self, layouts: Sequence[Options]) -> Iterator[Options]:
        """Each layout with its share of one half of the time, then the best one with the other; the
        next best where there is no plan of it or time is left, then the first without a sketch, or
        the first that does not fit.  To divide the model counts, to capture it does not.
        """
        if not self.several:
            yield from layouts
            return
        self._time_limit = layouts[0].time_limit
        total = DEFAULT_SECONDS if self._time_limit is None else self._time_limit
        self.sketches = True
        yield from self._to_sketch(layouts, total)
        self.sketches, self._making = False, True
        known = [one for one in layouts if named(one) in self._steps]
        known.sort(key=lambda one: self._steps[named(one)])
        none = [one for one in layouts if named(one) in self._bounds.keys() - self._steps.keys()]
        known += none[:1]  # or its error
        if not known and isinstance(self._first, InfeasibleError):
            known += layouts[:1]  # for its error: no sketch looks for the memory that is enough
        for one in known:
            rest = total - self._spent
            if self.best is None:
                yield replace(one, time_limit=max(rest, total / 2))
            elif rest > total / 4 and self._close(named(one)):
                yield replace(one, time_limit=rest)

    def _to_sketch(self, layouts: Sequence[Options], total: float) -> Iterator[Options]:
        """Whole stages, then those in most parts, the best splits so far first.  What one leaves is
        for the next ones, and each may take as long as a sketch does.

        Where costs are estimated, parts that are behind even if they shared all work, fewer ones,
        and what comes late have no sketch: their bound is all work on all devices.
        """
        left, behind, counts = len(layouts), False, [*dict.fromkeys(one.parts for one in layouts)]
        for parts in (*counts[:1], *counts[:0:-1]):
            alike = [one for one in layouts if one.parts == parts]
            alike.sort(key=lambda one: self._of_split.get(one.split, inf))
            open_to = alike[0].costs == "estimated" and self.best_seconds < inf
            if open_to and parts != 1 and not (behind or self._late(total)):
                self.ideal = True
                yield replace(alike[0], time_limit=min(SKETCH, total / 2))
                self.ideal = False
                behind = self._ideal[1] > self.best_seconds * CLOSE
            for one in alike:
                if behind or self._late(total):
                    self._bounded(one, self._ideal[0])
                    self._passed += 1
                else:
                    share = (total / 2 - self._spent) / left
                    yield replace(one, time_limit=max(share, min(SKETCH, total / 2)))
                left -= 1

    def _late(self, total: float) -> bool:
        """True if a layout without a sketch is bounded, and one with it may take too long."""
        return self._ideal[0] > 0 and self._spent > SKETCHING * total

    def _close(self, name: str) -> bool:
        """True if a plan of a layout may be better than the best one, by its sketch."""
        close = self._steps.get(name, inf) < self.best_seconds * CLOSE
        return close and self._bounds[name] < self.best_seconds

    @contextmanager
    def trying(self, options: Options) -> Iterator[None]:
        """Context of planning one layout: among several it may be impossible, or a sketch."""
        self._began = inf if self.whole is None else time.monotonic()
        self._name = named(options)
        try:
            yield
        except Sketched as sketch:
            self._sketched(options, sketch)
        except NOT_HERE as error:
            if not self.several:
                raise
            if self.ideal:  # the layouts have errors of their own
                return
            if isinstance(error, NotFoundError):  # there may be one
                self._bounded(options, self._least)
            else:
                self._bounds.pop(named(options), None)  # what was sketched does not fit
            self.listener.told(f"{named(options)}: {error.message}")
            if self._first is None or self._making:
                error.message = f"{named(options)}: {error.message}; nor is there another layout"
                self._first = error
        finally:
            self._spent += max(time.monotonic() - self._began, 0.0)

    def _sketched(self, options: Options, sketch: Sketched) -> None:
        if self.ideal:
            self._ideal = self._least, sketch.seconds
            self.listener.told(f"{options.parts} parts that share all work: {sketch}")
            return
        self._bounded(options, sketch.least_seconds)
        if self.sketches and sketch.seconds < inf:
            self._steps[named(options)] = self._of_split[options.split] = sketch.seconds
            self._starts[named(options)] = sketch.best
            self.best_seconds = min(self.best_seconds, sketch.seconds)
        self.listener.told(f"{named(options)}: {sketch}")

    @property
    def elsewhere(self) -> float:
        """Seconds of a step that a plan of the present layout has to be faster than."""
        if self._making and self.best is None:
            return inf
        return self.best_seconds * (CLOSE if self.ideal else 1)

    @property
    def start(self) -> Candidate | None:
        """The best candidate of the present layout's sketch, if it has one."""
        return self._starts.get(self._name)

    def check(self, least_seconds: float) -> None:
        """Take the seconds that no step of the present layout can take less than.

        Raises:
            Sketched: the best one so far takes no longer.
        """
        self._least, self._began = least_seconds, min(self._began, time.monotonic())
        if least_seconds >= self.elsewhere:
            raise Sketched(least_seconds)

    def add(self, found: Planned) -> None:
        """Take a plan, which is the best one if its step is the shortest."""
        if not self.several:
            self.best = found
            return
        plan, name = found.plan, named(found.options)
        seconds = (plan.forecast or simulate(plan).forecast).step_seconds
        self._steps[name] = seconds
        self._bounded(found.options, plan.certificate.bound_seconds * plan.training.scale)
        self.listener.told(f"{name}: {format_seconds(seconds)} a step")
        if seconds <= self.elsewhere:
            self.best, self.best_seconds = found, seconds

    def _bounded(self, options: Options, seconds: float) -> None:
        """No plan of a layout has a shorter step."""
        self._bounds[named(options)] = max(self._bounds.get(named(options), 0.0), seconds)

    def fastest(self) -> Planned:
        """The best plan; its bound is the least of all layouts.

        Raises:
            PdcompileError: that of the first layout, where none has a plan.
        """
        if self.best is None:
            assert self._first is not None
            raise self._first
        if not self.several:
            return self.best
        plan, own = self.best.plan, named(self.best.options)
        bound, count = min(self._bounds.values()) / plan.training.scale, len(self._bounds)
        scope = f"{plan.certificate.scope}; {count} layouts of parts, alike on all stages"
        if self._passed:
            scope += f", {self._passed} of them bounded by all work on all devices"
        certificate = replace(
            plan.certificate, scope=scope,
            bound_seconds=min(bound, plan.certificate.objective_seconds),
        )  # fmt: skip
        if certificate.gap > 0:
            certificate = replace(certificate, status="feasible")
        seconds = certificate.objective_seconds * plan.training.scale
        updates = self.best_seconds - seconds
        others = sorted((s - updates, name) for name, s in self._steps.items() if name != own)
        least = [(s, f"{name}, at least") for name, s in self._bounds.items() if name != own]
        others = others or sorted(one for one in least if one[0] > seconds)  # none was tried
        rows = [Alternative("parts", own, name, s) for s, name in others[:1]]
        plan = replace(plan, certificate=certificate, alternatives=(*plan.alternatives, *rows))
        options = replace(self.best.options, time_limit=self._time_limit)
        return self.best._replace(options=options, plan=plan)
