"""Synthetic operands: tensors of a recorded shape, dtype and layout that an op accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pdcompile.ir.graph import Ref
from pdcompile.passes.costs import Call, Operand

_CLASS_INDICES = frozenset(("crossentropy", "nllloss"))


@dataclass
class Synthesis:
    """Makes the operands of one op.  Draws from its own generator, never from the default one."""

    call: Call
    device: torch.device
    generator: torch.Generator

    def value(self, name: str) -> Any:
        """What the graph's value would be: a tensor, or the items of a container in order."""
        value = self.call.index.graph.values[name]
        if not value.is_tensor:
            return tuple(self.tensor(leaf) for leaf in self.call.index.leaves(name))
        return self.tensor(self.call.index.value(value))

    def tensor(self, operand: Operand) -> torch.Tensor:
        """Floating-point values lie in (0.1, 1), where every function is defined and normal."""
        dtype = getattr(torch, operand.dtype)
        order = operand.stride_order or tuple(range(len(operand.shape)))
        shape = [operand.shape[dim] for dim in order]
        if dtype.is_floating_point or dtype.is_complex:
            real = torch.empty(shape, dtype=torch.float32, device=self.device)
            made = real.uniform_(0.1, 1.0, generator=self.generator).to(dtype)
        elif dtype == torch.bool:
            made = torch.ones(shape, dtype=dtype, device=self.device)
        elif self._is_offsets(operand):
            rows, count = int(self.call.first.shape[0]), int(operand.shape[0])
            ends = [rows * (i + 1) // count for i in range(count)]
            made = torch.tensor(ends, dtype=dtype, device=self.device)
        else:
            high = max(1, min(self._bound(operand), torch.iinfo(dtype).max))
            made = torch.randint(high, shape, generator=self.generator, device=self.device).to(
                dtype
            )
        # Back to the order of dims that the graph names them in, in the recorded layout.
        made = made.permute([order.index(dim) for dim in range(len(order))])
        if operand.requires_grad and (dtype.is_floating_point or dtype.is_complex):
            made.requires_grad_()
        return made

    def _is_offsets(self, operand: Operand) -> bool:
        """Whether it says where each group of rows ends: zeros would leave nothing to do."""
        offsets = self.call.tensor(2, "offs")
        return self.call.name == "groupedmm" and offsets is not None and operand == offsets

    def _bound(self, operand: Operand) -> int:
        """One more than the largest integer that is valid here; 1 where nothing is known."""
        call = self.call
        if call.name in ("embedding", "embeddingbag"):
            weight = call.tensor(1, "weight")
            return int(weight.shape[0]) if weight is not None else 1
        if (
            call.name == "getitem"
            and len(call.op.args) > 1
            and call.op.args[1] == Ref(operand.name)
        ):
            return int(call.first.shape[0])  # picks rows
        if call.name in _CLASS_INDICES and operand.name != call.first.name:
            scores = call.first.shape
            return int(scores[1] if len(scores) > 1 else scores[0])
        return 1
