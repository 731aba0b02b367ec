"""The model that a plan was made of, as far as the plan tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdcompile.plan.schema import Plan

if TYPE_CHECKING:
    from torch import nn


def made_of(plan: Plan) -> str:
    """The model of a plan: its class, and the target as the command line had it."""
    target = f" of {plan.command[0]}" if plan.command else ""
    return f"{plan.model or 'a model'}{target}"


def recorded_reduction(plan: Plan) -> str:
    """The function that the command which made a plan named as the loss reduction; "": none."""
    name = "--loss-reduction="
    return next((word.removeprefix(name) for word in plan.command if word.startswith(name)), "")


def absent_weight(plan: Plan, model: nn.Module) -> tuple[str, int] | None:
    """A parameter of the plan that the model does not have, and its stage; known before capture."""
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    held = ((fqn, stage.index) for stage in plan.stages for fqn in stage.parameters)
    return next(((fqn, stage) for fqn, stage in held if fqn not in known), None)
