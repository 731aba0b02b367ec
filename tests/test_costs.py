"""Costs from shapes: equal to torch's own counts where torch counts, closed forms in b."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from pdcompile.batch import example_call, resolve_batch
from pdcompile.ir.execution import Lookup, run_op
from pdcompile.ir.graph import Attr, OpGraph
from pdcompile.passes import trace
from pdcompile.passes.costs import (
    CostedOp,
    GraphIndex,
    calibrate,
    estimate,
)
from pdcompile.passes.costs.flops import rule_of
from pdcompile.passes.costs.rehearsal.kept_storages import kept_storages
from pdcompile.passes.costs.rehearsal.live_storages import saved_storages
from tests.helpers import models
from tests.helpers.graphs import B, GraphBuilder, random_graphs

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: models.gpt(layers=1),
    "gpt with dropout": lambda: models.gpt(layers=1, dropout=0.1),
    "mlp": models.mlp,
    "convnet": models.convnet,
    "unet": models.unet,
}


@cache
def captured(name: str) -> tuple[nn.Module, OpGraph]:
    """The model and its train graph with the loss, for microbatches of any size."""
    model = MODELS[name]()
    inputs, target = models.batch_for(model, 8)
    flat = example_call(model, inputs, target)
    loss = models.loss_for(model)
    found = trace.capture(model, flat, resolve_batch(flat), loss, microbatch_size=4)
    return model, found.train


def kept_bytes(model: nn.Module, batch_size: int) -> int:
    """Bytes of all storages that autograd keeps of one forward, parameters and inputs excepted."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    inputs, target = models.batch_for(model, batch_size)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = models.loss_for(model)(model(inputs), target)
    free = {
        t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), inputs, target)
    }
    assert loss.requires_grad
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in free)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("b", [4, 3])
def test_saved_bytes_are_what_autograd_keeps(name: str, b: int) -> None:
    model, graph = captured(name)
    costs = estimate(graph, microbatch_size=b)
    assert sum(cost.saved_bytes for cost in costs) == kept_bytes(model, b)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_flops_equal_the_flop_counter(name: str) -> None:
    model, graph = captured(name)
    inputs, target = models.batch_for(model, 4)
    with FlopCounterMode(display=False) as counter:
        models.loss_for(model)(model(inputs), target)
    index = GraphIndex.of(graph, 4)
    # Flash attention on the CPU runs where nothing is dropped: not all releases of torch count it.
    counts_it = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in flop_registry
    unknown = ("scaleddotproductattention",) if name == "gpt" and not counts_it else ()
    calls = [CostedOp(op, index) for op in graph.ops]
    costs = estimate(graph, microbatch_size=4)
    counted = sum(
        cost.flops
        for call, cost in zip(calls, costs, strict=True)
        if rule_of(call).product and call.name not in unknown
    )
    assert counted == counter.get_total_flops() > 0


def test_no_backward_and_nothing_saved_outside_of_autograd() -> None:
    g = GraphBuilder()
    x, w = g.input("x"), g.parameter("w")
    frozen = g.parameter("frozen", trainable=False)
    ema = g.op("ema", "torch.nn.functional.linear", (x,), parameters=(w,), grad_enabled=False)
    y = g.op("y", "torch.nn.functional.gelu", (ema,), parameters=(frozen,))
    z = g.op("z", "torch.nn.Linear", (y,), kind="module", module="z",
             parameters=(g.parameter("z.weight"),))  # fmt: skip
    graph = g.build(z, loss=z)
    ema_cost, y_cost, z_cost = estimate(graph, microbatch_size=4)
    for cost in (ema_cost, y_cost):
        assert (cost.backward_seconds, cost.saved_bytes, cost.workspace_bytes) == (0, 0, 0)
        assert cost.forward_seconds > 0
    assert z_cost.backward_seconds > 0
    assert z_cost.saved_bytes == 4 * 8 * 4


def test_one_storage_is_saved_once_and_views_cost_nothing() -> None:
    g = GraphBuilder()
    w = g.parameter("w")
    x = g.op("x", "torch.nn.functional.linear", (g.input("in"), Attr(w)), parameters=(w,))
    view = g.op("view", "view", (x, -1, 4, 2), kind="method", view_of=x, shape=(B, 4, 2))
    one = g.op("one", "torch.nn.functional.gelu", (x,))
    two = g.op("two", "torch.nn.functional.silu", (view,), shape=(B, 4, 2))
    flat = g.op("flat", "flatten", (two, 1), kind="method", view_of=two)
    end = g.op("end", "operator.add", (one, flat))
    names = ["x", "view", "one", "two", "flat", "end"]
    found = estimate(g.build(end, loss=end), microbatch_size=4)
    costs = dict(zip(names, found, strict=True))
    assert [costs[n].saved_bytes for n in ("one", "two", "end")] == [4 * 8 * 4, 0, 0]
    assert costs["view"].forward_seconds == costs["view"].backward_seconds == 0
    assert costs["view"].output_bytes == 0


