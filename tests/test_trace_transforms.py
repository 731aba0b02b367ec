"""torch.func inside of forward: recorded as the operators that are left below the transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from pdcompile.errors import TraceError
from pdcompile.ir.execution import Lookup, execute
from tests.helpers.captures import captured, faithful, make, rows

Forward = Callable[[Any, Tensor], Tensor]


def _rows(self: nn.Module, x: Tensor) -> Tensor:
    return vmap(lambda row: self.second(row.softmax(0)) + torch.arange(8) + self.table)(self.lin(x))


def _stacked(self: nn.Module, x: Tensor) -> Tensor:
    """The matrix product is taken apart in another way where no activation needs a gradient."""
    h = self.lin(x)
    return vmap(lambda weight: torch.tanh(h @ weight))(self.weights).mean(0)


def _ensemble(self: nn.Module, x: Tensor) -> Tensor:
    named = [dict(layer.named_parameters()) for layer in self.layers]
    stacked = {name: torch.stack([each[name] for each in named]) for name in named[0]}
    outputs = vmap(lambda p, y: functional_call(self.layers[0], p, (y,)), (0, None))(stacked, x)
    return self.lin(outputs.mean(0))


def _written(self: nn.Module, x: Tensor) -> Tensor:
    def shifted(row: Tensor) -> Tensor:
        made = torch.zeros_like(row)
        made[1:] = row[:-1]
        made += torch.tensor([0.5, -1.0, 0.0, 3.0, 0.25, 1.0, 2.0, -0.125])
        return made * self.second(row)

    return vmap(shifted)(self.lin(x))


def _counted(self: nn.Module, x: Tensor) -> Tensor:
    def scaled(row: Tensor) -> Tensor:
        self.table.add_(1)
        return self.second(row) / self.table

    return vmap(scaled)(self.lin(x))


def _gradients(self: nn.Module, x: Tensor) -> Tensor:
    h = self.lin(x)
    return vmap(grad(lambda row: torch.tanh(self.second(row)).sum()))(h) + h


def _inner_step(self: nn.Module, x: Tensor) -> Tensor:
    own = dict(self.second.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(self.second, parameters, (x,)).square().mean()

    slopes = grad(loss)(own)
    new = {name: parameter - 0.1 * slopes[name] for name, parameter in own.items()}
    return functional_call(self.second, new, (self.lin(x),))


def _jacobians(self: nn.Module, x: Tensor) -> Tensor:
    def curve(row: Tensor) -> Tensor:
        return torch.tanh(self.second(row))

    h = self.lin(x)
    return (vmap(jacrev(curve))(h) * vmap(jacfwd(curve))(h)).sum(-1)


def _hessian(self: nn.Module, x: Tensor) -> Tensor:
    return vmap(hessian(lambda row: torch.tanh(self.second(row)).sum()))(self.lin(x)).sum(-1)


def _products(self: nn.Module, x: Tensor) -> Tensor:
    h = self.lin(x)
    value, back = vjp(lambda y: torch.sin(self.second(y)), h)
    ahead = jvp(lambda y: torch.sin(self.second(y)), (h,), (x,))[1]
    return back(torch.ones_like(value))[0] + ahead


def _without_gradients(self: nn.Module, x: Tensor) -> Tensor:
    def scaled(row: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.second(row).sum()
        return self.second(row) * scale

    return vmap(scaled)(self.lin(x))


def _in_half_precision(self: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return vmap(lambda row: torch.tanh(self.second(row)).exp())(self.lin(x)).float()


EXACT = [_rows, _stacked, _ensemble, _written, _counted, _gradients, _inner_step, _jacobians,
         _hessian, _products, _without_gradients, _in_half_precision]  # fmt: skip


def _model(forward: Forward) -> Any:
    torch.manual_seed(3)
    return make(
        forward,
        second=nn.Linear(8, 8),
        layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(3)),
        weights=nn.Parameter(torch.randn(3, 8, 8) / 3),
        table=torch.arange(8.0) + 1,
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("forward", EXACT)
def test_computes_what_the_model_computes(forward: Forward) -> None:
    """And every value needs a gradient where the graph says so: a cut passes it back then."""
    model = _model(forward)
    found = faithful(model)
    assert not any(op.opaque for op in found.train.ops)
    needs: dict[str, bool] = {}

    def watch(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            needs[name] = value.requires_grad

    lookup = Lookup(model, 4, constants=found.train.tensor_values)
    execute(found.train, {"x": rows()}, lookup, watch=watch)
    values = found.train.values
    rewritten = {name for op in found.train.ops for name in op.mutates}
    said = {name: values[name].requires_grad for name in needs if name not in rewritten}
    assert said == {name: needs[name] for name in said}


def _draws(self: nn.Module, x: Tensor) -> Tensor:
    return vmap(lambda row: F.dropout(self.lin(row)), randomness="different")(x)


class _Sine(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0].cos()


def _own_backward(self: nn.Module, x: Tensor) -> Tensor:
    sine: Any = _Sine.apply
    return vmap(lambda row: sine(self.lin(row)))(x)


def _decides(self: nn.Module, x: Tensor) -> Tensor:
    h = self.lin(x)
    return h + grad(lambda y: y.sum() * 2 if y.sum() > 0 else y.sum())(h)


@pytest.mark.parametrize("forward", [_draws, _own_backward, _decides])
def test_what_the_operators_do_not_tell_is_refused(forward: Forward) -> None:
    with pytest.raises(TraceError) as caught:
        captured(_model(forward))
    assert "test_trace_transforms.py" in (caught.value.where or "")
    assert caught.value.remedy
