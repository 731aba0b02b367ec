"""Sums over ranks: over the replicas of a stage of gradients after a minibatch and of buffers
between calls, over all ranks of the norms that clipping needs.

Tensors travel in buckets, flat runs of one dtype, which are summed while the rank goes on; every
replica gets the same bits.  Which parameters have a gradient may differ (a branch that only some
microbatches take): behind its values a bucket counts, for each tensor, the replicas that have it.

The arithmetic of norms is that of torch.nn.utils.clip_grad_norm_, in the order of the model's
parameters, so that the coefficient is bit for bit the one that a single process would find.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import BroadcastOptions, ReduceOptions

from pdcompile.eager.gradients import norm_of
from pdcompile.eager.loss_scale import LossScale
from pdcompile.errors import ConfigError, ContractError
from pdcompile.runtime.device import Fetched, Handle, RankDevice
from pdcompile.runtime.transport import device_groups
from pdcompile.runtime.transport.links import Working, unrecorded
from pdcompile.runtime.transport.parts_group import PartsGroup
from pdcompile.schedule.spec import BUCKET_BYTES

#: what ranks in one process have given: by sum, by place among them
Board = dict[int, dict[int, Tensor]]


class GroupSums:
    """Ranks that sum, in processes of their own: a group of gloo or NCCL that does nothing else.

    `apart`: in memory of their own; `device`: that of this process; `direct`: the group is NCCL's,
    and sums in memory of the device.
    """

    apart = True

    def __init__(
        self, group: Any, ranks: Sequence[int], index: int, device: RankDevice | None = None,
        *, direct: bool = False,
    ) -> None:  # fmt: skip
        self.size, self.index, self.device = len(ranks), index, device or RankDevice()
        self._group = group
        self._direct = direct
        self._next = ranks[(index + 1) % len(ranks)]  # asked where a group does not say who it was

    def start(self, flat: Tensor, root: int | None = None) -> Handle:
        """Add this rank's part; `wait` returns the sum, which may be in host memory where the part
        was not; with a `root` there alone.  The same calls on every rank."""
        if root is None:
            return self._begun(flat, self._group.allreduce)
        options = ReduceOptions()
        options.rootRank = root
        return self._begun(flat, self._group.reduce, options)

    def spread(self, flat: Tensor, root: int) -> Handle:
        """Give all ranks what the root has; others give a tensor like it."""
        options = BroadcastOptions()
        options.rootRank = root
        return self._begun(flat, self._group.broadcast, options)

    def _begun(self, flat: Tensor, collective: Any, *options: Any) -> Handle:
        fetched = Fetched(self.device.place(flat)) if self._direct else self.device.fetch(flat)
        here = fetched.tensor
        real = torch.view_as_real(here) if here.is_complex() else here  # neither sums complex
        try:
            return Working(fetched, self._next, unrecorded, collective, real, *options)
        finally:
            del collective  # see Working

    def abandon(self) -> None:
        """Let go of what was begun, so that connections can close."""
        if self._group is None:
            return
        held, self._group = [self._group], None
        # The end of a group waits for its sums, which others may never begin.
        device_groups.end_all([held[0].abort if self._direct else held.clear])


class LocalSums:
    """Sums of ranks in one process, as `GroupSums`: parts lie on a board until all are there."""

    apart = False

    def __init__(
        self, board: Board, size: int, index: int, device: RankDevice | None = None
    ) -> None:
        self.size, self.index, self.device = size, index, device or RankDevice()
        self._board = board
        self._numbers = count()

    def start(self, flat: Tensor, root: int | None = None) -> Handle:
        number = next(self._numbers)
        parts = self._board.setdefault(number, {})
        parts[self.index] = flat
        if len(parts) == self.size:
            del self._board[number]
        return _Gathered(parts, self.size)

    def abandon(self) -> None:
        self._board.clear()
        self._numbers = count()


class _Gathered(Handle):
    def __init__(self, parts: dict[int, Tensor], size: int) -> None:
        self._parts, self._size = parts, size

    def ready(self) -> bool:
        return len(self._parts) == self._size

    def wait(self) -> Tensor:
        total = self._parts[0].clone()
        for index in range(1, self._size):
            total += self._parts[index]
        return total


Sums = GroupSums | LocalSums


class _Posted:
    """Buckets of tensors like these that are on their way, by number; `homes`: the replica that
    gets or gives each."""

    def __init__(self, sums: Sums, tensors: Mapping[str, Tensor], homes: Mapping[str, int]) -> None:
        self._sums, self._homes, self._buckets = sums, homes, buckets(tensors, homes)
        self._posted: dict[int, list[Handle]] = {}

    def ready(self, number: int) -> bool:
        return all(handle.ready() for handle in self._posted[number])

    def abandon(self) -> None:
        """Forget what is in flight: the connections are about to close."""
        self._posted.clear()
        self._sums.abandon()


class Reduction(_Posted):
    """One replica's part in the sums of its stage, of tensors like these, which every one has.

    `homes`: the replica that alone gets the sum of each; empty: all get all.
    """

    def __init__(
        self, sums: Sums, tensors: Mapping[str, Tensor], homes: Mapping[str, int] | None = None
    ) -> None:
        self._device = sums.device
        summed = {f: torch.uint8 if t.dtype is torch.bool else t.dtype for f, t in tensors.items()}
        self._like = {
            name: torch.empty_like(one, dtype=summed[name], device="meta")
            for name, one in tensors.items()
        }
        super().__init__(sums, self._like, homes or {})

    def post(self, number: int, tensors: dict[str, Tensor]) -> None:
        """Take all of this replica's tensors, out of the dict, into sum `number`; one that is not
        there counts as zero.

        Raises ContractError for a sparse tensor.
        """
        self._posted[number] = [
            self._sums.start(self._flat(bucket, tensors), self._homes.get(bucket[0]))
            for bucket in self._buckets
        ]

    def _flat(self, bucket: Sequence[str], tensors: dict[str, Tensor]) -> Tensor:
        dtype = self._like[bucket[0]].dtype
        present = torch.tensor([name in tensors for name in bucket], dtype=dtype)
        present = self._device.place(present)
        parts = []
        for name in bucket:
            tensor = tensors.pop(name, None)
            if tensor is None:
                size = self._like[name].numel()
                parts.append(torch.zeros(size, dtype=dtype, device=self._device.device))
                continue
            if tensor.layout != torch.strided:
                raise ContractError(
                    f"the gradient of {name!r} is sparse, and is to be summed over replicas",
                    remedy="leave sparse=True out, or plan with one replica for its stage",
                )
            parts.append(self._device.place(tensor.detach().reshape(-1).to(dtype)))
        return torch.cat([*parts, present])

    def wait(self, number: int) -> dict[str, tuple[Tensor, int]]:
        """The sums, each with the number of replicas that had a part; none where nobody had."""
        found: dict[str, tuple[Tensor, int]] = {}
        for bucket, handle in zip(self._buckets, self._posted.pop(number), strict=True):
            flat = handle.wait()
            if self._homes.get(bucket[0], self._sums.index) != self._sums.index:
                continue
            sizes = [self._like[name].numel() for name in bucket]
            present = self._device.fetch(flat[-len(bucket) :].real).wait()
            parts = torch.split(self._device.place(flat), [*sizes, len(bucket)])
            for name, part, replicas in zip(bucket, parts, present.tolist(), strict=False):
                if replicas:
                    found[name] = part.view(self._like[name].shape), int(replicas)
        return found


class Gathering(_Posted):
    """One replica's part in bringing tensors like these from their homes to all replicas.

    Without tensors it is a rendezvous: all homes have made the update.
    """

    _sums: GroupSums

    def post(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Give what this replica is the home of, and expect tensors like the others."""
        self._posted[number] = [
            self._sums.spread(self._flat([tensors[n] for n in bucket], home), home)
            for bucket in self._buckets
            for home in (self._homes[bucket[0]],)
        ] or [self._sums.start(torch.zeros(1))]

    def _flat(self, tensors: list[Tensor], home: int) -> Tensor:
        if home == self._sums.index:
            return torch.cat([one.detach().reshape(-1) for one in tensors])
        return tensors[0].new_empty(sum(one.numel() for one in tensors))

    @torch.no_grad()
    def wait(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Fill the tensors of other homes."""
        handles = self._posted.pop(number)
        for bucket, handle in zip(self._buckets or [[]], handles, strict=True):
            flat = handle.wait()
            if bucket and self._homes[bucket[0]] != self._sums.index:
                parts = torch.split(flat, [tensors[name].numel() for name in bucket])
                for name, part in zip(bucket, parts, strict=True):
                    tensors[name].copy_(part.view(tensors[name].shape))


def buckets(tensors: Mapping[str, Tensor], homes: Mapping[str, int]) -> list[list[str]]:
    """Names in the order in which backward ends with them, in runs of one dtype and home."""
    open_: dict[tuple[torch.dtype, int | None], tuple[list[str], int]] = {}
    found: list[list[str]] = []
    for name in reversed(list(tensors)):
        one = tensors[name]
        kind = one.dtype, homes.get(name)
        bucket, taken = open_.get(kind, ([], BUCKET_BYTES))
        if taken + one.nbytes > BUCKET_BYTES:
            bucket, taken = [], 0
            found.append(bucket)
        bucket.append(name)
        open_[kind] = bucket, taken + one.nbytes
    return found


ABSENT = -1.0  # the norm of a parameter without gradient: it is left out of the stack


class Norms:
    """One rank's part in the exchange: a sum in which every rank fills in what it owns.

    `owned[r]`: the trainable parameters that rank r owns, replicas the same ones; `dtypes`: of all
    parameters, in the order of the model.  A norm plus zeros is that norm, bit for bit.  `scale`:
    of the losses, which gradients are divided by first.  `beside`: parts that have slices of them,
    of which the first fills in for all.
    """

    def __init__(
        self, sums: Sums, rank: int, owned: Sequence[Sequence[str]],
        dtypes: Mapping[str, torch.dtype], scale: LossScale | None = None,
        beside: PartsGroup | None = None,
    ) -> None:  # fmt: skip
        self._sums, self._beside = sums, beside
        self.scale = scale
        self._mine = owned[rank]
        self._before = sum(map(len, owned[:rank]))
        self._names = [fqn for names in owned for fqn in names]
        self._dtypes = dtypes
        self.total = torch.tensor(0.0)  # of the last exchange
        self._posted: dict[int, tuple[dict[str, Tensor], Handle, float]] = {}  # with the scale

    def post(self, minibatch: int, gradients: Mapping[str, Tensor]) -> None:
        """Give this rank's norms to all others."""
        finite = self.scale is None or self.scale.unscale(minibatch, gradients.values())
        scaled_by = 1.0 if self.scale is None else self.scale.scale(minibatch)
        mine = {fqn: norm_of(g) for fqn, g in gradients.items()}
        finite = self._over_parts(mine, finite)
        there = self._sums.device
        absent = torch.full((), ABSENT, device=there.device)
        row = torch.zeros(len(self._names) + 2, dtype=torch.float64, device=there.device)
        if self._mine and (self._beside is None or self._beside.part == 0):
            listed = [mine.get(fqn, absent).to(torch.float64) for fqn in self._mine]
            row[self._before : self._before + len(listed)] = torch.stack(listed)
        if self.scale is not None:  # a norm can overflow where every gradient is finite
            row[-2], row[-1] = scaled_by, 0.0 if finite else 1.0
        # What is queued on a device is read from the row, which comes to the host.
        self._posted[minibatch] = {} if there.queued else mine, self._sums.start(row), scaled_by

    def _over_parts(self, norms: dict[str, Tensor], finite: bool) -> bool:
        """Makes norms of slices those of whole gradients; whether all parts have finite ones."""
        if self._beside is None:
            return finite
        sliced = [fqn for fqn in norms if fqn in self._beside.division.shards]
        squares = [norms[fqn].to(torch.float64) ** 2 for fqn in sliced]
        unlike = torch.tensor(0.0 if finite else 1.0, dtype=torch.float64)
        *sums, infinite = self._beside.summed(torch.stack([*squares, unlike])).unbind()
        for fqn, square in zip(sliced, sums, strict=True):
            norms[fqn] = square.sqrt().to(norms[fqn].dtype)
        return float(infinite) == 0.0

    def ready(self, minibatch: int) -> bool:
        return self._posted[minibatch][1].ready()

    def wait(self, minibatch: int) -> Tensor:
        """The total norm over all ranks: a scalar, the same everywhere."""
        norms, handle, scaled_by = self._posted.pop(minibatch)
        row = self._sums.device.fetch(handle.wait()).wait()
        if self.scale is not None:
            if (mean := float(row[-2]) / self._sums.size) != scaled_by:
                raise ContractError(
                    f"the loss of minibatch {minibatch} was scaled by {scaled_by:g} here, and by "
                    f"{mean:g} in the mean of all ranks",
                    where="grad_scaler",
                    remedy="give every rank a GradScaler of the same settings, and change them "
                    "alike",
                )
            self.scale.learn(minibatch, finite=not row[-1])
        for fqn, norm in zip(self._names, row.tolist(), strict=False):
            if norm != ABSENT and fqn not in norms:
                norms[fqn] = torch.tensor(norm, dtype=self._dtypes[fqn].to_real())
        stacked = [norms[fqn] for fqn in self._dtypes if fqn in norms]
        self.total = torch.tensor(0.0)
        if stacked:
            self.total = torch.linalg.vector_norm(torch.stack(stacked), 2.0)
        return self.total

    def abandon(self) -> None:
        """Forget what is in flight: the connections are about to close."""
        self._posted.clear()
        self._sums.abandon()


def check_max_norm(max_norm: float) -> None:
    """Raise ConfigError for what is not a norm."""
    number = isinstance(max_norm, int | float) and not isinstance(max_norm, bool)
    if not number or not max_norm > 0:
        raise ConfigError(f"max_norm={max_norm!r} is not a positive number", remedy="such as 1.0")
