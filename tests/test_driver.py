"""The driver: passes in order, forms on disk, and numbers that agree with each other."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pdcompile
from pdcompile import driver, planner
from pdcompile.batch import example_call
from pdcompile.driver import run_passes
from pdcompile.errors import ConfigError, InfeasibleError, PlanError
from pdcompile.options import Options
from pdcompile.pass_runner import Listener, PassRunner
from pdcompile.passes.costs.machines import KERNEL, STEP, Machine
from pdcompile.passes.planning.optimizer_state import optimizer_costs
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Training
from pdcompile.problem.constraints import CutBefore
from tests.helpers import casts, models
from tests.helpers.casts import without_casts


def compiled(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = getattr(models, name)()
    x, y = models.batch_for(model, 8, 0)
    options = {"stages": 2, "costs": "estimated", "microbatches": 4, "verify": "off"} | options
    return pdcompile.compile(model, x, example_target=y, loss_fn=models.loss_for(model), **options)


@pytest.mark.sample(1)
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "2bw"])
@pytest.mark.parametrize("name", ["unet", "gpt"])
def test_the_planner_and_the_simulator_agree(name: str, schedule: str, stages: int) -> None:
    """Both agree but for updates, which forecasts count and certificates do not.

    In a stream, stages with tied weights have theirs at another time of a minibatch than others.
    """
    plan = compiled(name, schedule=schedule, stages=stages, cut_tolerance=0).plan
    assert plan.certificate.status == "optimal"
    assert plan.certificate.gap == 0
    units = plan.training.num_microbatches if schedule == "2bw" else 1
    assert plan.forecast is not None
    bare = replace(plan, stages=tuple(replace(one, update_seconds=0.0) for one in plan.stages))
    certified = plan.certificate.objective_seconds
    assert simulate(bare).forecast.step_seconds / units == pytest.approx(certified, rel=1e-6)
    updates = max(stage.update_seconds for stage in plan.stages)
    times = 2 if plan.tied and schedule == "2bw" else 1
    assert (
        certified < plan.forecast.step_seconds / units < certified + 1.001 * times * updates / units
    )


def test_an_update_takes_what_the_optimizer_moves() -> None:
    def seconds(**options: Any) -> list[float]:
        return [stage.update_seconds for stage in compiled("mlp", **options).plan.stages]

    plain = compiled("mlp", optimizer=partial(torch.optim.SGD, lr=0.1)).plan
    expected = [3 * stage.trainable_bytes / 10e9 for stage in plain.stages]
    assert [stage.update_seconds for stage in plain.stages] == pytest.approx(expected)
    sgd, adam = partial(torch.optim.SGD, lr=0.1), partial(torch.optim.Adam, foreach=False)
    first = sum(expected)
    assert sum(seconds(optimizer=sgd, max_grad_norm=1.0)) == pytest.approx(2 * first)
    assert sum(seconds(optimizer=sgd, schedule="2bw")) == pytest.approx(5 / 3 * first)
    assert sum(seconds(optimizer=adam)) == pytest.approx(19 / 3 * first)
    assert sum(seconds(optimizer=None)) == 0


@pytest.mark.parametrize("calls", [0.0, 1e-6, 1e-3])
def test_python_of_a_call_and_its_update_is_forecast_and_not_certified(
    calls: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs measured on the CPU count one call of `step` on each of two stages."""
    machine = Machine(1e12, 1e12, calls)
    monkeypatch.setattr(planner, "machine_for", lambda *_: machine)
    options: dict[str, Any] = {"costs": "measured", "refine": False, "schedule": "1f1b"}
    adam = partial(torch.optim.Adam, foreach=False)
    plan = compiled("mlp", optimizer=adam, **options).plan
    parameters = sum(len(stage.parameters) for stage in plan.stages)
    share = calls * (STEP + KERNEL * optimizer_costs(adam)[0].calls * parameters / 2)
    assert plan.training.host_seconds == pytest.approx(share)
    moved = replace(plan.training, host_seconds=0.0)
    for stage in plan.stages:
        bare = moved.update_seconds(stage.trainable_bytes, versions=False)
        assert stage.update_seconds == pytest.approx(bare + share)
    assert plan.forecast is not None
    beyond = plan.forecast.step_seconds - plan.certificate.objective_seconds
    assert beyond == pytest.approx(max(one.update_seconds for one in plan.stages), rel=0.01)
    assert compiled("mlp", optimizer=adam).plan.training.host_seconds == 0


