"""Interceptor: sees calls of the running model before they are recorded, and may answer them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from torch import Tensor

from pdcompile.passes.trace.opaque.observed_calls import CallKey

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.tape import Tape

Proceed = Callable[..., Any]  # the next interceptor, or the tape, with the same arguments


@contextmanager
def patched(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes (owner, name, value) have these values inside."""
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(patch.object(*place))
        yield


class Interceptor:
    """One mechanism of the tape; a tape asks its interceptors in order."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def call(self, func: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        """The result of a torch function for the model."""
        return proceed(func, args, kwargs)

    def module(
        self, call: CallKey, plain: Callable[..., Any], args: Any, kwargs: Any, proceed: Proceed
    ) -> Any:
        """The result of a module for the model; `plain` calls it."""
        return proceed(call, plain, args, kwargs)

    def apply(self, cls: type, plain: Callable[..., Any], args: Any, proceed: Proceed) -> Any:
        """The result of ``cls.apply(*args)`` of an autograd.Function for the model."""
        return proceed(cls, plain, args)

    def around(self) -> AbstractContextManager[Any]:
        """A context that is open while the model runs."""
        return nullcontext()

    def asked(self, tensor: Any, name: str) -> None:
        """Called before a property is read that is not a tensor."""

    def allows(self, mask: Tensor) -> bool:
        """Whether a choice by the values of this mask may be recorded here."""
        return True

    def recorded(self, source: str) -> None:
        """Called before an op at `source` is recorded, and after a module of that line returned."""

    def finished(self) -> None:
        """Called after the model's last call."""
