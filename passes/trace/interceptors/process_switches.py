"""Refuses ops under switches of the process that forward set: a graph cannot hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.tape.interceptor import Interceptor

if TYPE_CHECKING:
    from pdcompile.passes.trace.tape.tape import Tape


class ProcessSwitches(Interceptor):
    """Compares the switches at every op with their state when the recording began."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        self._dtype = torch.get_default_dtype()
        self._kernels = attention_kernels()

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
    cuda = torch.backends.cuda
    enabled: tuple[Any, ...] = (
        cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled,
    )  # fmt: skip
    return tuple(each() for each in enabled)
