"""OwnDraws: a generator for one thread, where other threads may draw from torch's default one.

Ops on CPUs take a generator as an argument; torch's functions that end in them (dropout, attention,
an LSTM) do not.  So the argument is added underneath, by a dispatch mode that is on while something
draws.  The same seed gives the same numbers as the default generator's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pdcompile.releases.torch_internals import OpOverload, TorchDispatchMode

_alone = threading.Lock()  # over the default generator, for an op that takes no other
#: names of our own threads begin so: none of them draws
THREADS = "pdcompile"


def other_threads() -> list[str]:
    """Names of the threads that may draw while this one does (2 µs)."""
    here = threading.current_thread()
    others = [thread.name for thread in threading.enumerate() if thread is not here]
    return [name for name in others if not name.startswith(THREADS)]


class OwnDraws(TorchDispatchMode):
    """Makes ops on CPUs draw from `generator`, between `open` and `close` or in a ``with``."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = torch.Generator()
        self._is_open = False

    def open(self) -> None:
        """Have all that runs from now on draw from here."""
        if not self._is_open:
            self.__enter__()  # type: ignore[no-untyped-call]
            self._is_open = True

    def close(self) -> None:
        """Have all that runs from now on draw as it would without this."""
        if self._is_open:
            self._is_open = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = any(isinstance(one, torch.Generator) for one in (*args, *kwargs.values()))
        if given or not _draws_on_host(func, args, kwargs):
            return func(*args, **kwargs)
        taking = with_generator(func)
        if taking is not None:
            return taking(*args, **{**kwargs, "generator": self.generator})
        default = torch.default_generator
        with _alone:
            before = default.get_state()
            default.set_state(self.generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self.generator.set_state(default.get_state())
                default.set_state(before)

    @contextmanager
    def stands_for_default(self) -> Iterator[None]:
        """``torch.get_rng_state`` and ``set_rng_state`` mean this generator in this thread: a
        region under `torch.utils.checkpoint` runs again from the state that they gave."""
        here, get, put = threading.get_ident(), torch.get_rng_state, torch.set_rng_state

        def get_state() -> Tensor:
            return self.generator.get_state() if threading.get_ident() == here else get()

        def set_state(state: Tensor) -> None:
            if threading.get_ident() == here:
                self.generator.set_state(state)
            else:
                put(state)

        with patch.multiple(torch, get_rng_state=get_state, set_rng_state=set_state):
            yield


def _draws_on_host(func: Any, args: Any, kwargs: Any) -> bool:
    if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    device = next((a.device for a in args if isinstance(a, Tensor)), kwargs.get("device"))
    return device is None or torch.device(device).type == "cpu"


@functools.cache
def with_generator(func: OpOverload) -> OpOverload | None:
    """The overload of an op that takes a generator beside the same arguments; None without one."""

    def rest(op: OpOverload) -> list[tuple[str, str]]:
        given = op._schema.arguments
        return [(a.name, str(a.type)) for a in given if a.name != "generator"]

    packet = func.overloadpacket
    for one in (func, *(getattr(packet, name) for name in packet.overloads())):
        takes = any(a.name == "generator" for a in one._schema.arguments)
        if takes and rest(one) == rest(func):
            return one  # type: ignore[no-any-return]
    return None
