"""Uses of tied parameters told apart by the stages that a plan gives them to.

Each stage accumulates the gradients of its own uses over a minibatch; then, from the last holder
to the first, each adds its own to the sum (`TiedParameter`).  In a model that runs as a whole, a
use is an op that reads the parameter: a mode of torch puts a leaf of the op's stage in its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pdcompile.eager.gradients import added, gradient_hooks
from pdcompile.eager.randomness import CallKey, DrawScope
from pdcompile.errors import ConfigError
from pdcompile.plan import TiedParameter
from pdcompile.releases.torch_internals import pytree


class TiedUses(TorchFunctionMode):
    """Has each stage's ops read a leaf of their own in place of a tied parameter."""

    def __init__(self, model: nn.Module, tied: Sequence[TiedParameter]) -> None:
        """Raises ConfigError for a plan without the uses of its tied parameters."""
        super().__init__()
        self._model, self._tied = model, tied
        self._leaves: dict[int, dict[int, nn.Parameter]] = {}  # by id of the parameter, and stage
        self._stages: dict[int, dict[CallKey, tuple[int, ...]]] = {}
        for one in tied:
            if not one.uses:
                raise ConfigError(
                    f"the plan does not say which stage uses the tied parameter {one.fqn!r} where",
                    where="plan",
                    remedy="make the plan again: it is of an earlier version",
                )

    @contextmanager
    def of_minibatch(self) -> Iterator[None]:
        """Context of forwards and backwards, after which the sums are in ``.grad``."""
        parameters = dict(self._model.named_parameters())
        held = [(parameters[one.fqn], one) for one in self._tied]
        for parameter, one in held:
            self._stages[id(parameter)] = {(use.module, use.call): use.stages for use in one.uses}
            self._leaves[id(parameter)] = {
                stage: nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
                for stage in one.stages
            }
        try:
            yield
            for parameter, one in held:
                add_sum(parameter, [self._leaves[id(parameter)][s].grad for s in one.stages])
        finally:
            self._leaves.clear()

    def of_microbatch(self, scope: DrawScope) -> AbstractContextManager[Any]:
        """Context of model and ``loss_fn``, whose modules run in a scope; outside of a minibatch it
        changes nothing."""
        self._scope, self._used = scope, Counter[tuple[int, CallKey]]()
        return self if self._leaves else nullcontext()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        seen: set[int] = set()

        def replaced(tensor: Tensor) -> Tensor:
            if id(tensor) not in self._leaves:
                return tensor
            seen.add(id(tensor))
            return self._leaf(id(tensor))

        args, kwargs = pytree.tree_map_only(Tensor, replaced, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if any(isinstance(one, Tensor) for one in pytree.tree_leaves(result)):
            # else it asked for a shape, say
            self._used.update((one, self._call(one)) for one in seen)
        return result

    def _call(self, parameter: int) -> CallKey:
        """The innermost running call of a module whose uses the plan names."""
        stages = self._stages[parameter]
        running = reversed(self._scope.running)
        return next((one for one in running if one in stages), next(iter(stages)))

    def _leaf(self, parameter: int) -> nn.Parameter:
        call = self._call(parameter)
        stages = self._stages[parameter][call]
        place = min(self._used[parameter, call], len(stages) - 1)
        return self._leaves[parameter][stages[place]]


def add_sum(parameter: nn.Parameter, gradients: list[Tensor | None]) -> None:
    """Adds the sum of each stage's gradients, from the last to the first, to ``.grad``; the hooks
    of the user's run on the sum."""
    total: Tensor | None = None
    for one in reversed(gradients):
        total = one if total is None else total if one is None else added(one, total)
    if total is None:
        return
    hooks = gradient_hooks(parameter)
    with torch.no_grad():
        for hook in hooks:
            if not hook.after:
                changed = hook.function(total)
                total = total if changed is None else changed
        parameter.grad = added(parameter.grad, total)
        for hook in hooks:
            if hook.after:
                hook.function(parameter)
