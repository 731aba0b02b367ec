"""The optimizer's state of the whole model, gathered on rank 0 and loaded on every rank."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from torch import Tensor, nn

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
from pdcompile.checkpoint.tensor_file import dtype_name
from pdcompile.eager.optimizers import make_optimizer
from pdcompile.eager.randomness import preserved_rng
from pdcompile.errors import ConfigError
from pdcompile.runtime.interpreter import Box
from pdcompile.runtime.session import Session
from pdcompile.runtime.state.checkpoint_parts import all_parameters, made_groups, owners, writers
from pdcompile.runtime.state.exchange import Exchange
from pdcompile.runtime.state.model_state import dtype_of
from pdcompile.runtime.transport.contract import Expected
from pdcompile.schedule import Kind
from pdcompile.schedule.spec import Broadcast

Numbers = dict[tuple[str, str, tuple[int, ...]], int]  # by name, dtype and shape of a tensor


def gather_optimizer(session: Session, exchange: Exchange, numbers: Numbers) -> dict[str, Any]:
    """The state of an optimizer of the whole model, by name, on rank 0; elsewhere {}.

    `numbers`: of the tensors that were sent so far, each on a channel of its own.

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
    mine, owner = {worker.stage for worker in writers(session)}, owners(session)
    state = {f: one for f, one in named_state(optimizer, names).items() if owner[f] in mine}
    groups = [
        one._replace(names=tuple(f for f in one.names if owner.get(f) in mine))
        for one in named_groups(optimizer, names)
    ]
    if session.world is not None:
        groups, state = _received(session, exchange, groups, state, numbers)
    if 0 not in session.ranks:
        return {}
    found = [_merged(own, groups) for own in order]
    ordered = {fqn: state[fqn] for fqn in session.state.infos if fqn in state}
    return whole_state(found, copy.deepcopy(ordered))


def _received(
    session: Session, exchange: Exchange, groups: list[NamedGroup], state: Any, numbers: Numbers
) -> tuple[list[NamedGroup], Any]:
    """Groups and state of all ranks, on rank 0."""
    encoder = Encoder()
    told: dict[str, Any] = {
        "groups": [[g.place, g.names, encoder.encode(g.values, f"{g.place}")] for g in groups],
        "state": {f: encoder.encode(dict(one), f) for f, one in state.items()},
    }
    told["tensors"] = [[n, dtype_name(t), list(t.shape)] for n, t in encoder.tensors.items()]
    texts = json.loads(exchange.announce(json.dumps(exchange.gather(json.dumps(told)))))
    parts = [json.loads(text) for text in texts]
    box, broadcasts, places = Box({}, {}), [], dict[tuple[int, str], int]()
    first = _first_number(session)
    for rank, part in enumerate(parts):
        for name, dtype, shape in part["tensors"]:
            key = f"{rank}/{name}", dtype, tuple(shape)
            number = places[rank, name] = numbers.setdefault(key, first + len(numbers))
            if rank in session.ranks:
                box.tensors[number, -1] = encoder.tensors[name]
            else:
                box.expected[number, -1] = Expected(tuple(shape), dtype_of(dtype), 0)
            receivers = (0,) if rank else ()
            broadcasts.append(Broadcast(Kind.STATE, number, -1, rank, receivers))
    session.share(tuple(broadcasts), box)
    if 0 not in session.ranks:
        return [], {}
    every: list[NamedGroup] = []
    found: dict[str, Any] = {}
    for rank, part in enumerate(parts):

        def tensor(name: str, rank: int = rank) -> Tensor:
            return box.tensors[places[rank, name], -1].detach()

        where = f"rank {rank}"
        every += [
            NamedGroup(place, tuple(names), decode(values, where, tensor))
            for place, names, values in part["groups"]
        ]
        found |= {name: decode(one, where, tensor) for name, one in part["state"].items()}
    return every, found


def _first_number(session: Session) -> int:
    """The first that no tensor of the state has, nor a gradient that waits beside it."""
    stages = session.compiled.interfaces
    return len(session.state.dtypes) + sum(1 + len(one.parameters) for one in stages)


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
