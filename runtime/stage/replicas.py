"""Replicas of a stage: what they sum, and their weights where several are in one process.

Every replica makes the same update of the same sum.  In one process it is made once, by the
replica that comes to it first, in memory that all of them read: one optimizer, one set of weights.
Replicas in processes of their own compare digests of their weights: a write on one of them, or an
optimizer that draws random numbers, would part them in silence.  To read all weights would take
some percent of a step: with the gradients go digests of the ends of each parameter, and those of
all values between calls, before anybody reads a state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from pdcompile.compiled import Compiled
from pdcompile.eager.digest import digest, digest_of_ends
from pdcompile.eager.gradients import gradient_hooks
from pdcompile.errors import ConfigError, ContractError
from pdcompile.position import Accumulated
from pdcompile.runtime.device import Handle
from pdcompile.runtime.stage.gradients import Gradients
from pdcompile.runtime.stage.weights import StageWeights
from pdcompile.runtime.transport.reductions import Gathering, GroupSums, Reduction, Sums
from pdcompile.schedule import Action

OF_REPLICAS = (
    Action.POST_REDUCE, Action.WAIT_REDUCE, Action.POST_GATHER, Action.WAIT_GATHER,
    Action.POST_BUFFERS, Action.WAIT_BUFFERS,
)  # fmt: skip


class Replicas:
    """One replica's part in the collectives of its stage.

    Gradients of a minibatch become their sum, or their mean where each replica has had a minibatch
    of its own.  Buffers that training writes are each replica's own until somebody else reads
    them: then those that differ become their mean where they are floating, the first replica's
    otherwise.  `written`: their names.  Those of `maxima`, which an optimizer reads, become the
    largest before each update.  Gradients that wait for the others of their group are summed with
    them, and `shown` until the next minibatch.  `homes`: the replica that updates each
    parameter and alone gets its sum; empty: all do.
    """

    def __init__(
        self, sums: Sums, weights: StageWeights, written: Collection[str],
        homes: Mapping[str, int], gathering: Sums | None = None, maxima: Collection[str] = (),
    ) -> None:  # fmt: skip
        """`gathering`: a group of these ranks that brings new weights from their homes alone."""
        self.updates = True  # the user has the gradients, where not
        self._sums = sums
        self._weights = weights
        self._written = written
        weights.sums_hooked = False
        self.shown: Gradients = {}
        #: names of tensors and a row of digests for each replica, by what waits, and minibatch
        self._digests: dict[tuple[Action, int], tuple[list[str], Handle]] = {}
        own: dict[str, Tensor] = {fqn: weights.master(fqn) for fqn in weights.owned}
        self._gathering: Gathering | None = None
        apart: dict[str, int] = {}
        if isinstance(gathering, GroupSums):  # in one process one update is all replicas'
            apart = {fqn: homes[fqn] for fqn in own}
            brought = {fqn: one for fqn, one in own.items() if fqn not in weights.once}
            self._gathering = Gathering(gathering, brought, apart)
        self._gradients = Reduction(sums, own, apart)
        self._buffers = Reduction(sums, weights.buffers(written))
        self._maxima = maxima

    def execute(self, action: Action, minibatch: int) -> None:
        """Run one of `OF_REPLICAS`."""
        weights, number = self._weights, self._weights.update_of(minibatch)
        if action is Action.POST_REDUCE:
            self._gradients.post(number, weights.harvest(minibatch))
            self._largest.post(number, self._rows())
            if self._sums.apart:  # the version that the update replaces is there on all of them
                replaced = {fqn: weights.parameter(number + 1, fqn) for fqn in weights.owned}
                self._tell(Action.WAIT_REDUCE, minibatch, replaced, digest_of_ends)
        elif action is Action.WAIT_REDUCE:
            if self._sums.apart:
                self._refuse_unlike(self._unlike(action, minibatch))
            sums = self._gradients.wait(number)
            self._take_largest(number)
            gradients = weights.harvest(minibatch)
            gradients.clear()
            gradients.update({fqn: gradient for fqn, (gradient, _) in sums.items()})
            # Less than a group where the history began within it.
            count = min(weights.group, (number + 1) * weights.group - weights.begun)
            for gradient in gradients.values() if weights.group > 1 else ():
                gradient.div_(count)
            tied = weights.tied.intersection(gradients)
            weights.run_hooks(minibatch, gradients, tied)
            if not self.updates:
                weights.give_back(minibatch)
        elif action in (Action.POST_GATHER, Action.WAIT_GATHER):
            if (gathering := self._gathering) is not None:
                run = gathering.post if action is Action.POST_GATHER else gathering.wait
                run(number, {f: weights.parameter(number + 1, f).data for f in weights.owned})
        elif action is Action.POST_BUFFERS:
            held = weights.buffers(self._written)
            owned = weights.owned if self._sums.apart else ()
            compared: dict[str, Tensor] = {fqn: weights.master(fqn) for fqn in owned}
            self._tell(Action.WAIT_BUFFERS, minibatch, compared | held, digest)
            self._buffers.post(
                minibatch,
                {f: t for f, t in held.items() if self._sums.index == 0 or self._has_mean(f, t)},
            )
            if self._waits(minibatch):
                self._gradients.post(number, weights.harvest(minibatch))
        else:
            held = weights.buffers(self._written)
            unlike = self._unlike(action, minibatch)
            self._refuse_unlike([fqn for fqn in unlike if fqn not in held])
            sums = self._buffers.wait(minibatch)
            with torch.no_grad():
                for fqn in unlike:  # a mean of equal numbers can be another one
                    total, replicas = sums[fqn]
                    mean = self._has_mean(fqn, held[fqn])
                    held[fqn].copy_(total / replicas if mean else total)
            if self._waits(minibatch):
                self._bring_together(minibatch)

    def _has_mean(self, fqn: str, tensor: Tensor) -> bool:
        """True if a buffer becomes its mean; one that a step has read is the first replica's."""
        return fqn not in self._maxima and (tensor.is_floating_point() or tensor.is_complex())

    @cached_property
    def _largest(self) -> Reduction:
        """Sums of rows, after workers are made: the optimizer asks for buffers then."""
        return Reduction(self._sums, self._rows())

    def _rows(self) -> dict[str, Tensor]:
        """This replica's buffers that the optimizer reads, each in its row, in others zeros."""
        found: dict[str, Tensor] = {}
        for name, one in self._weights.buffers(self._maxima).items():
            found[name] = one.new_zeros(self._sums.size, *one.shape)
            found[name][self._sums.index] = one
        return found

    @torch.no_grad()
    def _take_largest(self, number: int) -> None:
        """Take the largest values, unless another replica has made the update with them here."""
        first, sums = self._weights.first_here, self._largest.wait(number)
        for name, held in first.buffers(self._maxima).items() if first.newest <= number else ():
            rows, _ = sums[name]
            held.copy_(rows.amax(0))

    def _waits(self, minibatch: int) -> bool:
        """True if gradients of this stage wait for others where a minibatch is the next."""
        return minibatch % self._weights.group > 0

    def _bring_together(self, minibatch: int) -> None:
        """The first replica goes on with the sum of the gradients so far, the others without."""
        sums = self._gradients.wait(self._weights.update_of(minibatch))
        self.shown = {fqn: total for fqn, (total, _) in sums.items()}
        gradients = self._weights.harvest(minibatch)
        gradients.clear()
        gradients.update(self.shown if self._sums.index == 0 else {})

    def resume(self, minibatches: int, accumulated: Mapping[str, Accumulated]) -> bool:
        """Go on with the sum of the last gradients before so many minibatches; False: it is none
        that the present group begins with."""
        weights = self._weights
        found = [accumulated.get(fqn, Accumulated(0, None)) for fqn in weights.owned]
        counts = {one.minibatches for one in found}
        count = max(counts, default=0)
        self.shown = {}
        if len(counts) != 1 or not 0 < count <= minibatches % weights.group:
            return False
        for fqn, (_, gradient) in zip(weights.owned, found, strict=True):
            if gradient is not None:
                self.shown[fqn] = gradient.to(weights.master(fqn), copy=True)
        weights.begun = minibatches - count
        if self._sums.index == 0:
            weights.harvest(minibatches).update(self.shown)
        return True

    def _tell(
        self, waits: Action, minibatch: int, tensors: Mapping[str, Tensor],
        hashed: Callable[[Tensor], int],
    ) -> None:  # fmt: skip
        """Send the other replicas digests of what this one holds, which `waits` compares."""
        rows = torch.zeros(self._sums.size, len(tensors), dtype=torch.int64)
        found = [hashed(one) >> 1 for one in tensors.values()]
        rows[self._sums.index] = torch.tensor(found, dtype=torch.int64)
        self._digests[waits, minibatch] = [*tensors], self._sums.start(rows)

    def _unlike(self, waits: Action, minibatch: int) -> list[str]:
        """Names of tensors of which replicas hold different values."""
        names, rows = self._digests.pop((waits, minibatch))
        every = rows.wait()
        differs = (every != every[:1]).any(0).tolist()
        return [name for name, one in zip(names, differs, strict=True) if one]

    def _refuse_unlike(self, weights: list[str]) -> None:
        """Raise ContractError where replicas hold different weights."""
        for fqn in weights:
            raise ContractError(
                "the replicas of this stage hold different values of this parameter",
                where=fqn,
                remedy="what you change between calls, change alike on every rank of the "
                "stage: weights, gradients, the optimizer's settings and its state; an "
                "optimizer that draws random numbers needs a seed that these ranks share",
            )

    def refuse_hooks(self) -> None:
        """Raise ConfigError for hooks on sums that no replica has."""
        for fqn in self._weights.owned:
            if any(summed for summed, _ in gradient_hooks(self._weights.master(fqn))):
                raise ConfigError(
                    "this parameter has a hook that runs on its accumulated gradient "
                    "(register_post_accumulate_grad_hook), and each replica of its stage "
                    "accumulates a part",
                    where=fqn,
                    remedy="register_hook runs on each microbatch's gradient; or change .grad "
                    "between pipe.forward_backward(...) and optimizer.step(); or plan with one "
                    "replica for its stage",
                )

    def ready(self, action: Action, minibatch: int) -> bool:
        if action is Action.WAIT_REDUCE:
            number = self._weights.update_of(minibatch)
            return self._gradients.ready(number) and self._largest.ready(number)
        if action is Action.WAIT_GATHER and self._gathering is not None:
            return self._gathering.ready(self._weights.update_of(minibatch))
        if action is Action.WAIT_BUFFERS:
            _, digests = self._digests[action, minibatch]
            waits = self._waits(minibatch)
            summed = not waits or self._gradients.ready(self._weights.update_of(minibatch))
            return digests.ready() and self._buffers.ready(minibatch) and summed
        return True

    def abandon(self) -> None:
        """Forget what is in flight: the connections are about to close."""
        self._digests.clear()
        self._largest.abandon()
        self._gradients.abandon()
        if self._gathering is not None:
            self._gathering.abandon()
        self._buffers.abandon()


