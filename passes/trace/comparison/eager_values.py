"""The tape on real tensors: what every op of the eager model really gives.

Only for explaining a difference; values are those of the model's own run, named as in capture.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from pdcompile.batch import BatchLayout, FlatCall
from pdcompile.ir.graph import Argument, Attr, Ref
from pdcompile.passes.trace.interceptors.order import EAGER_INTERCEPTORS
from pdcompile.passes.trace.subject import device_of
from pdcompile.passes.trace.tape.fake_tensors import FakeTensors
from pdcompile.passes.trace.tape.module_table import ModuleTable
from pdcompile.passes.trace.tape.observer import Observer
from pdcompile.passes.trace.tape.run import enter_inputs, run, watched
from pdcompile.passes.trace.tape.tape import Tape


class RealTensors(FakeTensors):
    """The same book-keeping with the real tensors in the place of their fake tensors."""

    def __init__(self, table: ModuleTable, device: torch.device) -> None:
        super().__init__(table, None, device)
        self.seen: dict[str, torch.Tensor] = {}

    def faked(self, value: Any) -> Any:
        return value

    def fake_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def name(self, tensor: torch.Tensor) -> Argument:
        if id(tensor) in self._value:
            return Ref(self._value[id(tensor)])
        return Attr(self.table.fqns.get(id(tensor), "constant"))

    def real_of(self, fake: torch.Tensor) -> torch.Tensor | None:
        return fake if id(fake) in self.table.fqns else None

    def add(self, name: str, fake: torch.Tensor) -> None:
        super().add(name, fake)
        self.seen[name] = fake.detach().clone()


def observe(
    model: nn.Module,
    flat: FlatCall,
    layout: BatchLayout,
    loss_fn: Callable[..., Any] | None,
) -> dict[str, torch.Tensor]:
    """Value name to tensor, each as it was when its op had run."""
    table = ModuleTable(model)
    reals = RealTensors(table, device_of(model, flat))
    observer = Observer()
    tape = Tape(table, reals, observer, EAGER_INTERCEPTORS)
    _, leaves, _ = enter_inputs(flat, layout, reals, tape)
    args, kwargs, target = flat.unflatten(leaves)
    with ExitStack() as stack:
        for each in (*(one.around() for one in tape.interceptors), watched(tape), observer, tape):
            stack.enter_context(each)
        run(model, args, kwargs, target, loss_fn, tape)
    return reals.seen
