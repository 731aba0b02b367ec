"""Equal replicas of stages that share ranks, from compile to training: as the reference."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pdcompile.cluster import Cluster, Device
from pdcompile.errors import ConfigError, NotFoundError
from pdcompile.passes.check import check as check_schedule
from pdcompile.passes.coarsen import coarsen
from pdcompile.passes.partition.space.candidates import evaluation, violations
from pdcompile.passes.planning.plan_check import check_plan
from pdcompile.passes.schedules import warmup
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Plan
from pdcompile.problem import StageLimits
from pdcompile.problem.deployment import StageDeployment
from pdcompile.problem.space import Candidate, SearchSpace, Setting
from pdcompile.schedule.registry import KINDS
from tests.helpers import alike
from tests.helpers.alike import WORKLOAD, Call, run_verbs
from tests.helpers.cases import case
from tests.helpers.graphs import residual
from tests.helpers.launch import processes
from tests.helpers.models import batch_for, gpt, mlp, unet
from tests.helpers.whole_space import at
from tests.test_replicas_on_ranks import TORCHRUN
from tests.test_space.test_branch_and_bound import cluster_of, explored

#: four stages on two places with two replicas each
OPTIONS: dict[str, Any] = {"microbatches": 4, "max_grad_norm": 0.3,
    "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}  # fmt: skip
compiled = partial(alike.compiled, replicas=2, stages=4, cluster=Cluster.local(4), **OPTIONS)
train_alike = partial(alike.train_alike, atol=2e-5, **OPTIONS)


BUILDS: dict[str, Any] = {
    "mlp": mlp, "unet": unet, "tied": partial(gpt, tied=True), "dropout": partial(gpt, dropout=0.2),
}  # fmt: skip
SLOW = (("mlp", "interleaved"), ("dropout", "interleaved"), ("mlp", "gpipe"), ("unet", "gpipe"))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        case((name, schedule) not in SLOW, name, schedule)
        for name, schedule in itertools.product(BUILDS, ["interleaved", "zb-v", "gpipe"])
    ],
)
def test_training_is_that_of_the_reference(name: str, schedule: str) -> None:
    """Skips, tied weights, draws, clipping, fewer microbatches than replicas, evaluation, and a
    loop of one's own."""
    pipe = compiled(BUILDS[name], schedule=schedule)
    groups = [(0, 1), (2, 3)]
    assert [s.ranks for s in pipe.plan.stages] == [
        groups[place] for place in KINDS[schedule].placement(4, 2)
    ]
    train_alike(pipe, BUILDS[name], schedule=schedule)


def test_replicas_recompute() -> None:
    build = partial(gpt, layers=1, dropout=0.2)
    pipe = compiled(build, schedule="zb-v", recompute=True)
    assert all(stage.recompute for stage in pipe.plan.stages)
    train_alike(pipe, build, schedule="zb-v", sizes=(8, 8))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({"stages": None}, [(0, 1), (2, 3), (2, 3), (0, 1)]),
        ({"stages": 2, "cluster": Cluster.local(2)}, [(0, 1), (0, 1)]),
        ({"replicas": (2,) * 4, "stages": None}, [(0, 1), (2, 3), (2, 3), (0, 1)]),
        ({"cluster": "auto"}, [(0, 1), (2, 3), (2, 3), (0, 1)]),
        ({"stages": 2}, [(0, 1), (2, 3)]),
        ({"replicas": "equal", "stages": 8}, [(0,), (1,), (2,), (3,), (3,), (2,), (1,), (0,)]),
        ({"replicas": "equal", "stages": None}, [(0, 1), (2, 3), (2, 3), (0, 1)]),
    ],
)
def test_how_many_stages_and_replicas_there_are(options: Any, ranks: Any) -> None:
    """Two stages a rank where nobody says; what is open the planner decides."""
    pipe = compiled(gpt, **{"schedule": "zb-v", "max_grad_norm": None, **options})
    plan = Plan.from_json(pipe.plan.to_json())
    assert [stage.ranks for stage in plan.stages] == ranks
    assert plan.certificate.bound_seconds <= plan.certificate.objective_seconds
    x, y = batch_for("gpt", 8)
    pipe.step(x, target=y)


