"""Storages that autograd keeps of a graph, which runs once on tensors without memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdcompile.ir.execution import Lookup, run_op
from pdcompile.ir.graph import OpGraph
from pdcompile.passes import trace
from pdcompile.passes.costs.rehearsal.kept_storages import kept_storages, new_bytes, new_of
from pdcompile.passes.costs.rehearsal.live_storages import saved_storages
from pdcompile.releases.torch_internals import FakeTensor
from tests.helpers import models


def kept_really(graph: OpGraph, model: nn.Module, x: Tensor) -> dict[str, list[int]]:
    """Bytes of each storage that the ops of a model with one input save when they run."""
    lookup = Lookup(model, len(x), constants=graph.tensor_values)
    env: dict[str, Any] = {graph.inputs[0].name: x}
    free = {t.untyped_storage()._cdata for t in (x, *model.parameters(), *model.buffers())}
    found, alive = {}, []
    for op in graph.ops:
        with saved_storages() as saved:
            env[op.name] = run_op(op, env, lookup)
        alive.append(saved)
        found[op.name] = sorted(one.nbytes() for key, one in saved.items() if key not in free)
    return found


class Writes(nn.Module):
    """Writes what needs a gradient into memory that needed none, then reads its other views."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        table = torch.zeros_like(x)
        left, free = table[:, :4], table.detach()
        table += x * self.w
        written = table.clone()
        written[:, 0] = left[:, 1] * left[:, 2]
        return (left * left).sum(1) + (written * written).sum(1) + (free * 2.0).sum(1)


class Views(nn.Module):
    """Reads two tensors that share memory, and two like them that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        one, other = x * self.w, x + self.w
        shared = one.view(-1, 2, 4).transpose(1, 2) * one.view(-1, 2, 4).transpose(1, 2)
        apart = one.view(-1, 2, 4).transpose(1, 2) * other.view(-1, 2, 4).transpose(1, 2)
        wide = other[:, :1].expand(-1, 8)
        return shared.flatten(1).sum(1) + apart.contiguous().flatten(1).sum(1) + (wide * x).sum(1)


class Divides(nn.Module):
    """Has a size that is computed on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.div(x.shape[1], 2, rounding_mode="trunc")  # type: ignore[call-overload]
        return (x * self.w).view(-1, parts - 0, 2).square().flatten(1)  # type: ignore[no-any-return]


class Twice(nn.Module):
    """Reads one value twice, and then a view of it that looks the same beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.w
        return (y + y).sum(1) + (y + y.view(-1, 8)).sum(1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("build", [Writes, Views, Divides, Twice])
def test_kept_bytes_follow_writes_and_shared_memory(build: Callable[[], nn.Module]) -> None:
    model, x = build(), torch.rand(4, 8)
    graph = trace.trace(model, x)
    kept = kept_storages(graph, 4)
    assert {op: sorted(kept[op].values()) for op in kept} == kept_really(graph, model, x)


def test_modules_of_another_dtype_run() -> None:
    layers = (nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.Hardswish(), nn.Dropout(0.5))
    model, x = nn.Sequential(*layers).bfloat16(), torch.rand(2, 3, 8, dtype=torch.bfloat16)
    graph = trace.trace(model, x)
    kept = kept_storages(graph, 2)
    assert {op: sorted(kept[op].values()) for op in kept} == kept_really(graph, model, x)


@pytest.mark.parametrize("name", [pytest.param("convnet", marks=pytest.mark.slow), "gpt", "writes"])
def test_bytes_of_a_third_size_follow_from_two(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run at that size is needed, between the two and beyond them."""
    known: dict[Any, Any] = {}
    monkeypatch.setattr("pdcompile.passes.costs.rehearsal.kept_storages._cache", known)
    if name == "writes":
        graph = trace.trace(Writes(), torch.rand(4, 8))
    else:
        graph = trace.trace(getattr(models, name)(), models.batch_for(name, 4)[0])
    kept_storages(graph, 2)
    kept_storages(graph, 16)
    found = {b: new_bytes(graph, b) for b in (1, 5, 24)}
    assert len(known) == 2
    for b, of_ops in found.items():
        assert of_ops == new_of(kept_storages(graph, b))
    assert any(found[1][name] < found[5][name] < found[24][name] for name in found[5])


class Rectified(nn.Module):
    """Ops of which autograd keeps the result."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x * 2.0).tanh().softmax(-1)


def test_nothing_of_an_analysis_outlives_it() -> None:
    """A node whose saved result held the result would be a circle that no collector sees."""
    x = torch.randn(8, 16, requires_grad=True)
    graph = trace.trace(Rectified(), x)
    gc.collect()
    before = {id(one) for one in gc.get_objects() if type(one) is FakeTensor}
    kept_storages(graph, 8)
    gc.collect()
    assert not [
        one for one in gc.get_objects() if type(one) is FakeTensor and id(one) not in before
    ]
    made = torch.relu(x * 2.0)
    with saved_storages() as saved:
        held = weakref.ref(torch.relu(made))
    saved.clear()
    assert held() is None