class ReplicaWeights(StageWeights):
    """Gradients, and the buffers that training writes, are this replica's own; the values of
    parameters are those of `first`, the first replica.

    `tensors(fqn)` is the tensor of the first replica.
    """

    def __init__(
        self, first: StageWeights, stage: int, compiled: Compiled,
        tensors: Callable[[str], Tensor], model: nn.Module,
    ) -> None:  # fmt: skip
        self._first = first
        self._own = {fqn: tensors(fqn).clone() for fqn in compiled.written_buffers(stage)}
        super().__init__(
            stage, compiled, lambda fqn: self._own.get(fqn, tensors(fqn)), model, apart=True
        )

    def _new_slot(self, fqn: str, master: nn.Parameter, version: int) -> nn.Parameter:
        return nn.Parameter(self._first.parameter(version, fqn).data)

    # -- gradients: the user knows those of the first replica ---------------------------------

    def present_gradients(self) -> Gradients:
        return {}

    def open_gradients(self, *, keep: bool, summed: bool = False) -> None:
        self._accumulating = None
        self.drop_sums()
        for fqn in self.owned:
            self.parameter(0, fqn).grad = None

    def give_back(self, minibatch: int) -> None:
        self.taken(minibatch)

    # -- values: those of the first replica ----------------------------------------------------

    def advance(self, minibatch: int) -> bool:
        self.newest, self.starts_anew = self.update_of(minibatch) + 1, False
        return self._first.advance(minibatch)

    def adopt(self) -> bool:
        self._first.adopt()
        for held, theirs in zip(self._slots, self._first._slots, strict=True):
            for fqn, slot in held.items():
                if slot.data_ptr() != theirs[fqn].data_ptr():
                    slot.data = theirs[fqn].data
        return True

    def older(self) -> list[tuple[str, Tensor]]:
        return []

    def forget(self) -> None:
        self.starts_anew = True

    # -- buffers -------------------------------------------------------------------------------

    def rebind(self, fqn: str, buffer: Tensor) -> None:
        if fqn in self._own:
            self._own[fqn] = buffer = buffer.clone()
        super().rebind(fqn, buffer)

    @property
    def first_here(self) -> StageWeights:
        return self._first

    @torch.no_grad()
    def follow_buffers(
        self, tensors: Callable[[str], Tensor], names: Collection[str] | None = None
    ) -> None:
        """Take the values of the first replica's buffers; None: of all."""
        for fqn, own in self._own.items():
            if names is None or fqn in names:
                own.copy_(tensors(fqn))
