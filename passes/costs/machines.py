"""Turns operations and bytes into seconds: a roofline with a price for every call, by device kind.

Device kinds are those that a cluster may name, for planning without the hardware.  What kernels
reach of a peak in a data sheet is an assumption, and the same for every kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from pdcompile.cluster import HOST_KIND, KNOWN_KINDS, Cluster
from pdcompile.errors import did_you_mean
from pdcompile.hardware.data_sheets import SHEETS, Sheet
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.costs.costed_op import CostedOp, costed_ops
from pdcompile.passes.costs.flops import rule_of


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


# Rows of the matrices that are multiplied, and numbers that are copied: enough to keep it busy.
HOST_SIZES, GPU_SIZES = (256, 1 << 20), (4096, 1 << 26)


@cache
def calibrate(budget_seconds: float = 0.05, device: str = HOST_KIND) -> Machine:
    """Measures a matrix product, a copy and a tiny addition in float32 on a device of this machine.

    Takes about `budget_seconds` and draws no random numbers.  The result is kept for the life
    of the process, so that one compilation compares all ops with one machine.
    """
    import torch

    from pdcompile.hardware import devices
    from pdcompile.passes.costs.timing import Took, took

    there = torch.device(device)
    n, count = HOST_SIZES if devices.is_host(there) else GPU_SIZES

    def seconds(run: Callable[[], object]) -> Took:
        return took(lambda: run, there, budget_seconds / 3)

    def beside_call(one: Took) -> float:
        """Seconds without the price of a call: a GPU that is kept occupied does not wait for it."""
        return one.seconds if one.dispatch_seconds else max(one.seconds - call, one.seconds / 2)

    with torch.no_grad():
        square, out = torch.ones(n, n, device=there), torch.empty(n, n, device=there)
        product = seconds(lambda: torch.mm(square, square, out=out))
        source, target = torch.ones(count, device=there), torch.empty(count, device=there)
        copy = seconds(lambda: target.copy_(source))
        tiny = torch.ones(8, device=there)
        shortest = seconds(lambda: torch.add(tiny, tiny))
    call = max(shortest.seconds, shortest.dispatch_seconds)
    return Machine(
        flops_per_second=2 * n**3 / beside_call(product),
        bytes_per_second=2 * source.nbytes / beside_call(copy),
        call_seconds=call,
    )


def seconds(call: CostedOp, machine: Machine) -> tuple[float, float]:
    """Forward and backward seconds of one op by the roofline."""
    if call.is_view:
        return 0.0, 0.0
    machine = machine.of(call.out.dtype)
    rule = rule_of(call)
    flops = rule.flops(call)
    read = sum(operand.bytes for operand in call.inputs)
    written = sum(output.bytes for output in call.outputs)
    if rule.looks_up:
        read = written
    forward = machine.seconds(flops, read + written)
    if not call.differentiated:
        return forward, 0.0
    factors = sum(operand.requires_grad for operand in call.inputs[:2]) or 1
    times = rule.backward or (factors if rule.product else 1)
    gradients = sum(operand.bytes for operand in call.inputs if operand.requires_grad)
    backward = machine.seconds(times * flops, read + written + gradients, calls=max(factors, 1))
    return forward, backward


TERA, GIGA = 1e12, 1e9
REACHED_FLOPS = 0.6  # of the peak, by large products of matrices
REACHED_BANDWIDTH = 0.8  # by element-wise kernels on large tensors
LAUNCH_SECONDS = 5e-6  # from one short kernel to the next, launched one by one
# Smallest calls that take as long as Python does for an instruction of ours, for what `step` does
# beside them, and for one of an optimizer's kernels (benchmarks/small_steps.py).
INSTRUCTION, STEP, KERNEL = 18, 500, 1.5


def _machine(sheet: Sheet) -> Machine:
    """The roofline of what kernels reach."""
    rates = zip(("float16", "bfloat16", "float64"), sheet[1:4], strict=True)
    return Machine(
        flops_per_second=sheet.float32_tera * TERA * REACHED_FLOPS,
        bytes_per_second=sheet.memory_gigabytes_per_second * GIGA * REACHED_BANDWIDTH,
        call_seconds=LAUNCH_SECONDS,
        by_dtype=tuple((dtype, tera * TERA * REACHED_FLOPS) for dtype, tera in rates if tera),
    )


KINDS: dict[str, Machine] = {
    HOST_KIND: REFERENCE,
    **{kind: _machine(sheet) for kind, sheet in SHEETS.items()},
}


def relative(cluster: Cluster, graph: OpGraph, microbatch_size: int) -> Cluster:
    """The cluster with speeds relative to its first device's kind, which estimates are for.

    Speeds that the cluster gives itself are kept.  A note says what was assumed.
    """
    kinds = list(dict.fromkeys(device.kind for device in cluster.devices))
    if kinds == ["cpu"]:
        return cluster
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        meant = "".join(did_you_mean(one, SHEETS) for one in unknown if one not in KNOWN_KINDS)
        note = (
            f"nothing is known of device kind {', '.join(map(repr, unknown))}: costs are "
            f"estimated for {'one core of a server CPU' if kinds[0] in unknown else kinds[0]}, "
            f"times each device's speed; {meant}known kinds are {', '.join(KNOWN_KINDS)}"
        )
        return replace(cluster, notes=(*cluster.notes, note))
    note = (
        f"costs are estimated for {kinds[0]} from its data sheet: {100 * REACHED_FLOPS:.0f} % of "
        f"the peak, {100 * REACHED_BANDWIDTH:.0f} % of the memory's bandwidth, "
        f"{LAUNCH_SECONDS * 1e6:.0f} us a kernel"
    )
    if len(kinds) > 1:
        own = any(device.speed != 1.0 for device in cluster.devices)
        calls = costed_ops(graph, microbatch_size)
        whole = {kind: math.fsum(sum(seconds(one, KINDS[kind])) for one in calls) for kind in kinds}
        speed = {kind: whole[kinds[0]] / max(s, 1e-300) for kind, s in whole.items()}
        if own:
            note += "; other kinds by the speeds that the cluster gives"
        else:
            devices = tuple(replace(device, speed=speed[device.kind]) for device in cluster.devices)
            cluster = replace(cluster, devices=devices)
            others = ", ".join(f"{kind} {speed[kind]:.2f}" for kind in kinds[1:])
            note += f"; speeds for this model, relative to it: {others}"
    return replace(cluster, notes=(*cluster.notes, note))
