"""Questions that forward asks of its process, and the switches of the process that it sets.

``if rank == 0`` and ``if os.environ["DEBUG"]`` look like constants to operators, and all ranks run
stages of the one capture that rank 0 makes: the lines are noted.  Ops under other switches are
refused, because a graph cannot hold them.  Libraries that ask whether they are traced are answered
so that they go where eager goes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.constants import read
from pdcompile.passes.trace.tape.interceptor import Interceptor, patched
from pdcompile.passes.trace.tape.observer import is_user, source_of_line

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.tape import Tape

_ASKED: tuple[tuple[Any, tuple[str, ...], str], ...] = (
    (dist, ("get_rank", "get_world_size"), "its rank"),
    (time, ("time", "time_ns", "monotonic", "perf_counter", "perf_counter_ns"), "the time"),
    (type(os.environ), ("__getitem__",), "the environment"),
)
_NOW = (
    "the capture has the answer that it got now, on this process, and so have the stages on all "
    "ranks"
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
        noted = self.tape.fakes.findings.holds_for
        asked = [(owner, name, what) for owner, names, what in _ASKED for name in names]
        return patched(*((o, n, _noting(getattr(o, n), what, noted)) for o, n, what in asked))

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
            line = source_of_line(file, frame.f_lineno)
            noted[f"forward or loss_fn asks for {what} ({line})"] = _NOW
        return plain(*args, **kwargs)

    return asked


GENERAL_PATH = (
    "where the model would look into its inputs for a short cut (nothing is masked), the stages "
    "always take the general path: microbatches for which eager takes the short cut may be "
    "rounded differently"
)

ASKED = "transformers.utils.import_utils"
QUESTION = "is_fake_tensor"


class TracingFlags(Interceptor):
    """Answer to libraries that ask whether they are traced, so that they go where eager goes.

    transformers builds a full attention mask when it is traced, and leaves it out where eager finds
    nothing masked; attention with fewer key than query heads then runs another kernel, whose
    gradients are rounded differently.  A tensor that depends on constants alone can be read while
    recording, so the answer for it is no.  For one that depends on the inputs it is yes: that
    general path holds for all inputs, up to rounding where eager takes the short cut.
    """

    @contextmanager
    def around(self) -> Iterator[None]:
        """Answers the question while this is open; notes where the answer depends on inputs."""
        tape, module = self.tape, sys.modules.get(ASKED)
        plain: Any = getattr(module, QUESTION, None)

        def is_fake_tensor(x: Any) -> bool:
            if not plain(x) or read(torch.clone, (x,), {}, tape.ops, tape.fakes):  # a constant
                return False
            tape.fakes.findings.rounded.add(GENERAL_PATH)
            return True

        places = () if plain is None else ((module, QUESTION, is_fake_tensor),)
        # The tape is no part of the answer: modules of torch that are imported meanwhile keep it.
        training, enabled = tape.training, torch.is_grad_enabled

        def is_grad_enabled() -> bool:
            """Answer the model as its mode would: recording has autograd on in both modes.

            Torch gets the true answer: what it does then is captured op by op.
            """
            asker = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
            return enabled() and (training or asker in ("torch", "pdcompile"))

        with patched((torch, "is_grad_enabled", is_grad_enabled), *places):
            yield
