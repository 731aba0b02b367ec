"""Gradients of one stage, from accumulation to the update that takes them.

Gradients of tied parameters, which other stages hold too, are accumulated by each of these on
Parameters of their own.  Once an update, from the last stage to the owner, each adds its own to
the sum of later ones.

A stage sends a gradient for every value that it got, of a shape that is known before.  Where the
backward of an autograd.Function returned None there is none, and zeros in its place would be
another training: optimizers decay and move a parameter whose gradient is zero, and leave one alone
that has no gradient.  What is sent then (`absent`) begins with a NaN that no arithmetic makes: of
those that processors make the lower bits are 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from ctypes import memmove, string_at
from functools import cache

import torch
from torch import Tensor, nn

from pdcompile.eager.gradients import added, gradient_hooks, memory_of
from pdcompile.hardware import devices
from pdcompile.releases.torch_internals import storage_uses
from pdcompile.runtime.transport.parts_group import PartsGroup

_LOWEST, _MIDDLE, _HIGHEST = 0xD3, 0xFF, 0x7F  # bytes of a NaN in every dtype, little-endian


def absent(like: Tensor) -> Tensor:
    """Message in place of a gradient of this tensor: in host memory, where whoever gets it within
    this process sees at once that it is none."""
    found = torch.zeros_like(like, memory_format=torch.contiguous_format, device=devices.HOST)
    if found.numel():
        mark = _mark(found.dtype)
        memmove(found.data_ptr(), mark, len(mark))
    return found


def shared_memory(gradients: Iterable[Tensor]) -> set[int]:
    """Memory that other tensors have, too, besides what these are views of (and the storage)."""
    return {
        memory_of(one)
        for one in gradients
        if one.is_sparse or storage_uses(one.untyped_storage()._cdata) > 2 + one._is_view()
    }


def is_absent(gradient: Tensor) -> bool:
    """True if a gradient that came in says that there was none; one on a device says nothing."""
    if not devices.on_host(gradient) or gradient.layout != torch.strided or not gradient.numel():
        return False
    mark = _mark(gradient.dtype)
    return string_at(gradient.data_ptr(), len(mark)) == mark


@cache
def _mark(dtype: torch.dtype) -> bytes:
    """Bytes of the first number, of a complex one of its real part."""
    return bytes([_LOWEST, *[_MIDDLE] * (dtype.to_real().itemsize - 2), _HIGHEST])


Gradients = dict[str, Tensor]


class StageGradients:
    """The gradients of a stage's trainable parameters, by FQN.

    `masters`: what the user and the optimizer see; `slots`: what backward adds to, by version of
    the weights; `tied`: parameters that other stages hold too, and whether this one owns them.
    One update takes `group` minibatches; `begun`: the first one whose gradients are known.
    """

    def __init__(
        self,
        masters: dict[str, nn.Parameter],
        slots: list[dict[str, nn.Parameter]],
        tied: Mapping[str, bool],
        group: int,
    ) -> None:
        self.group, self.begun, self.newest = group, 0, 0
        self._masters, self._slots = masters, slots
        self.owned = tuple(fqn for fqn in masters if tied.get(fqn, True))
        self.copies = tuple(fqn for fqn in masters if not tied.get(fqn, True))
        self.tied = frozenset(tied).intersection(masters)
        self.gradients: dict[int, Gradients] = {}  # put aside, not yet applied, by update
        self.sums_hooked = True  # else whoever sums over replicas runs hooks on the whole
        #: of later stages: of each replica, by update
        self._sums: dict[tuple[int, str], dict[int, Tensor]] = {}
        self._parts: dict[tuple[int, str], Tensor] = {}  # of copies, put aside, not yet passed on
        self._accumulating: tuple[int, int] | None = None  # update, version
        self._ran_on: dict[int, int] = {}  # version, by update
        self.without: Collection[str] = tuple(masters)  # a gradient when this backward began
        self.beside: PartsGroup | None = None  # the other parts of the stage
        self._over_parts: set[int] = set()  # updates whose gradients are summed over parts
        self._earlier: Gradients = {}  # of the user's earlier calls, while this one's are summed
        self._keeps = False  # .grad is the user's, to be added to

    def update_of(self, minibatch: int) -> int:
        """The update that takes a minibatch: it replaces the version of this number."""
        return minibatch // self.group

    def version_of(self, minibatch: int, lag: int) -> int:
        """The version that a minibatch runs on, where it is so many updates old."""
        return max(minibatch // self.group - lag, 0)

    def parameter(self, version: int, fqn: str) -> nn.Parameter:
        """The Parameter that backward adds to, where it runs on W_version."""
        return self._slots[version % len(self._slots)][fqn]

    def master(self, fqn: str) -> nn.Parameter:
        """The Parameter that the optimizer and the user see: the newest version."""
        return self._masters[fqn]

    def begin_backward(self, minibatch: int, version: int) -> None:
        """Gradients that follow belong to `minibatch`; those of an earlier update are put aside."""
        number = self.update_of(minibatch)
        if self._accumulating is None or self._accumulating[0] != number:
            self._put_aside()
            self.without = tuple(self._masters)
        elif self.without:
            self.without = [f for f in self.without if self.parameter(version, f).grad is None]
        self._accumulating = number, version
        self._ran_on[number] = version

    def separate_gradients(self, version: int, shared: Collection[int]) -> None:
        """Autograd may let .grad share memory with a gradient that is now being sent or kept, and
        the next microbatch would add to it there: give such parameters memory of their own.

        A .grad that was there before was added to where it is, and shares none.
        """
        for fqn in self.without if shared else ():
            one = self.parameter(version, fqn)
            if one.grad is not None and memory_of(one.grad) in shared:
                one.grad = one.grad.clone()

    def harvest(self, minibatch: int) -> Gradients:
        """The gradients of the update that takes a minibatch, of owned parameters that have one,
        with what other stages have summed."""
        number = self.update_of(minibatch)
        if self._accumulating is not None and self._accumulating[0] == number:
            self._put_aside()
        found = self.gradients.setdefault(number, {})
        came = [fqn for fqn in self.owned if (number, fqn) in self._sums] if self._sums else []
        for fqn in came:
            found |= self._sum(number, fqn, found.pop(fqn, None))
        if self.beside is not None and number not in self._over_parts:
            self._over_parts.add(number)  # all stages have passed on what they had
            self.beside.sum_gradients(found)
        if self.sums_hooked:
            self.run_hooks(minibatch, found, came)
        return found

    # -- gradients of tied parameters ---------------------------------------------------------

    def receive_sum(self, fqn: str, minibatch: int, place: int, part: Tensor) -> None:
        """The sum of a replica of later stages, which may say that it has none (`absent`).

        They come in any order, and are added in that of replicas.
        """
        found = self._sums.setdefault((self.update_of(minibatch), fqn), {})
        if not is_absent(part):
            resting = devices.on_host(self._masters[fqn])
            found[place] = devices.to_host(part) if resting else part

    def pass_on(self, fqn: str, minibatch: int) -> Tensor:
        """Sum of what a copy has accumulated and received of a minibatch; nothing of it is kept."""
        number = self.update_of(minibatch)
        if self._accumulating is not None and self._accumulating[0] == number:
            own = self._take(self._accumulating[1], (fqn,)).get(fqn)
        else:
            own = self._parts.pop((number, fqn), None)
        total = self._sum(number, fqn, own)
        return total[fqn] if total else absent(self._masters[fqn])

    def _sum(self, number: int, fqn: str, own: Tensor | None) -> Gradients:
        for _, part in sorted(self._sums.pop((number, fqn), {}).items()):
            own = added(own, part)
        return {} if own is None else {fqn: own}

    def run_hooks(self, minibatch: int, gradients: Gradients, names: Iterable[str]) -> None:
        """Run the user's hooks on sums of tied parameters: once, as on the whole gradient."""
        version = self._ran_on.pop(self.update_of(minibatch), self.newest)
        for fqn in names:
            master = self._masters[fqn]
            total = nn.Parameter(self.parameter(version, fqn).data)
            total.grad = gradients.pop(fqn, None)
            for hook in gradient_hooks(master):
                # After the user's own accumulation they run on what that makes of .grad.
                if total.grad is not None and not (hook.after and self._keeps):
                    hook.run(total, master)
            gradients |= {} if total.grad is None else {fqn: total.grad}

    def give_sums(self, minibatch: int) -> None:
        """The user gets the sums of tied parameters, in .grad (where replicas give none)."""
        owned = self.tied.intersection(self.owned)
        if (owned or self.beside is not None) and self.sums_hooked:
            self.harvest(minibatch)
            self.give_back(minibatch)
            for fqn in owned:
                master = self._masters[fqn]
                for hook in gradient_hooks(master) if master.grad is not None else ():
                    if hook.after:
                        hook.function(master)

    def taken(self, minibatch: int) -> Gradients:
        """The gradients of the update that takes a minibatch, which are no longer kept."""
        number = self.update_of(minibatch)
        self._over_parts.discard(number)
        return self.gradients.pop(number, {})

    def abandon(self, minibatch: int) -> None:
        """Forget the gradients of a minibatch that ends early."""
        self.gradients.pop(minibatch, None)
        self.drop_sums()

    def drop_sums(self) -> None:
        """Forget what stages were to sum."""
        self._sums.clear()
        self._parts.clear()
        for held in self._slots if self.tied else ():
            for fqn in self.tied:
                held[fqn].grad = None

    # -- what becomes of them -------------------------------------------------------------------

    def _put_aside(self) -> None:
        if self._accumulating is not None:
            number, version = self._accumulating
            self.gradients[number] = self._take(version, self.owned)
            for fqn, one in self._take(version, self.copies).items():
                self._parts[number, fqn] = one
            self._accumulating = None

    def _take(self, version: int, names: Iterable[str]) -> Gradients:
        found, held = Gradients(), self._slots[version % len(self._slots)]
        for fqn in names:
            parameter = held[fqn]
            if (gradient := parameter.grad) is not None:
                found[fqn], parameter.grad = gradient, None
        return found

    def present_gradients(self) -> Gradients:
        """Present .grad of the owned parameters (where nothing is `apart`)."""
        return {fqn: one for fqn in self.owned if (one := self._masters[fqn].grad) is not None}

    def open_gradients(self, *, keep: bool, summed: bool = False) -> None:
        """A call begins: what is in .grad is the user's, to be added to (`keep`) or dropped.

        Where nothing is `apart`: else .grad is not what backward adds to.  `summed`: what the call
        makes is summed over replicas first, or over parts; then `give_back` adds it.
        """
        summed = summed or self.beside is not None
        self._accumulating, self._keeps = None, keep
        self.drop_sums()
        present = self.present_gradients() if keep else {}
        self._earlier = {f: one for f, one in present.items() if summed or f in self.tied}
        for fqn in () if keep and not summed else self.owned:
            self._masters[fqn].grad = None

    def give_back(self, minibatch: int) -> None:
        """Add the gradients of a minibatch to those that the user had before."""
        for fqn, gradient in self.taken(minibatch).items():
            self._earlier[fqn] = added(self._earlier.get(fqn), gradient)
        for fqn, gradient in self._earlier.items():
            self._masters[fqn].grad = gradient
        self._earlier = {}
