"""Profiles: measured on copies, equal ops once, saved and checked strictly."""

from __future__ import annotations

import copy
import math
from functools import cache

import pytest
import torch
from torch import nn

from pdcompile.batch import example_call, resolve_batch
from pdcompile.errors import ConfigError, CostError
from pdcompile.ir.graph import Affine, OpGraph
from pdcompile.passes import trace
from pdcompile.passes.costs import CostedOp, GraphIndex
from pdcompile.passes.profile import Entry, Profile, measure, structural_key
from tests.helpers import models
from tests.helpers.costed import profile
from tests.helpers.graphs import GraphBuilder, chain


@cache
def captured(name: str = "convnet") -> tuple[nn.Module, OpGraph]:
    model: nn.Module = getattr(models, name)()
    inputs, target = models.batch_for(model, 4)
    flat = example_call(model, inputs, target)
    loss = models.loss_for(model)
    found = trace.capture(model, flat, resolve_batch(flat), loss, microbatch_size=4)
    return model, found.train


def test_estimated_costs_run_nothing() -> None:
    graph = profile(chain(3, costs=False), None, microbatch_size=4, costs="estimated")
    costs = [op.cost for op in graph.ops]
    assert all(cost is not None and cost.origin == "estimated" for cost in costs)
    assert all(cost is not None and cost.microbatch_size == 4 for cost in costs)


def test_measuring_leaves_model_and_generator_alone() -> None:
    model, graph = captured()
    before = copy.deepcopy(model.state_dict())
    grads = [p.grad for p in model.parameters()]
    state = torch.random.get_rng_state()
    calls: list[int] = []
    handle = model.get_submodule("conv1").register_forward_hook(lambda *a: calls.append(1))
    try:
        found = profile(graph, model, microbatch_size=4)
    finally:
        handle.remove()
    assert calls == []
    assert torch.equal(state, torch.random.get_rng_state())
    assert [p.grad for p in model.parameters()] == grads
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for op in found.ops:
        assert op.cost is not None
        assert op.cost.origin == "measured"
        assert 0 < op.cost.forward_seconds < math.inf
        assert 0 <= op.cost.backward_seconds < math.inf
    # The first convolution takes the call's input: it has a backward for its weight alone.
    assert found.ops[0].cost is not None
    assert found.ops[0].cost.backward_seconds > 0


def test_equal_layers_are_measured_once() -> None:
    model, graph = captured("mlp")
    told: list[tuple[int, int, str]] = []
    found = measure(graph, model, microbatch_size=4, progress=lambda *a: told.append(a),
                    budget_seconds=0.05)  # fmt: skip
    targets = [entry.target for entry in found.entries]
    # The first layer's input needs no gradient, which makes it another kind of op.
    assert targets.count("torch.nn.Linear") == 2
    assert targets.count("torch.relu") == 1
    assert [done for done, _, _ in told] == list(range(len(found.entries) + 1))
    assert told[-1][:2] == (len(found.entries), len(found.entries))


def test_integer_operands_are_in_range() -> None:
    model, graph = captured("gpt")
    found = profile(graph, model, microbatch_size=4)
    origins = {op.name: op.cost.origin for op in found.ops if op.cost is not None}
    assert origins["wte"] == origins["wpe"] == origins["cross_entropy"] == "measured"
    left = [name for name, origin in origins.items() if origin != "measured"]
    assert all(name.startswith("split") for name in left), "only getitems of containers"


def test_a_meta_model_is_measured_on_memory_of_its_own() -> None:
    model, graph = captured("mlp")
    with torch.device("meta"):
        bare = models.MLP(6, 16)
    found = measure(graph, bare, microbatch_size=4, budget_seconds=0.05)
    assert "torch.nn.Linear" in [entry.target for entry in found.entries]
    assert all(p.is_meta for p in bare.parameters())
    del model


def test_what_cannot_run_alone_is_estimated() -> None:
    g = GraphBuilder()
    y = g.op("y", "no.such.Function.apply", (g.input("x"),))
    found = profile(g.build(y), None, microbatch_size=4)
    assert found.ops[0].cost is not None
    assert found.ops[0].cost.origin == "estimated"
    assert found.ops[0].cost.forward_seconds > 0


def test_opaque_modules_say_what_they_keep() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 32), nn.Sigmoid(), nn.Linear(32, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(x)
            return result

    model = nn.ModuleDict({"block": Block()})
    g = GraphBuilder()
    shapes = {f"block.{name}": tuple(p.shape) for name, p in model["block"].named_parameters()}
    weights = tuple(g.parameter(name, shape) for name, shape in shapes.items())
    y = g.op("y", "tests.Block", (g.input("x"),), kind="opaque", module="block",
             parameters=weights, saved_bytes=Affine(32 * 4))  # fmt: skip
    found = profile(g.build(y, loss=y), model, microbatch_size=4)
    assert found.ops[0].cost is not None
    assert found.ops[0].cost.origin == "measured"
    # The sigmoid's result is kept; the call's input and the weights are there anyway.
    assert found.ops[0].cost.saved_bytes == 4 * 32 * 4


def test_keys_tell_shapes_and_gradients_apart_but_not_names() -> None:
    g = GraphBuilder()
    w = g.parameter("w")
    x, wide = g.input("x"), g.input("wide", (4, 16))
    a = g.op("a", "torch.nn.functional.gelu", (x,))
    b = g.op("b", "torch.nn.functional.gelu", (a,))
    c = g.op("c", "torch.nn.functional.gelu", (wide,), shape=(4, 16))
    d = g.op("d", "torch.nn.functional.linear", (x,), parameters=(w,))
    e = g.op("e", "torch.nn.functional.gelu", (d,))
    f = g.op("f", "torch.nn.functional.gelu", (d,), kwargs=(("approximate", "tanh"),))
    graph = g.build((a, b, c, e, f), loss=e)
    index = GraphIndex.of(graph, 4)
    keys = {op.name: structural_key(CostedOp(op, index)) for op in graph.ops}
    assert keys["a"] == keys["b"]
    assert len({keys[name] for name in "acdef"}) == 5


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([Entry("k", "torch.relu", 1.0)] * 2, "appears twice"),
        ([Entry("k", "torch.relu", -1.0)], "forward_seconds is negative"),
        ([Entry("k", "torch.relu", 1.0, -1.0)], "backward_seconds is negative"),
    ],
)
def test_a_bad_profile_is_refused(entries: list[Entry], text: str) -> None:
    found = Profile(torch.__version__, "cpu", 4, tuple(entries))
    with pytest.raises(CostError, match=text):
        profile(chain(2), None, microbatch_size=4, costs=found)


def test_a_stale_profile_is_refused() -> None:
    _, graph = captured("mlp")
    found = Profile(torch.__version__, "cpu", 4, ())
    with pytest.raises(CostError, match="microbatch_size is 4, here it is 2"):
        profile(graph, None, microbatch_size=2, costs=found)
    with pytest.raises(CostError, match="torch_version"):
        profile(graph, None, microbatch_size=4, costs=Profile("1.0", "cpu", 4, ()))
    other = Profile(torch.__version__, "cpu", 4, (Entry("x", "torch.relu", 1.0),))
    with pytest.raises(CostError, match="none of this model's ops"):
        profile(graph, None, microbatch_size=4, costs=other)


def test_unknown_costs_are_refused() -> None:
    for costs in ("guessed", 3, None, "costs.json"):
        with pytest.raises(ConfigError, match="not known"):
            profile(chain(2), None, microbatch_size=4, costs=costs)
