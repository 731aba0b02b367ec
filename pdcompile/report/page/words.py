"""Sentences of a report: limits of a plan, how good it is, meaning of its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from pdcompile.cluster import Device
from pdcompile.passes.simulate.critical_chain import CriticalPath, Share
from pdcompile.plan import Certificate, Plan
from pdcompile.report.plan_table import fullest
from pdcompile.units import format_bytes, format_rate

FULL = 0.9  # of a limit, from which memory is mentioned
EVEN = 1.05  # times the mean, up to which stages are called balanced


def named(share: Share) -> str:
    """Name of a part of the critical path: ``computing of stage 2``."""
    return {
        "compute": f"computing of stage {share.stage}",
        "update": f"updating stage {share.stage}",
        "link": "link " + " → ".join(map(str, share.ranks)),
        "sum": f"summing stage {share.stage}'s gradients over its replicas",
        "gather": f"bringing stage {share.stage}'s new weights to its replicas",
        "norms": "comparing norms of gradients over all ranks",
        "fill": "filling the pipeline (bubble)",
        "drain": "draining the pipeline (bubble)",
    }[share.what]


def path_in_words(path: CriticalPath) -> str:
    """``70 % computing of stage 2, 20 % link 1 → 2, 10 % bubble``: what is 1 % or more."""
    if not path.seconds:
        return "Nothing takes time."
    bubble = sum(one.seconds for one in path.shares if one.what in ("fill", "drain"))
    parts = [(one.seconds, named(one)) for one in path.shares if one.what not in ("fill", "drain")]
    parts = sorted([*parts, (bubble, "bubble (the pipeline fills and drains)")], reverse=True)
    shown = [f"{percent(s / path.seconds)} {name}" for s, name in parts if s >= path.seconds / 100]
    return ", ".join(shown)


def what_limits(plan: Plan, path: CriticalPath) -> Iterator[str]:
    """Sentences for somebody who has a minute: the most important first."""
    first = path.decisive
    if first is None:
        yield "No stage and no link takes time in this plan."
    else:
        subject = named(first)
        yield (
            f"{subject[0].upper()}{subject[1:]} limits this plan. Its critical path: "
            f"{path_in_words(path)}."
        )
    yield from _balance(plan)
    yield from _memory(plan)


def _balance(plan: Plan) -> Iterator[str]:
    loads = [
        (stage.forward_seconds + stage.backward_pass_seconds) / stage.replicas
        for stage in plan.stages
    ]
    mean = sum(loads) / len(loads)
    if len(loads) < 2 or not mean:
        return
    slowest = max(range(len(loads)), key=loads.__getitem__)
    more = loads[slowest] / mean - 1
    if loads[slowest] <= EVEN * mean:
        yield (
            f"Stages are balanced: the slowest, stage {slowest}, computes {percent(more)} longer "
            "than their mean."
        )
    else:
        yield f"Stage {slowest} computes {percent(more)} longer than the mean of all stages."


def _memory(plan: Plan) -> Iterator[str]:
    rank = fullest(plan)[0]
    total, limit = plan.ledgers[rank].total_bytes, plan.machines.devices[rank].memory_bytes
    if not limit:
        return
    part = total / limit
    if part > 1:
        more = format_bytes(total - limit)
        yield f"Rank {rank} needs {more} more than its limit of {format_bytes(limit)}."
    elif part > FULL:
        yield f"Memory is nearly full: rank {rank} needs {percent(part)} of its limit."


def proved(plan: Plan) -> str:
    """One sentence on how far a plan is from the best one."""
    one = plan.certificate
    if one.bound_seconds <= 0:
        return "Nothing is proved of other plans: a faster one may exist."
    if not one.gap:
        return "Proved: among all plans of this kind, with these costs, none is faster."
    return f"Proved: no plan of this kind saves more than {percent(one.gap)} of the time."


def gap_tile(one: Certificate) -> tuple[str, str]:
    """The gap as a headline, and a word on it."""
    if one.bound_seconds <= 0:
        return "unknown", "nothing is proved"
    return f"{100 * one.gap:.2g} %", "proved optimal" if not one.gap else "to the proved bound"


def cluster_in_words(plan: Plan) -> str:
    """``8 × h100 of 80.0 GB; nvlink 450 GB/s, infiniband 50.0 GB/s``."""
    cluster = plan.machines
    parts = (*plan.parts_of_rank, *[plan.training.most_parts] * len(cluster.devices))
    every = [one for one, count in zip(cluster.devices, parts, strict=False) for _ in range(count)]
    devices = [f"{len(list(group))} × {_device(device)}" for device, group in groupby(every)]
    levels = [
        f"{level.name} {format_rate(level.bytes_per_second)}"
        for level in cluster.levels
        if level.size > 1
    ]
    return "; ".join([", ".join(devices), *([", ".join(levels)] if levels else [])])


def _device(device: Device) -> str:
    limit = "" if device.memory_bytes is None else f" of {format_bytes(device.memory_bytes)}"
    return f"{device.kind}{limit}"


def percent(part: float) -> str:
    """``70 %``, ``3.2 %``."""
    return f"{100 * part:.0f} %" if part >= 0.0995 else f"{100 * part:.2g} %"
