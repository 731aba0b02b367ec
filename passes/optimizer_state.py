"""How much memory an optimizer's state takes, found by asking the optimizer itself.

One step on a small parameter shows which state tensors are kept; their bytes over the
parameter's bytes is the factor that the memory ledger uses (SGD 0, momentum 1, Adam 2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pdcompile.optimizers import NamedParameters

DEFAULT_FACTOR = 2.0
PROBE_SHAPE = (32, 32)


def optimizer_factor(build: Callable[..., Any] | None) -> tuple[float, str | None]:
    """Optimizer state bytes per trainable parameter byte, and a note when it had to be assumed.

    A callable that picks parameters by name may have no use for the probe's; then Adam's
    factor is assumed and the note says so.
    """
    if build is None:
        return 0.0, None
    probe = torch.nn.Parameter(torch.zeros(PROBE_SHAPE))
    probe.grad = torch.zeros(PROBE_SHAPE)
    try:
        optimizer = build(NamedParameters([("probe.weight", probe)]))
        optimizer.step()
    except Exception as error:  # a user's callable: whatever it raises, only the estimate suffers
        return DEFAULT_FACTOR, (
            f"optimizer state assumed {DEFAULT_FACTOR:g} bytes per parameter byte: the optimizer "
            f"callable could not be probed ({type(error).__name__}: {error})"
        )
    state = optimizer.state.get(probe, {})
    held = sum(
        tensor.numel() * tensor.element_size()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 1
    )
    return held / (probe.numel() * probe.element_size()), None
