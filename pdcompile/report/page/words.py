"""Sentences of a report: limits of a plan, how good it is, meaning of its numbers."""

from __future__ import annotations

from itertools import groupby

from pdcompile.cluster import Device
from pdcompile.passes.simulate.critical_chain import CriticalPath, Share
from pdcompile.plan import Certificate, Plan
from pdcompile.units import format_bytes, format_rate


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


def what_limits(path: CriticalPath) -> str:
    """The sentence for somebody who has a minute."""
    first = next((one for one in path.shares if one.what not in ("fill", "drain")), None)
    if first is None:
        return "No stage and no link takes time in this plan."
    subject = named(first)
    return f"{subject[0].upper()}{subject[1:]} limits this plan."


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