@given(st.integers(0, 2**40), st.booleans(), st.none() | st.floats(1e6, 1e12), st.floats(0, 1))
def test_python_of_an_update_is_the_same_whatever_it_moves(
    owned: int, versions: bool, rate: float | None, host: float
) -> None:
    training = Training(step_moved=21.0, moving_seconds=1e-10)
    bare = training.update_seconds(owned, versions=versions, rate=rate)
    found = replace(training, host_seconds=host).update_seconds(owned, versions=versions, rate=rate)
    assert found == pytest.approx(bare + host)


@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_a_plan_is_found_in_no_time(schedule: str) -> None:
    plan = compiled("gpt", time_limit=0, schedule=schedule).plan
    assert len(plan.stages) == 2
    assert plan.certificate.bound_seconds <= plan.certificate.objective_seconds


def test_memory_limits_hold_by_the_ledger() -> None:
    options = {"schedule": "2bw", "stages": 3, "outputs": "none"}
    free = compiled("unet", **options).plan
    assert free.forecast is not None
    needed = max(ledger.total_bytes for ledger in free.forecast.ledgers)
    limit = needed - 2048
    plan = compiled("unet", **options, memory=limit).plan
    assert plan.forecast is not None
    assert max(ledger.total_bytes for ledger in plan.forecast.ledgers) <= limit
    assert plan.certificate.bound_seconds <= plan.certificate.objective_seconds * (1 + 1e-9)
    assert "limit" in compiled("gpt", memory="2 MB").explain()


def test_bytes_of_a_given_plan_are_those_of_its_ops() -> None:
    plan = compiled("gpt").plan
    sizes = ("saved_bytes", "workspace_bytes", "input_bytes", "output_bytes")
    less = tuple(replace(stage, **dict.fromkeys(sizes, 0)) for stage in plan.stages)
    held = [ledger.total_bytes for ledger in plan.forecast.ledgers]
    found = compiled("gpt", plan=replace(plan, stages=less)).plan
    assert [ledger.total_bytes for ledger in found.forecast.ledgers] == held
    assert any("stages[1].saved_bytes of the given plan is 0 B" in note for note in found.notes)
    with pytest.raises(PlanError, match="by this plan, and has"):
        compiled("gpt", plan=replace(plan, stages=less), memory=max(held) - 1)
    more = tuple(replace(stage, saved_bytes=10**15) for stage in plan.stages)
    assert compiled("gpt", plan=replace(plan, stages=more)).plan.stages == plan.stages
    assert compiled("gpt", plan=plan, costs="measured").plan.notes == plan.notes


