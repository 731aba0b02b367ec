"""Agreement of all ranks on the call that they make: rank 0 tells the others at its beginning."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from pdcompile.batch import FlatCall
from pdcompile.errors import ContractError
from pdcompile.hardware import devices
from pdcompile.runtime.failure.instruction_log import number_in_words
from pdcompile.runtime.transport.contract import Channel, Expected
from pdcompile.runtime.transport.point_to_point import Transport
from pdcompile.schedule import Kind

_CALLS = ("step", "forward_backward", "flush", "eval_step", "predict", "clip_grad_norm_",
          "state_dict", "full_state_dict", "full_optimizer_state_dict", "save", "load", "recorded",
          "close", "capture")  # fmt: skip
_UNKNOWN = -1


class Agreement:
    """One rank's side.  `paths` name the inputs that are compared, in one order on all ranks."""

    def __init__(self, transport: Transport, num_ranks: int, paths: tuple[str, ...]) -> None:
        self._transport = transport
        self._num_ranks = num_ranks
        self._paths = paths

    def reach(
        self, call: str, number: int, minibatch: int, size: int | None, flat: FlatCall | None
    ) -> int | None:
        """Begin a call; returns its batch size, rank 0's where this rank does not know it.

        Raises ContractError when this rank makes another call than rank 0, or has another
        minibatch.  Nobody waits for anything that is not on its way: rank 0 goes on at once.
        """
        whole = flat.whole if flat else None
        mine = [_CALLS.index(call), number, minibatch, _UNKNOWN if size is None else size]
        mine.append(whole.order if whole else 0)
        leaves = flat.leaves if flat and not whole else {}
        mine += [_digest(leaves.get(path)) for path in self._paths]
        if self._transport.rank == 0:
            for peer in range(1, self._num_ranks):
                channel = Channel(Kind.CALL, 0, peer)
                self._transport.send(channel, torch.tensor(mine), minibatch, deferred=True)
            return size
        expected = Expected((len(mine),), torch.int64, minibatch)
        arrived = self._transport.receive(Channel(Kind.CALL, 0, 0), expected).wait()
        assert arrived is not None
        theirs = [int(number) for number in arrived]
        self._compare(theirs, mine)
        return theirs[3] if size is None else size

    def _compare(self, theirs: list[int], mine: list[int]) -> None:
        wrong = None
        if theirs[:3] != mine[:3]:
            there, here = (
                f"{number}, {_CALLS[call]} ({number_in_words(minibatch)})"
                for call, number, minibatch in (theirs[:3], mine[:3])
            )
            wrong = f"is in call {there}; this rank is in call {here}"
        elif _UNKNOWN not in (theirs[3], mine[3]) and theirs[3] != mine[3]:
            wrong = f"has a minibatch of {theirs[3]} samples, this rank one of {mine[3]}"
        elif theirs[4] != mine[4]:
            wrong = (
                "gives shards of other samples, or in another order, than this rank"
                if (theirs[4] and mine[4])
                else "and this rank do not both give shards"
            )
        else:
            for path, a, b in zip(self._paths, theirs[5:], mine[5:], strict=True):
                if a and b and a != b:
                    wrong = f"has other values in input {path!r} than this rank"
                    break
        if wrong:
            raise ContractError(
                f"rank 0 {wrong}",
                remedy="make the same calls with the same minibatches on every rank (none is rank "
                "0's alone, such as save; the same seed and order in every loader); inputs that a "
                "rank does not need may be None",
            )


def _digest(leaf: Any) -> int:
    """A number for a tensor, of at most 64 elements: enough to notice another minibatch, and
    too cheap to matter; 0 where there is none."""
    if not isinstance(leaf, Tensor) or not leaf.numel() or not devices.on_host(leaf):
        return 0  # a device is not waited for
    flat = leaf.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // 64)].contiguous()
    return 1 + zlib.crc32(sample.view(torch.uint8).numpy().tobytes())
