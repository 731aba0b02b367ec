"""Is there memory to compare the whole model at once?"""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from pdcompile.ir.graph import OpGraph
from pdcompile.passes.costs import estimate

SHARE = 0.5  # of the free memory, for a comparison


def room() -> int:
    """Bytes that a comparison may take: half of what is free."""
    return int(SHARE * _free())


def fits(model: nn.Module, graph: OpGraph) -> bool:
    """Whether gradients of eager and stages, updated weights, and both sides' activations fit."""
    tensors = (*model.parameters(), *model.buffers())
    weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    costs = estimate(graph, microbatch_size=graph.batch_size)
    return 3 * weights + 2 * sum(cost.saved_bytes for cost in costs) <= room()


def _free() -> int:
    """Free memory of this machine, or of the container where that is less."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdigit():
        free = min(free, int(text) - int(used.read_text()))
    return max(free, 0)
