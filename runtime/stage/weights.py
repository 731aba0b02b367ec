"""The weights of one stage: every live version, their gradients, and the update.

Schedules with a flush run on the model's own Parameters.  Where minibatches overlap there is one
module instance a version, with Parameters of its own that share everything else (buffers, frozen
parameters); weights W_v live in instance v mod versions, and the model's Parameter always shows
the newest.  An update copies the newest into the instance whose version nobody needs any more and
steps the optimizer there: replacing .data leaves graphs on the old storage alone, while writing
into a storage that a graph still needs would give wrong gradients without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn

from pdcompile.compiled import Compiled
from pdcompile.eager.gradients import GradientHook, gradient_hooks, memory_of
from pdcompile.ir.opaque import instance
from pdcompile.ir.stage_interface import StageInterface
from pdcompile.runtime.stage.gradients import StageGradients
from pdcompile.weights.source import Registered, registered, set_tensor


class Shared(NamedTuple):
    """A parameter in the memory of the host, each of its versions; `here`: this process steps it.

    `own`: the same memory, but what is written there is this process's alone.
    """

    parameter: nn.Parameter
    versions: list[Tensor]
    own: list[Tensor]
    here: bool

    def keep(self, newest: int) -> None:
        """Values that a step put elsewhere (p.data = …) come to where others read them."""
        there = self.versions[newest % len(self.versions)]
        if self.here and self.parameter.data_ptr() != there.data_ptr():
            there.copy_(self.parameter.data)
            self.parameter.data = there

    def leave(self, newest: int) -> None:
        """The parameter keeps its values, and shares them with nobody who writes them."""
        self.parameter.data = self.own[newest % len(self.own)]


class StageWeights(StageGradients):
    """All versions of a stage's module.  FQNs are canonical names of the model's tensors.

    `tensors(fqn)` is the tensor to use: the model's own Parameter or buffer, or a copy.
    To parameters that other stages hold too backward adds on Parameters of their own, without
    hooks: once an update the stages sum what they have, and hooks run on the owner's sum.  Updates
    of the others arrive by message.  `apart`, and where minibatches overlap: versions, or the only
    one, have Parameters of their own.  `model` has the opaque modules.  `once`: parameters in
    memory that replicas in other processes read too.
    """

    def __init__(
        self, stage: int, compiled: Compiled, tensors: Callable[[str], Tensor], model: nn.Module,
        *, apart: bool = False, once: Mapping[str, Shared] | None = None,
    ) -> None:  # fmt: skip
        interface, spec = compiled.interfaces[stage], compiled.stream.spec
        self.once = {fqn: one for fqn, one in (once or {}).items() if fqn in interface.parameters}
        tied = {t.fqn: stage == t.stages[0] for t in compiled.plan.tied if stage in t.stages}
        self.versions, self.apart = spec.versions(stage), apart or compiled.overlaps
        masters = dict[str, nn.Parameter]()
        slots = [dict[str, nn.Parameter]() for _ in range(self.versions)]
        self._hooked: list[tuple[tuple[str, GradientHook], list[Any]]] = []  # and their handles
        for fqn in interface.parameters:
            master = tensors(fqn)
            assert isinstance(master, nn.Parameter)
            if master.requires_grad:
                masters[fqn] = master
                own = fqn not in tied and not self.apart
                for version, held in enumerate(slots):
                    held[fqn] = master if own else self._new_slot(fqn, master, version)
        super().__init__(masters, slots, tied, spec.group(stage))
        stage_class = compiled.stage_classes[stage]
        self.modules = [instance(stage_class, interface, model) for _ in range(self.versions)]
        self.evaluators = self.modules  # others for another form of call
        homes = [home for module in self.modules for home in module.modules()]
        tables = [one._buffers for one in homes], [one._parameters for one in homes]
        self._tables = [[one for one in each if one] for each in tables]
        self._places = places(self.modules[0], interface)
        for held, module in zip(slots, self.modules, strict=True):
            for name, fqn in self._places.items():
                set_tensor(module, name, held[fqn] if fqn in held else tensors(fqn))
        self.updating = False  # an update of the present program has begun
        self.starts_anew = False  # all versions are the newest until there is another

    def _new_slot(self, fqn: str, master: nn.Parameter, version: int) -> nn.Parameter:
        """A Parameter for the module of a version alone."""
        if fqn in self.once:
            return nn.Parameter(self.once[fqn].versions[version])
        return nn.Parameter(master.data.clone() if version else master.data)

    def module(self, version: int, training: bool) -> nn.Module:
        """The instance that holds W_version, in the given mode."""
        module = (self.modules if training else self.evaluators)[version % self.versions]
        return module if module.training == training else module.train(training)

    def buffers(self, names: Collection[str]) -> dict[str, Tensor]:
        """Buffers of these names that the stage holds."""
        held = self.registered_buffers(self.modules[0], names)
        return {self._places[one.name]: one.tensor for one in held}

    @property
    def first_here(self) -> StageWeights:
        """Those of the first replica in this process, which the optimizer knows."""
        return self

    def registered_buffers(self, module: nn.Module, names: Collection[str]) -> list[Registered]:
        """Buffers of these names where an instance has them."""
        every = registered(module) if names else ()
        return [one for one in every if one.is_buffer and self._places[one.name] in names]

    def named(self) -> dict[str, Tensor]:
        """Parameters and buffers of the newest version, by their names in the model."""
        module = self.modules[self.newest % self.versions]
        return {self._places[one.name]: one.tensor for one in registered(module)}

    def memories(self, *, parameters: bool) -> set[int]:
        """Addresses of the memory of the weights of every version, or of the buffers."""
        every = [one for table in self._tables[parameters] for one in table.values()]
        return {memory_of(one) for one in every if one is not None}

    # -- versions ----------------------------------------------------------------------------

    def advance(self, minibatch: int) -> bool:
        """Make room for the update that takes `minibatch`: the next version starts as the newest.

        False where it has run already, for another replica in this process.
        """
        number = self.update_of(minibatch)
        if self.newest > number:
            return False
        self.newest, self.starts_anew, self.updating = number + 1, False, True
        for fqn in self.owned if self.versions > 1 else ():
            new = self.parameter(number + 1, fqn)
            if fqn not in self.once or self.once[fqn].here:
                new.data.copy_(self.parameter(number, fqn).data)
            self._masters[fqn].data = new.data
        return True

    def older(self) -> list[tuple[str, Tensor]]:
        """FQN and values of the trained parameters in every version but the newest."""
        return [(f, one) for f, one in self._replaced() if f not in self.once]  # homes may go on

    def _replaced(self) -> Iterator[tuple[str, nn.Parameter]]:
        newest = self._slots[self.newest % self.versions]
        return chain(*(held.items() for held in self._slots if held is not newest))

    def receive(self, fqn: str, minibatch: int, value: Tensor) -> None:
        """The owner's weights after the update of `minibatch`, for a tied copy.

        They may come before this stage's own update, when nobody needs the version that they
        overwrite any more.
        """
        self.starts_anew = False
        slot = self.parameter(minibatch + 1, fqn)
        if fqn not in self.first_here.once:  # where the owner has written it
            slot.data.copy_(value)
        self._masters[fqn].data = slot.data

    def adopt(self) -> bool:
        """Take over memory that a Parameter was given (p.data = …); True if modules may have it."""
        for one in self.once.values():
            one.keep(self.newest)
        held, moved = self._slots[self.newest % self.versions], not self.apart
        for fqn in self.owned if self.apart else self.tied.intersection(self.owned):
            newest, master = held[fqn], self._masters[fqn]
            if newest.data_ptr() != master.data_ptr():
                newest.data, moved = master.data, True
        return moved

    def leave(self) -> None:
        """The connections are about to close, and nobody writes the weights of others any more."""
        for one in self.once.values():
            one.leave(self.newest)

    def rebind(self, fqn: str, buffer: Tensor) -> None:
        """Another tensor takes the place of a buffer, in every version's module."""
        for module in self.modules:
            for name in (name for name, held in self._places.items() if held == fqn):
                set_tensor(module, name, buffer)

    def adopt_hooks(self) -> None:
        """Have every version run the hooks that the user's Parameters have on their gradients.

        Unless `apart` they are on the Parameter that backward works on.  Those of tied parameters
        run on sums (`run_hooks`).
        """
        masters = {f: self._masters[f] for f in self.owned if self.apart and f not in self.tied}
        wanted = [(fqn, hook) for fqn, one in masters.items() for hook in gradient_hooks(one)]
        if wanted == [pair for pair, _ in self._hooked]:
            return
        for handle in (handle for _, handles in self._hooked for handle in handles):
            handle.remove()
        self._hooked = [
            ((fqn, hook), [hook.follow(held[fqn], masters[fqn]) for held in self._slots])
            for fqn, hook in wanted
        ]

    def follow(self, fqn: str, owner: StageWeights) -> None:
        """A tied copy takes the newest values of its owner in this process."""
        copy, newest = self.parameter(self.newest, fqn), owner.master(fqn)
        if self.versions == 1:
            copy.data = newest.data
        else:
            copy.data.copy_(newest.data)

    def forget(self) -> None:
        """A new history begins: every version is the newest."""
        self.starts_anew = True
        for fqn, slot in self._replaced():
            slot.data.copy_(self.parameter(self.newest, fqn).data)

    def restart(self, minibatches: int) -> None:
        """A new history begins after so many minibatches, with other weights."""
        self.forget()
        if self.group > 1:  # gradients that wait for others of their group are of the old one
            self._put_aside()
            self.gradients.clear()
        self.newest, self.begun = self.update_of(minibatches), minibatches
        for fqn, master in self._masters.items():
            master.data = self.parameter(self.newest, fqn).data

    def load(self, fqn: str, value: Tensor) -> bool:
        """Overwrite every version of a trainable parameter, if it is held here."""
        for held in self._slots if fqn in self._masters else ():
            held[fqn].data.copy_(value)
        return fqn in self._masters


def places(module: nn.Module, interface: StageInterface) -> dict[str, str]:
    """FQN in the model of every parameter and buffer, by its names in the stage."""
    return {name: interface.aliases.get(name, name) for *_, name, _ in registered(module)}
