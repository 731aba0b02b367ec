"""Running a model without leaving a trace on it: what comparisons with eager have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def preserved_state(model: nn.Module, training: bool) -> Iterator[None]:
    """In the given mode; afterwards everything in the modules and all gradients are as before.

    A model in that mode already is left alone, so that modules switched apart stay so.
    """
    from pdcompile.passes.trace.python_state import (
        State,  # whose package needs this module first
    )

    state = State(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    fast = torch.backends.mha.get_fastpath_enabled()
    # The fused inference kernel of nn.TransformerEncoderLayer rounds differently from the
    # operators that it replaces, and a recorded model runs those.
    torch.backends.mha.set_fastpath_enabled(False)
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        state.restore()
        write_buffers(model, buffers)
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Afterwards the model has the buffer objects that it had: a forward may rebind them."""
    bound = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, buffers in bound:
            module._buffers.update(buffers)


def write_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Put values into the model's buffers, by name."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            # An expanded buffer cannot be written, and need not be.
            if buffer.shape != buffers[name].shape:
                buffer.resize_(buffers[name].shape)  # observers of quantisation begin empty
            if buffer.is_meta or not torch.equal(buffer, buffers[name]):
                buffer.copy_(buffers[name])
