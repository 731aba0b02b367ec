"""Non-finite values: the first op that makes one, under ``detect_nonfinite=True``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pdcompile.errors import NonFiniteError
from pdcompile.releases.torch_internals import TorchDispatchMode, pytree
from pdcompile.schedule import Action, Instruction, Phase

_UNINITIALISED = ("empty", "new_empty", "resize", "set_")


class NonFiniteCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at what every op gets and makes, several times as slow as the step itself.

    Refused is an op that makes NaN of values without it, and infinity of finite ones where nobody
    means it: in a backward, in an update, and as a scalar, which a loss is.  Elsewhere in a forward
    it may be meant, as in masks before a softmax.

    Args:
        current: the instruction that runs now.
    """

    def __init__(self, current: Callable[[], Instruction | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._current = current
        self._infinity = ""  # the last op of a forward that made infinity of finite values

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        before = _floats((args, kwargs))
        no_nan = not any(_has(torch.isnan, one) for one in before)
        finite = no_nan and not any(_has(torch.isinf, one) for one in before)
        made = func(*args, **kwargs)
        name = str(func.name()).rpartition("::")[2]
        for one in () if name.startswith(_UNINITIALISED) else _floats(made):
            nan = _has(torch.isnan, one)
            if not nan and not _has(torch.isinf, one):
                continue
            new = no_nan if nan else finite
            text = f"{name} made {'NaN' if nan else 'infinity'}, in a result of shape "
            text += str(tuple(one.shape))
            if (new and nan) or (new and self._exact) or not one.dim():
                raise self._error(text, new=new)
            self._infinity = text if new else self._infinity
        return made

    @property
    def _exact(self) -> bool:
        """Whether nobody means infinity in what runs now."""
        ins = self._current()
        if ins is None or ins.action.phase is not Phase.COMPUTE:
            return False
        return ins.action is not Action.FORWARD

    def _error(self, text: str, *, new: bool) -> NonFiniteError:
        if new:
            why = " of values without it"
        elif self._infinity:
            why = f"; before, of finite values, {self._infinity}"
        else:
            why = ", which its inputs have already: the minibatch or the weights do"
        return NonFiniteError(
            text + why,
            remedy="look at what goes into this op: a division by 0, a log or square root at 0, an "
            "overflow (of float16, or where the learning rate is too high), the minibatch",
        )


def _has(strange: Callable[[Tensor], Tensor], values: Tensor) -> bool:
    return bool(strange(values).any())


def _floats(tree: Any) -> list[Tensor]:
    return [
        leaf
        for leaf in pytree.tree_leaves(tree)
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    ]
