"""Trial of optimizers: refuses those whose update of one stage depends on gradients of another.

Stages are updated one by one, each when its gradients are there, and under torchrun by processes
that know of no others.  An optimizer that works on all parameters at once (it scales by the norm
of all gradients, or estimates one step size) would become another one.  It is found by trying:
one step of everything against a step stage by stage, on small copies of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.eager.optimizers import all_step_hooks, make_optimizer, members
from pdcompile.eager.randomness import preserved_rng
from pdcompile.errors import ConfigError, PdcompileError
from pdcompile.releases.torch_internals import global_step_hooks
from pdcompile.runtime.optimizer import Updater
from pdcompile.warn import warn

_LARGEST = 4  # size of a copy in each dimension
_SCALES = (1.0, 1e3, 1e-3)  # of gradients in the steps that are tried: clipping may wait for large
_RELATIVE = 1e-4  # difference that rounding does not explain
_UNTRIED = "whether the optimizer couples parameters of different stages was not tried"
_REMEDY = (
    "clip by the norm of all stages with max_grad_norm=; update each parameter by itself in the "
    "optimizer; or use one stage"
)

Copies = dict[str, nn.Parameter]


def refuse_coupled(
    build: Any, parameters: Mapping[str, Tensor], stages: Sequence[Sequence[str]]
) -> None:
    """Raise ConfigError when updates of different stages depend on one another.

    Args:
        build: the user's callable, see `make_optimizer`; None: nothing to look at.
        parameters: of the whole model, by name; only shapes and dtypes matter.
        stages: the names that each stage updates.

    An optimizer that draws random numbers cannot be tried; a warning says so.
    """
    trained = [names for names in stages if names]
    if build is None or len(trained) < 2:
        return
    together = [[name for names in trained for name in names]]
    with preserved_rng():
        try:
            whole = _after_steps(build, parameters, together, 0)
            if whole is None:
                return
            apart = _after_steps(build, parameters, trained, 0)
            again = _after_steps(build, parameters, together, 1)
        except PdcompileError:
            raise
        except Exception as error:  # a user's callable may want the true shapes
            why = f"{type(error).__name__}: {error}"
            warn(f"{_UNTRIED}, because it cannot be run on small copies ({why})")
            return
    if apart is None or again is None:  # another optimizer than at the first call
        return
    if _differing(whole, again):
        warn(f"{_UNTRIED}, because it draws random numbers, in another order stage by stage")
        return
    found = _differing(whole, apart)
    if found is not None:
        raise ConfigError(
            f"the optimizer's update of {found!r} depends on gradients of other stages: a step of "
            "all parameters and a step stage by stage give different weights",
            where="optimizer",
            remedy=_REMEDY,
        )


def _after_steps(
    build: Any, parameters: Mapping[str, Tensor], parts: Sequence[Sequence[str]], seed: int
) -> Copies | None:
    """Small copies of the parameters after three steps, each part by part.

    None for one of torch's own optimizers, which update parameter by parameter.
    """
    values = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=values)
    copies = {name: small_copy(parameter, draw) for name, parameter in parameters.items()}
    optimizer = make_optimizer(build, copies.items())
    assert optimizer is not None
    if _is_plain(optimizer):
        return None
    updater = Updater(optimizer, reach=0)
    torch.manual_seed(seed)
    for t, scale in enumerate(_SCALES):
        updater.snapshot(t)
        gradients = {
            name: scale * torch.randn(copies[name].shape, generator=values).to(copies[name].dtype)
            for name in parameters
        }
        for number, names in enumerate(parts):
            updater.apply(t, [(copies[name], gradients[name]) for name in names], stage=number)
    return copies


def small_copy(
    parameter: Tensor, values: Callable[[list[int]], Tensor] = torch.zeros
) -> nn.Parameter:
    """A parameter of at most 4 elements in each dimension, for trials of an optimizer.

    It has the attributes of the true one, which may choose its group.
    """
    shape = [min(size, _LARGEST) for size in parameter.shape]
    copy = nn.Parameter(values(shape).to(parameter.dtype), requires_grad=parameter.requires_grad)
    vars(copy).update(vars(parameter))
    return copy


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """True if it is torch's own, with nothing added to its step."""
    own = all(type(one).__module__.startswith("torch.optim.") for one in members(optimizer))
    hooks = [*all_step_hooks(optimizer), *global_step_hooks()]
    return own and not hooks and not any("step" in vars(one) for one in members(optimizer))


def _differing(one: Copies, other: Copies) -> str | None:
    """The first parameter that differs by more than rounding."""
    for name, value in one.items():
        wide = torch.complex128 if value.is_complex() else torch.float64
        a, b = value.detach().to(wide), other[name].detach().to(wide)
        if bool((a - b).abs().max() > _RELATIVE * a.abs().max()) if a.numel() else False:
            return name
    return None
