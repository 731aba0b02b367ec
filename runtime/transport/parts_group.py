"""Processes that make the same calls in the same order, and tell each other values: all of a
pipeline at its start and between calls, and the parts of one stage, which run one program.

Parts also make conversions, sum gradients, and compare what they hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import BarrierOptions

from pdcompile.eager.digest import flat_bytes
from pdcompile.hardware import devices
from pdcompile.parts.conversions import Alone, At, begun
from pdcompile.parts.shard import Division
from pdcompile.runtime.failure.instruction_log import InstructionLog, Outside
from pdcompile.runtime.transport.links import lost

WAIT = timedelta(hours=24)  # others read weights meanwhile; the watchdog knows who has failed
Rows = Sequence[Sequence[Tensor]]  # tensors for each part, or of each


class JointGroup:
    """Processes with a group of gloo; `next_process` is asked about a connection that broke."""

    where = Outside.MEETING

    def __init__(self, group: Any, count: int, log: InstructionLog, next_process: int) -> None:
        self.group, self.count = group, count
        self._log, self._next = log, next_process

    def gather(self) -> None:
        """Wait until all are here, each of which may take its time."""
        options = BarrierOptions()
        options.timeout = WAIT
        self._done(lambda: (torch.empty(0), self.group.barrier(options)))

    def tell(self, value: Any = None) -> list[Any]:
        """The values of all, which JSON takes."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self._collective(torch.tensor([len(text)]), "gather")
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(text)] = text
        rows = self._collective(padded, "gather")
        pairs = zip(rows, sizes.flatten().tolist(), strict=True)
        return [json.loads(row[:size].numpy().tobytes()) for row, size in pairs]

    def _collective(self, x: Tensor, kind: str, group: str = "group") -> Tensor:
        # No frame holds the group: connections close when the last reference to it is gone.
        return self._done(lambda: begun(getattr(self, group), x.contiguous(), kind, self.count))

    def _done(self, begin: Callable[[], tuple[Tensor, Any]]) -> Tensor:
        """The result of a collective; `begin` gives it with the Work that fills it."""
        with self._log.meeting(self.where):
            try:
                result, work = begin()
                work.wait()
            except RuntimeError as error:
                text = str(error)
            else:
                return result
            finally:
                work = None
            raise lost(self._next, text)

    def abandon(self) -> None:
        """Let go of the group, so that connections can close."""
        self.group = None


class PartsGroup(JointGroup, Alone):
    """One part, beside the others of its stage and replica.

    `group` is theirs alone; `on_devices` another one over NCCL, where they have GPUs of their own.
    """

    where = Outside.PARTS

    def __init__(
        self, group: Any, part: int, division: Division, log: InstructionLog, next_process: int
    ) -> None:
        super().__init__(group, division.parts, log, next_process)
        self.part, self.division, self.on_devices = part, division, None

    # -- conversions ---------------------------------------------------------------------------

    def meet(self, x: Tensor, at: At) -> Tensor:
        if self.on_devices is not None and not devices.on_host(x):
            return self._collective(x, at.kind, "on_devices")
        return self._collective(devices.to_host(x.detach()), at.kind).to(x.device)

    def summed(self, x: Tensor) -> Tensor:
        """The sum of what the parts have."""
        return self.meet(x, _SUM)

    def exchanged(self, rows: Rows, like: Rows) -> list[list[Tensor]]:
        """Tensors like these that each part has for this one; `rows`: those that it has for each.
        Rows travel with the length of the longest of any part, which `rows` or `like` has."""
        every = [*rows, *like]
        longest = max(sum(one.nbytes for one in row) for row in every)
        device = next(one.device for row in every for one in row)
        flat = torch.zeros(self.count, longest, dtype=torch.uint8, device=device)
        for place, row in zip(flat, rows, strict=True):
            for piece, one in _pieces(place, row):
                piece.copy_(flat_bytes(one))
        return [  # copies, at addresses that fit their dtypes
            [piece.clone().view(one.dtype).view(one.shape) for piece, one in _pieces(place, row)]
            for place, row in zip(self.meet(flat, _SWAP), like, strict=True)
        ]

    def abandon(self) -> None:
        super().abandon()
        self.on_devices = None

    # -- tensors of the model ------------------------------------------------------------------

    def whole(self, fqn: str, own: Tensor) -> Tensor:
        """A tensor of the model in host memory, from what all parts hold of it."""
        shard = self.division.shards.get(fqn)
        if shard is None:
            return own
        return shard.joined([*devices.to_host(self.meet(own.detach(), _GATHER))])

    def sum_gradients(self, gradients: dict[str, Tensor]) -> None:
        """Sums over parts the gradients of which each has a share, in place of these."""
        for fqn in sorted(self.division.summed.intersection(gradients)):
            gradients[fqn] = self.summed(gradients[fqn])


_SUM, _GATHER, _SWAP = (At(kind, "between stages", kind) for kind in ("sum", "gather", "swap"))


def _pieces(flat: Tensor, row: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Bytes from the beginning on, as many as each of these tensors has, with it."""
    sizes = [one.nbytes for one in row]
    return zip(torch.split(flat[: sum(sizes)], sizes), row, strict=True)
