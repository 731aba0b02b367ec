"""Every error that pdcompile raises on purpose: what is wrong, where, and what to do about it.

One root, `PdcompileError`, so that a program can catch all of them, and one child for each
kind of remedy.  The text is written for the person who reads it in a terminal: one lower-case
sentence with the offending values, then the place, then a remedy that can be pasted, then the
class's code, under which docs/errors.md says more.  Codes are never renamed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial


def some(names: Sequence[str], count: int = 3) -> str:
    """The first `count` names, and the number of the others: "a, b, c and 4 more"."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


class PdcompileError(Exception):
    """Root of the hierarchy.

    Args:
        message: one lower-case sentence that names the cause and the offending values.
        where: the place (``file.py:12``, ``plan.json: stages[1].ops``, a module's name).
        remedy: what to do now, as concrete as possible.
    """

    code = "PDC-ERROR"

    def __init_subclass__(cls) -> None:
        """Gives a class its code, as PDC-CONFIG to ConfigError; outside of this file classes have
        their parent's."""
        if cls.__module__ == __name__:
            cls.code = f"PDC-{cls.__name__.removesuffix('Error').upper()}"

    def __init__(self, message: str, *, where: str | None = None, remedy: str | None = None):
        self.message = message
        self.where = where
        self.remedy = remedy
        super().__init__(message, where, remedy)

    def __str__(self) -> str:
        return "\n".join([self.message, *(f"  {label}: {line}" for label, line in self.details())])

    def details(self) -> list[tuple[str, str]]:
        """Lines that follow the message, a label and a text each: where, remedy, code."""
        code = f"{self.code} (docs/errors.md)"
        lines = (("where", self.where), ("remedy", self.remedy), ("code", code))
        return [(label, line) for label, line in lines if line]

    def __reduce__(self) -> tuple[object, ...]:
        # Errors travel between ranks: keyword arguments have to survive pickling.
        return partial(type(self), where=self.where, remedy=self.remedy), (self.message,)


@contextmanager
def errors_as(
    kind: type[PdcompileError], message: str, where: object, remedy: str,
    of: type[Exception] = OSError,
) -> Iterator[None]:  # fmt: skip
    """Raises `kind` in place of errors inside, with what they say behind `message`: the system's,
    or those `of` a class, as Exception for code of the user's."""
    try:
        yield
    except PdcompileError:
        raise
    except of as error:
        said = getattr(error, "strerror", "") or f"{type(error).__name__}: {error}"
        raise kind(f"{message}: {said}", where=str(where), remedy=remedy) from error


@contextmanager
def store_errors() -> Iterator[None]:
    """Raises LaunchError where torch cannot open or reach the store that ranks meet in."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        said = str(error).splitlines()[0]
        if "EADDRINUSE" in said:
            raise LaunchError(
                f"another process of this host has the port of the store, {place}",
                where="MASTER_PORT",
                remedy="torchrun --standalone, which finds a free port (one host); a free one on "
                "every host: --master-port=29511; or end the earlier launch, if it still runs",
            ) from None
        raise LaunchError(
            f"rank {os.environ.get('RANK')} cannot reach the store at {place}: {said}",
            remedy="start all ranks with one torchrun, and give it a free --master-port",
        ) from None


class ConfigError(PdcompileError, ValueError):
    """An argument of `compile`, a command-line option or a target is unusable."""


class InputError(PdcompileError, ValueError):
    """A minibatch or example input does not fit: batch size, shape, dtype, missing leaf."""


class TraceError(PdcompileError):
    """The model cannot be captured faithfully; names the model's own file and line.

    `module_path` is the FQN of the module that was running, None where that is not known.
    """

    module_path: str | None = None


class VerifyError(PdcompileError):
    """A captured graph or a generated stage computes something else than the model."""


class CostError(PdcompileError, ValueError):
    """A profile or cost is unusable (negative, not finite, of another machine)."""


class ClusterError(PdcompileError, ValueError):
    """A cluster description is unusable; names the file, the key and the unit."""


class PlanError(PdcompileError, ValueError):
    """A plan is malformed, or does not belong to this model or cluster."""


class InfeasibleError(PdcompileError):
    """No plan satisfies the limits; names the limits that conflict and what would help.

    `others` are the remedies that ask for no memory.
    """

    others: tuple[str, ...] = ()


class NotFoundError(InfeasibleError):
    """No plan was found that satisfies the limits; it is not proved that there is none."""


class ScheduleError(PdcompileError):
    """A schedule fails its proof: pairing, order, weight versions, live slots, memory."""


class DeadlockError(ScheduleError):
    """A schedule deadlocks under rendezvous sends; carries the shortest wait-for cycle."""


class SourceError(PdcompileError):
    """Generated or edited stage source cannot be used."""


class CheckpointError(PdcompileError):
    """A checkpoint cannot be written, or is damaged, missing or of another model; names the file,
    and the tensor."""


class NonFiniteError(PdcompileError, ArithmeticError):
    """An op made NaN or infinity, under ``detect_nonfinite=True``; names the op."""


class NotPrepared(PdcompileError):
    """Asked for the plan before there is one: call `step` or `prepare` first."""


class ClosedError(PdcompileError):
    """The pipeline was closed."""


class LaunchError(PdcompileError):
    """The processes do not fit the plan: WORLD_SIZE, RANK, backend, or unlike plans on ranks."""


class ContractError(PdcompileError):
    """A peer sends something else than was planned (shape, dtype, edge, minibatch, plan)."""


class RankError(PdcompileError):
    """Another rank failed first; carries that rank's cause (rank, stage, microbatch, op)."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The beginning of a remedy for a name that is not known: ``did you mean 'scale'? ``, or ""
    where none is like it, in small letters or capitals."""
    by_small = {one.lower(): one for one in known}
    found = get_close_matches(name.lower(), by_small, n=1)
    return f"did you mean {by_small[found[0]]!r}? " if found else ""


def refuse_unknown(
    of: str, given: Iterable[str], known: Sequence[str], elsewhere: Mapping[str, str]
) -> None:
    """Refuse names that something has not.

    Args:
        of: what it is and of what kind, as in "compile has no option".
        elsewhere: remedies for names that have their place somewhere else.

    Raises:
        ConfigError: names them all, and what to write in the place of each.
    """
    names = list(given)
    if not names:
        return
    hints = {name: elsewhere.get(name) or did_you_mean(name, known).strip() for name in names}
    said = [f"{name}: {hint}" if len(names) > 1 else hint for name, hint in hints.items() if hint]
    listed = [] if all(name in elsewhere for name in names) else [f"there are {', '.join(known)}"]
    remedy = "; ".join([*said, *listed]).replace("?;", "?")
    raise ConfigError(
        f"{of} {' or '.join(map(repr, names))}", where=", ".join(names), remedy=remedy
    )
