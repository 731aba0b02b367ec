"""FlexAttention: in forward alone, its operators as it computes them without a fused kernel.

`flex_attention` compiles itself, which fake tensors do not survive; called without torch.compile it
runs its dense definition all the same.  Masks of `create_block_mask` are vmapped functions, which
`transforms` records.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from pdcompile.hardware import devices
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.tape.interceptor import Interceptor, patched
from pdcompile.releases.torch_internals import flex_attention_densely, flex_attention_places


class FlexAttention(Interceptor):
    """Records calls of flex_attention in which nothing needs a gradient."""

    def around(self) -> AbstractContextManager[None]:
        """Patches what flex_attention hands its arguments to."""
        instead = self._computed, self._validated, True
        places = flex_attention_places()
        return patched(*((*place, new) for place, new in zip(places, instead, strict=False)))

    def _validated(self, *inputs: torch.Tensor) -> None:
        """Raises TraceError: a gradient is needed, and backward is a kernel that is no operator."""
        if not (torch.is_grad_enabled() and any(each.requires_grad for each in inputs)):
            return
        told = refusals.error(refusals.FLEX_BACKWARD, "flex_attention", self.tape.where())
        # A module that is opaque runs the kernel itself, which there is none of on CPUs.
        kind = refusals.NeverOpaque if devices.is_host(self.tape.fakes.device) else type(told)
        raise refusals.as_kind(kind, told)

    def _computed(
        self, query: Any, key: Any, value: Any, score_mod: Any, mask: Any, scale: Any, options: Any
    ) -> Any:
        device = query.device.type
        inputs = query, key, value
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            inputs = query.to(dtype), key.to(dtype), value.to(dtype)
        with torch.autocast(device, enabled=False):
            return flex_attention_densely(*inputs, score_mod, mask, scale, options)