def test_a_bound_by_the_order_of_tasks_can_prove_a_plan_optimal() -> None:
    """One replica has two of three microbatches, whatever the cut: more than half of the work."""
    pipe = compiled(mlp, schedule="gpipe", stages=2, cluster=Cluster.local(2), microbatches=3)
    certificate = pipe.plan.certificate
    assert (certificate.status, certificate.gap) == ("optimal", 0.0)


@pytest.mark.parametrize("replicas", ["any", (2, 1), (2, 2, 1, 1)])
@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_unlike_counts_are_refused(schedule: str, replicas: Any) -> None:
    with pytest.raises(ConfigError, match="whose ranks hold several stages") as caught:
        compiled(mlp, schedule=schedule, replicas=replicas, stages=None)
    assert caught.value.remedy == "replicas=2 or 'equal', or schedule='1f1b'"


@pytest.mark.slow
def test_all_stages_of_a_rank_fit_into_its_memory() -> None:
    """Less than the fastest plan needs: another cut."""
    build = partial(gpt, layers=4, tied=True)
    free = compiled(build, schedule="zb-v").plan
    most = max(ledger.total_bytes for ledger in free.forecast.ledgers)
    plan = compiled(build, schedule="zb-v", memory=int(0.97 * most)).plan
    assert max(ledger.total_bytes for ledger in plan.forecast.ledgers) <= 0.97 * most
    with pytest.raises(NotFoundError, match="no plan of 4 stages on 4 ranks was found"):
        compiled(build, schedule="zb-v", memory=most // 3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_no_cut_beats_the_bound_and_few_the_plan(schedule: str) -> None:
    """All cuts into four stages are tried, on four devices of unlike speed."""
    graph = residual(3)
    cluster = cluster_of(*(Device(speed=speed) for speed in (2.0, 1.0, 1.0, 1.0)), rate=1e3)
    placement = KINDS[schedule].placement(4, 2)
    space = SearchSpace(
        replicas=(2,) * 4, schedules=(schedule,), microbatches=(4,), stages=4, in_order=True,
        placement=placement,
    )  # fmt: skip
    plan = explored(graph, cluster, space)
    check_plan(plan, at(graph)(4), cluster)
    check_schedule(plan)
    problem = coarsen(at(graph)(4), (StageLimits(),) * 4, num_microbatches=4)
    depths = warmup(schedule, 4, 4, (2,) * 4, placement=placement)
    ranks = tuple((2 * place, 2 * place + 1) for place in placement)
    every = []
    for cut in itertools.combinations_with_replacement(range(4), len(problem.items)):
        one = Candidate(Setting(schedule, 4), cut, (StageDeployment(2),) * 4, ranks, depths)
        if not violations(problem, cluster, one):
            every.append(evaluation(problem, cluster, one).seconds)
    found = plan.certificate
    assert found.bound_seconds <= min(every)
    assert found.objective_seconds <= 1.05 * min(every)
    assert found.objective_seconds == pytest.approx(simulate(plan).forecast.step_seconds, rel=1e-6)


def test_on_the_command_line(tmp_path: Path, call: Call) -> None:
    plan = str(tmp_path / "plan.json")
    given = ["--cluster", "1x4", "--replicas", "2", "--schedule", "zb-v", "--costs", "estimated"]
    said = run_verbs(
        call,
        ["plan", WORKLOAD, *given, "--json", "-o", plan],
        ["simulate", plan, "--json"],
        ["run", WORKLOAD, "--plan", plan, "--steps", "2", "--json"],
        ["explain", plan],
    )
    assert "zb-v: 4 stages on 4 ranks" in said


_THEIRS = '(models.mlp, "1f1b", "all"), (models.unet, "2bw", "none")'
assert _THEIRS in TORCHRUN
RANKS = (
    TORCHRUN.replace(_THEIRS, "CASES")
    .replace('schedule == "1f1b"', "True")
    .replace("replicas=REPLICAS", "replicas=2, stages=4")
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        '(models.mlp, "zb-v", "all")',
        '(models.unet, "interleaved", "last")',
        '(partial(models.gpt, tied=True), "zb-v", "last")',
    ],
)
def test_on_four_ranks(case: str, tmp_path: Path) -> None:
    run = processes(RANKS.replace("CASES", f"({case},)"), 4, tmp_path)
    assert run.code == 0, run
    assert run.output.count("equal") == 4, run
