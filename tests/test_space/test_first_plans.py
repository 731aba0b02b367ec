"""Large models: a plan at once, better ones told line by line, and the time limit kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.pass_runner import Listener
from pdcompile.passes.partition.space import pipelines
from pdcompile.passes.partition.space.pipelines import graph_free_ledgers
from pdcompile.passes.partition.space.search_branches import Branch
from pdcompile.passes.planning.branch_and_bound import PlanSearch
from pdcompile.passes.planning.search import trials as trials_of_search
from pdcompile.passes.planning.search.first_plans import FirstPlans
from pdcompile.passes.planning.search.trials import Trials
from pdcompile.plan import Plan
from pdcompile.problem.space import Candidate, SearchSpace
from pdcompile.schedule.registry import KINDS
from tests.helpers.clocks import TICK, ticking
from tests.helpers.graphs import chain
from tests.test_space.test_branch_and_bound import explored, step_seconds

LINE = re.compile(
    r"plan after (\S+) s: (\S+) (ns|us|ms|s) a step, gap (\S+) %: (\w+), .*microbatches, .* rank"
)


class Told(Listener):
    """Messages of a search on its plans."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def found(self, text: str) -> None:
        raise AssertionError("no cut alone is searched")

    def told(self, text: str) -> None:
        self.lines.append(text)


def searched(limit: float, told: Told, memory: int | None = None, layers: int = 400) -> Plan:
    """A chain of layers that has too many cuts to look at all, on eight devices."""
    levels = (Level("host", 4, 1e6), Level("network", 2, 1e5))
    cluster = Cluster((Device("cpu", memory),) * 8, levels)
    again = (False, True) if memory else (False,)
    space = SearchSpace("any", again, ("gpipe", "1f1b"), (4, 8), (0, 1))
    return explored(chain(layers), cluster, space, time_limit=limit, listener=told)


