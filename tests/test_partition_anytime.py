"""The planner can be stopped at any time and then says how good its plan is at least."""

import json
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pdcompile.passes.partition.search as search
from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition import partition
from pdcompile.passes.partition.bounds import bounding_cost
from pdcompile.passes.partition.budget import Budget, OutOfTimeError
from pdcompile.passes.partition.chains import solve, straight_chains
from pdcompile.passes.partition.model import all_ideals, build, positions
from pdcompile.passes.partition.search import Search
from pdcompile.passes.partition.segments import Segments
from tests.helpers.clocks import ticking
from tests.helpers.problems import chain_problem, evaluate, gpt_problem, random_problem

ROOT = Path(__file__).parent.parent
LINE = re.compile(r"plan [\d.]+ \w+, bound [\d.]+ \w+, gap [\d.e+-]+ %")
PROGRAM = """
import json, sys
from pdcompile.passes.partition import partition
from tests.helpers.problems import gpt_problem

problem = gpt_problem(40, 16, "flush")
tell = lambda line: print(line, flush=True)
found, certificate = partition(problem, time_limit=1200, progress=tell)
print(json.dumps([found.stage_of, certificate.status, certificate.gap, certificate.seconds]))
"""


def hard_search() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize(("lines", "pause"), [(1, 0), (4, 6)])
def test_control_c_returns_the_plan_and_its_gap(lines: int, pause: float) -> None:
    """Early, while the dynamic program runs, and later, inside CP-SAT."""
    process = hard_search()
    assert process.stdout is not None
    seen = [process.stdout.readline() for _ in range(lines)]
    time.sleep(pause)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    stage_of, status, gap, seconds = json.loads(out.splitlines()[-1])
    assert all(LINE.match(line) for line in seen)
    assert evaluate(gpt_problem(40, 16, "flush"), stage_of)
    assert status == "feasible"
    assert 0 < gap < 1
    assert seconds < 1000


def test_control_c_is_handled_after_integer_and_linear_programs() -> None:
    """A process of its own runs it, which would end without a word."""
    program = """
import signal
import numpy as np
from ortools.sat.python import cp_model
from pdcompile.passes.partition.budget import Budget, minimize
from pdcompile.passes.partition.space.in_turn import any_cut

chain, speeds = (np.array([2.0, 1.0]), np.array([2.0, 1.0])), np.ones(2)
for solve in (
    lambda budget: minimize(cp_model.CpModel(), budget, lambda _: False),
    lambda budget: any_cut(lambda *_: chain, speeds, 1.0, 2.0, lambda: budget.late),
):
    with Budget(9.0) as budget:
        solve(budget)
        signal.raise_signal(signal.SIGINT)
        assert budget.stopped
print("heard")
"""
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (run.returncode, run.stdout) == (0, "heard\n"), run.stderr


def test_control_c_before_there_is_a_plan_is_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The handler that was there before is back afterwards, too."""
    before = signal.getsignal(signal.SIGINT)

    def interrupted(found: Search) -> Segments:
        signal.raise_signal(signal.SIGINT)
        return Segments(found.model, positions(found.model))

    monkeypatch.setattr(search, "cut_by_program", interrupted)
    with pytest.raises(KeyboardInterrupt):
        partition(gpt_problem(2, 2))
    assert signal.getsignal(signal.SIGINT) is before


def test_every_line_says_plan_bound_and_gap_and_they_only_improve() -> None:
    lines: list[str] = []
    _, certificate = partition(gpt_problem(6, 4), progress=lines.append)
    assert all(LINE.fullmatch(line) for line in lines)
    gaps = [float(line.split("gap ")[1].split(" ")[0]) for line in lines]
    assert gaps == sorted(gaps, reverse=True)
    assert lines[-1].endswith("gap 0 %") or gaps[-1] < 0.001
    assert certificate.gap == 0


@pytest.mark.parametrize(
    ("layers", "stages", "steps"),
    [(207, 7, set()), (201, 4, {"cut_by_program"}), (205, 8, {"cut_by_program", "_kicked"})],
)
def test_a_plan_next_to_its_bound_is_not_improved_at_length(
    layers: int, stages: int, steps: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large problem is cut coarsely first: cuts between all of its groups, and kicks after them,
    come where there is news to find."""
    called = set()

    def noted(owner: object, name: str) -> None:
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (called.add(name), plain(*args))[1])

    noted(search, "cut_by_program")
    noted(search.LocalSearch, "_kicked")
    problem = chain_problem([1.0] * layers, stages, objective="flush", num_microbatches=8)
    found = search.solve(problem, Budget(20.0, patience=0.1))
    assert called == steps
    assert found.near == ("_kicked" not in steps)


