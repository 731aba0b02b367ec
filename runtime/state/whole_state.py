"""States of the whole model and its optimizer, gathered on rank 0 and loaded on every rank."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pdcompile.checkpoint import plain_values
from pdcompile.checkpoint.contents import OptimizerStates
from pdcompile.checkpoint.extra_states import extra_states
from pdcompile.checkpoint.manifest import HoldingKind, StageState
from pdcompile.checkpoint.named_optimizer import (
    NamedGroup,
    named_groups,
    named_loading,
    names_of,
    read_named,
)
from pdcompile.checkpoint.plain_values import Encoder
from pdcompile.errors import CheckpointError, ConfigError
from pdcompile.hardware import devices
from pdcompile.jsonio import decode, encode
from pdcompile.runtime.session import Session
from pdcompile.runtime.state.exchange import Exchange
from pdcompile.runtime.state.holdings import all_parameters, holdings, stage_states


def gather_state(session: Session, exchange: Exchange, minibatches: int) -> dict[str, Any]:
    """State of the whole model with its keys, copied to the CPU, on rank 0; elsewhere {}."""
    rows = [row for row in holdings(session, minibatches) if row.holding.kind is HoldingKind.WEIGHT]
    found: dict[str, Tensor] = {}
    whole = session.state.whole
    own = {row.holding.name: whole(row.holding.name, row.tensor) for row in rows if row.owned}
    own = own if session.is_first_part else {}
    for rank, (_, tensors) in enumerate(exchange.collect(None, own)):
        found |= {name: _on_host(one, live=rank == 0) for name, one in tensors.items()}
    if not session.is_first:
        return {}
    of = {key: fqn for fqn, keys in session.state.names.items() for key in keys}
    return {**{k: found[of[k]] for k in session.state.keys}, **extra_states(session.model)}


def _on_host(tensor: Tensor, *, live: bool) -> Tensor:
    """A tensor in host memory that nobody else has; `live`: this one is the pipeline's."""
    found = devices.to_host(tensor.detach())
    return found.clone() if live and found.data_ptr() == tensor.data_ptr() else found


def gather_optimizer(session: Session, exchange: Exchange, minibatches: int) -> dict[str, Any]:
    """The state of an optimizer of the whole model, by name, on rank 0; elsewhere {}.

    Raises:
        ConfigError: there is no optimizer.
        InputError: it keeps what belongs to no parameter.
        CheckpointError: it keeps what cannot be sent to another process.
    """
    if session.optimizer is None:
        raise ConfigError(
            "there is no optimizer (optimizer=None)",
            where="full_optimizer_state_dict",
            remedy="ask your own optimizer",
        )
    states = stage_states(session, minibatches)
    told = [encode(state) for state, _ in states]
    own = {f"{one.stage}/{n}": value for one, tensors in states for n, value in tensors.items()}
    if not session.is_first_part:
        told, own = [], {}
    stages: list[StageState] = []
    tensors: dict[str, Tensor] = {}
    for rank, (theirs, came) in enumerate(exchange.collect(told, own)):
        where = f"the state of rank {rank}"
        stages += [decode(StageState, one, where=where, error=CheckpointError) for one in theirs]
        tensors |= came
    if not session.is_first:
        return {}
    found = OptimizerStates(
        "the state of all ranks",
        sorted(stages, key=lambda one: one.stage),
        lambda stage, name: tensors[f"{stage.stage}/{name}"],
    )
    order = {fqn: n for n, fqn in enumerate(session.state.infos)}
    placed = defaultdict[int, list[NamedGroup]](list)  # of all stages
    for group in found.groups():
        placed[group.place].append(group)
    groups = []
    for _, held in sorted(placed.items()):
        names = sorted((name for one in held for name in one.names), key=order.__getitem__)
        values = next((one.values for one in held if {*names[:1]} <= {*one.names}), {})
        groups.append({**values, "params": names})
    state = {fqn: one for fqn in order if (one := found.optimizer_state(fqn))}
    return copy.deepcopy({"state": state, "param_groups": groups})


def made_groups(session: Session, exchange: Exchange) -> list[NamedGroup]:
    """The optimizers' groups of all ranks."""
    made = session.optimizer
    own = [] if made is None else named_groups(made, names_of(all_parameters(session)))
    if session.world is None:
        return own
    encoder = Encoder(inline=True)
    told = [[g.place, g.names, encoder.encode(g.values, "groups"), g.kind] for g in own]
    return [
        NamedGroup(place, tuple(names), plain_values.decode(values, "groups"), kind)
        for groups in exchange.everywhere(told)
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
