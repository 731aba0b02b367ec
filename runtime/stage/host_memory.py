"""Weights once a host: the ranks of dispatched stages have them in one memory.

It is a case of updates at homes.  The home of a parameter steps it where every replica reads it,
and what brings new weights back is a rendezvous without bytes.  No replica reads the version that
an update overwrites: its gradients are in the sum that the home has waited for.  The memory has no
name in any file system (where there is no Linux, none once all have it): it goes with the last
process that has mapped it, however that ends.

Where ranks compute on GPUs and recompute, weights rest there, and so do gradients and the states of
optimizers: a stage has copies of its weights on the device while it runs (`brought`), forward and
again backward, and its gradients go to the host as soon as they are whole.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from pdcompile.errors import ConfigError
from pdcompile.hardware import devices
from pdcompile.releases.torch_internals import run_backward
from pdcompile.runtime.device import RankDevice
from pdcompile.runtime.stage.weights import Shared
from pdcompile.runtime.state.model_state import State
from pdcompile.runtime.transport.launch import World
from pdcompile.schedule.spec import PipelineSpec
from pdcompile.weights.source import like, registered, replaced

_LINE = 64  # bytes between two tensors, of a cache line
_mapped: set[str] = set()  # paths, in this process


def shared_weights(
    state: State, world: World | None, spec: PipelineSpec, device: RankDevice
) -> dict[str, Shared]:
    """Moves the parameters that this process holds to memory of the host, by name, where a plan has
    them there.

    Raises:
        ConfigError: those of another pipeline are there, or processes cannot map each other's.
    """
    parameters = {f: one for f, one in state.tensors.items() if isinstance(one, nn.Parameter)}
    resting = [(fqn, one) for fqn, one in parameters.items() if devices.on_host(one)]
    if mine := [fqn for fqn, one in resting if one.untyped_storage().filename in _mapped]:
        raise ConfigError(
            "another pipeline of this model has its weights where other ranks write them, too",
            where=mine[0],
            remedy="close() it first, or have it train a copy (keep_model=True)",
        )
    places, size = dict[str, list[int]](), 0
    for fqn, stages in state.stages.items() if spec.once else ():
        info, replicated = state.infos[fqn], all(len(spec.ranks[s]) > 1 for s in stages)
        if info.kind == "parameter" and replicated:
            count = spec.versions(stages[0]) if info.requires_grad else 1
            length = -(-info.bytes // _LINE) * _LINE
            places[fqn] = [size + n * length for n in range(count)]
            size += count * length
    if not size or (world is None and not spec.fetched):
        return {}
    if world is None:
        return {fqn: _alone(state, fqn, len(at), device) for fqn, at in places.items()}
    path, file = _file(world, size)
    _mapped.add(path)
    try:
        maps = [torch.from_file(path, one, size, dtype=torch.uint8) for one in (True, False)]
    except RuntimeError as error:
        raise ConfigError(
            f"processes of this host cannot map each other's memory ({error}), where weights are "
            "once a host",
            remedy="run them as one user in one container; or updates='every'",
        ) from error
    if device.queued:
        devices.pin(maps[0])
    found = dict[str, Shared]()
    for fqn, offsets in places.items():
        one = parameters.get(fqn)
        if one is not None and not one.is_meta and one.numel():
            versions, own = ([_at(memory, at, one) for at in offsets] for memory in maps)
            found[fqn] = Shared(one, versions, own, state.updated_here(fqn))
            for version in versions:  # all processes write the same values
                version.copy_(one.data)
    world.joint.gather()
    if file is not None:
        file.close()
    for shared in found.values():
        shared.parameter.data = shared.versions[0]
    return found


def _alone(state: State, fqn: str, count: int, device: RankDevice) -> Shared:
    """The same of a process that has all ranks: nobody else reads what it writes."""
    one = cast(nn.Parameter, state.tensors[fqn])
    versions = [_at(device.pinned(one.nbytes), 0, one).copy_(one.data) for _ in range(count)]
    one.data = versions[0]
    return Shared(one, versions, versions, here=True)


@contextmanager
def brought(module: nn.Module, device: RankDevice) -> Iterator[None]:
    """Context in which a stage has copies on the device of its weights that rest on the host; their
    gradients are accumulated where these rest, by autograd, which runs hooks."""
    held = [(one, one.tensor) for one in registered(module)]
    resting = [(o, p) for o, p in held if isinstance(p, nn.Parameter) and devices.on_host(p)]
    copies = {
        own: cast(nn.Parameter, like(own, device.place(own.data, pinned=True)))
        for own in dict.fromkeys(own for _, own in resting)
    }
    with replaced((one, copies[own]) for one, own in resting):
        yield
        came = [(own, device.fetch(c.grad)) for own, c in copies.items() if c.grad is not None]
        if came:
            run_backward([(own, one.wait()) for own, one in came])


def _at(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    flat = memory[offset : offset + like.nbytes].view(like.dtype)
    return flat.as_strided(like.shape, torch.empty_like(like, device="meta").stride())


def _file(world: World, size: int) -> tuple[str, Any]:
    """Path of a file that every process can map; the file, which goes when the process that made it
    closes it."""
    first, path, file = world.processes[0][world.part], "", None
    if world.process == first:
        if sys.platform == "linux":
            file = os.fdopen(os.memfd_create("pdcompile"), "wb")
            path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        else:
            file = tempfile.NamedTemporaryFile(prefix="pdcompile-")  # noqa: SIM115  (closed when all have it)
            path = file.name
        file.truncate(size)
    return world.told(path)[first], file
