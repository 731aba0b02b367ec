"""Models as research code writes them: gradients inside forward, arrays, scripted parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import pdcompile
from pdcompile import Cluster
from pdcompile.passes.coarsen.spans import Groups, close_cycles, join_spans
from pdcompile.passes.trace.python_state import preserved_state
from tests.helpers.captures import captured, faithful, make, rows

pytestmark = pytest.mark.usefixtures("captured_anew")


def _residual(self: Any, x: Tensor) -> dict[str, Tensor]:
    """The residual of u_xx = u, as a physics-informed network takes it."""
    with torch.enable_grad():
        x = x.clone().requires_grad_(True)
        u = self.last(torch.tanh(self.lin(x)))
        (ux,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (uxx,) = torch.autograd.grad(ux.sum(), [x], create_graph=True)
    return {"loss": (self.after(uxx) - u).square().mean(), "u": u}


def test_gradients_taken_inside_forward_are_captured_in_both_modes() -> None:
    model = make(_residual, last=nn.Linear(8, 1), after=nn.Linear(8, 1))
    found = faithful(model)
    assert [op.target for op in found.train.ops].count("torch.autograd.grad") == 2
    graph = found.eval
    last = max(i for i, op in enumerate(graph.ops) if op.target == "torch.autograd.grad")
    assert all(op.enables_grad for op in graph.ops[: last + 1])
    assert not any(op.enables_grad for op in graph.ops[last + 1 :])


def test_ops_that_a_gradient_inside_forward_goes_through_stay_together() -> None:
    model = make(_residual, last=nn.Linear(8, 1), after=nn.Linear(8, 1))
    graph = captured(model).train
    groups = Groups(len(graph.ops) + 1)
    join_spans(graph, groups)
    close_cycles(graph, groups)
    place = {op.name: groups.find(i) for i, op in enumerate(graph.ops)}
    inside = [op.name for op in graph.ops if op.module_path in ("lin", "last")]
    gradients = [op.name for op in graph.ops if op.target == "torch.autograd.grad"]
    assert len({place[name] for name in (*inside, *gradients)}) == 1


def _inner_step(self: Any, x: Tensor) -> Tensor:
    """One step of gradient descent on a parameter, as meta-learning takes it."""
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(
            self.lin(x).sin().sum(), [self.lin.weight], create_graph=True
        )
    return torch.nn.functional.linear(x, self.lin.weight - 0.1 * gradient)


def test_a_gradient_for_a_parameter_inside_forward() -> None:
    graph = faithful(make(_inner_step)).train
    groups = Groups(len(graph.ops) + 1)
    join_spans(graph, groups)
    used = [i for i, op in enumerate(graph.ops) if "lin.weight" in (*op.attributes, *op.parameters)]
    step = next(i for i, op in enumerate(graph.ops) if op.target == "torch.autograd.grad")
    assert {groups.find(i) for i in used if i < step} == {groups.find(step)}


def test_stages_of_a_model_with_a_gradient_inside_forward() -> None:
    model = make(_residual, last=nn.Linear(8, 1), after=nn.Linear(8, 1))
    twin = make(_residual, last=nn.Linear(8, 1), after=nn.Linear(8, 1))
    twin.load_state_dict(model.state_dict())
    options: dict[str, Any] = {
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "stages": 2,
        "microbatches": 2,
        "cluster": Cluster.local(2),
        "costs": "estimated",
    }
    with pdcompile.compile(model, **options) as pipe:
        eager = pdcompile.reference(twin, **options)
        for seed in range(2):
            loss = float(pipe.step(rows(4, seed=seed)).loss)
            assert loss == float(eager.step(rows(4, seed=seed)).loss)
        assert torch.equal(pipe.predict(rows())["u"], eager.predict(rows())["u"])
        for name, value in pipe.full_state_dict().items():
            assert torch.equal(value, twin.state_dict()[name])


def _grid(self: Any, x: Tensor) -> Tensor:
    positions = torch.tensor(np.linspace(0, 1, 8), dtype=torch.float32)
    return self.lin(x) * positions + torch.from_numpy(np.arange(8.0)).float()


def test_tables_made_of_arrays_in_every_call_are_constants() -> None:
    found = faithful(make(_grid))
    kinds = [info.kind for info in found.train.tensors.values()]
    assert kinds.count("constant") == 2


class OwnKernels(nn.Module):
    """Chooses the kernels of its attention itself."""

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.MATH]):
            return nn.functional.scaled_dot_product_attention(x, x, x)


def test_a_module_that_chooses_kernels_of_attention_is_opaque() -> None:
    model = make(lambda self, x: self.lin(self.part(x[:, None])), part=OwnKernels())
    with pytest.warns(UserWarning, match="opaque.*'part'.*sdpa_kernel"):
        faithful(model)


class Observing(nn.Module):
    """Keeps the range of what it sees, as observers of quantisation do: empty until then."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach().amax(0)
        self.most.resize_(seen.shape).copy_(seen)
        return x


def test_a_buffer_that_begins_empty_is_left_so() -> None:
    model = Observing()
    with preserved_state(model, training=True):
        model(rows())
        assert model.most.shape == (8,)
    assert model.most.shape == (0,)
