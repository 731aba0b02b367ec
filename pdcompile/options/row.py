"""Row: one option of `pdcompile.compile` and of the command line, with all that is known of it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from pdcompile.errors import ConfigError, PdcompileError, did_you_mean
from pdcompile.options.values import Check, refuse

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
WIDTH = 100


@dataclass(frozen=True, slots=True)
class Flag:
    """An option as it is written on the command line.

    Args:
        form: of its value in the help, with ``|`` between choices.
        read: the value of a text, without loading anything of the user's; raises KeyError or
            ValueError for one that is none.  Left out: what is given, where the check accepts it.
        type: of what is read; bool: a switch.
        verbs: those that have it; empty: every verb that takes a target.
        least: the smallest number.
        help, more: in place of the row's, and after it.
        remedy: forms that a value has, where `form` does not tell.
    """

    form: str | None = None
    read: Callable[[Any], Any] | None = None
    type: Any = str
    verbs: tuple[str, ...] = ()
    least: int | None = None
    help: str = ""
    more: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One option; its name, type and default are those of the field of `Options` that has the row.

    Args:
        help: for Python and the command line.
        more: for Python alone.
        check: called with the name and a value; finds what cannot be right, whatever model and
            minibatch are.
        flag: on the command line; None: in Python alone.
        plan: the place in a plan that records it.  Left out, it is then the plan's.
        of_training: a `Workload` takes it too.
        compared: all ranks have to say the same.
        of_search: without effect where a plan is given, and refused there.
    """

    help: str
    more: str = ""
    check: Check | None = None
    flag: Flag | None = None
    plan: str = ""
    of_training: bool = False
    compared: bool = False
    of_search: bool = False
    name: str = ""
    default: Any = None
    panel: str = ""

    @property
    def is_open(self) -> bool:
        """True if None stands for "not said": a given plan then decides, else the default."""
        return bool(self.plan) and self.default != "auto"

    @property
    def unsaid(self) -> Any:
        """The default in the signature of `compile`."""
        return None if self.is_open else self.default

    @property
    def written(self) -> str:
        """The name on the command line."""
        return f"--{self.name.replace('_', '-')}"

    def read(self, given: Any) -> Any:
        """The value of what the command line says.  Raises ConfigError: it is none."""
        flag = self.flag or Flag()
        if flag.read is None:
            if self.check is not None:
                refuse(self.check(self.written, given))
            return given
        try:
            return flag.read(given)
        except PdcompileError:
            raise
        except (KeyError, ValueError) as error:
            forms = (flag.form or "").split("|")
            raise ConfigError(
                f"{self.written} {given} is not a valid value",
                where=self.written,
                remedy=did_you_mean(given, forms) + (flag.remedy or f"one of {', '.join(forms)}"),
            ) from error


def option(default: T, help: str, more: str = "", **row: Any) -> T:
    """A field of a dataclass of options: its default, `help` and `more`, and the rest of a row."""
    made: T = field(default=default, metadata={"row": Row(help, more, **row)})
    return made


def rows_of(panels: Mapping[str, type]) -> dict[str, Row]:
    """Every row by the name of its option, from dataclasses of options by their panel; "": each
    row has its own."""
    return {
        one.name: replace(row, name=one.name, default=one.default, panel=panel or row.panel)
        for panel, kind in panels.items()
        for one in fields(kind)
        for row in (one.metadata["row"],)
    }


def documented(rows: Mapping[str, Row]) -> Callable[[F], F]:
    """Decorator that adds the help of every option to a docstring, at the end of its ``Args:``."""
    lines = []
    for row in rows.values():
        lines += textwrap.wrap(
            f"{row.name}: {row.help} {row.more}".rstrip(), WIDTH,
            initial_indent=8 * " ", subsequent_indent=12 * " ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip

    def add(function: F) -> F:
        before, raises, after = (function.__doc__ or "").partition("\n\n    Raises:")
        function.__doc__ = "\n".join([before, *lines]) + raises + after
        return function

    return add
