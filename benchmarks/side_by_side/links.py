"""The links that ranks have, measured or given, as a cluster that plans can be made for."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

MESSAGE_BYTES = 4 << 20
REPEATS = 15


def cluster_text(ranks: int, bytes_per_second: float, latency: float) -> str:
    """Machines that one network joins, as TOML."""
    level = f'bandwidth = "{bytes_per_second:.0f} B/s"\nlatency = "{latency * 1e6:.0f} us"'
    devices = f"[[devices]]\ncount = {ranks}\n\n"
    return f'{devices}[[levels]]\nname = "network"\nsize = {ranks}\n{level}\n'


def measured_links() -> tuple[float, float]:
    """Bytes per second and seconds of latency between ranks of the present group, while all
    send to the next and receive from the one before, as in a ring."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def once(size: int) -> float:
        out, into = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        dist.barrier()
        began = time.perf_counter()
        works = [dist.isend(out, (rank + 1) % ranks), dist.irecv(into, (rank - 1) % ranks)]
        for work in works:
            assert work is not None
            work.wait()
        return time.perf_counter() - began

    def typical(size: int) -> float:
        found = torch.tensor(statistics.median(once(size) for _ in range(REPEATS)))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    latency = typical(1)
    return MESSAGE_BYTES / max(typical(MESSAGE_BYTES) - latency, latency), latency
