"""An optimizer's state by the names of parameters, whatever parameters an optimizer has.

torch numbers parameters through, so that a state fits only where the same parameters are in the
same order.  By name it fits any cut.  The form is that of torch.distributed.checkpoint: ``state``
by name, and names as the ``params`` of each group; torch's own optimizers load it as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdcompile.eager.optimizers import members
from pdcompile.errors import InputError, some
from pdcompile.warn import warn

#: of states that have the shape of their parameter, in torch's optimizers
_OF_PARAMETER = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg",
    "grad_avg", "sum", "acc_delta", "ax", "prev", "step_size",
)  # fmt: skip
_OWN = ("params", "param_names")
RATES = ("lr", "initial_lr", "max_lr", "min_lr")  # what schedulers write among them


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a param_group, without its parameters."""
    return {key: value for key, value in group.items() if key not in _OWN}


class NamedGroup(NamedTuple):
    """A param_group: its place in its optimizer, the names of parameters, the values, and the class
    of the optimizer ("": not known)."""

    place: int
    names: tuple[str, ...]
    values: dict[str, Any]
    kind: str = ""


def names_of(tensors: Mapping[str, Tensor]) -> dict[int, str]:
    """The name of each parameter, by its id."""
    return {id(tensor): name for name, tensor in tensors.items()}


