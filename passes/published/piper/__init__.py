"""Piper's space: stages with data- and tensor-parallel degrees and a variant of every node.

`solve` is the way in.  `chain` is the engine below it, which knows nothing of this cost model:
any space whose stages are choices (devices, replicas, what may be in flight) can fill its menu.
"""

from pdcompile.passes.published.piper.solve import solve

__all__ = ["solve"]
