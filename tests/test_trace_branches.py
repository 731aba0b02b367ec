"""Branches on values that forward computes: both ways are captured, each call takes its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import TraceError
from tests.helpers.captures import captured, faithful, make, rows
from tests.helpers.pipelines import states_equal

Forward = Callable[[Any, Tensor], Tensor]


def _clamp(self: nn.Module, x: Tensor) -> Tensor:
    h = F.dropout(self.lin(x), 0.2, self.training)
    if not torch.isfinite(h).all() or (h > 1).any():
        h = torch.clamp(h, min=-0.5, max=0.5)
    return self.second(h)


def _nested(self: nn.Module, x: Tensor) -> Tensor:
    h = self.lin(x)
    if h.sum() > 0:
        h = h * 3 if (h > 1).any() else self.second(h)
    return self.lin(h)


def _early(self: nn.Module, x: Tensor) -> Tensor:
    h = x
    for layer in self.layers:
        h = layer(h)
        if h.abs().max() > 1:
            return h
    return h * 2


def _skipped(self: nn.Module, x: Tensor) -> Tensor:
    h = self.lin(x)
    for i, layer in enumerate(self.layers):
        if h.norm() > 1.5 * i:
            h = layer(h)
    return self.second(h)


def _other_parameters(self: nn.Module, x: Tensor) -> Tensor:
    h = self.lin(x)
    one, two = self.layers[0](h).tanh(), self.layers[1](h).tanh()
    return self.second(one if h.mean() > 0 else two)


def _read_in_branches(self: nn.Module, x: Tensor) -> Tensor:
    """What two branches leave is read inside of two more only."""
    h = self.lin(x)
    memory = h
    for i, layer in enumerate(self.layers[:2]):
        if memory.norm() > 1.5 * i:
            continue
        memory = layer(memory)
    for i, layer in enumerate(self.layers[2:]):
        if h.norm() > 2 + i:
            continue
        h = h + layer(memory)
    return self.second(h)


def _read_if_taken(self: nn.Module, x: Tensor) -> Tensor:
    """What one branch leaves is read only if another one is taken."""
    h = self.lin(x)
    memory = self.layers[0](h) if h.norm() > 1.5 else h
    return h + self.layers[1](memory) if h.mean() > 0 else h


def _model(forward: Forward) -> nn.Module:
    count = 4 if forward is _read_in_branches else 3  # each decision doubles the recordings
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))
    return make(forward, second=nn.Linear(8, 8), layers=layers)


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def _inputs() -> list[Tensor]:
    """With all outcomes among them."""
    return [scale * rows(seed=seed) for scale in (0.1, 1.0, 4.0) for seed in range(3)]


def _same(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> bool:
    return all(
        a is b is None or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one.values(), other.values(), strict=True)
    )


FORWARDS = [_clamp, _nested, _early, _skipped, _other_parameters, _read_in_branches]


@pytest.mark.sample(1)
@pytest.mark.parametrize("forward", FORWARDS)
def test_every_call_takes_its_own_way(forward: Forward) -> None:
    model = _model(forward)
    graph = faithful(model, sizes=(1, 4)).train
    module = graph.to_module(model)
    ways = set()
    for training in (True, False):
        model.train(training)
        module.train(training)
        for x in _inputs():
            torch.manual_seed(1)
            expected = model(x)
            expected.square().sum().backward()
            gradients = _gradients(model)
            torch.manual_seed(1)
            found = module(x)
            found.square().sum().backward()
            assert torch.equal(found, expected)
            assert _same(_gradients(model), gradients)
            used = tuple(name for name, grad in gradients.items() if grad is not None)
            ways.add((_way(expected), used))
    assert len(ways) > 1


def _way(output: Tensor) -> tuple[str, ...]:
    """The operators that backward meets: another way, other operators."""
    found, stack, seen = [], [output.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.append(type(node).__name__)
            held = getattr(node, "variable", None)
            found.append(str(tuple(held.shape)) if held is not None else "")
            stack += [after for after, _ in node.next_functions]
    return tuple(found)


@pytest.mark.sample(1)
@pytest.mark.parametrize("forward", [_clamp, _skipped, _other_parameters])
def test_stages_take_the_way_of_each_microbatch(forward: Forward) -> None:
    model, loss_fn, y = _model(forward), nn.MSELoss(), rows(seed=9)
    options: dict[str, Any] = {"loss_fn": loss_fn, "microbatches": 2, "optimizer": None}
    reference = pdcompile.reference(model, keep_model=True, **options)
    pipe = pdcompile.compile(
        model, (rows(),), example_target=y, stages=2, keep_model=True, costs="estimated", **options
    )
    for x in _inputs():
        expected = float(reference.step(x, target=y).loss)
        assert float(pipe.step(x, target=y).loss) == expected
        mine = {name: p.grad for name, p in pipe.named_parameters()}
        theirs = {name: p.grad for name, p in reference.named_parameters()}
        assert _same({n: mine[n] for n in theirs}, theirs)
        for parameter in (*pipe.parameters(), *reference.parameters()):
            parameter.grad = None


def _counts(self: nn.Module, x: Tensor) -> Tensor:
    hits = 0
    for layer in self.layers:
        x = layer(x)
        hits += bool((x > 0.5).any())
    return x * 2 if hits == 2 else x


def _and_then_read(self: nn.Module, x: Tensor) -> Tensor:
    """Nobody reads what the inner decision leaves unless a third one is True."""
    h = memory = self.lin(x)
    if x[:, 0].sum() > 0 and x[:, 1].sum() > 0:
        memory = h.tanh()
    if x[:, 2].sum() > 0:
        h = self.layers[0](memory)
    return self.second(h)


def _flag(self: nn.Module, x: Tensor) -> Tensor:
    h, flag = self.lin(x), False
    if x[:, 0].sum() > 0 and x[:, 1].sum() > 0:
        flag = True
    if x[:, 2].sum() > 0 and flag:
        h = self.layers[0](h)
    return self.second(h)


def _five_flags(self: nn.Module, x: Tensor) -> Tensor:
    h = self.lin(x)
    f = [bool(x[:, i].sum() > 0) for i in range(5)]
    return self.second(h * 2 if f == [False, False, False, True, True] else h)


def _eight_flags(self: nn.Module, x: Tensor) -> Tensor:
    h = self.lin(x)
    f = [bool(x[:, i].sum() > 0) for i in range(8)]
    return self.second(h * 2 if not f[0] and f[1] and f[2] else h)


def _random_flags(self: nn.Module, x: Tensor) -> Tensor:
    h = memory = self.lin(x)
    if torch.rand([]) < 0.5 and torch.rand([]) < 0.5:
        memory = self.layers[1](h)
    if torch.rand([]) < 0.5:
        h = self.layers[0](memory)
    return self.second(h)


def _writes(self: nn.Module, x: Tensor) -> Tensor:
    h = self.lin(x)
    if h.sum() > 0:
        h.mul_(2)
    return self.second(h)


def _writes_later(self: nn.Module, x: Tensor) -> Tensor:
    h = self.lin(x)
    y = h if h.sum() > 0 else h * 2
    y += 1
    return self.second(h) + y


def _for_ever(self: nn.Module, x: Tensor) -> Tensor:
    h = self.lin(x)
    while h.norm() > 1:
        h = h / 2
    return h


def _may_fail(self: nn.Module, x: Tensor) -> Tensor:
    h = self.lin(x)
    index = h[:, 0].abs().long() * 100
    return h[index] if (index < 4).all() else h


def _other_shape(self: nn.Module, x: Tensor) -> Tensor:
    h = self.lin(x)
    return h if h.sum() > 0 else torch.cat([h, h], 1)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "forward",
    [
        _counts,
        _read_if_taken,
        _and_then_read,
        _flag,
        _five_flags,
        _eight_flags,
        _random_flags,
        _writes,
        _writes_later,
        _for_ever,
        _may_fail,
        _other_shape,
    ],
)
def test_what_is_more_than_a_choice_is_refused(forward: Forward) -> None:
    with pytest.raises(TraceError, match="reads the value") as caught:
        captured(_model(forward))
    assert "test_trace_branches.py:" in str(caught.value.where)


def test_a_validation_inside_of_a_branch_is_none() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = self.lin(x)
        if h.sum() > 0 and (h > 100).any():
            raise ValueError("too large")
        return h

    with pytest.raises(TraceError, match="reads the value"):
        captured(make(forward))


class Block(nn.Module):
    """A residual block with dropout inside, (b, 8) -> (b, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.drop(self.lin(x)).relu(), 0.1, self.training)


