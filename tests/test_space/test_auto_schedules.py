"""Choices of auto among all schedules, against every cut under every one of them."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import InfeasibleError, NotFoundError
from pdcompile.ir.records import SizeRange
from pdcompile.options import Options
from pdcompile.options.configuration import configure, search_space
from pdcompile.pass_runner import Listener
from pdcompile.passes.check import check as check_schedule
from pdcompile.passes.coarsen import coarsen
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.space.candidates import evaluation, violations
from pdcompile.passes.partition.space.in_turn import StagesInTurn
from pdcompile.passes.partition.space.path_bound import heaviest_path
from pdcompile.passes.partition.space.pipelines import Part, PreparedProblem
from pdcompile.passes.partition.space.seats import Seats
from pdcompile.passes.planning.branch_and_bound import PlanSearch, best_plan
from pdcompile.passes.planning.plan_check import check_plan
from pdcompile.passes.schedules import warmup
from pdcompile.plan import Plan, Training
from pdcompile.problem import PartitionProblem, StageLimits
from pdcompile.problem.constraints import Constraint, Pin
from pdcompile.problem.deployment import StageDeployment
from pdcompile.problem.space import Candidate, SearchSpace, Setting
from pdcompile.report.plan_table import explain
from pdcompile.schedule import registry
from pdcompile.schedule.registry import KINDS
from tests.helpers.graphs import chain
from tests.helpers.problems import chain_problem
from tests.helpers.whole_space import BATCH, at
from tests.test_path_bound import branched
from tests.test_round_trips import narrow_places

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
    options, where = (StageDeployment(),) * stages, tuple((rank,) for rank in placement)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "ranks", "m", "alone", "chosen"),
    [
        pytest.param(5, 3, 4, True, "zb-h1", marks=pytest.mark.slow),
        (5, 3, 4, False, "zb-v"),
        pytest.param(7, 2, 4, False, "interleaved", marks=pytest.mark.slow),
    ],
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
    check_plan(plan, graph(m), cluster)
    check_schedule(plan)
    found, every = plan.certificate, of_schedules(problem, cluster, m)
    every = {name: every[name] for name in (*ALONE, *([] if alone else SHARING))}
    assert min(every, key=lambda name: every[name] * (1 + KINDS[name].gain)) == chosen
    assert plan.training.schedule == chosen
    assert found.objective_seconds == pytest.approx(every[chosen], rel=1e-6)
    assert found.bound_seconds <= min(every.values()) * (1 + 1e-9)
    assert all(name in found.scope for name in every)
    other = {one.choice: one for one in plan.alternatives}["schedule"]
    assert other.own == chosen
    assert every[other.value] * (1 - 1e-6) <= other.step_seconds
    assert Plan.from_json(plan.to_json()) == plan
    assert re.search(rf"^schedule +{chosen} +{other.value} ", explain(plan), re.M)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("least", "schedule", "what"),
    [
        ("SPLITTING", "zb-h1", "splitting backwards"),
        ("STALENESS", "2bw", "training on old weights"),
    ],
)
def test_a_plan_that_is_not_the_fastest_says_so(
    monkeypatch: pytest.MonkeyPatch, least: str, schedule: str, what: str
) -> None:
    """No forecast has what splitting a backward may cost, nor what old weights do: such a
    schedule has to save more than that, and is named where it does not."""
    monkeypatch.setattr(registry, least, 0.9)
    graph, cluster = at(chain(5)), cluster_of(2)
    space = SearchSpace(schedules=("1f1b", schedule), microbatches=(4,), stages=2)
    problem = coarsen(graph(4), (StageLimits(),) * 2, num_microbatches=4)
    training = Training(batch_size=BATCH)
    plan = best_plan(graph, lambda _: problem, cluster, space, training, time_limit=200)
    check_plan(plan, graph(4), cluster)
    found = plan.certificate
    assert plan.training.schedule == "1f1b"
    microbatches = 4 if KINDS[schedule].stream else 1  # seconds of a stream are of one of them
    fastest = microbatches * min(every_cut(problem, cluster, schedule, 4, 1))
    assert found.fastest_seconds == pytest.approx(fastest)
    assert found.bound_seconds <= found.fastest_seconds < found.objective_seconds
    assert any(f"slower than the fastest found ({schedule}" in note for note in plan.notes)
    assert any(f"{what} has to save 90 %" in note for note in plan.notes)


def test_schedules_that_do_not_fit_are_not_named_as_slower() -> None:
    graph, training = at(chain(5)), Training(batch_size=BATCH)
    problem = coarsen(graph(8), (StageLimits(),) * 3, num_microbatches=8)
    alone = SearchSpace(schedules=("1f1b",), microbatches=(8,), stages=3)
    both = replace(alone, schedules=("1f1b", "gpipe"))

    def planned(space: SearchSpace, memory: int | None = None) -> Plan:
        cluster = replace(cluster_of(3), devices=(Device("cpu", memory),) * 3)
        return best_plan(graph, lambda _: problem, cluster, space, training)

    free = planned(alone)
    assert "gpipe" in [one.value for one in planned(both).alternatives]
    assert free.forecast is not None
    least = max(ledger.total_bytes for ledger in free.forecast.ledgers)
    plan = planned(both, int(1.1 * least))
    assert plan.training.schedule == "1f1b"
    assert "gpipe" not in [one.value for one in plan.alternatives]


def test_what_no_schedule_can_hold_is_proved() -> None:
    """Also where ranks may hold several stages: less than the parameters, gradients and optimizer
    take is enough for nobody.  That no single stage a rank fits proves nothing there."""
    graph, training = at(chain(5)), Training(batch_size=BATCH, optimizer_factor=2.0)
    problem = coarsen(graph(4), (StageLimits(),) * 2, num_microbatches=4)
    least = 4 * sum(item.trainable_bytes for item in problem.items)
    for less in (6, 0):
        device = Device("cpu", least // 2 - less // 2)
        cluster = replace(cluster_of(2), devices=(device, device))
        with pytest.raises(InfeasibleError) as caught:
            best_plan(graph, lambda _: problem, cluster, every_schedule(2, 4), training)
        assert ("whatever the schedule" in str(caught.value)) == (less > 0)
        assert isinstance(caught.value, NotFoundError) == (less == 0)


def passed(prepared: PreparedProblem) -> set[int]:
    """Items of the heaviest path."""
    model = prepared.whole
    return {item for v in heaviest_path(model) for item in model.members[v]}


def least_in_turn(
    problem: PartitionProblem,
    cluster: Cluster,
    setting: Setting,
    option: StageDeployment,
    must: set[int],
) -> float | None:
    """The least seconds of all cuts into two stages a place, each with one of some items."""
    places = len(cluster.devices) // option.replicas
    count, m = 2 * places, setting.num_microbatches
    placement = KINDS[setting.schedule].placement(count, places)
    depths = warmup(setting.schedule, count, m, (option.replicas,) * count, placement=placement)
    begins = [place * option.replicas for place in placement]
    where = tuple(tuple(range(at, at + option.replicas)) for at in begins)
    arcs = [(t.producer, c) for t in problem.traffic for c in t.consumers]
    found = []
    for cut in itertools.product(range(count), repeat=len(problem.items)):
        if any(cut[a] > cut[b] for a, b in arcs) or len({cut[i] for i in must}) < count:
            continue
        one = Candidate(setting, cut, (option,) * count, where, depths)
        if not violations(problem, cluster, one):
            found.append(evaluation(problem, cluster, one).seconds)
    return min(found, default=None)


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 10))]
)
def test_no_cut_of_ranks_with_several_stages_is_below_their_bound(block: int) -> None:
    """Cases have branches beside the chain, unlike devices, reductions, and forwards that run
    twice."""
    ratios = []
    for seed in range(100 * block, 100 * block + 100):
        r = random.Random(seed)
        problem = branched(seed)
        option, name = (
            StageDeployment(r.choice((1, 1, 2)), r.random() < 0.2),
            r.choice(("gpipe", *SHARING)),
        )
        setting, ranks = Setting(name, r.randint(1, 9)), 2 * option.replicas
        speeds = r.choice(((1.0,) * 4, (1.0, 2.0, 1.0, 0.5)))[:ranks]
        link = Level("link", ranks, r.choice((float("inf"), 3.0)), r.choice((0.0, 0.1)))
        cluster = Cluster(tuple(Device(speed=speed) for speed in speeds), (link,))
        problem = replace(
            problem, stages=(StageLimits(),) * 4, num_microbatches=setting.num_microbatches,
            objective="flush", pins=(),
        )  # fmt: skip
        prepared = PreparedProblem(problem, 1)
        least = least_in_turn(problem, cluster, setting, option, passed(prepared))
        if not least:
            continue
        space = SearchSpace(
            recompute=(option.recompute,), schedules=(name,), stages=4, in_order=True,
            placement=KINDS[name].placement(4, 2), microbatches=(setting.num_microbatches,),
            replicas=(option.replicas,) * 4,
        )  # fmt: skip
        seats = Seats(cluster, tuple(range(ranks)))
        bound = StagesInTurn(Part(prepared, space, setting, seats, (option.replicas,), 4)).bound()
        assert bound <= least * (1 + 1e-9), seed
        ratios.append(bound / least)
    assert max(ratios) > 0.6


def test_the_order_of_tasks_says_how_long_a_chain_takes() -> None:
    """The bound of 64 equal ops on four places is near the best of the first cuts."""
    for name in SHARING:
        for m in (4, 8, 16):
            problem = replace(chain_problem([1.0] * 64, 4, num_microbatches=m), objective="flush")
            space = SearchSpace(
                schedules=(name,), microbatches=(m,), stages=8, in_order=True,
                placement=KINDS[name].placement(8, 4),
            )  # fmt: skip
            cluster, setting = cluster_of(4), Setting(name, m)
            prepared = PreparedProblem(problem, 1)
            part = Part(prepared, space, setting, Seats(cluster, (0, 1, 2, 3)), (1,), 8)
            found = StagesInTurn(part)
            first = itertools.islice(found.candidates(lambda: float("inf")), 3)
            seconds = min(evaluation(problem, cluster, one).seconds for _, one in first if one)
            assert 0.85 * seconds <= found.bound() <= seconds * (1 + 1e-9), (name, m)
            assert found.bound() > 64 * m / 4  # on all devices


def test_messages_decide_where_ranks_hold_several_stages_too() -> None:
    """Equal loads send 10 s there and back in each turn; cuts by round trips go first."""
    sizes = [2 if j in (2, 6, 8) else 400 for j in range(11)]
    problem = narrow_places()
    traffic = zip(problem.traffic, sizes, strict=True)
    problem = replace(
        problem,
        traffic=tuple(replace(t, forward_bytes=n, backward_bytes=n) for t, n in traffic),
        stages=(StageLimits(),) * 4,
    )
    space = SearchSpace(
        schedules=("interleaved",), microbatches=(12,), stages=4, in_order=True,
        placement=KINDS["interleaved"].placement(4, 2),
    )  # fmt: skip
    cluster = Cluster((Device(),) * 2, (Level("link", 2, 40.0, 0.0),))
    seats, setting = Seats(cluster, (0, 1)), Setting("interleaved", 12)
    found = StagesInTurn(Part(PreparedProblem(problem, 1), space, setting, seats, (1,), 4))
    first = [one for _, one in found.candidates(lambda: 0.0) if one]
    quickest, *even = (evaluation(problem, cluster, one).seconds for one in first)
    assert [first[0].stage_of.count(s) for s in range(4)] == [3, 4, 2, 3]
    assert quickest < 0.96 * min(even)
    assert first[0].stage_of in [one.stage_of for one in found.likely()]


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
    """The stage of a number is another one where there are twice as many stages."""
    graph, cluster = at(chain(7)), cluster_of(2)
    wishes: tuple[Constraint, ...] = (Pin("linear_3", 0),)

    def planned(wishes: tuple[Constraint, ...]) -> Plan:
        problem = coarsen(graph(4), (StageLimits(),) * 2, num_microbatches=4, constraints=wishes)
        training = Training(batch_size=BATCH)
        return best_plan(graph, lambda _: problem, cluster, every_schedule(2, 4), training)

    assert "zb-v" in planned(()).certificate.scope
    assert "zb-v" not in planned(wishes).certificate.scope


def test_ranks_that_hold_several_stages_have_first_plans_too() -> None:
    graph, cluster, space = at(chain(7)), cluster_of(2), every_schedule(2, 4)
    problem = coarsen(graph(4), (StageLimits(),) * 2, num_microbatches=4)
    found: list[Candidate] = []
    with Budget(60) as budget:
        search = PlanSearch(
            graph, lambda _: problem, cluster, space, Training(batch_size=BATCH), 0, Listener(),
            budget, budget, float("inf"), 0.0,
        )  # fmt: skip
        search._branch_and_bound = lambda *_: found.extend(  # type: ignore[method-assign]
            one for _, one in search.trials.found
        )
        search.run()
    assert found[-1].shared
