"""Several stages a rank, from compile to training: bit for bit as the reference."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pdcompile.cluster import Cluster
from pdcompile.errors import ConfigError, InfeasibleError, LaunchError, NotFoundError, PlanError
from pdcompile.options import Options
from pdcompile.options.configuration import chosen_schedule, machines
from pdcompile.plan import Plan
from pdcompile.schedule.registry import KINDS
from tests.helpers import alike
from tests.helpers.alike import COMMON, WORKLOAD, Call, run_verbs
from tests.helpers.launch import processes
from tests.helpers.models import batch_for, gpt, loss_for, mlp, unet
from tests.helpers.pipelines import by_hand

OPTIONS: dict[str, Any] = {"schedule": "interleaved", "microbatches": 4}
compiled, train_alike = partial(alike.compiled, **OPTIONS), partial(alike.train_alike, **OPTIONS)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("schedule", "per_rank"),
    [("interleaved", 2), pytest.param("interleaved", 3, marks=pytest.mark.slow), ("zb-v", 2)],
)
@pytest.mark.parametrize("build", [mlp, unet, partial(gpt, tied=True), partial(gpt, dropout=0.2)],
                         ids=["mlp", "unet", "tied", "dropout"])  # fmt: skip
def test_in_one_process(build: Any, schedule: str, per_rank: int, ranks: int) -> None:
    """Skips, tied weights, dropout, clipping, short minibatches."""
    stages, model = ranks * per_rank, build()
    if stages > 6 and not isinstance(build, partial):
        return  # these have fewer ops than that
    x, y = batch_for(model, 8)
    placed = KINDS[schedule].placement(stages, ranks)
    options = {**alike.OPTIONS, **OPTIONS, "schedule": schedule, "loss_fn": loss_for(model)}
    pipe = by_hand(model, stages, (x,), y, ranks=placed, **options).prepare()
    train_alike(pipe, build, schedule=schedule)


@pytest.mark.sample(1)
@pytest.mark.parametrize("extra", [1, 3])
def test_an_extra_warm_up_on_layers_that_do_not_divide(extra: int) -> None:
    """Three blocks on two ranks with two stages each."""
    schedule, build = f"interleaved+{extra}", partial(gpt, layers=3)
    pipe = compiled(build, stages=4, cluster=Cluster.local(2), schedule=schedule)
    assert pipe.plan.training.schedule == schedule
    blocks = [
        {f.split(".")[1] for f in one.parameters if "blocks" in f} for one in pipe.plan.stages
    ]
    assert len({*map(len, blocks)}) > 1
    train_alike(pipe, build, schedule=schedule)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "gpipe"])
@pytest.mark.parametrize(
    ("build", "stages", "ranks"),
    [
        (mlp, 4, 2),
        pytest.param(partial(gpt, tied=True), 6, 3, marks=pytest.mark.slow),
        (unet, 6, 2),
    ],
)
def test_what_is_planned_runs(build: Any, stages: int, ranks: int, schedule: str) -> None:
    """The plan is read back, refuses what it should, says what it is, and trains."""
    if not KINDS[schedule].holds(stages // ranks):
        stages = 2 * ranks
    options = {"schedule": schedule, "stages": stages, "cluster": Cluster.local(ranks)}
    placed = KINDS[schedule].placement(stages, ranks)
    pipe = compiled(build, **options)
    plan = Plan.from_json(pipe.plan.to_json())
    assert [stage.ranks for stage in plan.stages] == [(rank,) for rank in placed]
    found = plan.certificate
    assert plan.forecast is not None
    assert found.status == "feasible"
    assert 0 < found.bound_seconds <= found.objective_seconds
    assert plan.problem is not None
    assert "on ranks " + "-".join(map(str, placed)) in found.scope
    train_alike(pipe, build, schedule=schedule)
    again = compiled(build, schedule=schedule, plan=plan)
    assert again.plan.stages == plan.stages
    claimed = replace(found, status="optimal", fastest_seconds=None)
    with pytest.raises(PlanError, match='"optimal" with a gap of'):
        compiled(build, schedule=schedule, plan=replace(plan, certificate=claimed))


def test_two_stages_a_rank_where_nobody_says() -> None:
    pipe = compiled(mlp, cluster=Cluster.local(2))
    assert [stage.ranks for stage in pipe.plan.stages] == [(0,), (1,), (0,), (1,)]
    alone = compiled(mlp, stages=2)
    assert [stage.ranks for stage in alone.plan.stages] == [(0,), (0,)]
    assert alone.plan.certificate.status == "optimal"  # one device, which is always busy


@pytest.mark.slow
def test_more_stages_a_rank_idle_less() -> None:
    def seconds(schedule: str, stages: int) -> float:
        pipe = compiled(partial(gpt, layers=4), schedule=schedule, stages=stages,
                        cluster=Cluster.local(2), max_grad_norm=None)  # fmt: skip
        assert pipe.plan.forecast is not None
        return pipe.plan.forecast.step_seconds

    assert seconds("interleaved", 4) < seconds("interleaved", 2) == seconds("1f1b", 2)


@pytest.mark.slow
def test_all_stages_of_a_rank_fit_into_its_memory() -> None:
    """Less than the fastest plan needs: another cut; still less: stages that recompute."""
    cluster = Cluster.local(2)
    options: dict[str, Any] = {"stages": 4, "cluster": cluster, "time_limit": 20}
    free = compiled(partial(gpt, layers=4, tied=True), **options).plan
    assert free.forecast is not None
    most = max(ledger.total_bytes for ledger in free.forecast.ledgers)
    for share, recompute in ((0.98, False), (0.85, "auto")):
        limit = int(share * most)
        plan = compiled(
            partial(gpt, layers=4, tied=True), memory=limit, recompute=recompute, **options
        ).plan
        assert plan.forecast is not None
        assert max(ledger.total_bytes for ledger in plan.forecast.ledgers) <= limit
        assert any(stage.recompute for stage in plan.stages) == (recompute == "auto")
    with pytest.raises(NotFoundError, match="no plan of 4 stages on 2 ranks was found"):
        compiled(partial(gpt, layers=4, tied=True), memory=most // 2, **options)
    with pytest.raises(InfeasibleError, match="whatever the schedule"):
        compiled(partial(gpt, layers=4, tied=True), memory=most // 3, **options)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
@pytest.mark.parametrize(
    "recompute", [(True, False, False, True), pytest.param(True, marks=pytest.mark.slow)]
)
def test_stages_of_a_rank_recompute(recompute: Any, schedule: str) -> None:
    pipe = compiled(partial(gpt, dropout=0.2), stages=4, recompute=recompute, schedule=schedule)
    again = recompute if isinstance(recompute, tuple) else (True,) * 4
    assert tuple(stage.recompute for stage in pipe.plan.stages) == again
    train_alike(pipe, partial(gpt, dropout=0.2), schedule=schedule)


@pytest.mark.parametrize(
    ("options", "processes", "error", "remedy"),
    [
        ({"stages": 3}, None, ConfigError, "a multiple of 2 stages, or cluster=Cluster.local(3)"),
        ({"stages": 3}, 2, LaunchError, "a multiple of 2 stages runs under schedule gpipe or"),
        ({"stages": 3, "cluster": "1x2"}, None, ConfigError, "a multiple of 2 stages runs under"),
        ({"stages": 6, "schedule": "zb-v"}, 2, LaunchError,
         "3 stages on each run under schedule gpipe or interleaved"),
        ({"stages": 6, "schedule": "zb-v", "cluster": "1x2"}, None, ConfigError,
         "3 stages on each run under schedule gpipe or interleaved"),
        ({"stages": 4, "cluster": "1x2", "schedule": "1f1b"}, None, ConfigError,
         "2 stages on each run under schedule gpipe or interleaved"),
        ({"replicas": "any"}, None, ConfigError, "replicas=2 or 'equal', or schedule='1f1b'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    options: dict[str, Any], processes: int | None, error: type[Exception], remedy: str
) -> None:
    asked = Options(**{"schedule": "interleaved", **options})
    with pytest.raises(error) as caught:
        machines(replace(asked, schedule=chosen_schedule(asked)), processes)
    assert remedy in str(caught.value)


def test_on_the_command_line(tmp_path: Path, call: Call) -> None:
    plan = str(tmp_path / "plan.json")
    given = ["--cluster", "1x2", "--stages", "4", "--schedule", "interleaved"]
    said = run_verbs(
        call,
        ["plan", WORKLOAD, *given, "--costs", "estimated", "--json", "-o", plan],
        ["run", WORKLOAD, "--plan", plan, "--steps", "2", "--json"],
        ["explain", plan],
    )
    assert "interleaved: 4 stages on 2 ranks" in said


TORCHRUN = (
    COMMON
    + """
build, options = partial(models.gpt, tied=True), dict(schedule=SCHEDULE, microbatches=4)
pipe = compiled(build, stages=4, outputs="last", **options)
train_alike(pipe, build, **options)
assert pipe.stages == (rank, rank + 2 if SCHEDULE == "interleaved" else 3 - rank)
pipe.close()
say("equal")
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [pytest.param("interleaved", marks=pytest.mark.slow), "zb-v"])
def test_on_two_ranks(schedule: str, tmp_path: Path) -> None:
    run = processes(f"SCHEDULE = {schedule!r}\n{TORCHRUN}", 2, tmp_path)
    assert run.code == 0, run
    assert run.output.count("equal") == 2, run
