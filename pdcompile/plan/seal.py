"""Seal: a digest, in a plan's file, of what nobody can edit and be right.

A person may move ops, and compute the objective anew; but the problem that the planner solved
follows from graph, cluster and schedule, and the bound was proved of that, not of the plan.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from pdcompile.errors import PlanError
from pdcompile.jsonio import canonical

DIGITS = 32
CLAIMED = ("bound_seconds", "fastest_seconds", "prover", "scope")  # of the certificate
DECIDING = ("schedule", "num_microbatches", "warmup", "optimizer_factor")  # of the training


def seal_of(plan: dict[str, Any]) -> str:
    """The seal of a plan as JSON has it: of its problem, and of what is claimed of other plans."""
    deciding = [plan["training"].get(name) for name in DECIDING]
    claimed = [plan["certificate"].get(name) for name in CLAIMED]
    sealed = [plan.get("problem"), deciding], [claimed, deciding]
    return ".".join(sha256(canonical(one)).hexdigest()[:DIGITS] for one in sealed)


def check_seal(plan: dict[str, Any], seal: Any, where: str) -> None:
    """Raise PlanError where a problem, or a bound that is claimed, is not as it was written."""
    given, own = str(seal).split("."), seal_of(plan).split(".")
    if plan.get("problem") is not None and given[:1] != own[:1]:
        raise _edited("problem", 'remove "problem"', where)
    if plan["certificate"]["bound_seconds"] > 0 and given[1:] != own[1:]:
        raise _edited("certificate", "write bound_seconds 0.0 and status 'feasible'", where)


def _edited(part: str, instead: str, where: str) -> PlanError:
    deciding = ", ".join(DECIDING)
    return PlanError(
        f"the {part} was edited, or one of {deciding} in the training, of which it was made",
        where=f"{where}: {part}",
        remedy=f"make the plan again, or {instead}",
    )
