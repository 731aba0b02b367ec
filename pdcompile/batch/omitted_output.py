"""OmittedOutput: stands in a result for an output that training steps leave out.

A plan that drops all of them leaves nothing there: reading them raises `dropped`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from pdcompile.errors import ConfigError
from pdcompile.releases.torch_internals import pytree

#: beginning of a plan's note that drops all outputs of training, as nobody named any
DROPPED = "training steps keep no outputs"


class OmittedOutputError(ConfigError, TypeError):
    """An output is used that training steps leave out."""


def dropped(notes: Iterable[str]) -> OmittedOutputError:
    """The error for reading outputs that training steps drop, by the notes of the plan."""
    note = next((one for one in notes if one.startswith(DROPPED)), DROPPED)
    return OmittedOutputError(
        note.partition("; ")[0],
        where="result.outputs",
        remedy='compile(..., outputs="last") keeps them, "all" on all ranks; pipe.predict(...) and '
        "pipe.eval_step(...) give those of evaluation",
    )


class OmittedOutput:
    """The mark of an output that training steps leave out; whoever uses it is told the remedy.

    `place` says where it is in the model's output, such as ``past_key_values.layers[0].keys``.
    """

    __slots__ = ("place",)

    def __init__(self, place: str) -> None:
        self.place = place

    def __repr__(self) -> str:
        return f"OmittedOutput({self.place!r})"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise OmittedOutputError(
            "training steps leave out this output: a stage before the last one makes it, and it "
            "would be sent for the caller alone",
            where=f"outputs: {self.place}",
            remedy='compile(..., outputs="everything") gives it too, "all" on all ranks; '
            "pipe.predict(...) and pipe.eval_step(...) give it anyway",
        )

    if not TYPE_CHECKING:  # else a mark would seem to have all of these
        __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __call__ = _refuse
        __float__ = __int__ = __index__ = __array__ = _refuse
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
        __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __neg__ = _refuse
        __lt__ = __le__ = __gt__ = __ge__ = _refuse

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("__") or name in self.__slots__:  # asked by copy, pickle, torch
                raise AttributeError(name)
            try:
                self._refuse()
            except OmittedOutputError as error:
                raise AttributeError(f"no {name!r} here: {error}", name=name, obj=self) from None

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        given = pytree.tree_leaves((args, kwargs or {}))
        next(one for one in given if isinstance(one, cls))._refuse()
