"""Optimizers: a trial before training, and what may change while an update is in flight.

Stages are updated one by one, each when its gradients are there, and under torchrun by processes
that know of no others.  An optimizer that works on all parameters at once (it scales by the norm
of all gradients, or estimates one step size) would become another one.  It is found by trying:
one step of everything against a step stage by stage, on small copies of the parameters.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from pdcompile.eager import digest
from pdcompile.eager.loss_scale import LossScale
from pdcompile.eager.optimizers import all_step_hooks, make_optimizer, members
from pdcompile.eager.randomness import preserved_rng
from pdcompile.errors import ConfigError, ContractError, PdcompileError
from pdcompile.parts.shard import Shard
from pdcompile.problem.deployment import balanced_homes
from pdcompile.releases.torch_internals import step_hooks
from pdcompile.runtime.optimizer import Updater
from pdcompile.runtime.stage.homes import Homes
from pdcompile.runtime.transport.parts_group import PartsGroup
from pdcompile.warn import warn
from pdcompile.weights.source import like

if TYPE_CHECKING:
    from pdcompile.runtime.state.model_state import State

_LARGEST = 4  # size of a copy in each dimension
_SCALES = (1.0, 1e3, 1e-3)  # of gradients in the steps that are tried: clipping may wait for large
_RELATIVE = 1e-4  # difference that rounding does not explain
#: classes that update each element by itself: no trial shows that of others, which may go by sizes
#: that copies do not have, or later
_BY_ELEMENT = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta,
    torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop,
    torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip
_LEAST_RATE = 0.1  # of learning: what small steps differ in would not show
_UNTRIED = "whether the optimizer couples parameters of different stages was not tried"
_REMEDY = (
    "clip by the norm of all stages with max_grad_norm=; update each parameter by itself in the "
    "optimizer; or use one stage (of one part), whose replicas all update (updates='every')"
)

Copies = dict[str, nn.Parameter]
_PLAIN = (bool, int, float, str, tuple, type(None))


def homes_of(build: Any, state: State) -> dict[str, int]:
    """The home of each parameter of which parts have slices and that is to be stepped whole: bytes
    are balanced over the parts of a rank's stages, the largest first.

    Raises:
        ConfigError: it cannot update stages, or what homes have, apart from each other.
    """
    beside, trained = state.beside, state.trainable()
    shards = {} if beside is None else beside.division.shards
    slices = {f: _bare(one, state.infos[f].shape) for f, one in trained.items()}
    wholes = {f: _bare(one, state.whole_shape(f)) for f, one in trained.items()}
    found = set(stepped_whole(build, slices, wholes, shards)) if build is not None else set()
    homes, units = dict[str, int](), list[list[str]]()
    for names in state.owned:
        count = 1 if beside is None else beside.count
        sizes = {fqn: wholes[fqn].nbytes for fqn in found.intersection(names)}
        own = balanced_homes([range(count)], [sizes])
        homes |= own
        apart = [[fqn for fqn in names if own.get(fqn) == part] for part in range(count)]
        units += [[fqn for fqn in names if fqn not in found], *apart]
    refuse_coupled(build, wholes, units, parts=beside is not None)
    return homes


def refuse_coupled(
    build: Any, parameters: Mapping[str, Tensor], stages: Sequence[Sequence[str]],
    *, parts: bool = False,
) -> None:  # fmt: skip
    """Raise ConfigError when updates of different stages depend on one another.

    Args:
        build: the user's callable, see `make_optimizer`; None: nothing to look at.
        parameters: of the whole model, by name; only shapes and dtypes matter.
        stages: the names that each stage updates, or each home of its own.

    An optimizer that draws random numbers cannot be tried; a warning says so, but for `parts` of a
    stage: what they have whole each draws for, and would not stay the same.
    """
    trained = [names for names in stages if names]
    if build is None or len(trained) < 2:
        return
    together = [name for names in trained for name in names]
    with preserved_rng():
        try:
            whole, drew = _after_steps(build, parameters, [together])
            apart, _ = (whole, drew) if drew else _after_steps(build, parameters, trained)
        except PdcompileError:
            raise
        except Exception as error:  # a user's callable may want the true shapes
            why = f"{type(error).__name__}: {error}"
            warn(f"{_UNTRIED}, because it cannot be run on small copies ({why})")
            return
    if drew and parts:
        message = "the optimizer draws random numbers, and parts of a stage would draw others"
        remedy = "draw none in step, or use whole stages (parts=1)"
        raise ConfigError(message, where="optimizer", remedy=remedy)
    if drew:
        warn(f"{_UNTRIED}, because it draws random numbers, in another order stage by stage")
    found = _differing(whole, apart) if apart else None
    if found is not None:
        raise ConfigError(
            f"the optimizer's update of {found!r} depends on gradients of other stages, or of "
            "what other parts or replicas of its stage update: a step of all parameters and steps "
            "of what each rank updates give different weights",
            where="optimizer",
            remedy=_REMEDY,
        )


def stepped_whole(
    build: Any,
    slices: Mapping[str, nn.Parameter],
    wholes: Mapping[str, nn.Parameter],
    shards: Mapping[str, Shard],
) -> Collection[str]:
    """Names of the parameters with slices that are not known to be updated element by element, or
    whose settings depend on sizes: to step the whole is right in any case."""
    sliced = wholes.keys() & shards.keys()
    if not sliced:
        return ()
    small, found = {name: small_copy(one) for name, one in wholes.items()}, None
    with preserved_rng():
        try:
            whole = _settings(build, wholes)
            found = {f for f in sliced if f in whole and whole[f][""] not in _BY_ELEMENT}
            for which, types in (slices, _PLAIN), (small, (bool, str)):
                wanted, other = _settings(build, wholes, types), _settings(build, which, types)
                found |= {f for f in sliced if wanted.get(f) != other.get(f)}
            mixed = {f: wholes[f] if f in found else one for f, one in slices.items()}
            return found if _settings(build, mixed) == whole else sliced
        except PdcompileError:
            raise
        except Exception:  # a user's callable may want the true shapes, or values
            return sliced if found is None else found


def _settings(
    build: Any, parameters: Mapping[str, nn.Parameter], types: tuple[type, ...] = _PLAIN
) -> dict[str, dict[str, Any]]:
    """Class of optimizer, None with something added to its step, and settings of the group that are
    of these types, of each parameter."""
    optimizer = make_optimizer(build, parameters.items())
    assert optimizer is not None
    names = {id(one): name for name, one in parameters.items()}
    return {
        names[id(one)]: {"": type(member) if _is_plain(member) else None}
        | {k: v for k, v in group.items() if type(v) in types}
        for member in members(optimizer)
        for group in member.param_groups
        for one in group["params"]
    }


def _bare(parameter: Tensor, shape: Sequence[int]) -> nn.Parameter:
    """A parameter of this shape without memory."""
    return cast(nn.Parameter, like(parameter, parameter.new_empty(shape, device="meta")))


def _after_steps(
    build: Any, parameters: Mapping[str, Tensor], parts: Sequence[Sequence[str]]
) -> tuple[Copies, bool]:
    """Small copies of the parameters after three steps, each part by part, and whether these drew
    random numbers; none for torch's own optimizers, which update parameter by parameter."""
    values = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=values)
    copies = {name: small_copy(parameter, draw) for name, parameter in parameters.items()}
    optimizer = make_optimizer(build, copies.items())
    assert optimizer is not None
    if _is_plain(optimizer):
        return {}, False
    for group in optimizer.param_groups:
        group["lr"] = max(group.get("lr") or 0.0, _LEAST_RATE)
    updater, state = Updater(optimizer, reach=0), torch.get_rng_state()
    for t, scale in enumerate(_SCALES):
        updater.snapshot(t)
        gradients = {
            name: scale * draw(_small(parameter)).to(parameter.dtype)
            for name, parameter in parameters.items()
        }
        for number, names in enumerate(parts):
            given, own = [(copies[n], gradients[n]) for n in names], {id(copies[n]) for n in names}
            updater.apply(t, given, number, own)
    return copies, not state.equal(torch.get_rng_state())


