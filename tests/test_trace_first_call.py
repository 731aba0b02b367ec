"""First calls of models: what they do in those only, and what they cache, leaves no trace in a
capture."""

from __future__ import annotations

import copy
import functools
import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import TraceError
from pdcompile.passes.trace.global_state import freeze
from tests.helpers.captures import captured, faithful, make, rows


class Hooked(nn.Module):
    """Installs hooks on its blocks when it is called first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8)) for _ in range(2)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if not getattr(self, "ready", False):
            for block in self.blocks:
                block.register_forward_hook(lambda module, args, out: out.tanh())
            self.ready = True
        for block in self.blocks:
            x = block(x)
        return {"y": x}


def test_hooks_that_the_first_call_installs() -> None:
    model = Hooked()
    found = faithful(model, rows())
    assert [op.target for op in found.train.ops].count("tanh") == 2
    assert not hasattr(model, "ready")
    assert not model.blocks[0]._forward_hooks


def _registers(self: nn.Module, x: Tensor) -> Tensor:
    if not hasattr(self, "table"):
        self.register_buffer("table", torch.arange(8) / 8, persistent=False)
    return self.lin(x) * self.table


def _lengthens(self: nn.Module, x: Tensor) -> Tensor:
    if len(self.table) < x.shape[1]:
        self.table = torch.arange(x.shape[1]) / 8
    return self.lin(x) * self.table


def _lengthens_by_data(self: nn.Module, x: Tensor) -> Tensor:
    if len(self.table) < x.shape[1]:
        self.table = x.detach().mean(0)
    return self.lin(x) * self.table


def _with_table(forward: Any, table: Tensor | None) -> nn.Module:
    model = make(forward)
    if table is not None:
        model.register_buffer("table", table)
    return model


@pytest.mark.parametrize(
    ("forward", "table"), [(_registers, None), (_lengthens, torch.ones(2))],
    ids=["registered", "longer"],
)  # fmt: skip
def test_tables_that_the_first_call_makes(forward: Any, table: Tensor | None) -> None:
    """A buffer that calls register, or put a longer one in place of, is made anew by stages."""
    faithful(model := _with_table(forward, table))
    assert [*model.buffers()] == ([] if table is None else [table])
    x, target = rows(8), torch.zeros(8, 8)
    given = partial(torch.optim.SGD, lr=0.1)
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "optimizer": given}
    plain = pdcompile.reference(copy.deepcopy(model), microbatches=4, **options)
    with pdcompile.compile(
        model, microbatches=4, cluster="local:2", costs="estimated", **options
    ) as pipe:
        for _ in range(3):
            assert float(pipe.step(x, target=target).loss) == float(
                plain.step(x, target=target).loss
            )


def test_a_longer_buffer_of_data_is_refused() -> None:
    with pytest.raises(TraceError, match="rebinds table to a new tensor"):
        captured(_with_table(_lengthens_by_data, torch.ones(2)))


def test_attributes_that_every_call_sets_alike() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        self.width = x.shape[1]
        self.kind = {"dtype": x.dtype}
        return self.lin(x) / self.width

    model = make(forward)
    faithful(model)
    assert not hasattr(model, "width")


def test_an_attribute_that_follows_the_batch() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        self.count = x.shape[0]
        return self.lin(x) / self.count

    faithful(make(forward))


def _grows(self: nn.Module, x: Tensor) -> Tensor:
    self.seen.append(1)
    return self.lin(x)


def _other_first_call(self: nn.Module, x: Tensor) -> Tensor:
    first = not hasattr(self, "started")
    self.started = True
    return self.lin(x) * 2 if first else self.lin(x)


def _from_the_last_call(self: nn.Module, x: Tensor) -> Tensor:
    scale = getattr(self, "scale", 1)
    self.scale = 2
    return self.lin(x) * scale


@pytest.mark.parametrize("forward", [_grows, _other_first_call, _from_the_last_call])
def test_state_that_changes_later_calls_is_refused(forward: Any) -> None:
    with pytest.raises(TraceError, match="forward changes the Python attribute"):
        captured(make(forward, seen=[]))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_cached_helper_keeps_no_stand_ins(frozen: bool, request: pytest.FixtureRequest) -> None:
    @functools.lru_cache(maxsize=8)
    def positions(length: int) -> Tensor:
        return torch.arange(length) % 3

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.lin(x) + self.table(positions(x.shape[1])).sum(1)

    model = make(forward, table=nn.Embedding(3, 8))
    if frozen:  # as commands do with all that they have loaded
        if not gc.get_freeze_count():
            request.addfinalizer(gc.unfreeze)
        freeze()
    faithful(model)
    assert bool(gc.get_freeze_count()) >= frozen
    assert type(positions(8)) is Tensor
    assert positions(8).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


said: list[str] = []


@functools.cache
def say_once(message: str) -> None:
    said.append(message)


def test_a_message_that_is_given_once_is_not_given_by_every_trial_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said.clear()
    monkeypatch.setattr(say_once, "__module__", "library.utils.logging")

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        say_once("x is taken as it is")
        return self.lin(x)

    faithful(make(forward))
    assert said == ["x is taken as it is"]
