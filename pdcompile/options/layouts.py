"""Layouts: numbers of parts and their splits among which the planner chooses (`parts="any"`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pdcompile.errors import ClusterError, ConfigError, LaunchError
from pdcompile.options import Options
from pdcompile.options.configuration import Configuration, innermost_devices, joined, machines
from pdcompile.parts.shard import Split

#: in the order in which they are tried; context, which few models want, has to be named
SPLITS: tuple[Split, ...] = ("width", "width+sequence", "sequence", "samples", "weights+samples")
OF_EXPERTS: tuple[Split, ...] = ("experts", "experts+samples")


def layouts(
    options: Options, num_ranks: int | None, *, experts: bool = False
) -> tuple[Options, ...]:
    """The options with each layout that the machines have room for: whole stages, and stages in
    2, 4, 8, … parts as far as the devices of the innermost level of links reach, by each split.

    Args:
        experts: the model may have some.

    Raises:
        ConfigError: there is none (ClusterError, LaunchError: where that is why).
    """
    if options.parts != "any" or options.plan is not None:
        return (options,)
    found, first = list[Options](), None
    for one in _tried(options, innermost_devices(options, num_ranks), experts):
        try:
            machines(one, num_ranks)
            found.append(one)
        except (ClusterError, ConfigError, LaunchError) as error:
            first = first or error
    if not found:
        assert first is not None
        raise first
    return tuple(found)


def named(options: Options) -> str:
    """``whole stages``, or ``2 parts by width``."""
    return "whole stages" if options.parts == 1 else f"{options.parts} parts by {options.split}"


def as_one_device(options: Options, chosen: Configuration) -> Configuration:
    """The configuration for whole stages where the parts of each are one device, which is as fast
    and large as all of them and has the links of all.

    Raises:
        ClusterError: devices are unlike.
    """
    cluster, parts = chosen.cluster, chosen.training.most_parts
    if len({*cluster.devices}) > 1:
        raise ClusterError("devices are unlike", where="cluster")
    levels = (replace(one, bytes_per_second=one.bytes_per_second * parts) for one in cluster.levels)
    wider = replace(chosen, cluster=replace(cluster, levels=tuple(levels)))
    return joined(options, wider, parts)


def _tried(options: Options, most: int, experts: bool) -> Iterator[Options]:
    parts, splits = 1, SPLITS + OF_EXPERTS * experts
    while parts <= most:
        if parts == 1:
            yield replace(options, parts=1, split="auto")
        else:
            for split in splits if options.split == "auto" else (options.split,):
                yield replace(options, parts=parts, split=split)
        parts *= 2