def small_copy(
    parameter: Tensor, values: Callable[[list[int]], Tensor] = torch.zeros
) -> nn.Parameter:
    """A parameter of at most 4 elements in each dimension, for trials of an optimizer.

    It has the attributes of the true one, which may choose its group.
    """
    return cast(nn.Parameter, like(parameter, values(_small(parameter)).to(parameter.dtype)))


def _small(parameter: Tensor) -> list[int]:
    return [min(size, _LARGEST) for size in parameter.shape]


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """True if it is torch's own, with nothing added to its step."""
    own = all(type(one).__module__.startswith("torch.optim.") for one in members(optimizer))
    hooks = [*all_step_hooks(optimizer), *step_hooks(None)]
    return own and not hooks and not any("step" in vars(one) for one in members(optimizer))


def _differing(one: Copies, other: Copies) -> str | None:
    """The first parameter that differs by more than rounding."""
    for name, value in one.items():
        wide = torch.complex128 if value.is_complex() else torch.float64
        a, b = value.detach().to(wide), other[name].detach().to(wide)
        if bool((a - b).abs().max() > _RELATIVE * a.abs().max()) if a.numel() else False:
            return name
    return None


@cache  # not at import: the first optimizer of a process imports all of torch's compiler
def _known() -> frozenset[str]:
    """Attributes that every optimizer has, and those that schedulers of learning rates add."""
    plain = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    return frozenset(vars(plain)) | {"_opt_called", "_step_count"}


