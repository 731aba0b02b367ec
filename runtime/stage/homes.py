"""Homes: the rank of a stage that steps a parameter, where not every rank does.

Among replicas it is the one that gets the sum of its gradients, and gives the others the new
weights (`runtime.stage.replicas`).  Among parts it steps the parameter whole, where a step on
slices is another one.  The optimizer of the home has the parameter, and keeps its state; those of
the others have one without memory in its place, so that groups are the same everywhere.  Slices
stay where weights and gradients are.  An update brings both to the home, which has the whole while
it steps, and takes back slices of the new weights: whatever else reads or writes slices, clips or
keeps versions of them, need not know of homes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from math import nan
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from pdcompile.eager.optimizers import make_optimizer, members
from pdcompile.errors import ConfigError, errors_as
from pdcompile.runtime.state.model_state import State
from pdcompile.units import format_bytes
from pdcompile.weights.source import like

Pairs = Iterable[tuple[nn.Parameter, Tensor]]  # parameters and their gradients


class Homes:
    """The parameters of a pipeline that not every rank steps, and this process's part in it.

    `of`: the part that is the home of each that is stepped whole.  `wholes`: what the optimizer has
    in place of slices, and of parameters whose home is another replica.
    """

    def __init__(self, state: State, of: Mapping[str, int]) -> None:
        self.of, self._state = of, state
        held = {fqn: one for fqn, one in state.named_parameters() if one.requires_grad}
        self._absent = {fqn for fqn in held if not state.updated_here(fqn)}
        self._slices = {f: one for f, one in held.items() if f in of or f in self._absent}
        self._updating = False
        mine = {f: one.data for f, one in self._slices.items() if f not in self._absent}
        here = self._gathered(mine)
        self.wholes: dict[str, nn.Parameter] = {}
        for fqn, own in self._slices.items():
            shape = state.whole_shape(fqn, own) if fqn in of else own.shape
            absent = own.new_empty(shape, device="meta")
            self.wholes[fqn] = cast(nn.Parameter, like(own, here.get(fqn, absent)))

    def __str__(self) -> str:
        here = sum(one.nbytes for fqn, one in self.wholes.items() if self.at_home(fqn))
        if not self.of:
            own = [one for fqn, one in self._state.named_parameters() if self.at_home(fqn)]
            return (
                f"the optimizer of this process steps {len(own)} parameter{'s' * (len(own) != 1)} "
                f"({format_bytes(sum(one.nbytes for one in own))}); {len(self._absent)} others are "
                "stepped by other replicas"
            )
        return (
            f"the optimizer steps {len(self.of)} parameters whole, each at one part of its stage "
            f"({format_bytes(here)} here): the forecast of memory has equal shares of their state, "
            "and not the whole weights and gradients that a home has during an update"
        )

    def optimizer(
        self, build: Any, named: Iterable[tuple[str, nn.Parameter]]
    ) -> torch.optim.Optimizer | None:
        """The optimizer of this process."""
        own = [(fqn, self.wholes.get(fqn, one)) for fqn, one in named]
        known, state = {fqn for fqn, _ in own}, self._state
        kinds = {fqn: info.kind for fqn, info in state.infos.items() if fqn not in known}
        others = [
            (f, cast(nn.Parameter, state.tensors[f])) for f in kinds if kinds[f] == "parameter"
        ]
        with errors_as(ConfigError, "optimizer= raised", "optimizer", "try it alone", Exception):
            made = make_optimizer(build, own, others, state.buffer)
        self._let_go(self.wholes)
        for one in {made, *members(made)} if made is not None and self.wholes else ():
            self._refuse_others(one)
        return made

    def at_home(self, fqn: str) -> bool:
        """True where this process steps a parameter: as its home, or as all parts step slices."""
        if fqn in self._absent:
            return False
        beside = self._state.beside
        return beside is None or self.of.get(fqn, beside.part) == beside.part

    def saves(self, fqn: str) -> bool:
        """True where this process saves the optimizer's state of a parameter: the first part does
        what all step."""
        beside = self._state.beside
        return self.at_home(fqn) and (beside is None or self.of.get(fqn, 0) == beside.part)

    def own_values(self, fqn: str, values: dict[str, Any]) -> dict[str, Any]:
        """This process's part of the optimizer's state of a parameter."""
        if not self.at_home(fqn):
            return {}
        return values if fqn in self.of else self._state.own_values(fqn, values)

    @contextmanager
    def update(self, gradients: Pairs) -> Iterator[Pairs]:
        """Context of a step, with the parameters and gradients that it takes in place of these, of
        which slices are some.  All parts enter it alike."""
        every = {id(one): (one, gradient) for one, gradient in gradients}
        found = {f: every.pop(id(own)) for f, own in self._slices.items() if id(own) in every}
        whole = self._gathered({fqn: gradient for fqn, (_, gradient) in found.items()})
        for fqn, value in self._gathered({f: own.data for f, (own, _) in found.items()}).items():
            self.wholes[fqn].data = value
        self._updating = True
        try:
            yield [*every.values(), *((self.wholes[f], gradient) for f, gradient in whole.items())]
        finally:
            self._updating = False
        if (beside := self._state.beside) is not None and found:
            values = [(fqn, self.wholes[fqn].data) for fqn in whole]
            own, parts = beside.division.own, range(beside.count)
            rows = [[own(fqn, value, part) for fqn, value in values] for part in parts]
            slices = [[found[fqn][0].data for fqn in of] for of in self._by_home(found)]
            came = beside.exchanged(rows, slices)
            for one, value in zip(chain(*slices), chain(*came), strict=True):
                one.copy_(value)
            self._let_go(whole)

    def _by_home(self, names: Iterable[str]) -> list[list[str]]:
        count = 1 if self._state.beside is None else self._state.beside.count
        return [[fqn for fqn in names if self.of[fqn] == part] for part in range(count)]

    def _gathered(self, slices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors of which this part is the home, from the slices of all parts."""
        beside, names = self._state.beside, self._by_home(slices)
        if beside is None or not slices:
            return {}
        rows = [[slices[fqn] for fqn in of] for of in names]
        came = zip(*beside.exchanged(rows, [rows[beside.part]] * beside.count), strict=True)
        shards, mine = beside.division.shards, names[beside.part]
        return {fqn: shards[fqn].joined(one) for fqn, one in zip(mine, came, strict=True)}

    def _let_go(self, names: Iterable[str]) -> None:
        """Let go of the whole between updates; the number in its place is none to compute with."""
        for whole in (self.wholes[fqn] for fqn in names if self.at_home(fqn)):
            whole.data = whole.new_full((), nan).expand(whole.shape)

    def check_none(self, call: str) -> None:
        """Raise ConfigError for a call on gradients without an update, which homes do not get."""
        if self.of or self._state.at_replicas:
            raise _only_step(call)

    def _refuse_others(self, one: torch.optim.Optimizer) -> None:
        """Refuse steps of an optimizer that the user makes: homes have no gradients then."""
        step = one.step

        def stepped(_: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._updating:
                raise _only_step("optimizer.step")
            return step(*args, **kwargs)

        vars(one).update(step=MethodType(stepped, one))


def _only_step(call: str) -> ConfigError:
    return ConfigError(
        "parameters are stepped at their homes, to which an update of `step` brings gradients",
        where=call,
        remedy="leave updates to pipe.step(...); or updates='every', and for stages with parts an "
        "optimizer that updates each element by itself (AdamW), or optimizer=None and one of yours "
        "for pipe.parameters(), which are slices there",
    )
