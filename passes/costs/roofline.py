"""From operations and bytes to seconds: a roofline with a price for every call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from time import perf_counter


@dataclass(frozen=True, slots=True)
class Machine:
    """The reference device (speed 1): peak, memory bandwidth, and seconds a call costs.

    `flops_per_second` is that of float32; `by_dtype` lists dtypes that are faster or slower.
    """

    flops_per_second: float
    bytes_per_second: float
    call_seconds: float
    by_dtype: tuple[tuple[str, float], ...] = ()

    def of(self, dtype: str) -> Machine:
        """The machine for ops that compute in a dtype."""
        rate = dict(self.by_dtype).get(dtype)
        return self if rate is None else replace(self, flops_per_second=rate, by_dtype=())

    def seconds(self, flops: float, moved_bytes: float, calls: int = 1) -> float:
        """Time of `calls` kernels that do `flops` and move `moved_bytes` between them.

        The terms are added, not maximised: on a CPU arithmetic and cache misses hide each other
        only in part, and a sum ranks ops the same way.
        """
        arithmetic = flops / self.flops_per_second
        return arithmetic + moved_bytes / self.bytes_per_second + calls * self.call_seconds


# One core of a server CPU: 8 fused multiply-adds of fp32 a cycle at 3 GHz, one memory channel's
# share, and what PyTorch needs to dispatch a call with autograd on.
REFERENCE = Machine(flops_per_second=50e9, bytes_per_second=10e9, call_seconds=5e-6)


@cache
def calibrate(budget_seconds: float = 0.05) -> Machine:
    """Measure a matrix product, a copy and a tiny addition on this machine's CPU.

    Takes about `budget_seconds` and draws no random numbers.  The result is kept for the life
    of the process, so that one compilation compares all ops with one machine.
    """
    import torch

    with torch.no_grad():
        n = 256
        square, out = torch.ones(n, n), torch.empty(n, n)
        product = _typical(lambda: torch.mm(square, square, out=out), budget_seconds / 3)
        source, target = torch.ones(1 << 20), torch.empty(1 << 20)
        copy = _typical(lambda: target.copy_(source), budget_seconds / 3)
        tiny = torch.ones(8)
        call = _typical(lambda: torch.add(tiny, tiny), budget_seconds / 3)
    return Machine(
        flops_per_second=2 * n**3 / max(product - call, product / 2),
        bytes_per_second=2 * source.nbytes / max(copy - call, copy / 2),
        call_seconds=call,
    )


def _typical(run: object, budget_seconds: float) -> float:
    assert callable(run)
    run()
    times: list[float] = []
    end = perf_counter() + budget_seconds
    while not times or (perf_counter() < end and len(times) < 1000):
        began = perf_counter()
        run()
        times.append(perf_counter() - began)
    return median(times)
