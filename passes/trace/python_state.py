"""The model's state around runs of it: changes by a call are refused, or taken back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.eager.modes import in_mode
from pdcompile.eager.snapshot import Alike, difference, restore, snapshot, tensors_at
from pdcompile.errors import TraceError
from pdcompile.passes.stages.naming import below
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.tape.interceptor import patched
from pdcompile.passes.trace.tape.observer import source_of_class


class State:
    """A snapshot of everything in the modules of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())
        self._before = {path: snapshot(vars(module)) for path, module in self._modules}

    def change(
        self,
        assigned: Mapping[tuple[int, str], str],
        alike: Alike = lambda one, other: one is other,
        within: Collection[str] | None = None,
    ) -> TraceError | None:
        """The refusal of the first change since the snapshot; None if there is none.

        Args:
            assigned: (id of module, attribute) to the line that assigned it.
            alike: whether a tensor may take the place of another one.
            within: paths of modules; None: all of the model.
        """
        for path, module in self._modules:
            if within is not None and not any(below(path, owner) for owner in within):
                continue
            kept, attributes = self._before[path].content, vars(module)
            for name in [*kept, *(n for n in attributes if n not in kept)]:
                if kept.get(name, self) is attributes.get(name, kept):
                    continue
                place = found = f"{path}.{name}" if path else name
                if name in kept and name in attributes:
                    found = difference(kept[name], attributes[name], place, alike)
                if found is None:
                    continue
                refusal = refusals.CHANGED_STATE
                if any(one.requires_grad for _, one in tensors_at(attributes.get(name))):
                    refusal = refusals.CHANGED_WITH_GRADIENT
                if name in ("_buffers", "_parameters"):
                    name = found[len(place) :].strip("[]'\"")
                    found, refusal = (f"{path}.{name}" if path else name), refusals.REBOUND
                where = assigned.get((id(module), name)) or source_of_class(type(module))
                return refusals.error(refusal, found, where)
        return None

    def restore(self) -> None:
        for before in self._before.values():
            restore(before)


def lines_of_assignments(
    assigned: dict[tuple[int, str], str], line: Callable[[], str]
) -> AbstractContextManager[None]:
    """Notes the line of the first assignment to each attribute of a module."""
    plain = nn.Module.__setattr__

    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        assigned.setdefault((id(self), name), line())
        plain(self, name, value)

    return patched((nn.Module, "__setattr__", __setattr__))


@contextmanager
def preserved_state(model: nn.Module, training: bool) -> Iterator[None]:
    """Puts the model into a mode; at the end all in the modules and all gradients are as before.

    A model in that mode already is left alone, so that modules switched apart stay so.
    """
    state = State(model)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    fast = torch.backends.mha.get_fastpath_enabled()
    # The fused inference kernel of nn.TransformerEncoderLayer rounds differently from the
    # operators that it replaces, and a recorded model runs those.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with in_mode(model, training, back=False), kept_buffers(model):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        state.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Gives the model back its buffers: the objects, which a forward may rebind, and the values."""
    bound = [(module, dict(module._buffers)) for module in model.modules()]
    values = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for module, buffers in bound:
            module._buffers.clear()  # also of those that a first call registers
            module._buffers.update(buffers)
        write_buffers(model, values)


def write_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Puts values into the model's buffers, by name; those of which none is given stay."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            value = buffers.get(name, buffer)
            # An expanded buffer cannot be written, and need not be.
            if buffer.shape != value.shape:
                buffer.resize_(value.shape)  # observers of quantisation begin empty
            if buffer.is_meta or not torch.equal(buffer, value):
                buffer.copy_(value)
