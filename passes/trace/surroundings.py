"""Switches of the whole process that a forward may turn, and that no op of a graph could show."""

from __future__ import annotations

import torch

from pdcompile.passes.trace import refuse


class Surroundings:
    """How the switches stood when the recording began."""

    def __init__(self) -> None:
        self._dtype = torch.get_default_dtype()

    def check(self, source: str) -> None:
        """Raise TraceError where an op at `source` runs under others.

        ``torch.ones(8)`` below set_default_dtype(torch.float64) would be float32 in a stage.
        """
        if torch.get_default_dtype() is not self._dtype:
            raise refuse.error(refuse.DEFAULT_DTYPE, str(torch.get_default_dtype()), source)
