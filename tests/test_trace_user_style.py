"""Ways of writing a model that are legal and a little unusual: captured, or opaque."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import TraceError
from tests.helpers.captures import captured, faithful, make, rows, targets


def test_a_module_that_runs_on_lent_weights_is_captured_inside() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        halved = {name: tensor * 0.5 for name, tensor in self.lin.named_parameters()}
        return torch.func.functional_call(self.lin, halved, (x,)) + self.lin(x)

    found = targets(faithful(make(forward)))
    assert found.count("Linear") == found.count("linear") == 1


def test_an_expanded_buffer_is_left_alone() -> None:
    scale = torch.ones(1, 1).expand(1, 8)
    model = make(lambda self, x: self.lin(x) * self.scale, scale=scale)
    faithful(model)
    assert model.scale is scale


class OtherDefault(nn.Module):
    """Makes a tensor while the default dtype is another one."""

    def forward(self, x: Tensor) -> Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            tenth = torch.ones(8) * 0.1
        finally:
            torch.set_default_dtype(before)
        return (x * tenth).to(x.dtype)


def test_another_default_dtype_is_kept_with_the_module_that_sets_it() -> None:
    model = make(lambda self, x: self.part(self.lin(x)), part=OtherDefault())
    with pytest.warns(UserWarning, match="opaque.*default dtype.*torch.float64"):
        faithful(model)


class Counting(nn.Module):
    """Counts its calls where no module can see it."""

    calls: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        Counting.calls.append(1)
        return x / len(Counting.calls)


class Moving(nn.Module):
    """Gives a tensor the storage of another one."""

    def forward(self, x: Tensor) -> Tensor:
        y, other = x * 2, torch.empty(0)
        other.set_(y.detach())  # type: ignore[call-overload]
        return y + other


class Aside(nn.Module):
    """Uses weights that it does not register, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [nn.Linear(8, 8)]
        self.half = [torch.full((8,), 0.5)]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.parts[0](x * self.half[0])
        return y


def test_what_counts_calls_outside_of_the_model_is_refused_with_the_line() -> None:
    model = make(lambda self, x: self.part(self.lin(x)), part=Counting())
    with pytest.raises(TraceError, match="other results when it is called again") as caught:
        captured(model)
    assert "test_trace_user_style.py" in (caught.value.where or "")
    assert "registered buffer" in (caught.value.remedy or "")


@pytest.mark.parametrize("part", [Moving, Aside])
def test_what_has_no_op_is_opaque(part: type[nn.Module]) -> None:
    model = make(lambda self, x: self.part(self.lin(x)), part=part())
    with pytest.warns(UserWarning, match="opaque"):
        found = faithful(model)
    assert not found.train.tensor_values
    assert all(info.kind != "constant" for info in found.train.tensors.values())


class Teaching(nn.Module):
    """Switches itself to evaluation for a part of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        before = self.training
        self.eval()
        with torch.no_grad():
            taught = self.drop(self.norm(x))
        self.train(before)
        result: Tensor = self.drop(self.norm(x)) + taught
        return result


def test_a_part_that_forward_runs_in_evaluation_mode_does_so_in_the_graph() -> None:
    model = make(lambda self, x: self.part(self.lin(x)), part=Teaching())
    found = faithful(model, sizes=(4, 6))
    assert targets(found).count("BatchNorm1d") == 1


def test_a_mode_that_forward_leaves_switched_is_refused_at_its_line() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        y = self.drop(self.lin(x))
        self.drop.eval()
        return y

    with pytest.raises(TraceError, match=r"changes the Python attribute drop\.training") as caught:
        captured(make(forward, drop=nn.Dropout(0.5)))
    assert "test_trace_user_style.py" in (caught.value.where or "")


def test_a_written_buffer_in_the_memory_of_another_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.lin(x - self.both[0])

    both = torch.zeros(2, 8)
    read_only = make(lambda self, x: self.lin(x) + self.mean, both=both, mean=both[0])
    faithful(read_only)
    with pytest.raises(TraceError, match=r"writes the buffer mean \(shared with both\)"):
        captured(make(forward, both=both, mean=both[0]))


class Sparse(nn.Module):
    """Multiplies with a sparse matrix, as graph networks do."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.sparse.mm(torch.eye(8).to_sparse(), x.t()).t()
        return result


class Adjacent(nn.Module):
    """Has a sparse matrix in an attribute."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.adjacent = torch.eye(8).roll(1, 0).to_sparse(layout=layout)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.sparse.mm(self.adjacent, x.t()).t()
        return result


def _graph_network(layout: torch.layout) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Adjacent(layout), nn.Linear(8, 8))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_sparse_attributes_are_kept_with_their_module(layout: torch.layout, schedule: str) -> None:
    """Writes of them are looked for while microbatches are in flight."""
    with pytest.raises(TraceError, match="not dense"):
        captured(Adjacent(layout))
    options: dict[str, Any] = {
        "loss_fn": nn.functional.mse_loss, "optimizer": partial(torch.optim.SGD, lr=0.1),
        "microbatches": 4, "schedule": schedule,
    }  # fmt: skip
    local = {"cluster": "local:2", "costs": "estimated"}
    plain = pdcompile.reference(_graph_network(layout), **options)
    x, y = rows(8), torch.zeros(8, 8)
    with pdcompile.compile(_graph_network(layout), **options, **local) as pipe:
        with pytest.warns(UserWarning, match="opaque.*not dense"):
            pipe.prepare(x, target=y)
        for _ in range(3):
            assert float(pipe.step(x, target=y).loss) == float(plain.step(x, target=y).loss)


def test_sparse_matrices_are_kept_with_the_module_that_makes_them() -> None:
    model = make(lambda self, x: self.part(self.lin(x)), part=Sparse())
    with pytest.warns(UserWarning, match="opaque.*not dense"):
        faithful(model)
    with pytest.raises(TraceError, match="not dense") as caught:
        captured(make(lambda self, x: self.lin(x) + torch.eye(8).to_sparse().sum().to_dense()))
    assert "test_trace_user_style.py" in (caught.value.where or "")


@torch.jit.script
def _scripted(x: Tensor) -> Tensor:
    return x * torch.tanh(x)


def test_a_warning_says_that_torchscript_rounds_in_its_own_way() -> None:
    with pytest.warns(UserWarning, match="TorchScript function '_scripted'.*rounds differently"):
        faithful(make(lambda self, x: _scripted(self.lin(x))))


def test_whether_autograd_is_on_is_asked_of_the_run_and_not_of_the_capture() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        y = self.lin(x)
        if torch.is_grad_enabled():
            y = y * 2
        with torch.no_grad():
            return y + 1 if torch.is_grad_enabled() else y

    found = faithful(make(forward))
    assert targets(found) == ["Linear", "mul"]
    assert [op.target.rpartition(".")[2] for op in found.eval.ops] == ["Linear"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "move",
    [
        lambda module, x: module.to(torch.float32),
        lambda module, x: module.to(x),
        lambda module, x: module.to(device=x.device),
        lambda module, x: module.float(),
    ],
    ids=["dtype", "tensor", "device", "float"],
)
def test_a_module_is_moved_to_where_it_is(move: Callable[[nn.Module, Tensor], nn.Module]) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        self.lin = move(self.lin, x)
        return self.lin(x)

    to = nn.Module.to
    faithful(make(forward))
    assert nn.Module.to is to


def test_a_module_that_another_dtype_is_given_is_refused() -> None:
    with pytest.raises(TraceError, match="rebinds"):
        captured(make(lambda self, x: self.lin.double()(x.double())))
