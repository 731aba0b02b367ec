"""States of the whole model and its optimizer, gathered on rank 0 and loaded on every rank."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from pdcompile.checkpoint.contents import OptimizerStates
from pdcompile.checkpoint.extra_states import extra_states
from pdcompile.checkpoint.manifest import HoldingKind, StageState
from pdcompile.checkpoint.named_optimizer import (
    NamedGroup,
    named_groups,
    named_loading,
    names_of,
    read_whole,
)
from pdcompile.eager.optimizers import make_optimizer
from pdcompile.eager.randomness import preserved_rng
from pdcompile.errors import CheckpointError, ConfigError, errors_as
from pdcompile.hardware import devices
from pdcompile.jsonio import decode, encode
from pdcompile.runtime.session import Session
from pdcompile.runtime.state.exchange import Exchange
from pdcompile.runtime.state.holdings import all_parameters, holdings, stage_states
from pdcompile.weights.source import like


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
        ConfigError: there is no optimizer, or none can be made for the whole model.
        InputError: it keeps what belongs to no parameter.
        CheckpointError: it keeps what cannot be sent to another process.
    """
    if session.optimizer is None:
        raise ConfigError(
            "there is no optimizer (optimizer=None)",
            where="full_optimizer_state_dict",
            remedy="ask your own optimizer",
        )
    order = whole_order(session)
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
    groups = found.groups()
    state = {fqn: one for fqn in session.state.infos if (one := found.optimizer_state(fqn))}
    merged = [_merged(one, groups) for one in order]
    return {
        "state": copy.deepcopy(state),
        "param_groups": [{**group.values, "params": list(group.names)} for group in merged],
    }


def _merged(own: NamedGroup, groups: list[NamedGroup]) -> NamedGroup:
    """A group of the whole model, with the values of the stage of its first parameter."""
    of = {name: group for group in groups for name in group.names}
    found = next((of[name] for name in own.names if name in of), None)
    if found is None:  # it has no parameters
        found = next((group for group in groups if group.place == own.place), None)
    return own._replace(values={} if found is None else dict(found.values))


def whole_order(session: Session) -> list[NamedGroup]:
    """The groups of an optimizer of the whole model, as it is made.

    It is made of parameters without memory of their own; in one process it is the optimizer.

    Raises:
        ConfigError: the user's callable cannot make one.
    """
    assert session.optimizer is not None
    if session.world is None:
        return named_groups(session.optimizer, names_of(all_parameters(session)))
    of = session.state.whole_shape
    bare = {
        fqn: cast(nn.Parameter, like(one, torch.empty((), dtype=one.dtype).expand(of(fqn))))
        for fqn, one in all_parameters(session).items()
    }
    said = "the optimizer cannot be made for all of the model's parameters at one time"
    remedy = (
        "look at names and shapes alone in the function that makes it; pipe.save needs no "
        "optimizer of the whole model"
    )
    with errors_as(ConfigError, said, "optimizer", remedy, Exception), preserved_rng():
        made = make_optimizer(session.options.optimizer, bare.items())
    assert made is not None
    return named_groups(made, names_of(bare))


def load_optimizer(session: Session, given: Any) -> None:
    """Take this process's part of the state of an optimizer of the whole model.

    Raises:
        InputError: it is none; nothing was changed.
    """
    assert session.optimizer is not None
    made = whole_order(session)
    groups, state = read_whole(given, [group.names for group in made])
    names = names_of(all_parameters(session))
    mine = {names.get(id(p)) for group in session.optimizer.param_groups for p in group["params"]}
    of = session.homes.own_values
    own = copy.deepcopy({name: of(name, one) for name, one in state.items() if name in mine})
    named_loading(session.optimizer, names, groups, own, made)()
