"""States of learning-rate schedulers: every rank saves its own, with the groups that it goes by.

A scheduler keeps lists with an entry for each group of its optimizer (base rates, minima), and
ranks may have unlike groups.  A state is loaded where the groups are those that it was saved with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch

from pdcompile.checkpoint.manifest import StoredScheduler
from pdcompile.checkpoint.named_optimizer import named_groups
from pdcompile.checkpoint.plain_values import Encoder
from pdcompile.errors import CheckpointError

Names: TypeAlias = tuple[str, ...]  # of the parameters in a group


def scheduler_groups(
    scheduler: Any, optimizer: torch.optim.Optimizer | None, names: Mapping[int, str]
) -> list[Names]:
    """The groups of a scheduler's optimizer, else of `optimizer`."""
    own = getattr(scheduler, "optimizer", None)
    own = own if isinstance(own, torch.optim.Optimizer) else optimizer
    return [] if own is None else [one.names for one in named_groups(own, names)]


def scheduler_state(name: str, scheduler: Any) -> Any:
    """JSON of a scheduler's state.

    Raises:
        CheckpointError: it gives none, or one that no file without code can hold.
    """
    try:
        state = scheduler.state_dict()
    except Exception as error:  # the user's
        raise CheckpointError(
            f"scheduler {name} ({type(scheduler).__name__}) gives no state: "
            f"{type(error).__name__}: {error}",
            where="schedulers",
            remedy="hand over schedulers whose state_dict() works, or save it yourself",
        ) from error
    return Encoder(inline=True).encode(state, f"schedulers/{name}")


def fitting_state(parts: Sequence[StoredScheduler], own: Sequence[Names]) -> Any:
    """JSON of the state for a scheduler whose optimizer has the groups `own`.

    Args:
        parts: the scheduler as each stage's rank had it.

    Raises:
        CheckpointError: ranks that had its parameters had other groups, or unlike states.
    """
    mine = {name for names in own for name in names}
    near = [part for part in parts if not mine.isdisjoint(chain(*part.groups))] or [*parts]
    for part in near:
        moved = len(part.groups) != len(own) or any(
            not mine.intersection(held) <= set(names)
            for held, names in zip(part.groups, own, strict=True)
        )
        if moved or part.state != near[0].state:
            raise CheckpointError(
                f"scheduler {part.name} goes by the groups of its optimizer, and this rank has "
                + ("others than those that it was saved with" if moved else "those of ranks that "
                   "saved unlike states of it"),
                where="schedulers",
                remedy="load it on the plan that it was saved with, where each rank takes its own "
                "(plan=, as many processes, the same groups); or make the scheduler anew, at the "
                "step that training is at (last_epoch=), and leave it out",
            )  # fmt: skip
    return near[0].state
