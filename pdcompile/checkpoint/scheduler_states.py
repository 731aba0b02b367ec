"""States of learning-rate schedulers: saved by every rank, loaded into other groups by names.

A scheduler keeps lists with an entry for each group of its optimizer (base rates, minima), and
ranks may have unlike groups.  Where the groups are those of one saved state, that is loaded as it
is.  Otherwise the lists are put together group by group, and everything else has to be the same in
all states that are needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdcompile.checkpoint.named_optimizer import named_groups
from pdcompile.checkpoint.plain_values import Encoder
from pdcompile.errors import CheckpointError

Names = tuple[str, ...]

# Attributes of torch's schedulers that go by groups, and a list that never does.
_BY_GROUP = frozenset(
    ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")
)
_WHOLE = "_milestones"
_CONTAINERS = (list, tuple, dict)


class SchedulerPart(NamedTuple):
    """A scheduler as one stage's rank had it: that stage's parameters in each group of its
    optimizer, and its state."""

    groups: tuple[Names, ...]
    state: Any


def scheduler_groups(
    scheduler: Any, optimizer: torch.optim.Optimizer | None, names: Mapping[int, str]
) -> list[tuple[Any, Names]]:
    """The groups of a scheduler's optimizer, else of `optimizer`, each with its names."""
    own = getattr(scheduler, "optimizer", None)
    own = own if isinstance(own, torch.optim.Optimizer) else optimizer
    if own is None:
        return []
    named = named_groups(own, names)
    return [(group, one.names) for group, one in zip(own.param_groups, named, strict=True)]


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


def merged_state(
    parts: Sequence[SchedulerPart],
    own: Sequence[Names],
    here: Any,
    kept: Collection[int],
    name: str,
) -> Any:
    """The state for a scheduler whose optimizer has the groups `own`.

    Args:
        here: its present state.
        kept: groups that keep their own rates.
        name: for errors.

    Raises:
        CheckpointError: the states are unlike where they have to be the same.
    """
    mine = {one for names in own for one in names}
    near = [part for part in parts if not mine.isdisjoint(chain(*part.groups))] or [*parts]
    alike = not kept and all(
        len(part.groups) == len(own) and _same(part.state, near[0].state) for part in near
    )
    if alike and all(
        mine.intersection(held) <= set(own[n])
        for part in near
        for n, held in enumerate(part.groups)
    ):
        return near[0].state
    return _Merge(near, own, kept, name).value([part.state for part in near], here, "")


class _Merge:
    """One state of several."""

    def __init__(
        self, parts: Sequence[SchedulerPart], own: Sequence[Names], kept: Collection[int], name: str
    ) -> None:
        self._counts = [len(part.groups) for part in parts]
        self._own, self._kept, self._name = own, kept, name
        self._sources = [_sources(parts, n, names) for n, names in enumerate(own)]

    def value(self, values: Sequence[Any], here: Any, where: str) -> Any:
        """The value of an attribute, of those in all states, and the present one."""
        first, kinds = values[0], {type(value) for value in values}
        key = where.rpartition(".")[2]
        if kinds == {dict} and all(value.keys() == first.keys() for value in values):
            there = here if isinstance(here, dict) else {}
            return {
                k: self.value([v[k] for v in values], there.get(k), f"{where}.{k}") for k in first
            }
        if kinds not in ({list}, {tuple}):
            return self._same_in_all(values, where)
        lengths = [len(value) for value in values]
        known = key in _BY_GROUP and lengths == self._counts
        if not known and len({*lengths}) == 1 and any(isinstance(v, _CONTAINERS) for v in first):
            now = [*(here if isinstance(here, type(first)) else ()), *[None] * len(first)]
            return type(first)(
                self.value([v[n] for v in values], now[n], f"{where}.{n}")
                for n in range(len(first))
            )
        fits = isinstance(here, type(first)) and len(here) == len(self._own)
        if not known and (lengths != self._counts or not fits or key == _WHOLE):
            return self._same_in_all(values, where)
        found = self._by_group(values, here, where)
        if not known and _all_same(values) and len(here) == len(first) and not _same(found, first):
            raise self._error(
                where,
                f"{str(first)[:60]}: whether it goes by groups, whose order is another now, cannot "
                "be told",
            )
        return found

    def _by_group(self, values: Sequence[Any], here: Any, where: str) -> Any:
        found = []
        for n, sources in enumerate(self._sources):
            given = [values[part][group] for part, group in sources]
            if n in self._kept or not given or (not self._own[n] and not _all_same(given)):
                if not isinstance(here, list | tuple) or len(here) != len(self._own):
                    raise self._unlike(where, given or values)
                given = [here[n]]
            found.append(self._same_in_all(given, where))
        return type(values[0])(found)

    def _same_in_all(self, values: Sequence[Any], where: str) -> Any:
        if not _all_same(values):
            raise self._unlike(where, values)
        return values[0]

    def _unlike(self, where: str, values: Sequence[Any]) -> CheckpointError:
        other = next((one for one in values[1:] if not _same(one, values[0])), values[-1])
        return self._error(
            where,
            f"{str(values[0])[:60]} on one rank of those that saved it, and {str(other)[:60]} on "
            "another, and the stages or groups of this rank are of both",
        )

    def _error(self, where: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"{where.lstrip('.') or 'the state'} of scheduler {self._name} is {what}",
            where="schedulers",
            remedy="load it on the plan that it was saved with, where each rank takes its own "
            "(plan=, as many processes, the same groups); or make the scheduler anew, and leave it "
            "out",
        )


def _sources(parts: Sequence[SchedulerPart], n: int, names: Names) -> list[tuple[int, int]]:
    """(state, group in it) of the groups that parameters of group n were in; of the groups in its
    place where it has none."""
    return [
        (at, group)
        for at, part in enumerate(parts)
        for group, held in enumerate(part.groups)
        if (not set(held).isdisjoint(names) if names else group == n)
    ]


def _all_same(values: Sequence[Any]) -> bool:
    return all(_same(value, values[0]) for value in values)


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other) or (one != one and other != other)
