"""Recomputes buffers that no checkpoint has, because the model computes them when it is built.

On the meta device the computation left no value.  Libraries that build models there have a method
that fills the buffers of one module in place; its result is used only if it wrote all of it, which
two runs on different memory show.  The constructor is never called again, because its arguments
are not known.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.eager.digest import flat_bytes
from pdcompile.eager.randomness import preserved_rng, reseed, seed_of


def recomputed(
    model: nn.Module, path: str, leaves: Sequence[str], seed: int
) -> tuple[dict[str, Tensor], str]:
    """Values of some buffers of the module at `path`, and "" or the reason why there are none.

    The model is not changed: a copy without parameters is filled.
    """
    reasons = []
    for name, fill in _ways(model, path):
        try:
            first, second = (
                _filled(model.get_submodule(path), leaves, fill, k, seed_of(seed, 0, 0, path, 0))
                for k in (0, 1)
            )
        except Exception as error:  # of any class: it is the model's code
            reasons.append(f"{name} raised {type(error).__name__}: {error}")
            continue
        short = [leaf for leaf in leaves if not _same(first[leaf], second[leaf])]
        if not short:
            return first, ""
        reasons.append(f"{name} does not fill {', '.join(short)}")
    return {}, "; ".join(reasons) or "its module has no method that computes it"


def _ways(model: nn.Module, path: str) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """The methods of libraries that may fill the buffers, each as a function of the module."""
    module = model.get_submodule(path)
    for name in ("init_non_persistent_buffers", "reset_parameters"):
        if callable(getattr(module, name, None)):
            yield f"{type(module).__name__}.{name}", methodcaller(name)
    parts = path.split(".") if path else []
    for count in range(len(parts), -1, -1):  # the innermost model around it
        owner: Any = model.get_submodule(".".join(parts[:count]))
        if callable(getattr(owner, "_init_weights", None)):
            yield f"{type(owner).__name__}._init_weights", owner._init_weights
            return


def _filled(
    module: nn.Module, leaves: Sequence[str], fill: Callable[[Any], Any], before: int, seed: int
) -> dict[str, Tensor]:
    """The buffers after `fill` ran on a copy of the module whose buffers held `before`."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
        for parameter in module.parameters()
    }
    twin = copy.deepcopy(module, memo)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set:
            twin._buffers[name] = torch.full_like(buffer, before, device="cpu")
    with preserved_rng(), torch.no_grad(), torch.device("cpu"):
        reseed(seed)
        fill(twin)
    found = {}
    for leaf in leaves:
        buffer, wanted = twin._buffers[leaf], module._buffers[leaf]
        assert wanted is not None
        if buffer is None or buffer.shape != wanted.shape or buffer.dtype != wanted.dtype:
            raise TypeError(f"{leaf} became another tensor")
        found[leaf] = buffer.detach()
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    """True if two tensors are equal to the last bit; False on the meta device."""
    if one.is_meta or other.is_meta:
        return False
    return torch.equal(flat_bytes(one), flat_bytes(other))
