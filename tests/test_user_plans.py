"""Plans that users give: what is not said is the plan's, what contradicts it is refused; the same
for compile, the command line and the reference."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import pdcompile
from pdcompile import Plan
from pdcompile.cluster import Cluster, Device
from pdcompile.errors import ConfigError, PlanError
from pdcompile.passes.stages import assemble
from tests.helpers import models
from tests.helpers.alike import WORKLOAD

# The package's name for it is a function of the module.
forecasts: Any = sys.modules["pdcompile.passes.costs.forecast"]

Call = Callable[..., tuple[int, str, str]]
MADE_WITH: dict[str, Any] = {
    "schedule": "2bw",
    "stages": 3,
    "microbatches": 2,
    "recompute": (True, False, False),
    "max_grad_norm": 0.5,
    "seed": 7,
    "loss_reduction": "sum",
    "outputs": "none",
}
OTHERS: dict[str, Any] = {
    "schedule": "1f1b",
    "stages": 2,
    "microbatches": 4,
    "replicas": 2,
    "recompute": False,
    "max_grad_norm": 1.0,
    "seed": 0,
    "loss_reduction": "mean",
    "linear_lr_scaling": True,
    "autocast": "bfloat16",
}


def compiled(model: torch.nn.Module | None = None, size: int = 8, **options: Any) -> Any:
    model = model or seeded()
    x, y = models.batch_for(model, size, 0)
    given = {"loss_fn": models.loss_for(model), "costs": "estimated", "verify": "off"} | options
    return pdcompile.compile(model, x, example_target=y, **given)


def seeded() -> torch.nn.Module:
    torch.manual_seed(0)
    return models.gpt(layers=1)


@pytest.fixture(scope="module")
def plan() -> Plan:
    with compiled(**MADE_WITH) as pipe:
        return pipe.plan  # type: ignore[no-any-return]


def test_what_is_not_said_is_the_plans(plan: Plan) -> None:
    """The same training, to the last bit, of the pipeline and of the reference."""
    one, other = seeded(), seeded()
    batches = [models.batch_for(one, 8, i) for i in range(3)]
    again = compiled(one, plan=plan)
    assert again.plan.training == plan.training
    assert again.plan.stages == plan.stages
    expected = pdcompile.reference(other, plan=plan, loss_fn=models.loss_for(other))
    losses = [
        [float(each.step(x, target=y).loss) for x, y in batches] for each in (again, expected)
    ]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3
    x, y = batches[0]
    assert again.step(x, target=y).outputs is None
    again.close()


@pytest.mark.parametrize("name", OTHERS)
def test_what_contradicts_the_plan_is_refused(name: str, plan: Plan) -> None:
    """The refusal comes at once, from `compile` itself, also where it is the default of
    planning."""
    model, given = seeded(), {"plan": plan, name: OTHERS[name]}
    for refused in (pdcompile.compile, pdcompile.reference):
        with pytest.raises(ConfigError, match=f"the plan has {name}=") as caught:
            refused(model, loss_fn=models.loss_for(model), **given)  # type: ignore[operator]
        assert str(caught.value.where).startswith("plan: ")
        assert f"leave {name} out, as the plan says it" in str(caught.value.remedy)


def test_all_that_contradicts_is_named(plan: Plan) -> None:
    with pytest.raises(ConfigError) as caught:
        compiled(plan=plan, schedule="gpipe", seed=0, max_grad_norm=0.5)
    assert "leave schedule, seed out, as the plan says them" in str(caught.value.remedy)


def test_what_the_planner_would_decide_the_plan_has_decided(plan: Plan) -> None:
    auto = {"schedule": "auto", "microbatches": "auto", "replicas": "any", "recompute": "auto"}
    assert compiled(plan=plan, **auto).plan.training == plan.training
    assert compiled(plan=plan, **MADE_WITH).plan.training == plan.training


@pytest.mark.slow
def test_a_function_is_not_in_a_plan() -> None:
    plan = compiled(loss_reduction=items, stages=2).plan
    for given in (None, "mean"):
        with pytest.raises(ConfigError, match="which a plan does not hold") as caught:
            compiled(plan=plan, loss_reduction=given)
        assert "--loss-reduction FILE:FUNCTION" in str(caught.value.remedy)
    assert compiled(plan=plan, loss_reduction=items).plan.stages == plan.stages


def items(args: Any, kwargs: Any, target: Any) -> int:
    return int(target.numel())


def test_a_machine_or_an_optimizer_that_the_plan_did_not_know() -> None:
    """The limit of a device is that of `memory=`; more state of the optimizer is noted."""
    sgd, adam = (partial(kind, lr=0.1) for kind in (torch.optim.SGD, torch.optim.AdamW))
    plan = compiled(stages=2, optimizer=sgd).plan
    small = Cluster((Device("cpu", 1000),) * 2, Cluster.local(2).levels)
    with pytest.raises(PlanError, match=r"rank 0 needs .* by this plan, and has 1\.00 kB"):
        compiled(plan=plan, optimizer=sgd, cluster=small)
    for optimizer, noted in ((sgd, False), (None, False), (adam, True)):
        notes = compiled(plan=plan, optimizer=optimizer).plan.notes
        assert any("it was planned with one that keeps 0" in note for note in notes) == noted


def test_minibatches_of_another_size(plan: Plan) -> None:
    """Minibatches of one sample are among them, which is fewer than the plan has microbatches."""
    for size in (1, 4):
        with pytest.raises(PlanError, match=f"of 8 samples, and this one has {size}"):
            compiled(size=size, plan=plan)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (models.mlp(layers=8), r"MLP: op '.*' \(.*models.py:.* is on no stage"),
        (models.mlp(width=32), "MLP: parameter_bytes is .*, and the graph makes it"),
        (torch.nn.Linear(16, 16), "Linear: the parameter '.*' on stage 0 is only in the plan"),
    ],
    ids=["more layers", "wider ones", "another class"],
)
def test_a_plan_of_another_model_says_what_differs_first(
    model: torch.nn.Module, said: str, tmp_path: Path
) -> None:
    with compiled(models.mlp(), stages=2) as pipe:
        made = replace(pipe.plan, command=("net.py:build",))
    (tmp_path / "own.json").write_text(made.to_json())
    x = torch.ones(8, next(model.parameters()).shape[1])
    with pytest.raises(PlanError, match="another model: MLP of net.py:build, .* " + said) as caught:
        pdcompile.compile(
            model, loss_fn=torch.nn.functional.mse_loss, plan=tmp_path / "own.json", verify="off"
        ).prepare(x, target=x)
    assert str(caught.value.where).startswith(f"{tmp_path / 'own.json'}: stages")


def test_an_error_of_a_plan_names_its_file(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(plan.to_json())
    for given, where in ((plan, "plan"), (file, str(file))):
        with pytest.raises(PlanError) as size:
            compiled(plan=given, size=12)
        assert size.value.where == f"{where}: training.batch_size"
        with pytest.raises(ConfigError) as option:
            compiled(plan=given, seed=0)
        assert option.value.where == f"{where}: training.seed"


def test_the_command_line_does_as_compile_does(tmp_path: Path, call: Call) -> None:
    file = str(tmp_path / "plan.json")
    made_with = ("--schedule", "2bw", "--seed", "7", "--max-grad-norm", "0.5", "--microbatches")
    common = ("--cluster", "local:2", "--costs", "estimated")
    code, _, err = call("plan", WORKLOAD, *common, *made_with, "2", "-o", file)
    assert code == 0, err
    run = ("run", WORKLOAD, "--steps", "2", "--every", "1", "--json")
    found = [call(*run, *given) for given in (("--plan", file), (*common, *made_with, "2"))]
    assert [code for code, *_ in found] == [0, 0], found
    assert json.loads(found[0][1])["losses"] == json.loads(found[1][1])["losses"]
    for option, name, value in (
        ("--schedule", "schedule", "1f1b"),
        ("--seed", "seed", "0"),
        ("--microbatches", "microbatches", "4"),
        ("--stages", "stages", "1"),
        ("--replicas", "replicas", "2"),
        ("--recompute", "recompute", "on"),
        ("--max-grad-norm", "max_grad_norm", "1"),
        ("--loss-reduction", "loss_reduction", "sum"),
        ("--autocast", "autocast", "bfloat16"),
    ):
        code, _, err = call(*run, "--plan", file, option, value)
        assert (code, f"the plan has {name}=" in err) == (2, True), err


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "zb-h1"])
def test_stages_of_a_plan_are_rehearsed_again_where_it_may_be_wrong(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of this model and version knows what they hold, which takes a large model minutes."""
    made = compiled(stages=2, microbatches=2, schedule=schedule, cluster=Cluster.local(2)).plan
    again = Plan.from_json(made.to_json())
    rehearsed: list[int] = []
    real = forecasts._rehearsed

    def noted(stage: Any) -> Any:
        rehearsed.append(len(stage.calls))
        return real(stage)

    monkeypatch.setattr(forecasts, "_rehearsed", noted)
    pipe = compiled(plan=again)
    assert rehearsed == []
    assert "plan" in dict(pipe._running.compiled.pass_seconds)  # whatever takes time has a name
    assert pipe.plan.stages == made.stages
    stage = made.stages[1]
    less = replace(made, stages=(made.stages[0], replace(stage, saved_bytes=1)))
    mended = compiled(plan=less).plan
    assert len(rehearsed) >= 2
    assert mended.stages == made.stages
    assert any("stages[1].saved_bytes of the given plan is 1 B" in note for note in mended.notes)
    told: list[tuple[int, int, str]] = []
    graph = pipe._running.compiled.capture.train
    assemble.with_own_bytes(less, graph, lambda *part: told.append(part))
    assert told == [(0, 2, "stage 0"), (1, 2, "stage 1")]  # progress says "1 of 2 stages"
    rehearsed.clear()
    monkeypatch.setattr(pdcompile, "__version__", "another")
    assert compiled(plan=again).plan.stages == made.stages
    assert len(rehearsed) >= 2
