"""Comparing what two steps left behind, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pdcompile.passes.verify.report import Difference
from pdcompile.passes.verify.runs import Outcome

Row = tuple[str, str, int, torch.Tensor | None, torch.Tensor | None]


def differences(
    mode: str,
    loss: str,
    home: Mapping[str, int],
    last: int,
    expected: Outcome,
    got: Outcome,
    *,
    exact: bool,
    step: int = 0,
) -> list[Difference]:
    """All tensors that differ: outputs, the loss (named `loss`), gradients, buffers.

    Args:
        home: the first stage that holds a parameter or buffer, by FQN.
        last: the last stage, which has the outputs.
    """
    rows: list[Row] = [
        ("output", name, last, value, got.outputs.get(name))
        for name, value in expected.outputs.items()
    ]
    rows.append(("loss", loss, last, expected.loss, got.loss))
    rows += [
        ("gradient", name, home.get(name, 0), value, got.gradients[name])
        for name, value in expected.gradients.items()
    ]
    rows += [
        ("buffer", name, home.get(name, 0), value, got.buffers[name])
        for name, value in expected.buffers.items()
        if name in home or name in got.buffers  # else forward makes it anew where it is missing
    ]
    found = []
    for what, name, stage, one, other in rows:
        largest = distance(one, other, exact=exact)
        if largest is not None:
            found.append(Difference(mode, what, name, stage, largest, step))
    return found


def distance(one: torch.Tensor | None, other: torch.Tensor | None, *, exact: bool) -> float | None:
    """The largest absolute difference; None where there is none that counts."""
    if one is None or other is None:
        # A parameter that got no gradient and one that got zeros update alike in most optimizers,
        # but not in all: it is a difference.
        return None if one is other else float("inf")
    one, other = (t.to_dense() if t.layout != torch.strided else t for t in (one, other))
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if one.numel() == 0 or torch.equal(one, other):
        return None
    if not (one.is_floating_point() or one.is_complex()):
        return float((one.to(torch.float64) - other.to(torch.float64)).abs().max())
    equal = (one == other) | ((one != one) & (other != other))
    if bool(equal.all()) or (not exact and torch.allclose(one, other, equal_nan=True)):
        return None
    gap = (one - other).abs()
    return float(gap.max()) if bool(torch.isfinite(gap).all()) else float("inf")
