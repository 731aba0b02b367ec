"""Machines by name: what text describes a cluster, and the descriptions that come with pdcompile.

Each ``*.toml`` beside this file is one of them; comments say where its numbers are from.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

from pdcompile.cluster import Cluster, counts_of
from pdcompile.errors import ClusterError, did_you_mean

FOLDER = Path(__file__).parent
FORMS = (
    "cluster.toml, '2x4' (hosts x devices), '2x8:h100' (of machines with a name), 'local:4' (four "
    "stages in this process), or 'auto' (one device a process)"
)


@cache
def names() -> tuple[str, ...]:
    """Machines that are described here."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


@cache
def described(name: str) -> Cluster:
    """The machines of a name, as many as their file says.  Raises ClusterError: there are none."""
    if name not in names():
        raise ClusterError(
            f"there are no machines of the name {name!r}",
            remedy=did_you_mean(name, names())
            + f"one of {', '.join(names())}; or describe yours in a cluster.toml",
        )
    return Cluster.load(str(FOLDER / f"{name}.toml"))


def cluster_of(text: str) -> Cluster:
    """The cluster that a text describes: one of `FORMS` except ``auto``.

    Raises:
        ClusterError: there is no such form, name or file, or hosts have other devices.
    """
    text = text.strip()
    if text.endswith(".toml"):
        return Cluster.load(text)
    kind, colon, rest = text.partition(":")
    if text in names():
        return described(text)
    if not colon or not (kind == "local" or rest in names() or any(counts_of(kind))):
        try:
            return Cluster.parse(text)  # with assumed links
        except ClusterError as error:
            raise ClusterError(
                error.message,
                remedy=f"{did_you_mean(text, names())}{error.remedy}, 'local:4' for four stages in "
                f"one process; machines with a name are {', '.join(names())}",
            ) from None
    if kind == "local":
        if not (rest.isascii() and rest.isdigit() and int(rest) > 0):
            raise ClusterError(
                f"cluster {text!r} has no number of stages", remedy="for example 'local:4'"
            )
        return Cluster.local(int(rest))
    return _so_many(kind, rest)


def _so_many(counts: str, name: str) -> Cluster:
    """Machines of a name: so many hosts, of so many devices each.

    The last level of a description joins hosts, all others are inside of one.  Hosts with fewer
    devices have those of the innermost levels.
    """
    machines = described(name)
    hosts, devices = counts_of(counts)
    if not devices:
        raise ClusterError(
            f"cluster '{counts}:{name}' has no number of hosts and devices",
            remedy=f"for example '2x{_a_host(machines)}:{name}': 2 hosts of {_a_host(machines)}",
        )
    outer = machines.levels[-1] if len(machines.levels) > 1 else None
    inside, left = [], devices
    for level in machines.levels[: len(machines.levels) - (outer is not None)]:
        size = min(level.size, left)
        if left % size:
            break
        inside.append(replace(level, size=size))
        left //= size
    if math.prod(level.size for level in inside) != devices:
        raise ClusterError(
            f"cluster '{counts}:{name}' has {devices} devices a host, and one of these has "
            f"{_a_host(machines)}",
            remedy=f"at most {_a_host(machines)} devices a host, and more hosts: "
            f"'{max(2, -(-devices // _a_host(machines)))}x{_a_host(machines)}:{name}'",
        )
    if hosts > 1 and outer is None:
        raise ClusterError(
            f"nothing is known of links between hosts of {name!r}",
            remedy=f"one host: '{devices}:{name}'; or describe yours in a cluster.toml",
        )
    levels = (*inside, replace(outer, size=hosts)) if hosts > 1 and outer else tuple(inside)
    return Cluster(machines.devices[:1] * (hosts * devices), levels, notes=machines.notes)


def _a_host(machines: Cluster) -> int:
    """Devices of a host."""
    sizes = [level.size for level in machines.levels]
    return math.prod(sizes[:-1] if len(sizes) > 1 else sizes)
