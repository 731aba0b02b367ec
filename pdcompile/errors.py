"""Every error that pdcompile raises on purpose: what is wrong, where, and what to do about it.

One root, `PdcompileError`, so that a program can catch all of them, and one child for each
kind of remedy.  The text is written for the person who reads it in a terminal: one lower-case
sentence with the offending values, then the place, then a remedy that can be pasted.
"""

from __future__ import annotations

from collections.abc import Sequence


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

    def __init__(self, message: str, *, where: str | None = None, remedy: str | None = None):
        self.message = message
        self.where = where
        self.remedy = remedy
        super().__init__(message, where, remedy)

    def __str__(self) -> str:
        lines = [self.message]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.remedy:
            lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors travel between ranks: keyword arguments have to survive pickling.
        return (_rebuild, (type(self), self.message, self.where, self.remedy))


def _rebuild(
    kind: type[PdcompileError], message: str, where: str | None, remedy: str | None
) -> PdcompileError:
    return kind(message, where=where, remedy=remedy)


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
