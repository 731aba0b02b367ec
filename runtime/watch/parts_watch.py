"""Comparison of what the parts of a stage hold alike: whole tensors and the optimizer's settings.

What a user changes on one of them alone would make each train a model of its own.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from pdcompile.eager.digest import digest_of_ends
from pdcompile.errors import ContractError
from pdcompile.runtime.transport.parts_group import PartsGroup

_SETTINGS = "the optimizer's param_groups"
_PLAIN = (bool, int, float, str, tuple, type(None))


def refuse_unlike(
    beside: PartsGroup | None, tensors: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
) -> None:  # fmt: skip
    """Raise ContractError where this part holds something else than the first one.

    All parts call it (None: a stage is whole).  Of tensors in host memory ends are compared, which
    is quick.
    """
    if beside is None:
        return
    sliced = beside.division.shards
    held = {fqn: digest_of_ends(one) for fqn, one in tensors.items() if fqn not in sliced}
    groups = [] if optimizer is None else optimizer.param_groups
    settings = [{k: v for k, v in one.items() if isinstance(v, _PLAIN)} for one in groups]
    held[_SETTINGS] = zlib.crc32(json.dumps(settings, sort_keys=True, default=str).encode())
    first = beside.tell([*held.values()])[0]
    for name, mine, theirs in zip(held, held.values(), first, strict=True):
        if mine != theirs and mine and theirs:
            raise ContractError(
                "this part of a stage holds other values of this than the first part",
                where=name,
                remedy="what you change between calls, change alike on every rank of the stage: "
                "weights and buffers that parts have whole, gradients, hooks, the optimizer's "
                "settings and its state",
            )
