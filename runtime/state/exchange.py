"""Exchange: values and tensors that processes tell each other while they save or load.

All of a pipeline make the same calls, within a call of the session.
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


def everywhere(session: Session, value: Any) -> list[Any]:
    """The values of all processes, on every one."""
    world = session.world
    return [json.loads(json.dumps(value))] if world is None else world.told(value)


def of_first(
    session: Session, make: Callable[[], Any], undo: Callable[[], object] = lambda: None
) -> Any:
    """The value that the first process makes, on every rank; see `agreed`."""
    return agreed(session, make if session.is_first else lambda: None, undo=undo)[0]


def agreed(
    session: Session,
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
    own = None
    try:
        told = {"value": part()}
    except (PdcompileError, OSError) as error:
        own = error if isinstance(error, PdcompileError) else CheckpointError(str(error))
        told = {"error": [own.message, own.where, own.remedy]}
    every = everywhere(session, told)
    wrong = next((process for process, one in enumerate(every) if "error" in one), None)
    if wrong is None:
        return [one["value"] for one in every]
    if session.is_first:
        undo()
    everywhere(session, None)
    message, where, remedy = every[wrong]["error"]
    said = f"rank {wrong} {failed}: {message}" if failed else message
    raise Refused(own or CheckpointError(said, where=where, remedy=remedy))


def collect(
    session: Session, value: Any, tensors: Mapping[str, Tensor]
) -> list[tuple[Any, Mapping[str, Tensor]]]:
    """Each process's value and tensors by name, on the first one; elsewhere [].

    Raises:
        ContractError: other bytes came than were sent.
    """
    if session.world is None:
        return [(json.loads(json.dumps(value)), tensors)]
    listed = []
    for name, one in tensors.items():
        order = memory_order(one)
        listed.append([name, dtype_name(one.dtype), one.shape, order, digest(laid(one, order))])
    every = everywhere(session, [value, listed])
    if session.world.process:
        for one in tensors.values():
            flat = flat_bytes(devices.to_host(laid(one, memory_order(one))))
            _transfer(session, flat, 0, sending=True)
        return []
    found: list[tuple[Any, Mapping[str, Tensor]]] = [(every[0][0], tensors)]
    for peer, (said, theirs) in enumerate(every[1:], 1):
        came = dict[str, Tensor]()
        for name, dtype, shape, order, sent in theirs:
            expected = Expected(tuple(shape), getattr(torch, dtype), 0)
            memory = torch.empty(max(1, expected.num_bytes), dtype=torch.uint8)
            if digest(_transfer(session, memory, peer, sending=False)) != sent:
                raise ContractError(
                    f"other bytes came from rank {peer} than it sent",
                    where=name,
                    remedy="look for faulty memory or network",
                )
            came[name] = from_bytes(memory, expected, tuple(order))
        found.append((said, came))
    return found


def _transfer(session: Session, flat: Tensor, peer: int, *, sending: bool) -> Tensor:
    """Send bytes to a process, or fill them with what it sends."""
    control, tag = session.workers[0].far.control, Channel(Kind.STATE, 0, peer).tag
    with session.meeting():
        return control.begin(Fetched(flat), tag, peer, sending=sending).wait()
