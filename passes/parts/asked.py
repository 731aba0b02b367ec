"""Modules that are divided as a `Split` asks, and not as the family of all others does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from pdcompile.errors import ConfigError
from pdcompile.passes.coarsen.constraints import match
from pdcompile.passes.parts.axes import WHOLE_STAGE, Axes
from pdcompile.problem.constraints import Split

Asked = tuple[Split, tuple[str, ...]]  # one that asks for an axis, with the names of its ops


def asked(axes: Axes, splits: Sequence[Split], *, evaluates: bool) -> list[Asked]:
    """Those that ask for an axis, with their ops in stages that are divided; the ops of those that
    ask for none lose theirs.

    Raises:
        ConfigError: what a constraint names runs in training on whole stages alone; or two are of
            one op.
    """
    graph, each, owner = axes.graph, list[Asked](), dict[str, Split]()
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
    return each