def test_memory_that_only_the_formula_fits_is_infeasible() -> None:
    plan = compiled("mlp", stages=2).plan
    assert plan.forecast is not None
    ledgers = plan.forecast.ledgers
    smallest = min(ledger.total_bytes - ledger.receive_bytes for ledger in ledgers)
    with pytest.raises(InfeasibleError) as caught:
        compiled("mlp", stages=2, memory=smallest // 2)
    assert "remedy" in str(caught.value)


def test_every_form_is_written_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDCOMPILE_DUMP", str(tmp_path / "forms"))
    pipe = compiled("mlp", verify="auto")
    written = sorted(path.name for path in (tmp_path / "forms").iterdir())
    assert [name.split("_")[0] for name in written] == [
        f"{n:02d}" for n in range(1, len(written) + 1)
    ]
    stems = [name.split("_", 1)[1].split(".")[0] for name in written]
    assert stems == [
        "graph", "costs", "problem", "plan", "proof", "forecast", "sources", "verified",
    ]  # fmt: skip
    plan = pdcompile.Plan.from_json((tmp_path / "forms" / "04_plan.json").read_text())
    assert plan == pipe.plan


def test_forms_that_cannot_be_written_say_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDCOMPILE_DUMP", str(tmp_path / "file"))
    step = PassRunner()
    with pytest.raises(ConfigError, match="PDCOMPILE_DUMP"):
        step("graph", lambda: "text")


def test_steps_tell_what_runs_and_how_long() -> None:
    told: list[str] = []

    class Ear(Listener):
        def starts(self, name: str) -> None:
            told.append(f"{name} starts")

        def ended(self, name: str, seconds: float) -> None:
            told.append(f"{name} ended")
            assert seconds >= 0

    step = PassRunner(Ear())
    assert step("one", lambda: 41) == 41
    assert told == ["one starts", "one ended"]
    assert list(step.seconds) == ["one"]


def test_measuring_and_searching_tell_how_far_they_are() -> None:
    model = models.mlp()
    x, y = models.batch_for(model, 8, 0)
    parts: list[tuple[int, int]] = []
    found: list[str] = []

    class Ear(Listener):
        def part(self, done: int, total: int, what: str) -> None:
            parts.append((done, total))

        def found(self, text: str) -> None:
            found.append(text)

    run_passes(
        model,
        example_call(model, x, y),
        Options(loss_fn=models.loss_for(model), stages=3, microbatches=4, refine=False),
        None,
        PassRunner(Ear()),
    )
    assert [done for done, _ in parts] == list(range(parts[-1][1] + 1))
    assert found


def test_an_edited_plan_says_what_is_wrong_where(tmp_path: Path) -> None:
    plan = compiled("mlp").plan
    data = json.loads(plan.to_json())
    moved = data["stages"][1]["ops"].pop(0)
    data["stages"][0]["ops"].append(moved)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError) as caught:
        compiled("mlp", plan=str(path))
    assert caught.value.where
    path.write_text(plan.to_json())
    assert compiled("mlp", plan=path).plan.stages == plan.stages
    assert compiled("mlp", plan=path, stages=None).plan.stages == plan.stages


def test_a_plan_for_other_options_is_refused() -> None:
    plan = compiled("mlp").plan
    for options in (
        {"max_grad_norm": 1.0},
        {"seed": 3},
        {"loss_reduction": "sum"},
        {"schedule": "2bw"},
        {"microbatches": 2},
        {"memory": "1 kB"},
    ):
        with pytest.raises((ConfigError, PlanError), match=next(iter(options))):
            compiled("mlp", plan=plan, **options)
    for options in (
        {"time_limit": 1.0}, {"constraints": [CutBefore("layers.1")]}, {"max_staleness": 1},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="would have no effect"):
            compiled("mlp", plan=plan, **options)
    assert compiled("mlp", plan=plan, microbatches="auto").plan.stages == plan.stages


def test_costs_beside_a_plan_are_noted() -> None:
    plan = compiled("mlp").plan
    for costs, noted in (("measured", False), ("estimated", True)):
        notes = compiled("mlp", plan=plan, costs=costs).plan.notes
        assert any("costs= (--costs) has no effect" in one for one in notes) is noted


def test_microbatches_are_chosen_from_the_minibatch() -> None:
    plan = compiled("mlp", microbatches="auto").plan
    assert plan.training.num_microbatches == 8
    assert plan.certificate.scope.endswith(
        "; 8 microbatches by rule (--microbatches 2,4,8 compares)"
    )
    for chosen in ({"microbatches": 8}, {"microbatches": "auto", "recompute": "auto"}):
        assert "by rule" not in compiled("mlp", **chosen).plan.certificate.scope
    assert compiled("mlp", microbatches="auto", stages=1).plan.training.num_microbatches == 1


