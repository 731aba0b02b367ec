"""Share of a model that is opaque: FLOPs counted by torch on the model itself, parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from pdcompile.ir.graph import Capture
from pdcompile.passes.trace.python_state import preserved_state
from tests.zoo.case import Case


def opaque_paths(capture: Capture) -> tuple[str, ...]:
    """Paths of the modules that are one op each, outermost ones only."""
    graphs = (capture.train, capture.eval)
    paths = {op.module_path for graph in graphs for op in graph.ops if op.kind == "opaque"}
    return tuple(sorted(p for p in paths if not any(_inside(p, other) for other in paths)))


def opaque_flops(case: Case, paths: tuple[str, ...]) -> float:
    """The share of forward FLOPs that these modules have, 0 to 1."""
    if not paths:
        return 0.0
    inputs = case.inputs(0)
    counter = FlopCounterMode(display=False, custom_mapping=_MAPPING)
    alone = preserved_state(case.model, case.model.training)
    with alone, torch.random.fork_rng(devices=[]), torch.no_grad(), counter:
        case.model(**inputs) if isinstance(inputs, dict) else case.model(*inputs)
    counts = {where: sum(by_op.values()) for where, by_op in counter.get_flop_counts().items()}
    total = counts.get("Global", 0)
    root = type(case.model).__name__
    own = sum(counts.get(f"{root}.{path}" if path else root, 0) for path in paths)
    return own / total if total else float(bool(paths))


def largest_opaque_parameters(model: nn.Module, paths: tuple[str, ...]) -> float:
    """The largest share of the model's parameters that one of these modules has, 0 to 1."""
    total = sum(p.numel() for p in model.parameters())
    own = [sum(p.numel() for p in model.get_submodule(path).parameters()) for path in paths]
    return max(own, default=0) / max(total, 1)


def _inside(path: str, other: str) -> bool:
    return path != other and (other == "" or path.startswith(f"{other}."))


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


# torch counts the CUDA kernels of attention only.
_MAPPING = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}
