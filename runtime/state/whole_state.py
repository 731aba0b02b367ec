"""States of the whole model and its optimizer, gathered on rank 0 and loaded on every rank."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor

from pdcompile.checkpoint.extra_states import extra_states
from pdcompile.checkpoint.manifest import HoldingKind
from pdcompile.checkpoint.named_optimizer import (
    NamedGroup,
    joined,
    named_groups,
    named_loading,
    names_of,
    read_named,
)
from pdcompile.checkpoint.plain_values import Encoder, decode
from pdcompile.hardware import devices
from pdcompile.jsonio import encode
from pdcompile.runtime.session import Session
from pdcompile.runtime.state.exchange import collect, everywhere
from pdcompile.runtime.state.holdings import all_parameters, holdings, stage_states, whole_rows


def gather_state(session: Session, minibatches: int) -> dict[str, Any]:
    """State of the whole model with its keys, copied to the CPU, on rank 0; elsewhere {}."""
    rows = [row for row in holdings(session, minibatches) if row.holding.kind is HoldingKind.WEIGHT]
    found: dict[str, Tensor] = {}
    own = {row.holding.name: row.tensor for row in whole_rows(session, rows)}
    for process, (_, tensors) in enumerate(collect(session, None, own)):
        found |= {name: _on_host(one, live=process == 0) for name, one in tensors.items()}
    if not session.is_first:
        return {}
    of = {key: fqn for fqn, keys in session.state.names.items() for key in keys}
    return {**{k: found[of[k]] for k in session.state.keys}, **extra_states(session.model)}


def _on_host(tensor: Tensor, *, live: bool) -> Tensor:
    """A tensor in host memory that nobody else has; `live`: this one is the pipeline's."""
    found = devices.to_host(tensor.detach())
    return found.clone() if live and found.data_ptr() == tensor.data_ptr() else found


def gather_optimizer(session: Session, minibatches: int) -> dict[str, Any]:
    """The state of an optimizer of the whole model, by name, on rank 0; elsewhere {}.

    Raises:
        InputError: it keeps what belongs to no parameter.
        CheckpointError: it keeps what cannot be sent to another process.
    """
    states = stage_states(session, minibatches)
    told = [encode(state) for state, _ in states]
    own = {f"{one.stage}/{n}": value for one, tensors in states for n, value in tensors.items()}
    state, groups = dict[str, Any](), list[NamedGroup]()
    for rank, (theirs, came) in enumerate(collect(session, told, own)):
        where = f"the state of rank {rank}"
        for stage in theirs:
            tensor = partial(_of_stage, came, stage["stage"])
            state |= {f: decode(one, where, tensor) for f, one in stage["state"].items()}
            for n, group in enumerate(stage["groups"]):
                values = decode(group["values"], where, tensor)
                groups.append(NamedGroup(n, tuple(group["names"]), values, group["kind"]))
    if not session.is_first:
        return {}
    order = {fqn: n for n, fqn in enumerate(session.state.infos)}
    listed = {fqn: state[fqn] for fqn in order if state.get(fqn)}
    return copy.deepcopy({"state": listed, "param_groups": whole_groups(groups, order)})


def whole_groups(groups: list[NamedGroup], order: Mapping[str, int]) -> list[dict[str, Any]]:
    """Groups of the whole model, of those of its stages: ones with other settings stay apart."""
    found = sorted(joined(groups), key=attrgetter("place"))
    filled = {one.place for one in found if one.names}
    return [
        {**one.values, "params": sorted(one.names, key=order.__getitem__)}
        for one in found
        if one.names or one.place not in filled
    ]


def _of_stage(tensors: Mapping[str, Tensor], stage: int, name: str) -> Tensor:
    return tensors[f"{stage}/{name}"]


def made_groups(session: Session) -> list[NamedGroup]:
    """The optimizers' groups of all ranks."""
    made = session.optimizer
    own = [] if made is None else named_groups(made, names_of(all_parameters(session)))
    if session.world is None:
        return own
    encoder = Encoder(inline=True)
    told = [[g.place, g.names, encoder.encode(g.values, "groups"), g.kind] for g in own]
    return [
        NamedGroup(place, tuple(names), decode(values, "groups"), kind)
        for groups in everywhere(session, told)
        for place, names, values, kind in groups
    ]


def load_optimizer(session: Session, given: Any, made: Sequence[NamedGroup]) -> None:
    """Take this process's part of the state of an optimizer of the whole model.

    `made`: the groups of all ranks' optimizers.

    Raises:
        InputError: it is none; nothing was changed.
    """
    assert session.optimizer is not None
    groups, state = read_named(given)
    names = names_of(all_parameters(session))
    mine = {names.get(id(p)) for group in session.optimizer.param_groups for p in group["params"]}
    of = session.homes.own_values
    own = copy.deepcopy({name: of(name, one) for name, one in state.items() if name in mine})
    named_loading(session.optimizer, names, groups, own, made)()