class Squeezes(nn.Module):
    """Leaves the dimension of samples out where there is one sample: another graph for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(256, 256) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).squeeze(0)
        out: Tensor = self.third(torch.relu(self.second(hidden)))
        return out.view(-1, 64, 256)


TWO_DEVICES = """
[[devices]]
count = 2
memory = "80 GB"

[[levels]]
name = "link"
size = 2
bandwidth = "300 GB/s"
latency = "0 us"
"""


def test_a_model_is_captured_again_where_single_samples_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first capture, with two samples, does not hold for one: the second is of one alone."""
    sizes: list[int] = []
    capture = driver.capture

    def counted(*given: Any, **options: Any) -> Any:
        sizes.append(options["microbatch_size"])
        return capture(*given, **options)

    monkeypatch.setattr("pdcompile.driver.capture", counted)
    cluster = tmp_path / "two.toml"
    cluster.write_text(TWO_DEVICES)
    torch.manual_seed(0)
    model, x, y = Squeezes(), torch.randn(4, 64, 256), torch.randn(4, 64, 256)
    loss: dict[str, Any] = {"loss_fn": nn.functional.mse_loss}
    expected = pdcompile.reference(copy.deepcopy(model), microbatches=4, **loss)
    with pytest.warns(UserWarning, match="every microbatch has to be of one sample"):
        pipe = pdcompile.compile(
            model, x, example_target=y, cluster=cluster, schedule="1f1b", recompute="auto",
            microbatches="auto", costs="estimated", verify="full", **loss,
        )  # fmt: skip
    assert sizes == [2, 1]
    assert pipe.plan.training.num_microbatches == 4
    assert len(pipe.plan.stages) == 2
    assert {one.choice for one in pipe.plan.alternatives} >= {"microbatches"}
    assert any("over all that was open" in note for note in pipe.plan.notes)
    for _ in range(2):
        assert pipe.step(x, target=y).loss == expected.step(x, target=y).loss


def test_optimizer_state_is_asked_of_the_optimizer() -> None:
    from functools import partial

    adam = compiled("mlp", optimizer=torch.optim.AdamW).plan
    plain = compiled("mlp", optimizer=partial(torch.optim.SGD, lr=0.1)).plan
    momentum = compiled("mlp", optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9)).plan
    assert [p.training.optimizer_factor for p in (plain, momentum, adam)] == [0, 1, 2]


class Casting(nn.Module):
    """Casts what is float32 already, as code for mixed precision does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.float()).float().tanh_()
        return x.double()


def test_a_pass_is_one_function_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass of docs/architecture.md: verified, and trained bit for bit as the reference."""
    captured = driver._captured
    monkeypatch.setattr(driver, "_captured", lambda *given: without_casts(captured(*given)))
    torch.manual_seed(0)
    model, x, y = Casting(), torch.randn(8, 8), torch.randn(8, 8).double()
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "microbatches": 4}
    expected = pdcompile.reference(copy.deepcopy(model), **options)
    pipe = pdcompile.compile(
        model, x, example_target=y, stages=2, costs="estimated", verify="full", **options
    )
    ops = [op for stage in pipe.plan.stages for op in stage.ops]
    assert [op for op in ops if "float" in op or "double" in op] == ["double"]
    for _ in range(3):
        assert pipe.step(x, target=y).loss == expected.step(x, target=y).loss


def test_the_page_shows_that_pass() -> None:
    page = Path(__file__).parent.parent / "docs" / "architecture.md"
    code = Path(casts.__file__).read_text().partition("CASTS = ")[2]
    shown = page.read_text().partition("   CASTS = ")[2].partition("   ```")[0]
    assert [line.strip() for line in shown.splitlines()] == [
        line.strip() for line in code.splitlines()
    ]
