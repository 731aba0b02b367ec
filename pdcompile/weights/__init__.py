"""Weights of models on the meta device, read from their source tensor by tensor.

A source is safetensors files, a function that fills one tensor at a time, or both.  `read` yields
the values of any subset of a model's tensors, `materialise` puts them into the model.
"""

from pdcompile.weights.source import (
    Slot,
    Source,
    check,
    materialise,
    open_source,
    read,
    set_tensor,
    slots,
)
from pdcompile.weights.tensor_files import TensorFiles

__all__ = [
    "Slot",
    "Source",
    "TensorFiles",
    "check",
    "materialise",
    "open_source",
    "read",
    "set_tensor",
    "slots",
]