class OptimizerWatch:
    """The optimizer as the last call left it, while an update of its is in flight.

    Values of its param_groups (learning rates) count from the next step on, as always: updates
    have them from the moment when their step was called.  So does what the user puts into the
    GradScaler, which shows the newest `scale` of the losses between calls.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer | None, scale: LossScale | None = None
    ) -> None:
        self._optimizer = optimizer
        self._scale = scale
        self._seen: list[tuple[str, Any]] = []

    def remember(self, *, in_flight: bool) -> None:
        """A call ends."""
        if self._scale is not None:
            self._scale.show()
        self._seen = self._present() if in_flight else []

    def check(self, *, in_flight: bool) -> None:
        """Raise ConfigError when an update in flight would meet another optimizer."""
        if self._scale is not None:
            self._scale.follow()
        if not in_flight:
            return
        now = self._present()
        if now != self._seen:
            changed = [w for (w, a), (_, b) in zip(self._seen, now, strict=False) if a != b]
            what = changed[0] if changed else "its state"
            raise in_flight_error("pipe.optimizer", f"changed ({what})", "the optimizer")

    def _present(self) -> list[tuple[str, Any]]:
        one = self._optimizer
        assert one is not None, "nothing is in flight without updates"
        known = _known()
        own = {
            (n, name): _state_of(value) if isinstance(value, Mapping) else _state_of({"": value})
            for n, member in enumerate(members(one))
            for name, value in vars(member).items()
            if name not in known
            and not hasattr(value, "_wrapped_by_lr_sched")
            and getattr(value, "__module__", "") != Homes.__module__
        }
        return [
            (
                "the parameters of its groups",
                [[id(p) for p in g["params"]] for g in one.param_groups],
            ),
            ("its step hooks", [id(hook) for hook in all_step_hooks(one)]),
            ("its attributes", own),
            ("its state", {id(p): _state_of(values) for p, values in one.state.items()}),
        ]


def _state_of(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return id(values)
    return {
        key: digest.write_state(value, digest.digest_of_ends) if isinstance(value, Tensor)
        else value if isinstance(value, bool | int | float | str) else id(value)
        for key, value in values.items()
    }  # fmt: skip


def in_flight_error(name: str | None, what: str, thing: str) -> ConfigError:
    """The refusal of a change that would hit an update in flight."""
    return ConfigError(
        f"{thing} was {what} while microbatches were in flight whose computation or update needs "
        "it as it was",
        where=name,
        remedy="call pipe.flush() before such a change; pipe.load_state_dict does so by itself",
    )


def refuse_unlike(
    beside: PartsGroup | None, tensors: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
) -> None:  # fmt: skip
    """Raise ContractError where this part of a stage holds something else than the first one: what
    a user changes on one of them alone would make each train a model of its own.

    All parts call it (None: a stage is whole).  Compared are whole tensors (of those in host memory
    the ends, which is quick) and the optimizer's settings.
    """
    if beside is None:
        return
    sliced = beside.division.shards
    held = {fqn: digest.digest_of_ends(one) for fqn, one in tensors.items() if fqn not in sliced}
    groups = [] if optimizer is None else optimizer.param_groups
    settings = [{k: v for k, v in one.items() if isinstance(v, _PLAIN)} for one in groups]
    text = json.dumps(settings, sort_keys=True, default=str)
    held["the optimizer's param_groups"] = zlib.crc32(text.encode())
    first = beside.tell([*held.values()])[0]
    for name, mine, theirs in zip(held, held.values(), first, strict=True):
        if mine != theirs and mine and theirs:
            raise ContractError(
                "this part of a stage holds other values of this than the first part",
                where=name,
                remedy="what you change between calls, change alike on every rank of the stage: "
                "weights and buffers that parts have whole, gradients, hooks, the optimizer's "
                "settings and its state",
            )
