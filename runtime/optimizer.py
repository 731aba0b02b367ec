"""The user's optimizer: made once a process, applied stage by stage and minibatch by minibatch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import repeat
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.eager.optimizers import all_step_hooks, members
from pdcompile.eager.snapshot import difference, snapshot
from pdcompile.errors import ConfigError
from pdcompile.runtime.stage.homes import Homes
from pdcompile.runtime.stage.weights import StageWeights
from pdcompile.warn import warn

Scale = Callable[[int, int], float]  # of the learning rate: of a stage, of a minibatch's update
_Place = tuple[int, str]  # of `Updater._values`: which dict, and the key in it
_SHARED = frozenset(("params", "param_groups", "state"))
_NOTHING = object()
_PLAIN = frozenset((bool, int, float, complex, str, type(None)))


class Updater:
    """The optimizer of one process, applied stage by stage and minibatch by minibatch.

    Learning rates and the like are those of the moment when the minibatch's `step` was called
    (`snapshot`), however much later the update runs: at most `reach` calls.

    In one process an update is one `optimizer.step()` a stage.  What the optimizer itself counts,
    in attributes or in its param_groups, is kept for each stage, as if each had an optimizer of
    its own (as under torchrun); only values that are replaced are noticed, not written ones.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, reach: int, scale: Scale | None = None,
        homes: Homes | None = None, *, alone: bool = False,
    ) -> None:  # fmt: skip
        """`scale`: what learning rates of an update are multiplied by.  `alone`: of one stage."""
        self.optimizer, self._alone = optimizer, alone
        self._homes = homes if homes is not None and homes.wholes else None
        self._scale = scale
        for group in optimizer.param_groups if scale is not None else ():
            if "lr" not in group:
                raise ConfigError(
                    f"{type(optimizer).__name__} has no learning rate to scale by stage or replica",
                    where="linear_lr_scaling",
                    remedy="leave linear_lr_scaling out, or use another schedule, or an optimizer "
                    "with lr",
                )
        self._reach = reach
        self._snapshots: dict[int, list[dict[str, Any]]] = {}
        self._before: dict[_Place, Any] = {}  # what was there before any stage's first update
        self._made: dict[int, dict[_Place, Any]] = {}  # by stage: what its updates left
        self._shown: dict[_Place, Any] = {}  # what the user sees: the last update's
        self._warned = False

    def warn_of_hooks(self) -> None:
        """Say once that step hooks run for each stage, in a process that has several."""
        if not self._warned and all_step_hooks(self.optimizer):
            self._warned = True
            warn(
                "the optimizer has step hooks, and stages are updated one by one: in one process "
                "its hooks run once a stage and update; a hook that goes through all parameters "
                "(an average of weights) belongs after pipe.step and pipe.flush"
            )

    def snapshot(self, minibatch: int) -> None:
        """Remember every param_group value for the update of this minibatch."""
        # Learning-rate schedulers warn unless the optimizer stepped before them; it will.
        for one in (self.optimizer, *members(self.optimizer)):
            one._opt_called = True  # type: ignore[attr-defined]
        self._snapshots.pop(minibatch - self._reach - 1, None)
        self._snapshots[minibatch] = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]

    def update(
        self, weights: StageWeights, minibatch: int, stage: int, *, skipped: bool = False
    ) -> bool:
        """Make W_minibatch+1 of a stage from its minibatch's gradients (`skipped`: from none); True
        where modules may have it in other memory."""
        gradients = weights.harvest(minibatch)
        if weights.advance(minibatch) and not skipped:
            given = zip(map(weights.master, gradients), gradients.values(), strict=True)
            tells = self._homes is None and not self._alone
            own = {*map(id, map(weights.master, weights.owned))} if tells else None
            self.apply(minibatch, given, stage, own)
        weights.taken(minibatch)
        return weights.adopt()

    def apply(
        self, minibatch: int, gradients: Iterable[tuple[nn.Parameter, Tensor]], stage: int,
        own: Collection[int] | None,
    ) -> None:  # fmt: skip
        """One optimizer step of a stage with these gradients alone; clears them.

        `own`: ids of its parameters, where it must leave others as they are.

        Raises:
            ConfigError: the step changed one of another stage.
        """
        groups, values = self.optimizer.param_groups, self._values()
        self._notice(values)
        every = [parameter for group in groups for parameter in group["params"]]
        hidden = [(parameter, parameter.grad) for parameter in every if parameter.grad is not None]
        others = [one for one in every if own is not None and id(one) not in own]
        # Values of another moment take the place of the present ones; most of them are the same.
        changed = [
            (group, then, dict(group), _writable(then))
            for group, then in zip(groups, self._snapshots[minibatch], strict=False)
            if any(map(is_not, then.values(), map(group.get, then, repeat(_NOTHING))))
        ]
        for group, then, *_ in changed:
            group.update(then)
        for parameter, _ in hidden:
            parameter.grad = None
        update = nullcontext([*gradients]) if self._homes is None else self._homes.update(gradients)
        with update as given:
            for parameter, gradient in given:
                parameter.grad = gradient
            self._enter(stage, values)
            before = [*map(dict, values)]
            writes = [one._version for one in others]
            with nullcontext() if self._scale is None else self._rates(stage, minibatch):
                self.optimizer.step()
            if [one._version for one in others] != writes:
                raise ConfigError(
                    "the optimizer's step with the gradients of one stage changes parameters of "
                    "another one, which may still need them, or have them on another rank",
                    where="optimizer",
                    remedy="in step leave parameters without a gradient alone, and cut at borders "
                    'of modules whose parameters belong together: CutAt("layers.*")',
                )
            self._leave(stage, before)
        for parameter, _ in given:
            parameter.grad = None
        for parameter, own_gradient in hidden:
            parameter.grad = own_gradient
        for group, then, now, written in changed:
            _carry_over(written, then, now)
            # What the optimizer itself changed (a step count of its own) stays.
            group.update({k: now[k] for k, v in then.items() if k in now and group[k] is v})
        values = self._values()
        self._shown = {(n, k): values[n].get(k, _NOTHING) for n, k in self._before}

    def values_of(self, stage: int) -> list[dict[str, Any]]:
        """The values of the param_groups that the next update of a stage begins with, but for the
        scale of its learning rates."""
        groups = self._values()
        self._notice(groups)
        found = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        groups[-len(found) :] = found
        for (n, key), value in self._left_by(stage).items():
            if len(groups) - len(found) <= n < len(groups) and value is not _NOTHING:
                groups[n][key] = value
        return found

    @contextmanager
    def _rates(self, stage: int, minibatch: int) -> Iterator[None]:
        """Context of a step with the learning rates of an update of a stage; what the optimizer
        makes of them stays, without their scale."""
        assert self._scale is not None
        factor = self._scale(stage, minibatch)
        groups = self.optimizer.param_groups if factor != 1.0 else []
        own = [group["lr"] for group in groups]
        scaled = [rate * factor for rate in own]
        for group, rate in zip(groups, scaled, strict=True):
            group["lr"] = rate
        yield
        for group, rate, given in zip(groups, own, scaled, strict=True):
            group["lr"] = rate if group["lr"] is given else group["lr"] / factor

    def _left_by(self, stage: int) -> dict[_Place, Any]:
        """Values that the last update of a stage left; `_NOTHING`: nothing is there."""
        return self._before | self._made.get(stage, {})

    def _values(self) -> list[dict[str, Any]]:
        """Attributes of the optimizers, where stages share them, then the values of the groups."""
        shared = () if self._alone else members(self.optimizer)
        return [*map(vars, shared), *self.optimizer.param_groups]

    def _notice(self, values: list[dict[str, Any]]) -> None:
        """Take over, for every stage, what the user has set since the last update."""
        for place, shown in self._shown.items():
            n, key = place
            if n < len(values) and values[n].get(key, _NOTHING) is not shown:
                self._before[place] = values[n].get(key, _NOTHING)
                for made in self._made.values():
                    made.pop(place, None)

    def _enter(self, stage: int, values: list[dict[str, Any]]) -> None:
        """Put back what this stage's last update left."""
        for (n, key), value in self._left_by(stage).items() if self._before else ():
            if n < len(values) and value is not _NOTHING:
                values[n][key] = value
            elif n < len(values):
                values[n].pop(key, None)

    def _leave(self, stage: int, before: list[dict[str, Any]]) -> None:
        """Note what a stage's update replaced, and what of that any stage's has replaced."""
        values = self._values()
        for n, (now, then) in enumerate(zip(values, before, strict=True)):
            if any(map(is_not, now.values(), map(then.get, now, repeat(_NOTHING)))):
                for key in now.keys() - _SHARED:
                    if now[key] is not then.get(key, _NOTHING):
                        self._before.setdefault((n, key), then.get(key, _NOTHING))
        for n, key in self._before:
            if n < len(values) and key in values[n]:
                self._made.setdefault(stage, {})[n, key] = values[n][key]


def _carry_over(before: dict[str, Any], after: dict[str, Any], live: dict[str, Any]) -> None:
    """Copy into a group what the optimizer wrote in place into values of a snapshot of it."""
    for key, was in before.items():
        value = after[key]
        if key not in live or difference(snapshot(was), value, key, torch.equal) is None:
            continue
        if isinstance(value, Tensor) and isinstance(live[key], Tensor):
            live[key].copy_(value)
        elif isinstance(value, list | dict):
            live[key] = copy.deepcopy(value)


def _writable(values: dict[str, Any]) -> dict[str, Any]:
    """Copies of values that can be written in place, and not only be replaced: not numbers, texts,
    or tuples of them."""
    return {
        key: copy.deepcopy(value)
        for key, value in values.items()
        if type(value) not in _PLAIN
        and not (type(value) is tuple and _PLAIN.issuperset(map(type, value)))
    }
