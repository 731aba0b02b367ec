"""Hooks of the user's on gradients of which each part has a slice or a share."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pdcompile.eager.gradients import gradient_hooks
from pdcompile.errors import ConfigError
from pdcompile.parts.shard import Division


def refuse_hooks(tensors: Mapping[str, Tensor], division: Division) -> None:
    """Raise ConfigError for a hook on the gradient of a parameter that is divided.

    Each part would run it on what it has of the gradient, and few hooks make of that their share of
    what they make of the whole.
    """
    for fqn in (*division.shards, *division.summed):
        if fqn in tensors and gradient_hooks(tensors[fqn]):
            has = "a slice" if fqn in division.shards else "a share of the sum"
            raise ConfigError(
                f"this parameter has a hook on its gradient, of which each of {division.parts} "
                f"parts has {has}",
                where=fqn,
                remedy="max_grad_norm= or pipe.clip_grad_norm_(...) clips by the whole norm; or "
                "change .grad between pipe.forward_backward(...) and optimizer.step(), where it is "
                "the sum, or this rank's slice of it; or parts=1",
            )
