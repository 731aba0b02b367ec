"""Interceptor: sees what the running model does before it is recorded, and may answer itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pdcompile.passes.trace.opaque.observed_calls import CallKey

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.tape import Tape

Proceed = Callable[..., Any]  # what the next interceptor does, or the tape, with the same arguments


class Interceptor:
    """One mechanism of the tape.  Those of a tape are asked in their order."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def call(self, func: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        """What a torch function returns to the model."""
        return proceed(func, args, kwargs)

    def module(
        self, call: CallKey, plain: Callable[..., Any], args: Any, kwargs: Any, proceed: Proceed
    ) -> Any:
        """What a module returns to the model; `plain` calls it."""
        return proceed(call, plain, args, kwargs)

    def apply(self, cls: type, plain: Callable[..., Any], args: Any, proceed: Proceed) -> Any:
        """What ``cls.apply(*args)`` of an autograd.Function returns to the model."""
        return proceed(cls, plain, args)

    def around(self) -> AbstractContextManager[Any]:
        """What is open while the model runs."""
        return nullcontext()

    def asked(self, tensor: Any, name: str) -> None:
        """A property is read that is no tensor."""

    def allows(self, mask: Tensor) -> bool:
        """Whether a choice by the values of this mask may be recorded here."""
        return True

    def recorded(self, source: str) -> None:
        """An op at `source` is about to be recorded, or a module of that line has returned."""

    def finished(self) -> None:
        """The model has made its last call."""
