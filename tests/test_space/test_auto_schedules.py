"""What auto chooses among all schedules, against every cut under every one of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.ir.records import SizeRange
from pdcompile.options import Options
from pdcompile.options.configuration import configure, search_space
from pdcompile.passes.check import check as check_schedule
from pdcompile.passes.coarsen import coarsen
from pdcompile.passes.partition.space.candidates import evaluation, violations
from pdcompile.passes.partition.space.pipelines import PreparedProblem
from pdcompile.passes.partition.space.places_bound import seconds_of_places
from pdcompile.passes.partition.space.seats import Seats
from pdcompile.passes.planning.branch_and_bound import best_plan
from pdcompile.passes.schedules import warmup
from pdcompile.plan import Plan, Training, check
from pdcompile.problem import PartitionProblem, StageLimits
from pdcompile.problem.constraints import Constraint, Pin
from pdcompile.problem.space import Candidate, SearchSpace, Setting, StageOption
from pdcompile.schedule.registry import KINDS
from tests.helpers.graphs import chain
from tests.helpers.whole_space import BATCH, at, woven

ALONE = ("gpipe", "1f1b", "zb-h1")
SHARING = ("interleaved", "zb-v")


def cluster_of(ranks: int, rate: float = float("inf")) -> Cluster:
    return Cluster((Device(),) * ranks, (Level("link", ranks, rate),))


def every_schedule(ranks: int, m: int) -> SearchSpace:
    stages = 2 * ranks
    sharing = tuple(
        SearchSpace(
            schedules=(name,), microbatches=(m,), stages=stages, in_order=True,
            placement=KINDS[name].placement(stages, ranks),
        )
        for name in SHARING
    )  # fmt: skip
    return SearchSpace(schedules=ALONE, microbatches=(m,), stages=ranks, sharing=sharing)


def every_cut(
    problem: PartitionProblem, cluster: Cluster, schedule: str, m: int, per_rank: int
) -> Iterator[float]:
    """Seconds of all plans of one schedule with so many stages on each rank."""
    ranks = len(cluster.devices)
    stages = per_rank * ranks
    placement = KINDS[schedule].placement(stages, ranks)
    depths = warmup(schedule, stages, m, placement=placement if per_rank > 1 else ())
    options, where = (StageOption(),) * stages, tuple((rank,) for rank in placement)
    for cut in itertools.product(range(stages), repeat=len(problem.items)):
        one = Candidate(Setting(schedule, m), cut, options, where, depths)
        if not violations(problem, cluster, one):
            yield evaluation(problem, cluster, one).seconds


def of_schedules(problem: PartitionProblem, cluster: Cluster, m: int) -> dict[str, float]:
    """The least seconds of every schedule."""
    return {
        name: min(every_cut(problem, cluster, name, m, KINDS[name].usual), default=float("inf"))
        for name in (*ALONE, *SHARING)
    }


@pytest.mark.parametrize(
    ("layers", "ranks", "m", "alone", "chosen"),
    [(5, 3, 4, True, "zb-h1"), (5, 3, 4, False, "zb-v"), (7, 2, 4, False, "zb-v")],
)
def test_auto_takes_the_best_schedule(
    layers: int, ranks: int, m: int, alone: bool, chosen: str
) -> None:
    graph, cluster, space = at(chain(layers)), cluster_of(ranks), every_schedule(ranks, m)
    if alone:
        space = replace(space, sharing=())
    problem = coarsen(graph(m), (StageLimits(),) * ranks, num_microbatches=m)
    training = Training(batch_size=BATCH)
    plan = best_plan(graph, lambda _: problem, cluster, space, training, time_limit=200)
    check(plan, graph(m), cluster)
    check_schedule(plan)
    found, every = plan.certificate, of_schedules(problem, cluster, m)
    every = {name: every[name] for name in (*ALONE, *([] if alone else SHARING))}
    assert min(every, key=every.__getitem__) == chosen
    assert plan.training.schedule == chosen
    assert found.objective_seconds == pytest.approx(every[chosen], rel=1e-6)
    assert found.bound_seconds <= min(every.values()) * (1 + 1e-9)
    assert all(name in found.scope for name in every)
    assert plan.notes[-1].startswith(f"{chosen} chosen among schedules: ")


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 10))]
)
def test_no_cut_of_ranks_with_several_stages_is_below_their_bound(block: int) -> None:
    ratios = []
    for seed in range(10 * block, 10 * block + 10):
        r = random.Random(seed)
        graph, m, ranks = at(woven(r)), r.choice((1, 2, 4, 8)), 2
        cluster = cluster_of(ranks)
        problem = coarsen(graph(m), (StageLimits(),) * ranks, num_microbatches=m)
        prepared = PreparedProblem(problem, 1)
        for name in SHARING:
            least = min(every_cut(problem, cluster, name, m, 2), default=None)
            if least is None:
                continue
            placement = KINDS[name].placement(2 * ranks, ranks)
            bound = seconds_of_places(
                prepared, Setting(name, m), Seats(cluster, (0, 1)), 1, placement
            )
            assert bound <= least * (1 + 1e-9), (seed, name)
            ratios.append(bound / least)
    assert max(ratios) > 0.6


def test_the_space_of_auto_follows_from_the_registry() -> None:
    def space(**more: object) -> SearchSpace:
        options = Options(schedule="auto", cluster="4", costs="estimated", **more)  # type: ignore[arg-type]
        chosen = configure(options, batch_size=8, splits=True, num_ranks=None)
        return search_space(options, chosen, SizeRange())

    found = space()
    assert found.schedules == ALONE
    assert [one.schedules for one in found.sharing] == [("interleaved",), ("zb-v",)]
    assert [one.placement for one in found.sharing] == [(0, 1, 2, 3) * 2, (0, 1, 2, 3, 3, 2, 1, 0)]
    assert [one.replicas for one in space(replicas="any").sharing] == ["equal", "equal"]
    assert space(replicas=4).sharing == ()  # one place
    assert space(stages=4).sharing == ()
    assert space(max_staleness=1).schedules == (*ALONE, "2bw")


def test_numbered_stages_leave_one_a_rank() -> None:
    """Of twice as many stages the one of that number is another."""
    graph, cluster = at(chain(7)), cluster_of(2)
    wishes: tuple[Constraint, ...] = (Pin("linear_3", 0),)

    def planned(wishes: tuple[Constraint, ...]) -> Plan:
        problem = coarsen(graph(4), (StageLimits(),) * 2, num_microbatches=4, constraints=wishes)
        training = Training(batch_size=BATCH)
        return best_plan(graph, lambda _: problem, cluster, every_schedule(2, 4), training)

    assert "zb-v" in planned(()).certificate.scope
    assert "zb-v" not in planned(wishes).certificate.scope
