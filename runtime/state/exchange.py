"""Exchange: values and tensors that ranks tell each other while they save or load.

Values go through the store as JSON.  That they are there all ranks know who have met then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pdcompile.errors import CheckpointError, PdcompileError
from pdcompile.ir.targets import dtype_name
from pdcompile.runtime.session import Session
from pdcompile.runtime.transport.contract import Expected
from pdcompile.schedule import Kind
from pdcompile.schedule.spec import Broadcast


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
        #: numbers of each rank's channels, by name, dtype and shape
        self._channels: dict[int, dict[tuple[Any, ...], int]] = {}

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
        """The values of `part` of the first process of each rank, on every process.

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
            first = range(len(every)) if world is None else [p for p, *_ in world.processes]
            return [every[process]["value"] for process in first]
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
        """Each rank's value and tensors by name, on rank 0; elsewhere [].

        A channel has tensors of one shape for ever: each name, dtype and shape has its own.
        """
        session = self._session
        if session.world is None:
            return [(json.loads(json.dumps(value)), tensors)]
        listed = [(name, dtype_name(one.dtype), one.shape) for name, one in tensors.items()]
        world, every = session.world, self.everywhere([value, listed])
        parts = [every[world.places.source(rank)] for rank in range(len(world.processes))]
        rows = dict[Broadcast, Tensor | Expected]()
        places: list[dict[str, tuple[int, int]]] = []
        for rank, (_, theirs) in enumerate(parts):
            places.append({})
            known = self._channels.setdefault(rank, {})
            for name, dtype, shape in theirs:
                number = known.setdefault((name, dtype, *shape), len(known))
                place = number * len(parts) + rank, -1  # whatever parts of other ranks have
                places[rank][name] = place
                rows[Broadcast(Kind.STATE, *place, rank, (0,) if rank else ())] = (
                    tensors[name] if rank in session.ranks
                    else Expected(tuple(shape), getattr(torch, dtype), 0)
                )  # fmt: skip
        found = session.share(rows.items())
        if 0 not in session.ranks:
            return []
        return [
            (said, {name: found[place].detach() for name, place in there.items()})
            for (said, _), there in zip(parts, places, strict=True)
        ]
