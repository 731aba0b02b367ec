"""One row a schedule: what it takes to add one, and that its name stands nowhere else."""

from __future__ import annotations

import ast
import re
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import pdcompile
from pdcompile.cluster import Cluster
from pdcompile.errors import ScheduleError
from pdcompile.passes.check import check
from pdcompile.passes.partition.space.candidates import scheduled
from pdcompile.passes.schedules import make_stream
from pdcompile.problem.space import Setting
from pdcompile.report.plan_table import explain
from pdcompile.schedule.registry import DEFAULT, KINDS, ScheduleKind, allowed, kind_of
from tests.helpers import pairs
from tests.helpers.models import batch_for, loss_for, mlp
from tests.helpers.problems import chain_problem
from tests.helpers.schedules import make_plan
from tests.test_imports import modules
from tests.test_schedules import drawn_in, picture

PAIRS = ScheduleKind(
    "pairs",
    update="updates as eager gradient accumulation does, bit for bit",
    source="a test",
    module="tests.helpers.pairs",
    warmup="all",
)


@pytest.fixture(name="added")
def fixture_added(monkeypatch: pytest.MonkeyPatch) -> str:
    """A row more in the registry, and nothing else."""
    monkeypatch.setitem(KINDS, PAIRS.name, PAIRS)
    return PAIRS.name


def test_a_row_and_a_generator_are_a_schedule(added: str) -> None:
    """It is planned, proved, simulated, and trains bit for bit as the reference does."""
    plan = make_plan(added, 3, 4)
    assert picture(plan) == drawn_in(pairs)
    assert "in flight: at most [2, 2, 2]" in str(check(plan))
    model = mlp()
    x, y = batch_for(model, 8)
    options = {
        "loss_fn": loss_for(model), "optimizer": partial(torch.optim.AdamW, lr=0.1),
        "schedule": added, "microbatches": 4, "max_grad_norm": 0.5,
    }  # fmt: skip
    expected = pdcompile.reference(deepcopy(model), **options)
    pipe = pdcompile.compile(model, (x,), stages=2, costs="estimated", progress=False, **options)
    losses = [[one.step(x, target=y).loss.item() for _ in range(3)] for one in (expected, pipe)]
    assert losses[0] == losses[1]
    same(pipe.to_model(), expected.to_model())
    assert pipe.plan.training.schedule == added
    assert pipe.plan.forecast is not None
    assert added in explain(pipe.plan)
    loaded = pdcompile.plan.Plan.from_json(pipe.plan.to_json())
    assert loaded == pipe.plan


def same(model: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_an_unknown_schedule_is_refused_everywhere() -> None:
    for build in (
        lambda: kind_of("pairs"),
        lambda: make_stream(make_plan("pairs", 2, 2, depths=(1, 0))),
        lambda: scheduled(chain_problem([1.0], 1), Cluster.local(1), Setting("pairs", 2), (0,)),
    ):
        with pytest.raises(ScheduleError, match=f"not one of {', '.join(KINDS)}") as caught:
            build()
        assert caught.value.remedy == f'schedule="{DEFAULT}"'


def test_staleness_says_which_schedules_a_search_may_take(added: str) -> None:
    flush = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "round")
    assert allowed(0) == (*flush, added)
    assert allowed(1) == (*flush, "2bw", "round-2bw", added)
    assert allowed("any") == (*flush, "2bw", "round-2bw", "stash", "vsync", "async", added)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_a_row_is_one_file(kind: ScheduleKind) -> None:
    """The file has the row's name, a source, a golden text, and a picture in its docstring."""
    tests = Path(__file__).parent
    assert kind.module.startswith("pdcompile.passes.schedules.")
    path = modules()[kind.module]
    assert "    stage 0" in path.read_text(encoding="utf-8")
    assert (tests / "golden" / f"schedule_{kind.name}.txt").exists()
    assert re.search(r"\d{4}", kind.source)


def literals(path: Path) -> set[str]:
    """All strings of a file but docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if node.body and isinstance(node.body[0], ast.Expr)
    }
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
    }


def test_names_of_schedules_stand_in_the_registry_alone() -> None:
    words = [name for name in KINDS if name not in ("forward", "round")]  # which are words besides
    named = re.compile(rf"\b({'|'.join(map(re.escape, words))})\b")
    found = {
        name: sorted(filter(named.search, literals(path)))
        for name, path in modules().items()
        if name != "pdcompile.schedule.registry"
        if named.search(path.read_text(encoding="utf-8"))
    }
    assert {name: strings for name, strings in found.items() if strings} == {}
    registry = modules()["pdcompile.schedule.registry"]
    assert sum(bool(named.search(text)) for text in literals(registry)) >= len(words)


def test_the_guide_says_what_every_schedule_costs() -> None:
    guide = Path(__file__).parents[1] / "docs" / "schedules.md"
    for name in KINDS:
        assert guide.read_text(encoding="utf-8").count(f"\n| `{name}` | ") == 1, name


def test_auto_considers_all_but_minibatches_in_one_piece() -> None:
    assert {name for name, kind in KINDS.items() if not kind.by_planner} == {
        "stash", "vsync", "async", "forward", "round", "round-2bw",
    }  # fmt: skip
    worth = {name for name, kind in KINDS.items() if kind.gain}
    assert worth == {"zb-h1", "zb-v"} | {name for name, kind in KINDS.items() if kind.stream}
