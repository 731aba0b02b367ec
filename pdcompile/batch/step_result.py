"""Results of a training call: the outputs, and a loss that waits only when it is read.

Returning a float would drain the pipeline at every step.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, SupportsFloat

import torch
from torch import Tensor

from pdcompile.errors import ConfigError
from pdcompile.warn import warn


def _of_number(operation: Callable[..., Any]) -> Callable[..., Any]:
    """A method that waits for the loss and applies the operation to its number."""

    def method(self: LazyLoss, *others: Any) -> Any:
        return operation(self.item(), *others)

    return method


class LazyLoss:
    """The loss of one minibatch, the same on every rank, delivered off the critical path.

    Arithmetic and comparisons wait and use ``item()``.

    Args:
        resolve: waits for the loss and returns it, a 0-dim tensor; called at most once when it
            succeeds.  Its errors are raised to the caller.
        ready: returns whether `resolve` would return at once.
    """

    __slots__ = ("_ready", "_resolve", "_value")

    def __init__(
        self, resolve: Callable[[], Tensor], ready: Callable[[], bool] = lambda: True
    ) -> None:
        self._resolve, self._ready = resolve, ready
        self._value: Tensor | None = None

    def done(self) -> bool:
        """True if `item` would return at once."""
        return self._value is not None or self._ready()

    def wait(self) -> Tensor:
        """Waits, and returns the loss as a detached 0-dim tensor."""
        if self._value is None:
            self._value = self._resolve().detach()
            self._resolve, self._ready = self._value.detach, bool  # frees what they refer to
        return self._value

    def item(self) -> float:
        """Waits, and returns the loss as a number; warns once of one that is not finite."""
        number = float(self.wait().item())
        if not math.isfinite(number):
            warn(
                f"the loss is {number}; compile(..., detect_nonfinite=True) names the op that "
                "first makes such a value",
                RuntimeWarning,
            )
        return number

    def __float__(self) -> float:
        return self.item()

    __add__ = _of_number(operator.add)
    __radd__ = __add__
    __sub__ = _of_number(operator.sub)
    __rsub__ = _of_number(lambda loss, other: other - loss)
    __mul__ = _of_number(operator.mul)
    __rmul__ = __mul__
    __truediv__ = _of_number(operator.truediv)
    __pow__ = _of_number(operator.pow)
    __neg__ = _of_number(operator.neg)
    __round__ = _of_number(round)
    __lt__ = _of_number(lambda loss, other: loss < float(other))
    __le__ = _of_number(lambda loss, other: loss <= float(other))
    __gt__ = _of_number(lambda loss, other: loss > float(other))
    __ge__ = _of_number(lambda loss, other: loss >= float(other))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SupportsFloat) and self.item() == float(other)

    __hash__ = object.__hash__  # by identity: hashing must not wait

    if not TYPE_CHECKING:  # else every attribute would seem to exist

        def __getattr__(self, name: str) -> NoReturn:
            hint = (
                "step has run backward already, and the update; forward_backward does without "
                "the update"
                if name == "backward"
                else "float(loss) is its number, loss.wait() a detached tensor"
            )
            raise AttributeError(f"the loss has no {name!r}: {hint}", name=name, obj=self)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyLoss, (self.wait().detach,)  # a copy or a pickle has no pipeline behind it

    def __repr__(self) -> str:
        # Printing for debugging must not drain a pipeline.
        return f"LazyLoss({self.item()!r})" if self.done() else "LazyLoss(pending)"


class StepResult:
    """The result of `step`, `forward_backward` and `eval_step`.

    Args:
        loss: the minibatch's loss, or None when there is none (evaluation without a loss).
        outputs: called once, when `outputs` is first read: waits for the model's output pytree.
    """

    __slots__ = ("_outputs", "_resolve", "loss")

    def __init__(self, loss: LazyLoss | None, outputs: Callable[[], Any]) -> None:
        self.loss = loss
        self._resolve: Callable[[], Any] | None = outputs
        self._outputs: Any = None

    @property
    def outputs(self) -> Any:
        """The model's own output pytree, detached, microbatches concatenated.  Waits."""
        if self._resolve is not None:
            self._outputs = self._resolve()
            self._resolve = None
        return self._outputs

    if not TYPE_CHECKING:  # else every attribute would seem to exist

        def __getattr__(self, name: str) -> NoReturn:
            hint = "it has loss and outputs, what the model returned: result.outputs"
            raise AttributeError(f"a result has no {name!r}: {hint}", name=name, obj=self)

    def __reduce__(self) -> tuple[Any, ...]:
        return StepResult, (self.loss, [self.outputs].pop)

    def __repr__(self) -> str:
        return f"StepResult(loss={self.loss!r})"


def own_loss(output: Any) -> Tensor | None:
    """The loss that a model returns itself: a scalar, ``output["loss"]`` or ``output.loss``.

    Returns None for an output without one.
    """
    if isinstance(output, Tensor):
        return output if output.ndim == 0 else None
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return found if isinstance(found, Tensor) else None


def check_loss(loss: Any, where: str) -> Tensor:
    """The loss, if it can be differentiated: a 0-dim floating-point tensor.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(loss, Tensor):
        found = f"is of type {type(loss).__name__}, expected a 0-dim tensor"
        remedy = "return the loss alone, as a tensor"
    elif loss.ndim != 0:
        found = f"has shape {tuple(loss.shape)}, expected a 0-dim tensor"
        remedy = "reduce it: .mean() or .sum() (and set loss_reduction to match)"
    elif not loss.is_floating_point():
        found = f"is of {str(loss.dtype).removeprefix('torch.')}, expected floating point"
        remedy = "compute it from the output: .float() of whole numbers has no gradient"
    else:
        return loss
    raise ConfigError(f"the loss {found}", where=where, remedy=remedy)


def scaled_loss(loss: Tensor, weight: float) -> Tensor:
    """A microbatch's loss times its weight, as it goes into backward.

    A microbatch without items (all its tokens are ignored) weighs 0.  Its mean loss is 0/0, whose
    gradients are nan even times 0, so it counts as 0 and has no gradients.
    """
    if weight == 0:
        return torch.zeros_like(loss)
    return loss if weight == 1 else loss * weight


def total_loss(losses: list[Tensor]) -> Tensor:
    """The reported loss: weighted microbatch losses, summed from left to right."""
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total.detach() if len(losses) > 1 else total.detach().clone()