def test_a_bound_alone_is_told_as_well() -> None:
    """A bound has nothing to be compared with where there is no plan; with one, each counts."""
    problem = chain_problem([1.0, 2.0, 3.0], 2)
    lines: list[str] = []
    state = Search(problem, build(problem), Budget(), progress=lines.append)
    state.prove(1.0, "relaxation")
    assert lines == []
    state.offer((0, 0, 1))
    state.prove(2.0, "relaxation")
    state.prove(2.0, "relaxation")
    assert lines == [
        "plan 3.00 s, bound 1.00 s, gap 67 %",
        "plan 3.00 s, bound 2.00 s, gap 33 %",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("time_limit", [0.0, 0.3])
@pytest.mark.parametrize("objective", ["bottleneck", "flush"])
def test_large_problems_end_in_time(
    objective: str, time_limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing long begins after the end: no matrices of 1,500 ideals, no integer program."""
    ticking(monkeypatch)
    problem = gpt_problem(400, 32, objective)
    built: list[int] = []

    def counted(model: object, ideals: list[int], **rest: bool) -> Segments:
        built.append(len(ideals))
        return Segments(model, ideals, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(search, "Segments", counted)
    monkeypatch.setattr(search, "IntegerProgram", lambda *_: pytest.fail("began too late"))
    found, certificate = partition(problem, time_limit=time_limit)
    assert found == evaluate(problem, found.stage_of)
    assert 0 < certificate.bound_seconds < found.objective
    assert time_limit > 0 or max(built) <= search.FIRST + 1


def test_parts_of_the_search_look_at_the_budget() -> None:
    model = build(gpt_problem(12, 4))
    over = Budget(0)
    assert all_ideals(model, 10**6, lambda: over.late) is None
    segments = Segments(model, positions(model))
    with pytest.raises(OutOfTimeError):
        solve(segments, bounding_cost(segments), over)


def test_however_many_chains_are_equally_good_one_is_found_soon() -> None:
    """The program's own chain is the last one, once too many were begun."""
    model = build(gpt_problem(12, 4))
    chains = straight_chains(Segments(model, positions(model)), lambda _: np.zeros((1, 1)))
    chains.solve()
    every = [*chains.enumerate(lambda: math.inf, 50)]
    assert len(every) < 50
    assert every[-1] == (0.0, chains.best())


def test_a_part_ends_with_the_whole() -> None:
    whole = Budget(math.inf)
    part = Budget(math.inf, within=whole)
    assert not part.late
    whole.stop()
    assert part.late
    assert part.left == 0
    assert not whole.deadline <= time.monotonic()


def test_patience_ends_with_as_much_work_without_news_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = [0.0]
    monkeypatch.setattr(time, "process_time", lambda: work[0])
    budget, still = Budget(1e6, patience=2.0), Budget(1e6)
    work[0] = 5.0
    assert not budget.late  # there was no news to wait after
    for begin, ends in ((0.5, 2.5), (2.0, 4.0), (3.5, 7.0)):
        work[0] = begin
        assert not budget.late
        budget.news()
        work[0] = ends - 0.25
        assert not budget.late
        assert budget.waits == pytest.approx(0.25)
        assert budget.left > 1e5  # shares of the time are of the whole
        work[0] = ends
        assert budget.late
        assert not still.late


@pytest.mark.parametrize(("given", "least"), [({}, 1.9), ({"time_limit": 60.0}, 50.0)])
def test_an_integer_program_goes_on_as_long_as_there_is_news(
    given: dict[str, float], least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has more time after a bound that is 0.1 % better, but for a limit, and none without."""
    runs: list[float] = []

    class Slow:
        def __init__(self, _: object, upper: float) -> None:
            self.upper = upper

        def below(self, _: float) -> None: ...
        def add_path(self, *_: object) -> None: ...

        def solve(
            self, budget: Budget, _: int, offer: object, bounded: Callable[[float], None]
        ) -> tuple[float, None]:
            runs.append(min(budget.left, budget.waits))
            share = (0.99, 0.995, 0.9955, 0.9)[len(runs) - 1]
            bounded(share * self.upper)
            return share * self.upper, None

    monkeypatch.setattr(search, "IntegerProgram", Slow)
    for clock in "monotonic", "process_time":
        monkeypatch.setattr(time, clock, lambda: 0.0)  # however slow the machine is
    _, certificate = partition(gpt_problem(12, 8, "flush"), **given)
    assert certificate.status == "feasible"
    assert certificate.gap == pytest.approx(0.0045)
    assert len(runs) == 3
    assert all(least < seconds <= given.get("time_limit", 20.0) for seconds in runs[1:])
    monkeypatch.setattr(search, "SOLVABLE", 1)  # what is large for the patience takes a limit
    runs.clear()
    partition(gpt_problem(12, 8, "flush"), **given)
    assert bool(runs) == bool(given)


def test_equal_seeds_give_equal_answers() -> None:
    for number in (3, 17, 40):
        problem = random_problem(number, 7)
        try:
            first = partition(problem, seed=5)
        except InfeasibleError:
            continue
        second = partition(problem, seed=5)
        assert first[0] == second[0]
        assert first[1].bound_seconds == second[1].bound_seconds
        assert first[1].prover == second[1].prover