def _layer_drop(self: nn.Module, x: Tensor) -> Tensor:
    h = F.dropout(self.lin(x), 0.2, self.training)
    for block in self.blocks:
        if self.training and torch.rand([]) < 0.4:
            continue
        h = block(h)
    return self.second(F.dropout(h, 0.2, self.training))


def _one_way_draws(self: nn.Module, x: Tensor) -> Tensor:
    h = self.lin(x)
    h = F.dropout(h, 0.5, self.training) if h.sum() > 0 else h
    return self.second(F.dropout(h, 0.2, self.training))


@pytest.mark.parametrize("forward", [_layer_drop, _one_way_draws])
def test_layers_are_dropped_as_in_the_reference(forward: Forward) -> None:
    torch.manual_seed(0)
    model = make(forward, second=nn.Linear(8, 8), blocks=nn.ModuleList(Block() for _ in range(3)))
    target = rows(seed=9)
    options: dict[str, Any] = {"loss_fn": nn.MSELoss(), "microbatches": 2, "seed": 3}
    optimizer = partial(torch.optim.SGD, lr=0.1)
    eager = pdcompile.reference(model, optimizer=optimizer, keep_model=True, **options)
    pipe = pdcompile.compile(
        model, (rows(),), example_target=target, stages=2, keep_model=True, costs="estimated",
        optimizer=optimizer, **options,
    )  # fmt: skip
    for step in range(6):
        x = rows(seed=step)
        ours, theirs = pipe.step(x, target=target), eager.step(x, target=target)
        assert float(ours.loss) == float(theirs.loss)
    assert not states_equal(pipe.full_state_dict(), eager.full_state_dict())
    pipe.close()
