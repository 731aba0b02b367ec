"""NamedParameters: the list that an optimizer callable receives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class NamedParameters(list["torch.nn.Parameter"]):
    """Parameters of one rank's stages, in the model's order, with their names.

    A plain list for ``torch.optim.AdamW(parameters)``; ``parameters.named`` gives
    ``(name, parameter)`` pairs for parameter groups::

        def optimizer(parameters):
            decay = [p for name, p in parameters.named if p.ndim > 1]
            rest = [p for name, p in parameters.named if p.ndim <= 1]
            return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest}])
    """

    def __init__(self, named: Iterable[tuple[str, torch.nn.Parameter]]):
        self.named = tuple(named)
        super().__init__(parameter for _, parameter in self.named)