def named_groups(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[NamedGroup]:
    """The groups of an optimizer; parameters without a name are left out."""
    every = [
        (type(one).__name__, group) for one in members(optimizer) for group in one.param_groups
    ]
    return [
        NamedGroup(
            n,
            tuple(names[id(p)] for p in group["params"] if id(p) in names),
            settings(group),
            kind,
        )
        for n, (kind, group) in enumerate(every)
    ]


def named_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> dict[str, dict[str, Any]]:
    """State of each parameter in an optimizer's ``state_dict()``, by name; tensors are its own.

    Raises:
        InputError: it holds something that belongs to no parameter.
    """
    state = optimizer.state_dict()
    numbered = [p for group in optimizer.param_groups for p in group["params"]]
    found = {}
    for number, values in state["state"].items():
        if type(number) is not int or number >= len(numbered) or not isinstance(values, dict):
            raise InputError(
                f"{type(optimizer).__name__} keeps {str(number)[:60]!r} in its state, which "
                "belongs to no parameter",
                where="optimizer",
                remedy="an optimizer whose state is by parameter; torch.save(pipe.optimizer."
                "state_dict(), …) on every rank saves this one for the same plan",
            )
        if values and id(numbered[number]) in names:
            found[names[id(numbered[number])]] = values
    return found


def read_named(given: Any) -> tuple[list[NamedGroup], Any]:
    """Groups and state by name, of what `full_optimizer_state_dict` gave.

    Raises:
        InputError: it is none, or numbers parameters.
    """
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
        raise InputError(
            f"an optimizer's state is a dict with 'state' and 'param_groups', and this is "
            f"{type(given).__name__}",
            where="load_optimizer_state_dict",
            remedy="give what full_optimizer_state_dict() returned on rank 0",
        )
    groups = given["param_groups"]
    if not all(isinstance(name, str) for group in groups for name in group["params"]):
        raise InputError(
            "the state has numbers of parameters, and which are whose depends on the plan",
            where="load_optimizer_state_dict",
            remedy="save pipe.full_optimizer_state_dict(), which has names and fits every plan; of "
            "an optimizer in plain PyTorch get_optimizer_state_dict(model, optimizer) has them "
            "(torch.distributed.checkpoint.state_dict); what pipe.optimizer.state_dict() gave fits "
            "the same plan: pipe.optimizer.load_state_dict(part)",
        )
    found = [NamedGroup(n, tuple(one["params"]), settings(one)) for n, one in enumerate(groups)]
    return found, given["state"]


def _parameters(counts: Sequence[int]) -> str:
    groups = f" in {len(counts)} groups" if len(counts) > 1 else ""
    return f"{sum(counts)} parameters{groups}"


def named_loading(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    groups: Sequence[NamedGroup],
    state: Mapping[str, dict[str, Any]],
    made: Sequence[NamedGroup] = (),
) -> Callable[[], None]:
    """Check that groups and state by name fit an optimizer; returns what gives it them.

    It takes them as far as it has their parameters, and the tensors of the state for its own.

    Args:
        made: the groups of the whole model's optimizer, or of all ranks', as they were made.

    Raises:
        InputError: a parameter is in no group of the state, or of another class of optimizers; two
            that are in one group now had unlike settings; or a tensor has another shape than its
            parameter.
    """
    chosen = _chosen_values(named_groups(optimizer, names), groups, made)
    if all(type(one).__module__.startswith("torch.optim.") for one in members(optimizer)):
        for group in optimizer.param_groups:  # others may mean something else
            for parameter in group["params"]:
                name = names.get(id(parameter), "")
                _check_shapes(name, parameter, state.get(name, {}))

    def load() -> None:
        present = zip(named_groups(optimizer, names), chosen, strict=True)
        others = [own.names for own, values in present if own.names and "lr" not in values]
        if others and any("lr" in group.values for group in groups):
            warn(
                f"{some([one[0] for one in others])} are in other groups than when the optimizer's "
                "state was saved: these groups keep their own learning rates"
            )
        _load(optimizer, names, chosen, state)

    return load


def _chosen_values(
    present: Sequence[NamedGroup], groups: Sequence[NamedGroup], made: Sequence[NamedGroup]
) -> list[Mapping[str, Any]]:
    """Values for each group of an optimizer.

    Where groups are others than they were, a group keeps its own rates (they are not among its
    values), and so what groups that were one differ in.
    """
    of = {name: group for group in joined(groups) for name in group.names}
    parted = _parted(made or present, of)
    found: list[Mapping[str, Any]] = []
    for own in present:
        unknown = [name for name in own.names if name not in of]
        if unknown:
            raise InputError(
                f"the state has no settings of {some(unknown)}, which this optimizer updates",
                where="param_groups",
                remedy="load the optimizer's state of a model with the same parameters",
            )
        sources = list({id(of[name]): of[name] for name in own.names}.values())
        if not sources:  # a rank without parameters of this group: schedulers still see it
            there = [g for g in joined(groups) if g.place == own.place and _like(g, own)]
            sources = there if len(there) == 1 else []
        kept = {key for one in sources for key in parted.get(id(one), ())}
        for other in sources:
            one, two = (next(iter({*s.names} & {*own.names}), "") for s in (sources[0], other))
            if not _like(own, other):
                raise InputError(
                    f"{two}: the checkpoint has the state of {other.kind}, and this one is "
                    f"{own.kind}",
                    where="param_groups",
                    remedy="make the optimizer that it was saved with",
                )
            for key in _differing(sources[0].values, other.values):
                if key not in RATES:
                    raise InputError(
                        f"{one} and {two} are in one group of this optimizer, and were saved with "
                        f"{key}={sources[0].values.get(key)!r} and {other.values.get(key)!r}",
                        where="param_groups",
                        remedy="make the optimizer with the groups that it was saved with",
                    )
                kept.add(key)
        kept |= {*RATES} if kept.intersection(RATES) else set()
        values = sources[0].values if sources else {}
        found.append({key: value for key, value in values.items() if key not in kept})
    return found


def _like(one: NamedGroup, other: NamedGroup) -> bool:
    """True if groups are of one class of optimizers, as far as that is known."""
    return one.kind == other.kind or not (one.kind and other.kind)


def joined(groups: Sequence[NamedGroup]) -> list[NamedGroup]:
    """Groups, with those of several stages that are in one place and have like values as one."""
    found: list[NamedGroup] = []
    for group in groups:
        for n, one in enumerate(found):
            if (
                one.place == group.place
                and _like(one, group)
                and not _differing(one.values, group.values)
            ):
                found[n] = one._replace(names=(*one.names, *group.names))
                break
        else:
            found.append(group)
    return found


def _parted(made: Sequence[NamedGroup], of: Mapping[str, NamedGroup]) -> dict[int, set[str]]:
    """Settings that differ between groups made of one saved group, by the id of that."""
    groups: dict[int, list[NamedGroup]] = {}
    for one in made:
        for number in {id(of[name]) for name in one.names if name in of}:
            groups.setdefault(number, []).append(one)
    return {
        number: {key for one in held for key in _differing(held[0].values, one.values)}
        for number, held in groups.items()
    }


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The settings of which two groups have unlike values."""
    found = []
    for key in {**one, **other}:
        a, b = one.get(key), other.get(key)
        tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
        if not (torch.equal(a, b) if tensors else type(a) is type(b) and bool(a == b)):  # type: ignore[arg-type]
            found.append(key)
    return found


def _check_shapes(name: str, parameter: Tensor, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if key in _OF_PARAMETER and isinstance(value, Tensor) and value.shape != parameter.shape:
            raise InputError(
                f"{key} of {name} is {tuple(value.shape)}, and the parameter is "
                f"{tuple(parameter.shape)}",
                where="optimizer",
                remedy="load the optimizer's state of a model with the same sizes",
            )


def _load(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    chosen: Sequence[Mapping[str, Any]],
    state: Mapping[str, dict[str, Any]],
) -> None:
    """Give an optimizer values of groups, and state by name.

    Tensors keep the dtype that they were saved with, which torch's own loading does not promise, on
    the device where that puts them.
    """
    numbered: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = {id(parameter): n for n, parameter in enumerate(numbered)}
    own = {
        n: state[names[id(parameter)]]
        for n, parameter in enumerate(numbered)
        if names.get(id(parameter)) in state
    }
    values_of = [
        {**settings(group), **copy.deepcopy(dict(values))}
        for group, values in zip(optimizer.param_groups, chosen, strict=True)
    ]
    for values, group in zip(values_of, optimizer.param_groups, strict=True):
        values["params"] = [numbers[id(parameter)] for parameter in group["params"]]
    optimizer.load_state_dict({"state": own, "param_groups": values_of})
    for n, values in own.items():
        loaded = optimizer.state.get(numbered[n])
        if loaded is None:
            continue
        for key, value in values.items():
            if isinstance(value, Tensor) and isinstance(loaded.get(key), Tensor):
                values[key] = value.to(loaded[key].device)
        optimizer.state[numbered[n]] = values


def refuse_other_part(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Raise InputError for a numbered state of other parameters than this optimizer's: a hook
    before its ``load_state_dict``."""
    own = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in state["param_groups"]]
    if own != theirs:
        raise InputError(
            f"the state has {_parameters(theirs)}, and this process updates {_parameters(own)}: it "
            "is of other stages, of a plan with another cut or of another rank",
            where="pipe.optimizer.load_state_dict",
            remedy="pipe.load_optimizer_state_dict(state) takes what "
            "pipe.full_optimizer_state_dict() gave, which fits every plan; the state of a part "
            "fits the plan that it was saved with (compile(..., plan='plan.json'))",
        )
