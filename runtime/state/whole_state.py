"""States of the whole model and its optimizer, gathered on rank 0 and loaded on every rank."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.checkpoint.extra_states import extra_states
from pdcompile.checkpoint.holding import HoldingKind
from pdcompile.checkpoint.named_optimizer import (
    NamedGroup,
    load_named,
    named_groups,
    named_state,
    names_of,
    read_whole,
    whole_state,
)
from pdcompile.checkpoint.plain_values import Encoder, decode
from pdcompile.eager.optimizers import make_optimizer
from pdcompile.eager.randomness import preserved_rng
from pdcompile.errors import ConfigError
from pdcompile.hardware import devices
from pdcompile.position import Accumulated
from pdcompile.runtime.session import Session
from pdcompile.runtime.state.exchange import Exchange
from pdcompile.runtime.state.holdings import (
    all_parameters,
    held,
    holdings,
    made_groups,
    writes,
)


def gather_state(
    session: Session, exchange: Exchange, minibatches: int
) -> tuple[dict[str, Any], dict[str, Accumulated]]:
    """All of the state with the model's keys, copied to the CPU, and gradients that wait for the
    rest of their group, on rank 0; elsewhere {} and {}."""
    gathered = (HoldingKind.WEIGHT, HoldingKind.ACCUMULATED)
    rows = [row for row in holdings(session, minibatches) if row.owned]
    own = {
        f"{row.holding.kind.name} {row.holding.name}": row.tensor
        for row in rows
        if row.holding.kind in gathered
    }
    trained = [f for w in session.workers if writes(session, w) for f in w.weights.owned]
    waiting = held(session, minibatches)
    counts = {fqn: waiting[fqn].minibatches for fqn in trained if fqn in waiting}
    weights: dict[str, Tensor] = {}
    accumulated: dict[str, Accumulated] = {}
    for rank, (theirs, tensors) in enumerate(exchange.collect(counts, own)):
        host = {name: _on_host(one, live=rank == 0) for name, one in tensors.items()}
        weights |= {
            key: host[f"{HoldingKind.WEIGHT.name} {fqn}"]
            for fqn, keys in session.state.names.items()
            for key in keys
            if f"{HoldingKind.WEIGHT.name} {fqn}" in host
        }
        for fqn, count in theirs.items():
            gradient = host.get(f"{HoldingKind.ACCUMULATED.name} {fqn}")
            accumulated[fqn] = Accumulated(count, gradient)
    if not weights:
        return {}, {}
    found = {key: weights[key] for key in session.state.keys}
    return {**found, **extra_states(session.model)}, accumulated


def _on_host(tensor: Tensor, *, live: bool) -> Tensor:
    """A tensor in host memory that nobody else has; `live`: this one is the pipeline's."""
    found = devices.to_host(tensor.detach())
    return found.clone() if live and found.data_ptr() == tensor.data_ptr() else found


def gather_optimizer(session: Session, exchange: Exchange) -> dict[str, Any]:
    """The state of an optimizer of the whole model, by name, on rank 0; elsewhere {}.

    Raises:
        ConfigError: there is no optimizer, or none can be made for the whole model.
        InputError: it keeps what belongs to no parameter.
        CheckpointError: it keeps what cannot be sent to another process.
    """
    optimizer = session.optimizer
    if optimizer is None:
        raise ConfigError(
            "there is no optimizer (optimizer=None)",
            where="full_optimizer_state_dict",
            remedy="ask your own optimizer",
        )
    order = whole_order(session)
    names = names_of(all_parameters(session))
    mine = {worker.stage for worker in session.workers if writes(session, worker)}
    owner = session.state.owner
    state = {f: one for f, one in named_state(optimizer, names).items() if owner(f) in mine}
    groups = [
        one._replace(names=tuple(f for f in one.names if owner(f) in mine))
        for one in named_groups(optimizer, names)
    ]
    if session.world is not None:
        groups, state = _received(exchange, groups, state)
    if 0 not in session.ranks:
        return {}
    found = [_merged(own, groups) for own in order]
    ordered = {fqn: state[fqn] for fqn in session.state.infos if fqn in state}
    return whole_state(found, copy.deepcopy(ordered))


def _received(
    exchange: Exchange, groups: list[NamedGroup], state: Any
) -> tuple[list[NamedGroup], Any]:
    """Groups and state of all ranks, on rank 0."""
    encoder = Encoder()
    told = [
        [[g.place, g.names, encoder.encode(g.values, f"{g.place}")] for g in groups],
        {f: encoder.encode(dict(one), f) for f, one in state.items()},
    ]
    every: list[NamedGroup] = []
    found: dict[str, Any] = {}
    for rank, ((theirs, states), tensors) in enumerate(exchange.collect(told, encoder.tensors)):
        value = partial(decode, where=f"rank {rank}", tensor=tensors.__getitem__)
        every += [NamedGroup(place, tuple(names), value(one)) for place, names, one in theirs]
        found |= {name: value(one) for name, one in states.items()}
    return every, found


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
        return made_groups(session)
    bare = {fqn: _bare(tensor) for fqn, tensor in all_parameters(session).items()}
    try:
        with preserved_rng():
            made = make_optimizer(session.options.optimizer, bare.items())
    except Exception as error:  # the user's callable
        raise ConfigError(
            f"the optimizer cannot be made for all of the model's parameters at one time: {error}",
            where="optimizer",
            remedy="look at names and shapes alone in the function that makes it; pipe.save needs "
            "no optimizer of the whole model",
        ) from error
    assert made is not None
    names = names_of(bare)
    return named_groups(made, names)


def _bare(tensor: Tensor) -> nn.Parameter:
    value = torch.empty(1, dtype=tensor.dtype).expand(tensor.shape)
    return nn.Parameter(value, requires_grad=tensor.requires_grad)


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
    own = copy.deepcopy({name: dict(one) for name, one in state.items() if name in mine})
    load_named(session.optimizer, names, groups, own, made)
