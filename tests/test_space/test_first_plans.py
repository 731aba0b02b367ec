"""Large models: a plan at once, better ones told line by line, and the time limit kept."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.pass_runner import Listener
from pdcompile.passes.partition.space.candidates import evaluation
from pdcompile.passes.partition.space.line_plans import LinePlans
from pdcompile.passes.planning.search.trials import Trials
from pdcompile.plan import Plan
from pdcompile.problem.space import Candidate, SearchSpace, Setting
from tests.helpers.graphs import chain
from tests.test_space.test_branch_and_bound import explored, step_seconds

TICK = 0.001  # seconds from one look at the clock to the next
LINE = re.compile(
    r"(\S+) s: (\S+) (ns|us|ms|s) a step, gap (\S+) %: (\w+), .*microbatches, .* rank"
)


class Told(Listener):
    """What a search says of its plans."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def found(self, text: str) -> None:
        raise AssertionError("no cut alone is searched")

    def better(self, text: str) -> None:
        self.lines.append(text)


class Judged(Exception):
    """The search comes to its first candidate."""


def searched(limit: float, told: Told, memory: int | None = None) -> Plan:
    """A chain of layers that has too many cuts to look at all, on eight devices."""
    levels = (Level("host", 4, 1e6), Level("network", 2, 1e5))
    cluster = Cluster((Device("cpu", memory),) * 8, levels)
    again = (False, True) if memory else (False,)
    space = SearchSpace("any", again, ("gpipe", "1f1b"), (4, 8), (0, 1))
    return explored(chain(400), cluster, space, time_limit=limit, listener=told)


def ticking(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """A clock that goes on only when somebody looks at it."""
    now = [0.0]

    def monotonic() -> float:
        now[0] += TICK
        return now[0]

    monkeypatch.setattr(time, "monotonic", monotonic)
    return lambda: now[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("limit", [0.5, 1.0, 2.0])
def test_the_time_limit_is_kept(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little time there is: between two looks nothing takes long."""
    clock, told = ticking(monkeypatch), Told()
    plan = searched(limit, told)
    assert clock() <= 1.05 * limit + 50 * TICK  # some of them are before the search and after it
    assert plan.certificate.seconds <= 1.05 * limit
    assert told.lines


def test_every_setting_has_a_plan_before_one_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the first that is judged is the fastest of them."""
    seconds, first = dict[Candidate, float](), LinePlans.first

    def made(self: LinePlans, setting: Setting, *rest: Any) -> Candidate | None:
        if (found := first(self, setting, *rest)) is not None:
            of = evaluation(self.prepared.problem, self.cluster, found)
            seconds[found] = of.seconds
        return found

    def judged(_: Trials, candidate: Candidate, **__: Any) -> bool:
        raise Judged(candidate)

    monkeypatch.setattr(LinePlans, "first", made)
    monkeypatch.setattr(Trials, "offer", judged)
    ticking(monkeypatch)
    with pytest.raises(Judged) as caught:
        searched(500.0, Told())
    layouts = {(one.setting, one.options[0].replicas) for one in seconds}
    assert len(layouts) == 4 * 6  # equal replicas x (schedule, microbatches, warm-up)
    assert seconds[caught.value.args[0]] == min(seconds.values())


@pytest.mark.slow
def test_better_plans_are_told_with_their_gaps() -> None:
    told = Told()
    plan = searched(60.0, told)
    found = [LINE.match(line) for line in told.lines]
    assert all(found), told.lines
    seconds = [float(one[2]) for one in found if one]
    assert all(a >= b for a, b in pairwise(seconds))
    assert all(0 <= float(one[4]) <= 100 for one in found if one)
    assert step_seconds(plan) == pytest.approx(seconds[-1], rel=1e-2)
    assert plan.certificate.gap < 0.1
    assert plan.certificate.prover == "dynamic program over ranks, along a path"
    assert len(plan.stages) >= 1