@pytest.mark.sample(1)
@pytest.mark.parametrize("limit", [0.5, 1.0, 2.0])
def test_the_time_limit_is_kept(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little time there is: between two looks nothing takes long."""
    clock, told = ticking(monkeypatch), Told()
    plan = searched(limit, told)
    assert clock() <= 1.05 * limit + 50 * TICK  # some of them are before the search and after it
    assert plan.certificate.seconds <= 1.05 * limit
    assert told.lines


def test_what_is_likely_to_be_fastest_is_cut_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was not cut is estimated to be faster than the best that was found."""
    estimate, likely, judge = FirstPlans._estimate, Branch.likely, FirstPlans._judge
    estimates, order, least = dict[int, float](), list[float](), list[float]()

    def estimated(self: FirstPlans, branch: Branch) -> float:
        return estimates.setdefault(id(branch), estimate(self, branch))

    def made(self: Branch, share: float) -> Iterator[Candidate]:
        order.append(estimates.pop(id(self)))
        return likely(self, share)

    def judged(self: FirstPlans, until: float) -> None:
        judge(self, until)
        least.append(self.trials.below_with_gain)
        self.trials.budget.stop()  # what is sought after these is no matter

    monkeypatch.setattr(FirstPlans, "_estimate", estimated)
    monkeypatch.setattr(Branch, "likely", made)
    monkeypatch.setattr(FirstPlans, "_judge", judged)
    ticking(monkeypatch)
    searched(500.0, Told(), layers=100)
    assert order == sorted(order)
    assert min(estimates.values(), default=float("inf")) >= least[0]


def test_every_setting_is_first_sought_in_all_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though plans of others took so much that they may lack some."""
    likely, shares = Branch.likely, dict[int, list[float]]()
    kept = list[Branch]()  # or a number might come again

    def made(self: Branch, share: float) -> Iterator[Candidate]:
        kept.append(self)
        shares.setdefault(id(self), []).append(share)
        return likely(self, share)

    monkeypatch.setattr(Branch, "likely", made)
    monkeypatch.setattr(Trials, "quick", lambda *_: False)
    monkeypatch.setattr(FirstPlans, "_bound", lambda self: self.trials.budget.stop())
    searched(10.0, Told(), 10**9, layers=100)
    assert {each[0] for each in shares.values()} == {1.0}


def test_no_plan_is_made_without_time_or_memory_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trials: Any = object.__new__(Trials)
    trials.beyond, trials.cluster, trials._made = {"1f1b": 1.02}, None, {}
    candidate: Any = SimpleNamespace(setting=SimpleNamespace(schedule="1f1b"))
    monkeypatch.setattr(Trials, "making", lambda *_: 5.0)
    monkeypatch.setattr(Trials, "_problem", lambda *_: None)
    for share, left, may in ((0.97, 6.0, True), (0.97, 4.0, False), (0.99, 6.0, False)):
        monkeypatch.setattr(trials_of_search, "timed", lambda *_, share=share: (1.0, share))
        assert trials.may_fit(candidate, left) is may


def test_the_best_plan_is_made_though_time_is_just_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the time is no reason for one that takes five times as long."""
    trials: Any = object.__new__(Trials)
    trials.found, trials.budget = [(5.0, "made"), (1.0, "best")], SimpleNamespace(spent=20, left=0)
    monkeypatch.setattr(Trials, "price", lambda _, seconds, one: seconds)
    for seconds, chosen in ((4.9, "best"), (5.1, "made")):
        making = {"made": 0.0, "best": seconds}
        monkeypatch.setattr(Trials, "making", lambda _, one, making=making: making[one])
        assert trials.chosen[1] == chosen


@pytest.mark.parametrize(("share", "stopped", "judged"), [
    (0.9, False, 1), (1.1, False, 0), (0.9, True, 0),
])  # fmt: skip
def test_one_plan_is_made_of_what_fits_by_the_estimate(
    share: float, stopped: bool, judged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One and no more, whatever the time, unless the user ends the search."""
    trials: Any = object.__new__(Trials)
    one: Any = SimpleNamespace(setting=SimpleNamespace(schedule="1f1b"))
    trials.elsewhere, trials.found, trials.beyond = float("inf"), [], {}
    trials.waiting = [(seconds, share, one) for seconds in (1.0, 2.0)]
    trials.budget = SimpleNamespace(stopped=stopped)
    monkeypatch.setattr(Trials, "over", lambda *_: True)
    monkeypatch.setattr(Trials, "filled", lambda *_: share)
    monkeypatch.setattr(Trials, "_judge", lambda self, *_: self.found.append((3.0, one)))
    assert trials.settle(0.8) == 1.0 + judged
    assert len(trials.found) == judged


@pytest.mark.parametrize(("seconds", "share", "making", "at_once"), [
    (9.0, 0.9, 2.0, True), (9.9, 0.9, 2.0, False), (9.0, 1.01, 2.0, False), (9.0, 0.9, 6.0, False),
])  # fmt: skip
def test_the_plan_of_a_much_better_candidate_is_made_at_once(
    seconds: float, share: float, making: float, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait behind looks at what is slower, until time is over."""
    trials: Any = object.__new__(Trials)
    one: Any = SimpleNamespace(setting=SimpleNamespace(schedule="1f1b"))
    trials.elsewhere, trials.found, trials.beyond = float("inf"), [(10.0, None)], {}
    trials.budget = SimpleNamespace(spent=5.0, left=15.0)
    monkeypatch.setattr(Trials, "making", lambda *_: making)
    assert trials._promises(seconds, share, one) is at_once
    trials.found = []  # the first plan is one that surely fits
    assert not trials._promises(seconds, share, one)


def test_what_lacked_memory_is_put_off_for_as_many_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fewer of them hold less, and come in their turn."""
    first: Any = object.__new__(FirstPlans)
    order = list[str]()
    room = SimpleNamespace(placement=(0,))

    def branch(name: str, schedule: str, *counts: int) -> Any:
        return SimpleNamespace(
            setting=SimpleNamespace(schedule=schedule), counts=counts, space=room,
            seats=SimpleNamespace(share=1.0), likely=lambda _: [name], name=name,
        )  # fmt: skip

    def offer(name: str) -> float:
        order.append(name)
        return 1.2 if name == "a 2" else 0.5

    first.trials = SimpleNamespace(
        sketch=False, over=lambda _: False, seen=True, some=True, offer=offer,
        below_with_gain=float("inf"), priced=lambda _: 0.0,
    )  # fmt: skip
    seconds = {"a 2": 1.0, "a 4": 1.1, "a 1": 1.2, "a any": 1.3, "b 2": 1.4, "b 8": 2.4}
    every = [
        branch("a 2", "a", 2), branch("a 4", "a", 4), branch("a 1", "a", 1),
        branch("a any", "a", 1, 2), branch("b 2", "b", 2), branch("b 8", "b", 8),
    ]  # fmt: skip
    monkeypatch.setattr(FirstPlans, "_branches", lambda _: iter(every))
    monkeypatch.setattr(FirstPlans, "_estimate", lambda _, one: seconds[one.name])
    monkeypatch.setattr(FirstPlans, "_least", lambda _, one: 0.0)
    first._judge(1.0)
    assert order == ["a 2", "a 1", "a any", "b 2", "a 4", "b 8"]


def test_plans_with_room_to_spare_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph-free ledger tells what surely fits: making a plan takes long."""
    monkeypatch.setattr(Trials, "quick", lambda *_: False)
    monkeypatch.setattr(FirstPlans, "_bound", lambda _: None)
    told = Told()
    made = list[Candidate]()

    def plan(self: Trials, candidate: Candidate) -> Plan:
        made.append(candidate)
        return whole(self, candidate)

    whole = Trials.plan
    monkeypatch.setattr(Trials, "plan", plan)
    ticking(monkeypatch)  # a busy machine would end the search at its first plan
    searched(2.0, told, 10**9, layers=100)
    assert len(told.lines) > 1
    assert len({*made}) == 1


def test_hosts_behind_slow_links_stay_idle_where_they_only_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One host is tried by itself, also of models with too many cuts to look at all."""
    levels = (Level("host", 4, 1e6), Level("network", 2, 1.0))
    cluster = Cluster((Device("cpu"),) * 8, levels)
    space = SearchSpace("any", (False,), ("1f1b",), (4,), (0,))
    ticking(monkeypatch)
    plan = explored(chain(100), cluster, space, time_limit=2.0)
    assert {rank for stage in plan.stages for rank in stage.ranks} == {0, 1, 2, 3}
    assert any("ranks 4, 5, 6, 7 stay idle" in note for note in plan.notes)


def test_no_ledger_is_made_of_what_takes_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes as long as all else; the ledgers of the plan that is chosen are looked at."""
    walked = list[Candidate]()

    def ledgers(problem: object, cluster: Cluster, candidate: Candidate) -> object:
        walked.append(candidate)
        return graph_free_ledgers(problem, cluster, candidate)  # type: ignore[arg-type]

    monkeypatch.setattr(pipelines, "graph_free_ledgers", ledgers)
    ticking(monkeypatch)
    for memory, some in ((10**12, False), (2 * 10**4, True)):
        walked.clear()
        plan = searched(2.0, Told(), memory, layers=100)
        assert bool(walked) is some
        assert plan.forecast is not None
        assert max(ledger.total_bytes for ledger in plan.forecast.ledgers) <= memory


def test_bounds_that_change_nothing_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks that hold several stages: where settings of one stage a rank are left open with a
    bound as low, no other makes a gap smaller."""
    sharpened, sharpen = list[Branch](), Branch.sharpen

    def told(self: Branch) -> None:
        sharpened.append(self)
        sharpen(self)

    monkeypatch.setattr(Branch, "sharpen", told)
    monkeypatch.setattr(PlanSearch, "_enough", lambda *_: "time was over")
    monkeypatch.setattr(FirstPlans, "_bound", lambda _: None)
    ticking(monkeypatch)
    cluster = Cluster((Device("cpu"),) * 4, (Level("host", 4, 1e9),))
    placement = KINDS["interleaved"].placement(8, 4)
    shared = SearchSpace(
        "1", (False,), ("interleaved",), (4,), stages=8, in_order=True, placement=placement
    )
    space = SearchSpace("1", (False,), ("1f1b",), (4,), sharing=(shared,))
    plan = explored(chain(100), cluster, space, time_limit=2.0)
    assert plan.certificate.gap > 0
    assert not [one for one in sharpened if one.space.placement]


@pytest.mark.slow
def test_better_plans_are_told_with_their_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    ticking(monkeypatch)
    plan = searched(10.0, told)
    found = [LINE.match(line) for line in told.lines]
    assert all(found), told.lines
    seconds = [float(one[2]) for one in found if one]
    assert all(a >= b for a, b in pairwise(seconds))
    assert all(0 <= float(one[4]) <= 100 for one in found if one)
    assert step_seconds(plan) == pytest.approx(seconds[-1], rel=1e-2)
    assert plan.certificate.gap < 0.1
    assert "dynamic program" in plan.certificate.prover
    assert len(plan.stages) >= 1
