"""Dynamic program, integer program, both together and brute force agree on random problems.

A part of what ``python benchmarks/sweep.py --count 10000`` does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
FAMILIES = ("chain", "skips", "links", "shared", "memory", "constraints", "mixed")


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The command's module, which finds its families beside it."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import sweep as module

    yield module
    for name in ("sweep", *(name for name in sys.modules if name.startswith("random_problems"))):
        sys.modules.pop(name, None)


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [20, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_agree(sweep: Any, family: str, count: int) -> None:
    found = sweep.sweep([family], count, 100_000)[family]
    assert found.problems == count
    assert not found.differences
    assert found.infeasible < 0.9 * count


@pytest.mark.parametrize(
    ("family", "seed"), [("chain", 240), ("chain", 548), ("links", 1218), ("memory", 703)]
)
def test_problems_of_which_the_solver_once_lost_the_optimum(
    sweep: Any, family: str, seed: int
) -> None:
    """CP-SAT's presolve, as a whole or some of its steps, found nothing better where there is."""
    assert sweep.sweep([family], 1, seed)[family].differences == []


def test_a_disagreement_is_reported(
    sweep: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prover that is 1 % off is found out, named with its seed, and the command fails."""
    from random_problems import straight

    def slightly_wrong(problem: Any) -> Any:
        answer = straight.by_ideals(problem)
        return answer and (answer[0], answer[1] * 1.01)

    monkeypatch.setattr(straight, "by_integer_program", slightly_wrong)
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--count", "5", "--family", "chain"])
    with pytest.raises(SystemExit) as caught:
        sweep.main()
    assert caught.value.code == 1
    assert "integer program: bound" in capsys.readouterr().out


def test_an_unknown_family_is_refused(sweep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--family", "wheels"])
    with pytest.raises(SystemExit) as caught:
        sweep.main()
    assert caught.value.code == 2


def test_brute_force_knows_the_answer(sweep: Any) -> None:
    """Two items of 3 seconds on two stages, and with both together on one."""
    from random_problems import straight

    from pdcompile.problem import Item, PartitionProblem, StageLimits, Traffic

    items = (Item("a", ("a",), 1.0, 2.0), Item("b", ("b",), 1.0, 2.0))
    problem = PartitionProblem(items, (Traffic("a", 0, (1,), 0),), (StageLimits(),) * 2)
    assert straight.brute_force(problem) == 3.0
    assert list(straight.assignments(problem)) == [(1, 1), (0, 1), (0, 0)]
    one = PartitionProblem(items, (), (StageLimits(),))
    assert straight.brute_force(one) == 6.0
