"""Exchange: values and tensors that ranks tell each other while they save or load.

Values go through the store as JSON.  That they are there all ranks know who have met then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pdcompile.batch import memory_order
from pdcompile.eager.digest import digest, flat_bytes
from pdcompile.errors import CheckpointError, ContractError, PdcompileError
from pdcompile.hardware import devices
from pdcompile.ir.targets import dtype_name
from pdcompile.runtime.device import Fetched
from pdcompile.runtime.session import Session
from pdcompile.runtime.transport.contract import Channel, Expected, from_bytes, laid
from pdcompile.schedule import Kind


class Refused(Exception):
    """Every rank refuses a call with `error`: nothing was changed, and the pipeline goes on."""

    def __init__(self, error: PdcompileError) -> None:
        super().__init__(str(error))
        self.error = error


class Exchange:
    """Every rank of the pipeline makes the same calls, within a call of the session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._number = 0

    # -- values --------------------------------------------------------------------------------

    def everywhere(self, value: Any) -> list[Any]:
        """The values of all processes, on every one."""
        world, text = self._session.world, json.dumps(value)
        if world is None:
            return [json.loads(text)]
        # Two keys in turn: who tells again has heard all, who told that after they heard the last.
        self._number = 1 - self._number
        keys = [f"told/{self._number}/{process}" for process in range(world.size)]
        world.store.set(keys[world.process], text)
        self._session.meet()
        return [json.loads(world.store.get(key)) for key in keys]

    def of_first(self, make: Callable[[], Any], undo: Callable[[], object] = lambda: None) -> Any:
        """The value that the first process makes, on every rank; see `agreed`."""
        here = self._session.is_first
        return self.agreed(make if here else lambda: None, undo=undo)[0]

    def agreed(
        self,
        part: Callable[[], Any],
        failed: str = "",
        undo: Callable[[], object] = lambda: None,
    ) -> list[Any]:
        """The values of `part` of all processes, on every one.

        Args:
            failed: says of a process that it could not make its part.
            undo: called on the first one after an error, before others go on.

        Raises:
            Refused: a process could not, with its own error there.
        """
        session, own = self._session, None
        try:
            told = {"value": part()}
        except (PdcompileError, OSError) as error:
            own = error if isinstance(error, PdcompileError) else CheckpointError(str(error))
            told = {"error": [own.message, own.where, own.remedy]}
        every, world = self.everywhere(told), session.world
        wrong = next((process for process, one in enumerate(every) if "error" in one), None)
        if wrong is None:
            return [one["value"] for one in every]
        if session.is_first:
            undo()
        if world is not None:
            session.meet()
        message, where, remedy = every[wrong]["error"]
        said = f"rank {wrong} {failed}: {message}" if failed else message
        raise Refused(own or CheckpointError(said, where=where, remedy=remedy))

    # -- tensors -------------------------------------------------------------------------------

    def collect(
        self, value: Any, tensors: Mapping[str, Tensor]
    ) -> list[tuple[Any, Mapping[str, Tensor]]]:
        """Each process's value and tensors by name, on the first one; elsewhere [].

        Raises:
            ContractError: other bytes came than were sent.
        """
        session = self._session
        if session.world is None:
            return [(json.loads(json.dumps(value)), tensors)]
        listed = []
        for name, one in tensors.items():
            order = memory_order(one)
            listed.append([name, dtype_name(one.dtype), one.shape, order, digest(laid(one, order))])
        every = self.everywhere([value, listed])
        if session.world.process:
            for one in tensors.values():
                flat = flat_bytes(devices.to_host(laid(one, memory_order(one))))
                self._transfer(flat, 0, sending=True)
            return []
        found: list[tuple[Any, Mapping[str, Tensor]]] = [(every[0][0], tensors)]
        for peer, (said, theirs) in enumerate(every[1:], 1):
            came = dict[str, Tensor]()
            for name, dtype, shape, order, sent in theirs:
                expected = Expected(tuple(shape), getattr(torch, dtype), 0)
                memory = torch.empty(max(1, expected.num_bytes), dtype=torch.uint8)
                if digest(self._transfer(memory, peer, sending=False)) != sent:
                    raise ContractError(
                        f"other bytes came from rank {peer} than it sent",
                        where=name,
                        remedy="look for faulty memory or network",
                    )
                came[name] = from_bytes(memory, expected, tuple(order))
            found.append((said, came))
        return found

    def _transfer(self, flat: Tensor, peer: int, *, sending: bool) -> Tensor:
        """Send bytes to a process, or fill them with what it sends."""
        control, tag = self._session.workers[0].far.control, Channel(Kind.STATE, 0, peer).tag
        with self._session.meeting():
            return control.begin(Fetched(flat), tag, peer, sending=sending).wait()
