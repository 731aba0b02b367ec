"""Results on fake tensors that are known from an earlier call are what the op itself would give."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import pdcompile
from pdcompile.passes.costs import forecast
from pdcompile.passes.trace.tape.observer import Observer
from pdcompile.releases import known_results
from pdcompile.releases.known_results import known_result

CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mm": lambda x, y: x @ y,
    "linear of three dims": lambda x, y: nn.functional.linear(x.view(2, 3, 4), y),
    "broadcast": lambda x, y: x.unsqueeze(1) + y,
    "scalar int": lambda x, y: x.long() + 1,
    "scalar float": lambda x, y: x.long() + 1.0,
    "scalar bool": lambda x, y: (x > 0) + True,
    "transposed": lambda x, y: x.t().contiguous() * x.t(),
    "slice": lambda x, y: x[1:4, ::2],
    "expand": lambda x, y: x[:, :1].expand(6, 5),
    "cat": lambda x, y: torch.cat([x, y], 0),
    "softmax": lambda x, y: torch.softmax(x, -1, dtype=torch.float64),
    "unsafe view": lambda x, y: torch.ops.aten._unsafe_view(x, (2, 12)),
    "pieces": lambda x, y: x.chunk(2),
    "in place": lambda x, y: x.clone().add_(y[0]),
    "index": lambda x, y: x[torch.zeros(3, dtype=torch.long)],
    "complex": lambda x, y: torch.view_as_complex(x.view(6, 2, 2)).conj(),
    "negative": lambda x, y: torch.view_as_complex(x.view(6, 2, 2)).conj().imag + 1,
    "constant": lambda x, y: torch.tensor([1.0, 2.0, 3.0, 4.0]) * x,
    "one number": lambda x, y: torch.tensor(2.0) * x,
    "constants": lambda x, y: torch.tensor([1.0, 2.0]) * torch.tensor(2.0),
    "constant written": lambda x, y: torch.tensor(2.0).fill_(y.detach()[0, 0]) + 1,
    "nothing and something": lambda x, y: torch.cat([torch.tensor([]), x], 0),
    "views": lambda x, y: x.split((1, 2, 3)),
    "values and indices": lambda x, y: torch.max(x, 1),
    "norm": lambda x, y: nn.functional.layer_norm(x, (4,), y[0], y[1]),
    "draw": lambda x, y: torch.bernoulli(x.detach()),
    "dropout": lambda x, y: nn.functional.dropout(x, 0.5),
    "attention": lambda x, y: nn.functional.scaled_dot_product_attention(x[None], y[None], y[None]),
    "written and moved": lambda x, y: x.clone().mul_(2).t_(),
}


def _form(result: Any, given: tuple[Tensor, ...]) -> list[Any]:
    found = []
    for each in [result] if isinstance(result, Tensor) else result:
        storage = each.untyped_storage()._cdata
        found.append(
            (
                type(each), tuple(each.shape), each.stride(), each.storage_offset(), each.dtype,
                each.fake_device, each.requires_grad, each.is_conj(), each._is_view(),
                str(torch._C._dispatch_keys(each)), type(each.grad_fn),
                [one.untyped_storage()._cdata == storage for one in given],
            )
        )  # fmt: skip
    return found


def _arguments(requires_grad: bool) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(6, 4).requires_grad_(requires_grad),
        torch.empty(4, 4).requires_grad_(requires_grad),
    )


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_known_result_is_like_the_one_of_the_op(name: str, requires_grad: bool) -> None:
    call = CALLS[name]
    with FakeTensorMode():
        given = _arguments(requires_grad)
        expected = _form(call(*given), given)
    with FakeTensorMode(), Observer():
        for _ in range(3):
            given = _arguments(requires_grad)
            assert _form(call(*given), given) == expected


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty the store: what other tests of this process asked for is asked for again."""
    monkeypatch.setattr(known_results, "_KNOWN", {})


def _asked(calls: Callable[[Tensor], Any]) -> list[str]:
    """The ops that reach the fake mode."""
    reached: list[str] = []

    class Mode(FakeTensorMode):
        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            reached.append(func.name())
            return super().dispatch(func, types, args, kwargs)

    with Mode():
        x = torch.empty(3, 4)
        reached.clear()
        calls(x)
    return reached


