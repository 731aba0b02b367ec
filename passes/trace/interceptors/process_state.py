"""What forward asks of its process, and the switches of the process that it sets.

``if rank == 0`` and ``if os.environ["DEBUG"]`` look like constants to operators, and all ranks run
stages of the one capture that rank 0 makes: the lines are noted.  Ops under other switches are
refused, because a graph cannot hold them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.tape.interceptor import Interceptor, patched
from pdcompile.passes.trace.tape.observer import is_user, source_of_line

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.tape import Tape

RANK, ENVIRONMENT, TIME = "its rank", "the environment", "the time"
_ASKED: tuple[tuple[Any, tuple[str, ...], str], ...] = (
    (dist, ("get_rank", "get_world_size"), RANK),
    (time, ("time", "time_ns", "monotonic", "perf_counter", "perf_counter_ns"), TIME),
    (type(os.environ), ("__getitem__",), ENVIRONMENT),
)
_BETWEEN = ("os.py", "_collections_abc.py", "<frozen os>", "<frozen _collections_abc>")


class ProcessState(Interceptor):
    """Notes the lines of the user's own files that ask, and compares the switches at every op with
    their state when the recording began."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        self._dtype = torch.get_default_dtype()
        self._kernels = attention_kernels()

    def around(self) -> AbstractContextManager[None]:
        noted = self.tape.fakes.findings.of_process
        return patched(
            *(
                (owner, name, _noting(getattr(owner, name), what, noted))
                for owner, names, what in _ASKED
                for name in names
            )
        )

    def recorded(self, source: str) -> None:
        """Raises TraceError where an op at `source` runs under other switches.

        ``torch.ones(8)`` below set_default_dtype(torch.float64) would be float32 in a stage.
        """
        if torch.get_default_dtype() is not self._dtype:
            raise refusals.error(refusals.DEFAULT_DTYPE, str(torch.get_default_dtype()), source)
        if attention_kernels() != self._kernels:
            raise refusals.error(refusals.ATTENTION, "torch.nn.attention.sdpa_kernel", source)


def attention_kernels() -> tuple[bool, ...]:
    """The switches of the kernels that scaled_dot_product_attention may choose from."""
    cuda: Any = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()


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
