"""First values of a session's tensors: the model's, or, without values there, a source's.

All ranks start from the weights of rank 0, as after one process had built the model.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pdcompile.compiled import Compiled
from pdcompile.eager.digest import flat_bytes
from pdcompile.errors import ConfigError, ContractError, some
from pdcompile.hardware import devices
from pdcompile.options import Options
from pdcompile.runtime.state.model_state import State
from pdcompile.runtime.transport.launch import WAIT, World
from pdcompile.warn import warn
from pdcompile.weights import materialise, open_source, slots


def initial_state(
    model: nn.Module,
    options: Options,
    compiled: Compiled,
    ranks: list[int],
    world: World | None,
) -> State:
    """The tensors that this process's `ranks` hold, with values that are equal on every rank.

    With ``weights=`` a process reads the tensors of its own stages and no others.

    Raises:
        ConfigError: tensors have no values and none are to be had.
        ContractError: ranks that hold one tensor got different values for it.
    """
    if options.weights is None:
        state = State(model, compiled, ranks)
        here = {f: t for f, t in state.tensors.items() if f not in options.held}
        refuse_meta(here)
        if world is not None:
            same_start(world, here)
        return state
    source = open_source(options.weights, seed=options.seed)
    built = [s.fqn for s in slots(model).values() if not (s.tensor.is_meta or source.stored(s))]
    names = None
    if world is not None:
        held = compiled.stages_of_rank
        mine = [compiled.interfaces[stage] for rank in ranks for stage in held[rank]]
        names = {name for one in mine for name in (*one.parameters, *one.buffers)}
    materialise(model, source, names)
    state = State(model, compiled, ranks)
    refuse_meta({fqn: t for fqn, t in state.tensors.items() if names is None or fqn in names})
    refuse_meta(compiled.capture.train.tensor_values)
    if world is not None:
        same_start(world, {fqn: state.tensors[fqn] for fqn in built})
        same_values(world, state.tensors, state.shared())
    return state


def refuse_meta(tensors: Mapping[str, Tensor]) -> None:
    """Raise ConfigError for a model without weights: it can be planned, but not run."""
    empty = [fqn for fqn, tensor in tensors.items() if tensor.device.type == "meta"]
    if empty:
        raise ConfigError(
            f"{len(empty)} tensors of the model have no values, they are on the meta device: "
            f"{some(empty)}",
            remedy="say where their values are: weights= a .safetensors file or a function (name, "
            "tensor); or give them values before compile: model.to_empty(device='cpu') and load a "
            "state_dict; `pdcompile plan` plans without",
        )


def same_start(world: World, tensors: Mapping[str, Tensor]) -> None:
    """Compare checksums of all tensors; where ranks differ, everyone takes rank 0's values.

    A program that does not seed its initialisation builds another model on every rank: stages would
    be parts of models that never existed together, and tied copies would disagree.  Every rank of
    the pipeline calls this with the same names in the same order.
    """
    world.store.set(f"weights/{world.rank}", str(_checksum(tensors)))
    with world.peers.log.meeting():
        sums = {bytes(world.store.get(f"weights/{rank}")) for rank in range(world.size)}
    if len(sums) == 1:
        return
    for tensor in tensors.values():
        flat = _bytes(tensor)
        if flat.numel() == 0:
            continue
        with world.peers.log.meeting():
            world.group.broadcast(flat, 0).wait()
        if world.rank != 0:
            with torch.no_grad():
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
    if world.rank == 0:
        warn(
            "the ranks built different weights: all continue with those of rank 0; call "
            "torch.manual_seed before building the model",
            RuntimeWarning,
        )


def same_values(
    world: World, tensors: Mapping[str, Tensor], shared: Mapping[str, list[int]]
) -> None:
    """Raise ContractError where ranks that hold one tensor gave it different values.

    `shared`: the ranks that hold each tensor that this rank and others hold.
    """
    for fqn in shared:
        world.store.set(f"values/{fqn}/{world.rank}", str(_checksum({fqn: tensors[fqn]})))
    for fqn, ranks in shared.items():
        keys = [f"values/{fqn}/{rank}" for rank in ranks]
        with world.peers.log.meeting():
            world.store.wait(keys, WAIT)  # a large stage takes its time to read
        if len({bytes(world.store.get(key)) for key in keys}) > 1:
            raise ContractError(
                f"ranks {', '.join(map(str, ranks))} hold {fqn} with different values",
                where=fqn,
                remedy="give every rank the same files; a function given as weights= draws from "
                "torch's default generator, which is seeded for each name, and from no other",
            )


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    total = 0
    for tensor in tensors.values():
        total = zlib.crc32(_bytes(tensor).numpy().data, total)
    return total


def _bytes(tensor: Tensor) -> Tensor:
    """The values as a flat run of bytes on the CPU (a copy unless they already are one)."""
    return flat_bytes(devices.to_host(tensor.detach()))