def test_equal_forms_are_asked_for_once_and_others_again() -> None:
    add = torch.ops.aten.add.Tensor

    def calls(x: Tensor) -> None:
        first, second = (known_result(add, (x, 1), {}) for _ in range(2))
        assert isinstance(second, FakeTensor)
        assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
        known_result(add, (x, 1.0), {})  # equal to 1, but of another type
        known_result(add, (x, True), {})
        known_result(add, (x, 1), {"alpha": 2})

    assert _asked(calls) == ["aten::add.Tensor"] * 4


def test_several_results_and_writes_are_asked_for_once() -> None:
    aten = torch.ops.aten

    def calls(x: Tensor) -> None:
        for _ in range(2):
            pieces = known_result(aten.split.Tensor, (x, 2), {})
            assert type(pieces) is list
            assert [piece.shape for piece in pieces] == [(2, 4), (1, 4)]
            most = known_result(aten.max.dim, (x, 1), {})
            assert type(most) is tuple
            assert [each.dtype for each in most] == [torch.float32, torch.int64]
            assert known_result(aten.bernoulli_.float, (x, 0.5), {}) is x

    asked = _asked(calls)
    for name in ("aten::split.Tensor", "aten::max.dim", "aten::bernoulli_.float"):
        assert asked.count(name) == 1


@pytest.mark.parametrize(
    "func",
    ["nonzero", "t_", "add.out", "resize_", "_resize_output_", "as_strided", "lift_fresh"],
)
def test_ops_whose_results_tell_of_more_than_forms_are_always_asked(func: str) -> None:
    name, _, overload = func.partition(".")
    op = getattr(getattr(torch.ops.aten, name), overload or "default")
    assert not known_results._by_form(op)


def test_a_result_with_values_is_not_known() -> None:
    """Fake tensors of constants carry their values, on which the next result may depend."""
    mul = torch.ops.aten.mul.Tensor

    def calls(x: Tensor) -> None:
        for _ in range(2):
            constant = torch.tensor(2.0)
            assert constant.constant is not None
            assert known_result(mul, (constant, 3.0), {}).constant is not None

    assert _asked(calls).count("aten::mul.Tensor") == 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor(0.5, dtype=x.dtype)
        a, b = self.up(self.norm(x)).chunk(2, dim=-1)
        gate = nn.functional.dropout(torch.cat([a, b], -1), 0.1, self.training)
        return x + scale * self.down(gate.transpose(0, 1).contiguous().transpose(0, 1))


@pytest.mark.sample(1)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_capture_is_the_same_without_known_results(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device(device):
        model = nn.Sequential(Block(), Block())
        x = torch.zeros(4, 8)
    with_known = pdcompile.trace(model, x)
    monkeypatch.setattr(known_results, "_by_form", lambda func: False)
    assert repr(pdcompile.trace(model, x)) == repr(with_known)


def test_rehearsals_are_the_same_without_known_results(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = pdcompile.trace(nn.Sequential(Block(), Block()), torch.zeros(4, 8))
    half = len(graph.ops) // 2
    stage_of = [int(i >= half) for i in range(len(graph.ops))]

    def held() -> Any:
        monkeypatch.setattr(sys.modules[forecast.__module__], "_cache", {})
        monkeypatch.setattr("pdcompile.releases.known_results._KNOWN", {})
        return forecast(graph, stage_of, 2, 4)

    with_known = held()
    assert all(one.rehearsed for one in with_known)
    monkeypatch.setattr(known_results, "_by_form", lambda func: False)
    assert held() == with_known


def test_a_result_that_is_a_part_of_its_storage_is_not_known() -> None:
    """One made of its form would hold fewer bytes."""
    add = torch.ops.aten.add.Tensor
    with FakeTensorMode():
        x = torch.empty(3)
        whole, part = torch.empty(3), torch.empty(8)[:3]
        assert known_results._known(add, (x, 1), {}, whole) is not None
        assert known_results._known(add, (x, 1), {}, part) is None
