"""Refining: factors from measured stages, when to stop, and stages timed without a trace."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pdcompile
from pdcompile.batch import example_call, resolve_batch
from pdcompile.cli.options import Flags
from pdcompile.driver import build
from pdcompile.errors import ConfigError
from pdcompile.ir.graph import Op, OpCost, OpGraph
from pdcompile.options import Options
from pdcompile.passes.costs.machines import INSTRUCTION
from pdcompile.passes.planning.refine import (
    LEAST,
    MOST,
    ROUNDS,
    compared,
    refine,
    rescale,
    rescaled,
)
from pdcompile.passes.profile.stage_times import StageTimes, measure_stages
from pdcompile.plan import Certificate, Plan, StagePlan, Training
from pdcompile.problem import ANY_CUT
from pdcompile.problem.constraints import CutBefore
from pdcompile.workload import Workload
from tests.helpers import models

CERTIFICATE = Certificate(1.0, 1.0, "optimal", "brute force", 0.0, ANY_CUT)


def costed(seconds: Sequence[float]) -> OpGraph:
    """Ops without any data flow: refining looks at costs alone."""
    ops = tuple(
        Op(f"op{i}", "function", "torch.relu", cost=OpCost(s / 3, 2 * s / 3))
        for i, s in enumerate(seconds)
    )
    return OpGraph(True, ops, {}, (), {}, None, None, 1)


def cut_at(graph: OpGraph, *places: int) -> list[tuple[str, ...]]:
    names = [op.name for op in graph.ops]
    ends = zip((0, *places), (*places, len(names)), strict=True)
    return [tuple(names[a:b]) for a, b in ends]


def plan_of(cut: Sequence[Sequence[str]]) -> Plan:
    stages = tuple(StagePlan(k, tuple(ops), (), ranks=(k,)) for k, ops in enumerate(cut))
    return Plan("", stages, (), (), Training(), "", CERTIFICATE)


def times_of(seconds: Sequence[float]) -> tuple[StageTimes, ...]:
    return tuple(StageTimes(s / 3, 2 * s / 3) for s in seconds)


seconds = st.floats(1e-6, 1e-2)


@given(st.lists(seconds, min_size=1, max_size=6), st.floats(0.5, 2.0))
def test_a_common_factor_is_found_exactly(work: list[float], factor: float) -> None:
    graph = costed(work)
    found = rescale(graph, [(op.name,) for op in graph.ops], times_of([factor * s for s in work]))
    assert found.common == pytest.approx(factor)
    assert found.stages == pytest.approx((1.0,) * len(work))
    assert str(found).startswith(f"x {found.common:.2f}, by stage x 1.00")


@given(st.lists(st.tuples(seconds, st.floats(0.3, 3.0)), min_size=2, max_size=8))
def test_factors_are_finite_and_bounded_and_never_worse_in_all(
    stages: list[tuple[float, float]],
) -> None:
    graph = costed([s for s, _ in stages])
    cut = [(op.name,) for op in graph.ops]
    truth = times_of([s * factor for s, factor in stages])
    scale = rescale(graph, cut, truth)
    assert all(LEAST <= factor <= MOST for factor in scale.of.values())
    after = compared(rescaled(graph, scale.of), cut, truth)
    whole = math.fsum(after.measured_seconds)

    def loss(errors: Sequence[float]) -> float:
        shares = [s / whole for s in after.measured_seconds]
        return math.fsum(w * e * e for w, e in zip(shares, errors, strict=True))

    assert loss(after.errors) <= loss(compared(graph, cut, truth).errors) * 1.5 + 1e-9


def test_nothing_measured_changes_nothing() -> None:
    graph = costed([0.0, 0.0])
    scale = rescale(graph, cut_at(graph, 1), times_of([0.0, 0.0]))
    assert rescaled(graph, scale.of) == graph


def test_a_good_forecast_is_not_solved_again() -> None:
    graph = costed([1e-3] * 4)
    plan = plan_of(cut_at(graph, 2))

    def solve(graph: OpGraph) -> Plan:
        raise AssertionError("solved again")

    found = refine(plan, graph, lambda _: times_of([2.05e-3, 1.95e-3]), solve)
    assert found.plan is plan
    assert found.graph is graph
    assert len(found.rounds) == 1
    assert "off by -2 %, +3 %" in str(found)


def test_short_stages_may_be_off() -> None:
    graph = costed([1e-3, 1e-5])
    found = compared(graph, cut_at(graph, 1), times_of([1e-3, 3e-5]))
    assert found.worst == pytest.approx(0)


def test_a_bad_forecast_moves_the_cut_and_is_measured_again() -> None:
    """Ops at the end take twice what they were said to."""
    graph = costed([1e-3] * 6)
    truth = {op.name: 1e-3 if i < 3 else 2e-3 for i, op in enumerate(graph.ops)}
    measured: list[Plan] = []

    def measure(plan: Plan) -> tuple[StageTimes, ...]:
        measured.append(plan)
        return times_of([sum(truth[name] for name in stage.ops) for stage in plan.stages])

    def solve(graph: OpGraph) -> Plan:
        costs = [op.cost.forward_seconds for op in graph.ops if op.cost]
        slowest = {i: max(sum(costs[:i]), sum(costs[i:])) for i in range(1, 6)}
        return plan_of(cut_at(graph, min(slowest, key=slowest.__getitem__)))

    found = refine(plan_of(cut_at(graph, 3)), graph, measure, solve)
    assert len(found.plan.stages[0].ops) == 4
    assert len(measured) == len(found.rounds) <= ROUNDS
    assert "another cut is better now" in str(found)


def test_measuring_ends_even_when_nothing_settles() -> None:
    graph = costed([1e-3] * 4)
    cuts = [plan_of(cut_at(graph, 1 + i % 3)) for i in range(10)]
    calls: list[Plan] = []

    def measure(plan: Plan) -> tuple[StageTimes, ...]:
        calls.append(plan)
        return times_of([4e-3, 1e-3])

    refine(cuts[0], graph, measure, lambda _: cuts[len(calls)])
    assert len(calls) == ROUNDS


class Residual(nn.Module):
    """A loss of derivatives by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.scale = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_(True)
        with torch.enable_grad():
            u = self.net(x)
            (slope,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
        return (self.scale(slope - u)).square().mean()


def test_stages_that_take_gradients_in_forward_are_timed() -> None:
    model = Residual()
    flat = example_call(model, torch.randn(4, 8), None)
    done = build(model, flat, Options(stages=2, verify="off", microbatches=1, costs="estimated"))
    times = measure_stages(
        done.capture.train, done.plan, done.sources, model, flat.leaves,
        microbatch_size=4, budget_seconds=0.01,
    )  # fmt: skip
    assert all(one.forward_seconds > 0 for one in times)


@pytest.mark.parametrize("in_process", [False, True])
def test_python_of_instructions_and_messages_counts_where_it_has_a_price(in_process: bool) -> None:
    """One instruction forward and one backward, and two more at each end of each message."""
    model = models.mlp(layers=6, width=16)
    flat = example_call(model, *models.batch_for(model, 8))
    cluster = pdcompile.Cluster.local(3) if in_process else pdcompile.Cluster.parse("3")
    options = Options(loss_fn=models.loss_for(model), cluster=cluster, microbatches=2,
                      verify="off", costs="estimated")  # fmt: skip
    done = build(model, flat, options)
    times = partial(
        measure_stages, done.capture.train, done.plan, done.sources, model, flat.leaves,
        microbatch_size=4, budget_seconds=0.01,
    )  # fmt: skip
    messages = (0, 0, 0) if in_process else (1, 2, 1)
    found = times(call_seconds=1e-3)
    expected = [2e-3 * INSTRUCTION * (1 + 2 * count) for count in messages]
    assert [one.host_seconds for one in found] == pytest.approx(expected)
    for one in found:
        assert one.seconds == one.forward_seconds + one.backward_seconds + one.host_seconds
    assert {one.host_seconds for one in times()} == {0.0}


def test_timing_stages_leaves_no_trace_and_equal_stages_run_once() -> None:
    model = models.mlp(layers=8, width=16)
    x, y = models.batch_for(model, 8)
    model.register_buffer("kept", torch.zeros(1))
    before = copy.deepcopy(model.state_dict())
    next(model.parameters()).grad = gradient = torch.ones(16, 16)
    state = torch.get_rng_state()
    flat = example_call(model, x, y)
    cuts = [CutBefore(f"layers.{i}") for i in (2, 4, 6)]
    options = Options(loss_fn=models.loss_for(model), stages=4, microbatches=2, verify="off",
                      costs="estimated", constraints=cuts)  # fmt: skip
    done = build(model, flat, options)
    told: list[tuple[int, int, str]] = []
    times = measure_stages(
        done.capture.train, done.plan, done.sources, model, flat.leaves,
        microbatch_size=resolve_batch(flat).size, budget_seconds=0.01,
        progress=lambda *part: told.append(part),
    )  # fmt: skip
    assert [done for done, _, _ in told] == [0, 1, 2, 3, 4]
    assert all(one.forward_seconds > 0 and one.backward_seconds > 0 for one in times)
    assert times[1] == times[2]
    assert len({one.seconds for one in times}) == 3
    assert torch.equal(torch.get_rng_state(), state)
    assert next(model.parameters()).grad is gradient
    assert torch.equal(gradient, torch.ones(16, 16))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "convnet"])
