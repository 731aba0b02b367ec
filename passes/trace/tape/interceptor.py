"""Interceptor: sees calls of the running model before they are recorded, and may answer them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

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
    """One mechanism of the tape; a tape asks its interceptors in order.

    Hooks that one may have, of which the first three answer a call of the model, by ``proceed(…)``
    of the same arguments or otherwise:

    - ``call(func, args, kwargs, proceed)``: a torch function;
    - ``module(call, plain, args, kwargs, proceed)``: a module, which `plain` calls;
    - ``apply(cls, plain, args, proceed)``: ``cls.apply(*args)`` of an autograd.Function;
    - ``recorded(source)``: before an op at `source` is recorded, and after a module of that line
      returned.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def around(self) -> AbstractContextManager[Any]:
        """A context that is open while the model runs."""
        return nullcontext()
