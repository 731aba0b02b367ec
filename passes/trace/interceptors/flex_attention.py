"""FlexAttention: its kernel is no operator, and has no backward on CPUs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from pdcompile.hardware import devices
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.tape.interceptor import Interceptor
from pdcompile.passes.trace.tape.observer import locate
from pdcompile.releases.torch_internals import flex_attention_checked


class FlexAttention(Interceptor):
    """Refuses calls of flex_attention by name: without gradients its module may be opaque."""

    def around(self) -> AbstractContextManager[Any]:
        return flex_attention_checked(self._refused)

    def _refused(self, *inputs: torch.Tensor) -> NoReturn:
        refuse_backward(*inputs)
        raise refusals.error(refusals.FLEX_KERNEL, "flex_attention", self.tape.where())


def refuse_backward(*inputs: torch.Tensor) -> None:
    """Raises NeverOpaque where a gradient is needed that no kernel computes."""
    needed = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
    if needed and devices.is_host(inputs[0].device):
        refusal, where = refusals.FLEX_BACKWARD, locate()[0]
        raise refusals.error(refusal, "flex_attention", where, refusals.NeverOpaque)