@given(random_graphs())
@settings(max_examples=60)
def test_costs_are_finite_and_never_negative(graph: OpGraph) -> None:
    for cost in estimate(graph, microbatch_size=3):
        for name in ("forward_seconds", "backward_seconds"):
            assert 0 <= getattr(cost, name) < math.inf
        for name in ("flops", "parameter_bytes", "saved_bytes", "output_bytes", "workspace_bytes"):
            assert isinstance(getattr(cost, name), int)
            assert getattr(cost, name) >= 0


def test_calibration_is_plausible_and_leaves_the_generator_alone() -> None:
    before = torch.random.get_rng_state()
    machine = calibrate()
    assert torch.equal(before, torch.random.get_rng_state())
    assert 1e8 < machine.flops_per_second < 1e14
    assert 1e7 < machine.bytes_per_second < 1e13
    assert 0 < machine.call_seconds < 1e-2


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, 0.5))


class Functions(nn.Module):
    """Applies every function of a table to the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weight(8)
        self.matrix = weight(8, 8)
        self.kernel = weight(6, 6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x * self.w
        mask = x > 0.5
        constant = torch.ones(6, 8)
        results = [
            F.relu(x), F.gelu(x), F.silu(x), F.softplus(x), F.logsigmoid(x), F.glu(x),
            F.leaky_relu(x), F.elu(x), F.hardtanh(x), F.softmax(x, -1), F.log_softmax(x, -1),
            x.sigmoid(), x.tanh(), x.exp(), x.log(), x.sqrt(), x.rsqrt(), x.sin(), x.abs(),
            x.pow(2), x.square(), x.reciprocal(), x.erf(), x.clamp(0.2, 0.7), x.expm1(), x.log1p(),
            x.sum(1), x.mean(), x.var(1), x.std(1), x.amax(1), x.norm(dim=1), x.logsumexp(1),
            x.cumsum(1), x.cumprod(1), x.max(), x / 3.0, x / constant, x * 2.0, x * constant,
            x * x, x - constant, -x, torch.cat([x, x]), torch.stack([x, x]), x.clone(),
            x.transpose(1, 2).contiguous(), x.double(), torch.where(mask, x, 0.0),
            x.masked_fill(mask, 0.0), F.layer_norm(x, (8,), self.w),
            F.rms_norm(x, (8,), self.w), F.group_norm(x, 2), F.instance_norm(x),
            F.batch_norm(x, None, None, training=True), F.dropout(x, 0.5),
            F.dropout2d(x[None], 0.5), F.linear(x, self.matrix),
            F.linear(x.transpose(0, 1), self.matrix), x @ self.matrix, x[0] @ self.matrix,
            torch.bmm(x, x.transpose(1, 2)), torch.einsum("bij,bkj->bik", x, x * 2.0),
            F.conv1d(x, self.kernel), F.avg_pool1d(x, 2), F.adaptive_avg_pool1d(x, 1),
            F.interpolate(x, scale_factor=2.0), F.mse_loss(x, constant.expand_as(x)),
            F.smooth_l1_loss(x, constant.expand_as(x)), F.pad(x, (1, 1)), x.flip(1),
            F.scaled_dot_product_attention(x[None], x[None], x[None]),
            F.scaled_dot_product_attention(x, x, x), torch.roll(x, 1), x.tril(),
        ]  # fmt: skip
        return tuple(results)


def test_what_is_kept_on_fake_tensors_is_what_autograd_keeps_of_every_function() -> None:
    torch.set_default_dtype(torch.float32)
    model, x = Functions(), torch.rand(4, 6, 8)
    graph = trace.trace(model, x)
    lookup = Lookup(model, 4, constants=graph.tensor_values)
    env: dict[str, Any] = {graph.inputs[0].name: x}
    free = {t.untyped_storage()._cdata for t in (x, *model.parameters())}
    fake, wrong, held = kept_storages(graph, 4), {}, []
    for op in graph.ops:
        with saved_storages() as found:
            env[op.name] = run_op(op, env, lookup)
        held.append(found)
        real = sorted(one.nbytes() for key, one in found.items() if key not in free)
        if real != sorted(fake[op.name].values()):
            wrong[op.name] = (real, fake[op.name])
    assert not wrong
    assert len(held) > 70
