"""Claims of a search on the whole space are true: optimal, infeasible, not found, its bound.

Limits are what ranks of random plans hold, so that one plan just fits and the next does not.
"""

from __future__ import annotations

from typing import Any

import pytest

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import InfeasibleError, NotFoundError
from pdcompile.passes.partition.space.pipelines import timed
from pdcompile.passes.planning import branch_and_bound
from pdcompile.passes.planning.search import trials
from pdcompile.problem.space import SearchSpace
from tests.helpers.graphs import chain
from tests.helpers.whole_space import WholeSpace, at, explored, random_space, verdict


def three(*devices: Device, latency: float = 0.0) -> Cluster:
    return Cluster(devices, (Level("link", len(devices), 1e5, latency),))


BY_STAGE = SearchSpace("any", (False, True), ("gpipe",), (2,))


@pytest.mark.slow
def test_a_plan_that_just_does_not_fit_proves_nothing_of_the_others() -> None:
    """The fastest one of the items' sums is a few bytes too large as a plan."""
    for limit in range(384, 396):
        devices = (Device("cpu", limit), Device("cpu", 29_968), Device("cpu", 3_987, 2.0))
        case = WholeSpace(at(chain(2)), three(*devices), BY_STAGE)
        assert verdict(case) == "optimal"


@pytest.mark.slow
def test_what_was_put_off_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that are not drawn at once, because they hardly fit, count in every verdict."""

    def doubted(*case: Any) -> tuple[float, float]:
        return timed(*case)[0], 2.0

    monkeypatch.setattr(trials, "timed", doubted)
    assert {verdict(random_space(seed)) for seed in range(11, 17)} == {"optimal", "infeasible"}
    monkeypatch.setattr(branch_and_bound, "SETTLING", 0.0)
    devices = (Device("cpu", 391), Device("cpu", 29_968), Device("cpu", 3_987, 2.0))
    case = WholeSpace(at(chain(2)), three(*devices), BY_STAGE)
    assert verdict(case) == "unknown"


@pytest.mark.slow
def test_a_stage_recomputes_where_only_its_ledger_asks_for_it() -> None:
    """It fits without, by the formula: what is in flight is too much."""
    space = SearchSpace("1", (False, True), ("gpipe",), (4,), stages=2)
    free = WholeSpace(at(chain(4)), three(Device(), Device()), space)
    plan = explored(free)
    assert plan.forecast is not None
    every = sum(ledger.total_bytes for ledger in plan.forecast.ledgers)
    recomputing = set()
    for limit in range(every // 2, every * 2 // 3, every // 80):
        device = Device("cpu", limit)
        case = WholeSpace(at(chain(4)), three(device, device), space)
        if verdict(case) == "optimal":
            stages = explored(case).stages
            recomputing.add(tuple(stage.recompute for stage in stages))
    assert len(recomputing) > 2


def test_what_is_not_exhausted_is_not_called_infeasible(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best plans fit by the formula; the search ends before it has seen one that does."""
    devices = (Device("cpu", 391), Device("cpu", 29_968), Device("cpu", 3_987, 2.0))
    case = WholeSpace(at(chain(2)), three(*devices), BY_STAGE)
    for share in ("SEARCHING", "SETTLING"):
        monkeypatch.setattr(branch_and_bound, share, 0.0)
    monkeypatch.setattr(trials.Trials, "_judge", lambda *_: 2.0)  # of the first
    with pytest.raises(NotFoundError, match="time was over") as caught:
        explored(case)
    assert "not proved" in str(caught.value)
    assert "time" in (caught.value.remedy or "")


def test_without_a_plan_no_number_of_tries_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = (Device("cpu", 391), Device("cpu", 29_968), Device("cpu", 3_987, 2.0))
    monkeypatch.setattr(branch_and_bound, "MAX_TRIED", 0)
    assert verdict(WholeSpace(at(chain(2)), three(*devices), BY_STAGE)) == "feasible"


def test_a_depth_that_changes_nothing_takes_nothing_away() -> None:
    """GPipe has one depth, and a single stage too: asking for more leaves these plans."""
    deeper = SearchSpace("1", (False,), ("gpipe",), (4,), (1,))
    assert verdict(WholeSpace(at(chain(2)), three(Device(), Device()), deeper)) == "optimal"


@pytest.mark.slow
def test_the_least_memory_is_of_the_largest_device() -> None:
    """A lack of the small devices says nothing of plans on the large ones."""
    sizes = (60, 300, 500)
    case = WholeSpace(at(chain(4)), three(*(Device("cpu", size) for size in sizes)), BY_STAGE)
    with pytest.raises(InfeasibleError, match="the largest device has 500 B") as caught:
        explored(case)
    assert not isinstance(caught.value, NotFoundError)
