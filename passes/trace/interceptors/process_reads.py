"""Notes where forward asks for its rank, the environment or the time: a capture has one answer.

``if rank == 0`` and ``if os.environ["DEBUG"]`` look like constants to operators, and all ranks run
stages of the one capture that rank 0 makes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from pdcompile.passes.trace.tape.interceptor import Interceptor
from pdcompile.passes.trace.tape.observer import is_user, source_of_line

RANK, ENVIRONMENT, TIME = "its rank", "the environment", "the time"
_ASKED: tuple[tuple[Any, tuple[str, ...], str], ...] = (
    (dist, ("get_rank", "get_world_size"), RANK),
    (time, ("time", "time_ns", "monotonic", "perf_counter", "perf_counter_ns"), TIME),
    (type(os.environ), ("__getitem__",), ENVIRONMENT),
)
_BETWEEN = ("os.py", "_collections_abc.py", "<frozen os>", "<frozen _collections_abc>")


class ProcessReads(Interceptor):
    """Notes the lines of the user's own files that ask."""

    def around(self) -> AbstractContextManager[None]:
        return asked_of_process(self.tape.fakes.findings.of_process)


@contextmanager
def asked_of_process(noted: dict[str, str]) -> Iterator[None]:
    """Notes, by line, what of the process is asked for inside."""
    with ExitStack() as stack:
        for owner, names, what in _ASKED:
            for name in names:
                plain = vars(owner)[name]
                stack.callback(setattr, owner, name, plain)
                setattr(owner, name, _noting(plain, what, noted))
        yield


def _noting(plain: Callable[..., Any], what: str, noted: dict[str, str]) -> Callable[..., Any]:
    def asked(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.endswith(_BETWEEN):
            frame = frame.f_back
        file = frame.f_code.co_filename
        if is_user(file) and "-packages" not in file:
            noted[source_of_line(file, frame.f_lineno)] = what
        return plain(*args, **kwargs)

    return asked
