"""Guard around all that runs: an error ends the pipeline on every rank, with the first cause.

Ranks agree on the call that they make at its beginning, when rank 0 tells the others.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pdcompile.batch import FlatCall
from pdcompile.errors import ClosedError, ContractError, PdcompileError
from pdcompile.hardware import devices
from pdcompile.ir.graph import Capture
from pdcompile.runtime.failure.first_cause import Verdict, describe, explained, place, verdict_of
from pdcompile.runtime.failure.instruction_log import Outside, number_in_words
from pdcompile.runtime.interpreter import Loss, Worker
from pdcompile.runtime.transport.contract import Channel, Expected
from pdcompile.runtime.transport.launch import World
from pdcompile.runtime.transport.links import PeerLost
from pdcompile.runtime.transport.point_to_point import GroupTransport
from pdcompile.schedule import Kind

_CALLS = ("step", "forward_backward", "flush", "eval_step", "predict", "clip_grad_norm_",
          "state_dict", "full_state_dict", "full_optimizer_state_dict", "save", "load", "recorded",
          "close", "capture")  # fmt: skip
_UNKNOWN = -1


class Agreement:
    """One rank's side.  `paths` name the inputs that are compared, in one order on all ranks; those
    of the parts of a stage are compared too."""

    def __init__(self, transport: GroupTransport, world: World, paths: tuple[str, ...]) -> None:
        self._transport, self._world, self._paths = transport, world, paths

    def reach(
        self, call: str, number: int, minibatch: int, size: int | None, flat: FlatCall | None
    ) -> int | None:
        """Begin a call; returns its batch size, rank 0's where this rank does not know it.

        Raises ContractError when this rank makes another call than rank 0, has refused others, or
        has another minibatch.  Nobody waits for what is not on its way: rank 0 goes on at once.
        """
        whole = flat.whole if flat else None
        mine = [_CALLS.index(call), number, minibatch, _UNKNOWN if size is None else size]
        mine.append(whole.order if whole else 0)
        leaves = flat.leaves if flat and not whole else {}
        mine += [_digest(leaves.get(path)) for path in self._paths]
        world = self._world
        if world.beside is not None:
            theirs, *_ = world.beside.tell(mine)
            self._compare(theirs, mine, world.processes[world.rank][0])
        if world.rank == 0:
            for peer in range(1, len(world.processes)):
                to = self._transport.outgoing(Channel(Kind.CALL, 0, peer))
                self._transport.defer(to.send(torch.tensor(mine), minibatch))
            return size
        expected = Expected((len(mine),), torch.int64, minibatch)
        end = self._transport.incoming(Channel(Kind.CALL, 0, 0))
        theirs = end.receive(expected, minibatch).wait().tolist()
        self._compare(theirs, mine, world.places.source(0))
        return theirs[3] if size is None else size

    def _compare(self, theirs: list[int], mine: list[int], rank: int) -> None:
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
                if a and b and a != b and wrong is None:
                    wrong = f"has other values in input {path!r} than this rank"
        if wrong:
            raise ContractError(
                f"rank {rank} {wrong}",
                remedy="make the same calls with the same minibatches on every rank (none is rank "
                "0's alone, such as save; the same seed and order in every loader); inputs that a "
                "rank does not need may be None; what one rank refuses, all have to refuse",
            )


def _digest(leaf: Any) -> int:
    """A number for a tensor, of at most 64 elements: enough to notice another minibatch, and
    too cheap to matter; 0 where there is none."""
    if not isinstance(leaf, Tensor) or not leaf.numel() or not devices.on_host(leaf):
        return 0  # a device is not waited for
    flat = leaf.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // 64)].contiguous()
    return 1 + zlib.crc32(sample.view(torch.uint8).numpy().tobytes())


class Guarded:
    """The ranks of this process, and how they end together with all others.

    `workers` are this process's ranks; `world` is None in one process; `failed` says why the
    pipeline ended, None while it runs.
    """

    def __init__(self, world: World | None, capture: Capture) -> None:
        self.world = world
        self.beside = None if world is None else world.beside
        self.workers: list[Worker] = []
        self.failed: str | None = None
        self.updating: int | None = None  # the minibatch of the present call, if it changes weights
        self.agreement: Agreement | None = None
        self._call = 0
        self._refused, self.refusals = False, 0  # of calls that the others may have begun
        self._capture = capture
        self._log = None if world is None else world.peers.log
        if world is not None:
            self._failures = world.failures
            world.exit.leave = weakref.WeakMethod(self.leave)

    def check_running(self) -> None:
        """Raise ClosedError, with the cause, once an error has ended the pipeline."""
        if self.failed is not None:
            raise ClosedError(
                f"the pipeline ended with an error: {self.failed}",
                remedy=f"make a new pipeline; {self.what_is_left}",
            )

    @property
    def what_is_left(self) -> str:
        """State of the parameters once an error has ended the pipeline, in words."""
        if self.updating is None:
            return "no weight has changed since the last call: pipe.parameters() has them"
        return (
            f"weights may be in the middle of the update of minibatch {self.updating}: go on from "
            "the last checkpoint"
        )

    @contextmanager
    def guard(self, minibatch: int | None = None) -> Iterator[None]:
        """Context of everything that runs: an error ends the pipeline on every rank.

        `minibatch`: the only one in flight; in one process an error ends only that, if it can.
        """
        self.check_running()
        if self._refused:  # and yet the program goes on
            self._refused = False
            self._failures.say("refused", "")
        lost: PeerLost | None = None
        if self._log is not None:
            self._log.enter(Outside.CALL)
        try:
            yield
            if self._log is not None:  # after an error it keeps what this rank was in
                self._log.enter(Outside.PROGRAM)
            return
        except PeerLost as error:
            own = self.workers[0]
            where = place(self.process_number(own.rank), error, own.current, own.base)
            lost = error.with_traceback(None)  # its frames hold the message: let go of them
        except BaseException as caught:
            told = explained(caught, self._capture)
            worker = next((w for w in self.workers if w.current is not None), self.workers[0])
            rank, base = self.process_number(worker.rank), worker.base
            cause = describe(rank, told, worker.current, base)
            if worker.current is not None:
                told.add_note(f"in {place(rank, told, worker.current, base)}")
            if minibatch is None or not self._forgot(minibatch):
                self.failed = cause
                told.add_note(f"the pipeline is closed: {self.what_is_left}")
                self._end_with(cause, verdict_of(caught))
            if told is caught:
                raise
            raise told from caught
        assert self.world is not None
        self.world.watchdog.stand_down()
        first = self._failures.cause(lost, where)
        self.failed = first.message
        self._failures.conclude()
        self._abandon()
        self._failures.seen()
        self.world.close()
        raise first from None

    def process_number(self, rank: int) -> int:
        """The number of a rank of this process, for people."""
        return rank if self.world is None else self.world.process

    @property
    def is_first(self) -> bool:
        """True on the process that shows and keeps what is there once."""
        return self.process_number(0) == 0

    @property
    def is_first_part(self) -> bool:
        """True where stages are whole, and on the first part of each."""
        return self.beside is None or self.beside.part == 0

    def _forgot(self, minibatch: int) -> bool:
        """Forget a minibatch, unless other processes have parts of it or its updates have begun.

        Buffers keep what it wrote, and .grad what `forward_backward` has added, as in eager.
        """
        sums = self.updating is not None and any(w.replicas is not None for w in self.workers)
        if self.world is not None or sums or any(w.weights.updating for w in self.workers):
            return False
        for worker in self.workers:
            worker.abandon(minibatch)
        self.end_call()
        return True

    def end_call(self) -> None:
        """A call ends: what the model holds now is the pipeline's own."""
        raise NotImplementedError

    def meeting(self) -> AbstractContextManager[None]:
        """Context of a part of a call that waits for other ranks and is no instruction."""
        return nullcontext() if self._log is None else self._log.meeting()

    def _end_with(self, cause: str, verdict: Verdict = Verdict.CRASH) -> None:
        """Report an error of this rank, and let its peers raise it before the program goes on."""
        if self.world is None:
            return
        self.world.fail(cause, verdict)
        self._abandon()
        self._failures.wait_for_peers()
        self.world.close()

    def _abandon(self) -> None:
        """Close the connections, so that peers stop waiting for this rank."""
        assert self.world is not None
        for worker in self.workers:
            worker.abandon()
        self.world.disconnect()

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Context of checks: by an error of ours this rank refuses a call that its peers may have
        begun."""
        try:
            yield
        except PdcompileError as error:
            if self.world is not None and self.failed is None:
                self._refused, self.refusals = True, self.refusals + 1
                said = f"rank {self.world.process} refused the call: {error.message}"
                self._failures.say("refused", said)
            raise

    def wait_loss(self, loss: Loss) -> Tensor:
        """Wait for a loss; a broken connection ends the pipeline as in a step."""
        if loss.ready():
            return loss.wait()
        with self.guard(), self.meeting():
            return loss.wait()

    def close(self) -> None:
        """Wait until every rank is here, and destroy what the pipeline made."""
        if self.world is not None:
            with self.meeting():
                self.workers[0].settle()
                self._failures.say("left", f"rank {self.world.process} ended in pipe.close()")
            self.world.joint.gather()
            for worker in self.workers:
                worker.abandon()
            self.world.close()

    def leave(self, cause: str) -> None:
        """The user's program ends with an error: let the peers know."""
        self.failed = cause
        self._end_with(cause)