def test_a_pipeline_says_what_was_timed_and_what_had_been(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDCOMPILE_CACHE", str(tmp_path))
    model = models.gpt(dropout=0.1, layers=2) if name == "gpt" else models.convnet()
    x, y = models.batch_for(model, 8)

    def compiled() -> pdcompile.Plan:
        pipe = pdcompile.compile(model, x, example_target=y, loss_fn=models.loss_for(model),
                                 stages=2, microbatches=4)  # fmt: skip
        assert " ".join(timed(pipe.plan).split()) in " ".join(pipe.explain().split())
        return pipe.plan

    def timed(plan: pdcompile.Plan) -> str:
        return next(one for one in plan.notes if "stages measured" in one)

    plan, again = compiled(), compiled()
    assert pdcompile.Plan.from_json(plan.to_json()) == plan
    assert "stages measured: " in timed(plan)
    assert "stages measured before (from the cache): " in timed(again)
    assert "come from the cache" in " ".join(again.notes)
    assert [stage.ops for stage in again.stages] == [stage.ops for stage in plan.stages]


def test_refining_is_left_out_where_it_cannot_be() -> None:
    model = models.mlp()
    x, y = models.batch_for(model, 8)

    def notes(**options: object) -> str:
        given = {"stages": 2, "microbatches": 4, "verify": "off"} | options
        pipe = pdcompile.compile(model, x, example_target=y,
                                 loss_fn=models.loss_for(model), **given)  # fmt: skip
        return " ".join(pipe.plan.notes)

    assert "measured" not in notes(costs="estimated")
    assert "measured" not in notes(refine=False)
    with pytest.raises(ConfigError, match="estimated"):  # before there is an example
        pdcompile.compile(model, loss_fn=models.loss_for(model), costs="estimated", refine=True)
    with pytest.raises(ConfigError, match="refine='often'"):
        notes(refine="often")
    pipe = pdcompile.compile(model, x, example_target=y, loss_fn=models.loss_for(model), stages=2,
                             costs="estimated", verify="off")  # fmt: skip
    with pytest.raises(ConfigError, match="a plan is given"):
        notes(plan=pipe.plan, microbatches="auto", refine=True)
    with pytest.raises(ConfigError, match="also decides replicas"):
        build(model, example_call(model, x, y), Options(refine=True, replicas="1"))


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("on", True), ("off", False)])
def test_the_command_line_says_when_to_refine(text: str, value: object) -> None:
    model = models.mlp()
    workload = Workload(model, models.batch_for(model, 8)[0])
    assert Flags({"refine": text}).to_options(workload).refine == value
    with pytest.raises(ConfigError, match="--refine often"):
        Flags({"refine": "often"}).to_options(workload)
