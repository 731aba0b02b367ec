"""Modules that are divided as a `Split` asks, and not as the family of all others does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import cast

from pdcompile.errors import ConfigError
from pdcompile.parts.shard import Split as Family
from pdcompile.passes.coarsen.constraints import match
from pdcompile.passes.parts.axes import WHOLE_STAGE, Axes
from pdcompile.problem.constraints import Split


@dataclass(frozen=True, slots=True)
class Asked:
    """Constraints that ask for an axis, with the names of their ops in stages that are divided."""

    divided: tuple[tuple[Split, tuple[str, ...]], ...] = ()

    @property
    def families(self) -> dict[str, Family]:
        """The families of their ops, by name."""
        return {n: cast(Family, one.axis) for one, names in self.divided for n in names}

    def fixed(self, products: Collection[str]) -> list[tuple[Split, tuple[str, ...]]]:
        """The ops of each that may not stay whole: products or, without any, all that it has."""
        return [(one, tuple(n for n in names if n in products) or names)
                for one, names in self.divided]  # fmt: skip


def asked(axes: Axes, splits: Sequence[Split], *, evaluates: bool) -> Asked:
    """The constraints with their ops; those that are to be whole lose their axes.

    Raises:
        ConfigError: what a constraint names runs in training on whole stages alone; or two are of
            one op.
    """
    graph, each, owner = axes.graph, list[tuple[Split, tuple[str, ...]]](), dict[str, Split]()
    for one in splits:
        names: tuple[str, ...] = ()
        with suppress(ConfigError):  # of evaluation, which may not have it
            names = tuple(graph.ops[i].name for i in match(graph, one.pattern, one))
        names = tuple(name for name in names if axes.ops[name].reason != WHOLE_STAGE)
        if not names and evaluates:
            continue
        if not names:
            raise ConfigError(
                f"{one}: it runs on stages of one part alone",
                where=str(one),
                remedy="leave it out, or Pin it to a stage of several parts",
            )
        for name in names:
            other = owner.setdefault(name, one)
            if other.axis != one.axis:
                raise ConfigError(
                    f"{other} and {one} are both of {name} ({axes.ops[name].op.source})",
                    where=str(one),
                    remedy=f"leave out {other} or {one}",
                )
            if one.axis == "whole":
                reason = f"{one} says so"
                axes.ops[name] = replace(axes.ops[name], loops={}, reason=reason)
        if one.axis != "whole":
            each.append((one, names))
    return Asked(tuple(each))
